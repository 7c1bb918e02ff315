"""What is measured on a device: the shapes of the models that will run there.

A point is one measurement: a request to the worker, and where its time goes in a family's rows.
`coarse` are measured first, all of them; `fine` lie between, and are measured where the coarse
ones disagree most.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servecast.costmodels.kernels import (
    WEIGHT_BITS,
    decode_form_s,
    experts_form_s,
    gemm_form_s,
    prefill_form_s,
)
from servecast.costmodels.operators import small_bytes
from servecast.costmodels.specs import BYTES_OF_DTYPE, HardwareSpec, ModelSpec
from servecast.costmodels.weights import kv_heads, layer_matrices, lm_head

SPLITS = (1, 2, 4, 8)

#: Tokens of a matrix: powers of four first, far apart in turn, so that little time still spans
#: much; then CUDA-graph sizes and both sides of tile edges.
COARSE_TOKENS = (1, 64, 256, 4, 1024, 16)
FINE_TOKENS = (
    *(
        2,
        3,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        14,
        20,
        24,
        32,
        33,
        40,
        48,
        65,
        80,
        96,
        112,
        128,
        129,
        160,
        192,
        224,
    ),
    *(257, 320, 384, 512, 513, 768, 1536, 2048, 3072, 4096, 6144, 8192),
)

#: Before and after the edges of tiles of rows, but those of the frame.
EDGE_TOKENS = (65, 128, 129, 257, 512, 513, 1025)

#: PyTorch's kernel for 4-bit weights reads them again for each 16 tokens.
MOST_INT4_TOKENS = 16

#: Far apart first, likewise.
COARSE_SEQUENCES = (1, 256, 16, 64, 4)
FINE_SEQUENCES = (2, 8, 32, 128, 512)
COARSE_CONTEXTS = (64, 4096, 512)
FINE_CONTEXTS = (16, 128, 256, 1024, 2048, 8192, 16384, 32768)
COARSE_NEW = (16, 1024, 256, 4096, 64)
FINE_NEW = (32, 128, 512, 2048, 8192)

#: Keys of a whole batch, where it attends as one.
COARSE_PACKED = (64, 1024, 16384)
FINE_PACKED = (256, 4096, 32768, 65536)

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
QUERY_LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9)

#: Tokens of the wholes that are measured: those of the frame, so that their parts are too.
WHOLE_TOKENS = (1, 16, 64, 256)

#: Tokens of a sequence there, and keys of a whole batch, of the frame likewise.
LAYER_CONTEXT = 512
LAYER_KEYS = 1024

#: Where block sizes, query lengths and skew are compared.
COMPARED_SEQUENCES, COMPARED_CONTEXT = 16, 1024

FP8_BITS = 8

#: Tokens of an expert.
COARSE_ROWS = (1, 16, 128, 1024)
FINE_ROWS = (2, 4, 8, 32, 64, 256, 512, 2048)

#: PyTorch's names of what a matrix computes in, and ours.
COMPUTE = {"float32": "32bit", "bfloat16": "16bit", "float16": "16bit", "fp8": "fp8"}

#: Smaller kernels of a layer, in the order they run; the norm runs twice.
SMALL = ("norm", "rope", "kv_write", "norm", "activation")


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes
    ----------
    family : "gemm 16bit", "decode 16", ... ; names of parts that are no family otherwise
    request : as `calibration/device/worker.py` takes it
    shape : coordinates in the family
    axis : the coordinate along which more points may be put in between; "" for none
    form_s : what the physical form gives; 0 where there is none
    """

    family: str
    request: Mapping[str, Any]
    shape: Mapping[str, float] = field(default_factory=dict)
    axis: str = ""
    form_s: float = 0.0

    @property
    def line(self) -> tuple[object, ...]:
        """Points that differ along the axis only."""
        rest = tuple(sorted((k, v) for k, v in self.shape.items() if k != self.axis))
        return self.family, rest


@dataclass(frozen=True)
class Target:
    """What the shapes are made for.

    Attributes
    ----------
    dtypes : of weights, as the worker names them; the first is also that of activations and KV
    block_size : of the main attention rows
    largest_m : tokens of a step
    most_sequences, longest : what will run together, and its contexts at most
    packed : batches attend as one, masked
    """

    models: tuple[ModelSpec, ...]
    hardware: HardwareSpec
    dtypes: tuple[str, ...]
    block_size: int
    largest_m: int
    splits: tuple[int, ...] = SPLITS
    most_sequences: int = 1024
    longest: int = 1 << 20
    packed: bool = False

    @property
    def dtype(self) -> str:
        return self.dtypes[0]

    @property
    def bits(self) -> int:
        """Of a number of KV, but where it is kept in fp8."""
        return 8 * BYTES_OF_DTYPE[self.dtype]

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """That KV is kept in: the weights' own, and fp8 where the device computes in it."""
        small = self.hardware.kind == "gpu" and self.hardware.fp8_flops_per_s is not None
        return (self.dtype, "fp8") if small and self.bits > FP8_BITS else (self.dtype,)

    def splits_of(self, model: ModelSpec) -> tuple[int, ...]:
        """Tensor-parallel sizes that the model's heads allow."""
        return tuple(t for t in self.splits if model.num_attention_heads % t == 0)


def coarse(target: Target) -> list[Point]:
    """Every family's frame, the families taking turns."""
    tokens = [m for m in COARSE_TOKENS if m < target.largest_m] + [target.largest_m]
    return _in_turn(
        [
            list(_gemms(target, tokens)),
            list(_edges(target)),
            list(_experts(target, COARSE_ROWS)),
            *_attention(target),
            list(_small(target)),
            list(_device(target)),
        ]
    )


def fine(target: Target) -> list[Point]:
    """Points between and beyond the coarse ones."""
    tokens = [m for m in FINE_TOKENS if m < target.largest_m]
    sequences = (*COARSE_SEQUENCES, *FINE_SEQUENCES)
    if target.packed:
        keys = (*COARSE_PACKED, *FINE_PACKED)
        return [
            *_gemms(target, tokens),
            *_experts(target, FINE_ROWS),
            *_packed(target, COARSE_NEW, FINE_PACKED),
            *_packed(target, FINE_NEW, keys),
        ]
    return [
        *_gemms(target, tokens),
        *_experts(target, FINE_ROWS),
        *_decodes(target, sequences, FINE_CONTEXTS),
        *_decodes(target, FINE_SEQUENCES, COARSE_CONTEXTS),
        *_prefills(target, FINE_NEW),
    ]


def _attention(target: Target) -> list[list[Point]]:
    if target.packed:
        return [list(_packed(target, (1, 4, *COARSE_NEW), COARSE_PACKED))]
    return [
        list(_decodes(target, COARSE_SEQUENCES, COARSE_CONTEXTS)),
        list(_prefills(target, COARSE_NEW)),
        list(_compared(target)),
    ]


def _in_turn(lists: Sequence[list[Point]]) -> list[Point]:
    """One of each list, again and again, each spread evenly over the whole."""
    placed = [
        ((at + 0.5) / len(points), order, point)
        for order, points in enumerate(lists)
        for at, point in enumerate(points)
    ]
    return [point for _, _, point in sorted(placed, key=lambda item: item[:2])]


def matrix_shapes(target: Target) -> list[tuple[int, int]]:
    """(n, k) of one rank's dense matrices, of each model and split, once each."""
    shapes = {
        (matrix.n, matrix.k): None
        for model in target.models
        for tensor in target.splits_of(model)
        for matrix in (*layer_matrices(model, tensor), lm_head(model, tensor))
        if matrix.copies == 1
    }
    return list(shapes)


def _gemms(target: Target, tokens: Sequence[int]) -> Iterator[Point]:
    shapes = matrix_shapes(target)
    for dtype in target.dtypes:
        for m in tokens:
            if dtype == "int4" and m > MOST_INT4_TOKENS:
                continue
            for n, k in shapes:
                yield _gemm(target.hardware, dtype, m, n, k)


def _edges(target: Target) -> Iterator[Point]:
    """Both sides of tile edges, for the largest matrix of a layer: points between neighbours that
    are next to each other would not be looked for."""
    model = target.models[0]
    matrices = [m for m in layer_matrices(model, target.splits[0]) if m.copies == 1]
    if not matrices:
        return
    largest = max(matrices, key=lambda matrix: matrix.n * matrix.k)
    for dtype in target.dtypes:
        for m in EDGE_TOKENS:
            if m < target.largest_m and dtype != "int4":
                yield _gemm(target.hardware, dtype, m, largest.n, largest.k)


def _gemm(hardware: HardwareSpec, dtype: str, m: int, n: int, k: int) -> Point:
    compute = COMPUTE.get(dtype, dtype)
    form = gemm_form_s(
        np.array(float(m)),
        n,
        k,
        hardware.peak_flops_per_s(compute),
        hardware.memory_bandwidth_bytes_per_s,
        WEIGHT_BITS[compute],
    )
    request = {"op": "gemm", "m": m, "n": n, "k": k, "dtype": dtype}
    # Rows alone: no server has this kernel, and theirs are priced by experts of 4 bits.
    family = "int4 weights" if dtype == "int4" else f"gemm {compute}"
    return Point(family, request, {"m": m, "n": n, "k": k}, "m", float(form))


def heads_of(target: Target) -> list[dict[str, int]]:
    """Heads of one rank, of each model and split, once each."""
    found: dict[tuple[int, int, int], dict[str, int]] = {}
    for model in target.models:
        if model.mla is not None:
            continue
        for tensor in target.splits_of(model):
            heads, own = model.num_attention_heads // tensor, kv_heads(model, tensor)
            found[heads, own, model.head_dim] = {
                "heads": heads,
                "kv_heads": own,
                "head_dim": model.head_dim,
            }
    return list(found.values())


def decode_point(
    target: Target,
    heads: Mapping[str, int],
    sequences: int,
    context: int,
    kv_dtype: str = "",
    **request: Any,
) -> Point:
    """Equal contexts, one new token each, KV in the weights' format or `kv_dtype`; `request`
    changes what is asked of the worker."""
    bits = FP8_BITS if kv_dtype == "fp8" else target.bits
    token_bytes = 2 * heads["kv_heads"] * heads["head_dim"] * bits / 8
    bandwidth = target.hardware.memory_bandwidth_bytes_per_s
    form = decode_form_s(sequences, np.array(float(context)), token_bytes, bandwidth)
    shape = {
        "sequences": sequences,
        "context": context,
        "kv_heads": heads["kv_heads"],
        "group": heads["heads"] / heads["kv_heads"],
    }
    asked = {
        "op": "decode",
        "sequences": sequences,
        "context": context,
        "block_size": target.block_size,
        "dtype": target.dtype,
        **heads,
        **request,
    }
    if bits != target.bits:
        asked["kv_dtype"] = kv_dtype
    return Point(f"decode {bits}", asked, shape, "context", float(form))


def _decodes(target: Target, sequences: Sequence[int], contexts: Sequence[int]) -> Iterator[Point]:
    for context in contexts:
        for number in sequences:
            if context <= target.longest and number <= target.most_sequences:
                for kv_dtype in target.kv_dtypes:
                    for heads in heads_of(target):
                        yield decode_point(target, heads, number, context, kv_dtype)


def prefill_point(target: Target, heads: Mapping[str, int], new: int, context: int = 0) -> Point:
    """A chunk of one prompt."""
    pairs = new * context + new * (new + 1) / 2
    flops = 4.0 * heads["heads"] * heads["head_dim"]
    form = prefill_form_s(np.array(pairs), flops, target.hardware.peak_flops_per_s())
    group = heads["heads"] / heads["kv_heads"]
    shape = {"new": new, "heads": heads["heads"], "group": group}
    request = {
        "op": "prefill",
        "new": new,
        "context": context,
        "block_size": target.block_size,
        "dtype": target.dtype,
        **heads,
    }
    return Point(f"prefill {target.bits}", request, shape, "new", float(form))


def _prefills(target: Target, news: Sequence[int]) -> Iterator[Point]:
    for new in news:
        if new <= target.largest_m:
            for heads in heads_of(target):
                yield prefill_point(target, heads, new)


def packed_point(target: Target, heads: Mapping[str, int], new: int, context: int) -> Point:
    """All queries of a batch over all its keys."""
    flops = 4.0 * heads["heads"] * heads["head_dim"]
    peak = target.hardware.peak_flops_per_s()
    form = prefill_form_s(np.array(float(new * context)), flops, peak)
    request = {"op": "packed", "new": new, "context": context, "dtype": target.dtype, **heads}
    shape = {"new": new, "context": context, "heads": heads["heads"]}
    return Point(f"packed {target.bits}", request, shape, "context", float(form))


def _packed(target: Target, news: Sequence[int], contexts: Sequence[int]) -> Iterator[Point]:
    most = target.longest * target.most_sequences
    for context in contexts:
        for new in news:
            if new <= min(context, target.largest_m) and context <= most:
                for heads in heads_of(target):
                    yield packed_point(target, heads, new, context)


def small_requests(
    model: ModelSpec, tensor: int, tokens: int, target: Target
) -> list[dict[str, Any]]:
    """The kernels of one layer beside matrices and attention, in order."""
    shared = {
        "tokens": tokens,
        "hidden": model.hidden_size,
        "intermediate": max(1, model.intermediate_size // tensor),
        "heads": model.num_attention_heads // tensor,
        "kv_heads": kv_heads(model, tensor),
        "head_dim": model.head_dim,
        "block_size": target.block_size,
        "dtype": target.dtype,
    }
    return [{"op": name, **shared} for name in SMALL]


def _small(target: Target) -> Iterator[Point]:
    for model in target.models:
        width = small_bytes(model, 1)
        for tokens in dict.fromkeys((*WHOLE_TOKENS, min(1024, target.largest_m))):
            if tokens > target.largest_m:
                continue
            parts = small_requests(model, 1, tokens, target)
            request = {"op": "chain", "parts": parts}
            yield Point("small", request, {"bytes": tokens * width})
            for kind in dict.fromkeys(SMALL):
                own = next(part for part in parts if part["op"] == kind)
                yield Point(kind, own, {"tokens": tokens})
            own = {**parts[0], "op": "embedding", "vocab": model.vocab_size}
            yield Point("embedding", own, {"tokens": tokens})
        for rows in (1, 8, 64, 256):
            asked = {"op": "sampling", "tokens": rows, "vocab": model.vocab_size}
            asked["dtype"] = target.dtype
            yield Point("sampling", asked, {"logits": rows * model.vocab_size})
            drawn = {**asked, "greedy": False}
            yield Point("sampling top-k top-p", drawn, {"logits": rows * model.vocab_size})


def _compared(target: Target) -> Iterator[Point]:
    """What block sizes, drafts and unequal contexts cost, beside equal ones of the same sum."""
    heads = next(iter(heads_of(target)), None)
    if heads is None:
        return
    number = min(COMPARED_SEQUENCES, target.most_sequences)
    context = min(COMPARED_CONTEXT, target.longest)
    plain = decode_point(target, heads, number, context)

    def varied(name: str, shape: Mapping[str, float], **request: Any) -> Point:
        point = decode_point(target, heads, number, context, **request)
        return Point(name, point.request, {**point.shape, **shape}, "", point.form_s)

    for size in BLOCK_SIZES:
        yield varied("block_size", {"block_size": size}, block_size=size)
    yield Point("query_len", plain.request, {"query_len": 1})
    for length in QUERY_LENGTHS:
        yield varied("query_len", {"query_len": length}, query_len=length)
    for skew in (0.0, 0.5, 0.75, 1.0):
        # One sequence in four holds `skew` of what the others give up.
        long = round(context * (1 + 3 * skew))
        short = max(1, (4 * context - long) // 3)
        contexts = [long if at % 4 == 0 else short for at in range(number)]
        yield varied("skew", {"skew": skew}, contexts=contexts)
    for before in (256, 1024, 4096):
        point = prefill_point(target, heads, min(256, target.largest_m), before)
        yield Point("chunk", point.request, {**point.shape, "context": before}, "", point.form_s)


def _device(target: Target) -> Iterator[Point]:
    """Copies, launches, and a layer and a small model as a whole."""
    whole = 1 << 26
    for kind in ("device", "to_device", "from_device"):
        for block in (1 << 14, 1 << 18, 1 << 22):
            for pinned in (False, True):
                request = {"op": "copy", "kind": kind, "bytes": whole, "block_bytes": block}
                name = f"copy {kind}{' pinned' if pinned else ''}"
                if kind != "device" or not pinned:
                    # What waits for the host cannot be captured in a graph.
                    own = {**request, "pinned": pinned, "eager": kind != "device"}
                    yield Point(name, own, {"block_bytes": block})
    yield Point("launch", {"op": "launch"})
    yield Point("launch eager", {"op": "launch", "eager": True})
    for model in target.models:
        for tokens in WHOLE_TOKENS:
            if tokens > target.largest_m:
                continue
            parts = layer_requests(model, tokens, target)
            yield Point("layer", {"op": "chain", "parts": parts}, {"tokens": tokens})
            if model is target.models[0]:
                yield Point(
                    "model", {"op": "chain", "parts": parts, "repeat": 4}, {"tokens": tokens}
                )


def layer_requests(
    model: ModelSpec, tokens: int, target: Target, context: int | None = None
) -> list[dict[str, Any]]:
    """One dense layer: its parts in order.

    It decodes `tokens` sequences of `context`, or takes a prompt of so many where that is more
    than will run together. Without a context the parts are some that the frame has.
    """
    matrices = [
        _gemm(target.hardware, target.dtype, tokens, matrix.n, matrix.k).request
        for matrix in layer_matrices(model)
        if matrix.copies == 1
    ]
    heads = heads_of(target)[:1]
    attention = [_own_attention(target, own, tokens, context).request for own in heads]
    return [
        dict(part) for part in (*matrices, *attention, *small_requests(model, 1, tokens, target))
    ]


def _own_attention(
    target: Target, heads: Mapping[str, int], tokens: int, context: int | None
) -> Point:
    if target.packed:
        keys = LAYER_KEYS if context is None else tokens * context
        return packed_point(target, heads, tokens, keys)
    if tokens <= target.most_sequences:
        return decode_point(target, heads, tokens, context or LAYER_CONTEXT)
    return prefill_point(target, heads, tokens)


def _experts(target: Target, rows: Sequence[int]) -> Iterator[Point]:
    """All experts of a mixture, a quarter of them, and as many as one token chooses."""
    for row in rows:
        for model in target.models:
            if model.moe is None or model.moe.num_experts < 2:
                continue
            number = model.moe.num_experts
            for met in sorted({number, max(1, number // 4), model.moe.experts_per_token}):
                if row * met > target.largest_m * model.moe.experts_per_token:
                    continue
                for tensor in target.splits_of(model):
                    width = max(1, model.moe.intermediate_size // tensor)
                    yield experts_point(target, row, met, model.hidden_size, width)


def experts_point(target: Target, rows: int, met: int, hidden: int, intermediate: int) -> Point:
    """`met` gated experts of `rows` tokens each."""
    compute = COMPUTE[target.dtype]
    form, _ = experts_form_s(
        np.array(float(rows * met)),
        float(hidden * intermediate),
        np.array(float(met)),
        1,
        target.hardware.peak_flops_per_s(compute),
        target.hardware.memory_bandwidth_bytes_per_s,
        WEIGHT_BITS[compute],
    )
    shape = {"rows": rows, "intermediate": intermediate, "met": met}
    request = {"op": "experts", **shape, "hidden": hidden, "dtype": target.dtype}
    return Point(f"experts {compute}", request, shape, "rows", float(form))
