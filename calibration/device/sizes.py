"""Bytes that a measurement's operands take, so that none is asked for that does not fit.

Known without torch: the campaign plans by it, the worker refuses by it.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

Request = Mapping[str, Any]

ITEM_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}


def contexts_of(request: Request) -> list[int]:
    """Of each sequence: `contexts`, or `sequences` of `context` each."""
    return list(request.get("contexts") or [request["context"]] * request["sequences"])


def operand_bytes(request: Request) -> float:
    """Of one set of operands: weights, activations, KV, whatever is largest of it."""
    op = request["op"]
    if op == "chain":
        return float(sum(operand_bytes(part) for part in request["parts"]))
    item = ITEM_BYTES.get(request.get("dtype", "float32"), 4.0)
    if op == "gemm":
        m, n, k = request["m"], request["n"], request["k"]
        return float(item * n * k + max(item, 2.0) * m * (n + k))
    if op == "experts":
        met, rows, hidden, width = (
            request[name] for name in ("met", "rows", "hidden", "intermediate")
        )
        return float(item * met * (3 * hidden * width + rows * (2 * hidden + 3 * width)))
    if op in ("decode", "prefill"):
        width = 2 * request["kv_heads"] * request["head_dim"]
        item = ITEM_BYTES.get(request.get("kv_dtype", ""), item)
        if op == "prefill":
            return float(item * width * (request.get("context", 0) + request["new"]))
        # Every sequence has as many blocks in its table as the longest.
        longest = max(contexts_of(request))
        blocks = ceil(longest / request["block_size"])
        return float(item * width * blocks * request["block_size"] * len(contexts_of(request)))
    if op == "packed":
        context, width = request["context"], 2 * request["head_dim"]
        kv = context * width * (request["kv_heads"] + request["heads"])
        return float(item * (kv + context * request["new"]))
    if op in ("sampling", "embedding"):
        rows = request["tokens"] if op == "sampling" else request["hidden"]
        return float(4.0 * rows * request["vocab"])
    if op == "copy":
        return 2.0 * float(request["bytes"])
    return 0.0
