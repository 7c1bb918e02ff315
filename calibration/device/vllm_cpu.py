"""vLLM's own kernels on a CPU: matrices, paged attention and the small ones of a layer.

They differ from PyTorch's by more than a fit could mend, so where the Python that measures has
vLLM, these are timed in their place. Operands are laid out as vLLM 0.32 lays them out
(v1/attention/backends/cpu_attn.py, model_executor/layers/utils.py).
"""

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from servecast.calibration.device import operators
from servecast.calibration.device.operators import Builder, Request, dtype_of
from servecast.calibration.device.sizes import contexts_of
from servecast.calibration.device.timing import Call, copies

EPSILON = 1e-5


class _Linear(torch.nn.Module):
    """What vLLM's dispatch takes: a weight, and a place for the kernel that it chooses."""

    cpu_linear: Any

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(n, k).to(dtype), requires_grad=False)
        self.bias = None


def gemm(request: Request, device: torch.device) -> list[Call]:
    """As `operators.gemm`; unquantised only."""
    if request["dtype"] not in ("float32", "bfloat16", "float16"):
        return operators.gemm(request, device)
    m, n, k = request["m"], request["n"], request["k"]
    dtype = dtype_of(request)
    x = torch.randn(m, k).to(dtype)

    def call() -> Call:
        layer = _Linear(n, k, dtype)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        return lambda: layer.cpu_linear(x, layer.weight, None)

    return [call() for _ in range(copies(n * k * dtype.itemsize, device))]


def _attention(request: Request, device: torch.device, contexts: list[int], new: int) -> list[Call]:
    heads, kv_heads, dim = request["heads"], request["kv_heads"], request["head_dim"]
    block, dtype = request["block_size"], dtype_of(request)
    isa = _get_attn_isa(dtype, block, dim)
    sequences = len(contexts)
    query = torch.randn(sequences * new, heads, dim).to(dtype)
    out = torch.empty_like(query)
    starts = torch.arange(0, sequences * new + 1, new, dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    blocks = -(-max(contexts) // block)

    def call() -> Call:
        order = torch.randperm(sequences * blocks).to(torch.int32)
        table = order.view(sequences, blocks).contiguous()
        cache = torch.randn(sequences * blocks, kv_heads, block, 2 * dim).to(dtype)
        keys, values = cache.view(-1, kv_heads, 2 * block, dim).chunk(2, dim=2)

        def run() -> None:
            plan = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=sequences,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                seq_lens=lengths,
                dtype=dtype,
                query_start_loc=starts,
                causal=True,
                sliding_window_size=-1,
                isa=isa,
                enable_kv_split=True,
            )
            ops.cpu_attention_with_kv_cache(
                query=query,
                key_cache=keys,
                value_cache=values,
                output=out,
                query_start_loc=starts,
                seq_lens=lengths,
                scale=dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=table,
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
            )

        return run

    kv_bytes = 2 * sequences * blocks * block * kv_heads * dim * dtype.itemsize
    return [call() for _ in range(copies(kv_bytes, device))]


def prefill(request: Request, device: torch.device) -> list[Call]:
    """As `operators.prefill`, over a paged cache of `block_size`."""
    new = request["new"]
    return _attention(request, device, [request.get("context", 0) + new], new)


def decode(request: Request, device: torch.device) -> list[Call]:
    """As `operators.decode`."""
    return _attention(request, device, contexts_of(request), request.get("query_len", 1))


def norm(request: Request, device: torch.device) -> list[Call]:
    """As `operators.norm`."""
    shape = (request["tokens"], request["hidden"])
    x, rest = (torch.randn(*shape).to(dtype_of(request)) for _ in range(2))
    weight = torch.randn(shape[1]).to(dtype_of(request))
    return [lambda: torch.ops._C.fused_add_rms_norm(x, rest, weight, EPSILON)]


def rope(request: Request, device: torch.device) -> list[Call]:
    """As `operators.rope`."""
    tokens, dim, dtype = request["tokens"], request["head_dim"], dtype_of(request)
    queries = torch.randn(tokens, request["heads"] * dim).to(dtype)
    keys = torch.randn(tokens, request["kv_heads"] * dim).to(dtype)
    table = torch.randn(4096, dim).to(dtype)
    at = torch.randint(0, 4096, (tokens,))
    return [lambda: ops.rotary_embedding(at, queries, keys, dim, table, True)]


def activation(request: Request, device: torch.device) -> list[Call]:
    """As `operators.activation`."""
    width = request["intermediate"]
    x = torch.randn(request["tokens"], 2 * width).to(dtype_of(request))
    out = torch.empty(request["tokens"], width, dtype=x.dtype)
    return [lambda: torch.ops._C.silu_and_mul(out, x)]


def kv_write(request: Request, device: torch.device) -> list[Call]:
    """As `operators.kv_write`."""
    tokens, kv_heads, dim = request["tokens"], request["kv_heads"], request["head_dim"]
    block, dtype = request["block_size"], dtype_of(request)
    blocks = 4 * -(-tokens // block)
    cache = torch.zeros(blocks, kv_heads, block, 2 * dim, dtype=dtype)
    keys, values = cache.view(blocks, kv_heads, 2 * block, dim).chunk(2, dim=2)
    new_keys, new_values = (torch.randn(tokens, kv_heads, dim).to(dtype) for _ in range(2))
    slots = torch.randperm(blocks * block)[:tokens]
    isa = _get_attn_isa(dtype, block, dim)
    return [lambda: ops.cpu_attn_reshape_and_cache(new_keys, new_values, keys, values, slots, isa)]


BUILDERS: dict[str, Builder] = {
    **operators.BUILDERS,
    "gemm": gemm,
    "prefill": prefill,
    "decode": decode,
    "norm": norm,
    "rope": rope,
    "activation": activation,
    "kv_write": kv_write,
}
