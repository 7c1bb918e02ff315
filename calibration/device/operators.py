"""The operators of a decoder layer, as calls to be timed: a request in, calls on own operands out.

A request is a mapping with `op` and its shape. Calls of one request do the same work on different
operands, so that taken in turn they find nothing in the cache. What a device or a PyTorch has no
kernel for raises (RuntimeError, NotImplementedError, AttributeError, and so on).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from servecast.calibration.device import attention
from servecast.calibration.device.sizes import contexts_of
from servecast.calibration.device.timing import Call, copies

Request = Mapping[str, Any]
Builder = Callable[[Request, torch.device], Sequence[Call]]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}

#: Weights that share a scale where they are stored in 4 bits.
INT4_GROUP = 128

#: PyTorch's kernels for attention, the fastest first where there is a cuDNN for it.
BY_PREFERENCE = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

#: Rows that PyTorch's kernel for int8 has on a GPU, at least. Servers have kernels for fewer, and
#: those too are computed in tiles of as many.
LEAST_INT8_ROWS = 32


def dtype_of(request: Request) -> torch.dtype:
    return DTYPES[request["dtype"]]


def _numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> Any:
    if dtype == torch.int8:
        return torch.randint(-8, 8, shape, dtype=dtype, device=device)
    return torch.randn(*shape, device=device).to(dtype)


def _generation(device: torch.device) -> int:
    """Major compute capability of a GPU; 0 elsewhere."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def gemm(request: Request, device: torch.device) -> list[Call]:
    """y (m, n) = x (m, k) @ W.T, weights of bfloat16, float16, float32, fp8, int8 or int4."""
    m, n, k = request["m"], request["n"], request["k"]
    if request["dtype"] == "int4":
        return _int4(m, n, k, device)
    dtype = dtype_of(request)
    padded = device.type == "cuda" and dtype == torch.int8
    x = _numbers(max(m, LEAST_INT8_ROWS) if padded else m, k, dtype=dtype, device=device)
    one = torch.ones((), device=device)
    # Sums in fewer bits, as servers have them.
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": device.type == "cuda"}

    def call(weight: Any) -> Call:
        if dtype == torch.float8_e4m3fn:
            turned = weight.t()
            return lambda: torch._scaled_mm(x, turned, one, one, **how)
        if dtype == torch.int8:
            turned = weight.t()
            return lambda: torch._int_mm(x, turned)
        return lambda: functional.linear(x, weight)

    number = copies(n * k * dtype.itemsize, device)
    return [call(_numbers(n, k, dtype=dtype, device=device)) for _ in range(number)]


def _int4(m: int, n: int, k: int, device: torch.device) -> list[Call]:
    x = _numbers(m, k, dtype=torch.bfloat16, device=device)

    def call() -> Call:
        scales = torch.ones(k // INT4_GROUP, n, 2, dtype=torch.bfloat16, device=device)
        if device.type == "cpu":
            weight = torch.randint(0, 16, (n, k), dtype=torch.int32)
            packed = torch._convert_weight_to_int4pack_for_cpu(weight, 1)
            return lambda: torch._weight_int4pack_mm_for_cpu(x, packed, INT4_GROUP, scales)
        pairs = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        packed = torch._convert_weight_to_int4pack(pairs, 8)
        return lambda: torch._weight_int4pack_mm(x, packed, INT4_GROUP, scales)

    return [call() for _ in range(copies(n * k / 2, device))]


def experts(request: Request, device: torch.device) -> list[Call]:
    """Gated experts, `met` of them, of `rows` tokens each: (met, rows, hidden) to the same."""
    met, rows, hidden = request["met"], request["rows"], request["hidden"]
    width, dtype = request["intermediate"], dtype_of(request)
    x = _numbers(met * rows, hidden, dtype=dtype, device=device)
    ends = torch.arange(1, met + 1, dtype=torch.int32, device=device) * rows
    # Elsewhere PyTorch asks the device for the ends first, one matrix after another.
    in_one = _generation(device) in (9, 10) and dtype == torch.bfloat16

    def grouped(tokens: Any, weights: Any) -> Any:
        turned = weights.transpose(1, 2)
        if in_one:
            return torch._grouped_mm(tokens, turned, offs=ends)
        return torch.bmm(tokens.view(met, rows, -1), turned).flatten(0, 1)

    gated = _silu_times(device)

    def call() -> Call:
        first = _numbers(met, 2 * width, hidden, dtype=dtype, device=device)
        second = _numbers(met, hidden, width, dtype=dtype, device=device)
        return lambda: grouped(gated(grouped(x, first)), second)

    weight_bytes = 3 * met * hidden * width * dtype.itemsize
    return [call() for _ in range(copies(weight_bytes, device))]


def prefill(request: Request, device: torch.device) -> list[Call]:
    """A chunk of `new` tokens behind `context` others, causal.

    Without a context on Hopper and data-centre Blackwell by cuDNN's kernel, where it takes the
    shape: PyTorch's own is FlashAttention 2, which servers have left behind there.
    """
    heads, kv_heads, dim = request["heads"], request["kv_heads"], request["head_dim"]
    new, context = request["new"], request.get("context", 0)
    shape = {"dtype": dtype_of(request), "device": device}
    query = _numbers(1, heads, new, dim, **shape)

    attend = attention.prefill
    if _generation(device) in (9, 10):
        attend = sdpa_kernel(BY_PREFERENCE, set_priority=True)(attention.prefill)

    def call() -> Call:
        keys, values = (_numbers(1, kv_heads, context + new, dim, **shape) for _ in range(2))
        return lambda: attend(query, keys, values)

    kv_bytes = 2 * kv_heads * (context + new) * dim * shape["dtype"].itemsize
    return [call() for _ in range(copies(kv_bytes, device))]


def decode(request: Request, device: torch.device) -> list[Call]:
    """The newest `query_len` tokens of every sequence over a paged cache."""
    contexts = contexts_of(request)
    kv_dtype = DTYPES[request.get("kv_dtype", request["dtype"])]
    kernel: Callable[[attention.Paged], Any] = attention.gathered
    if device.type == "cuda":
        from servecast.calibration.device import triton_attention as own

        streams, many = len(contexts) * request["kv_heads"], own.multiprocessors_of(device)
        parts = own.parts_for(streams, max(contexts), many)
        kernel = partial(own.paged_attention, parts=parts)

    def call() -> Call:
        paged = attention.random_paged(
            contexts,
            heads=request["heads"],
            kv_heads=request["kv_heads"],
            head_dim=request["head_dim"],
            block_size=request["block_size"],
            query_len=request.get("query_len", 1),
            dtype=dtype_of(request),
            kv_dtype=kv_dtype,
            device=device,
        )
        return lambda: kernel(paged)

    width = 2 * request["kv_heads"] * request["head_dim"] * kv_dtype.itemsize
    return [call() for _ in range(copies(sum(contexts) * width, device))]


def packed(request: Request, device: torch.device) -> list[Call]:
    """`new` queries of a whole batch over `context` keys of it, masked."""
    shape = {name: request[name] for name in ("heads", "kv_heads", "head_dim")}
    dtype = dtype_of(request)

    def call() -> Call:
        operands = attention.random_packed(
            request["new"], request["context"], dtype=dtype, device=device, **shape
        )
        return lambda: attention.packed(operands)

    kv_bytes = 2 * shape["kv_heads"] * shape["head_dim"] * request["context"] * dtype.itemsize
    return [call() for _ in range(copies(kv_bytes, device))]


def norm(request: Request, device: torch.device) -> list[Call]:
    """RMS norm of (tokens, hidden), with the residual added before."""
    shape = (request["tokens"], request["hidden"])
    dtype = dtype_of(request)
    x, rest = (_numbers(*shape, dtype=dtype, device=device) for _ in range(2))
    weight = _numbers(shape[1], dtype=dtype, device=device)
    if device.type == "cuda":
        from servecast.calibration.device.triton_small import add_norm

        return [lambda: add_norm(x, rest, weight)]
    return [lambda: functional.rms_norm(x + rest, (shape[1],), weight)]


def rope(request: Request, device: torch.device) -> list[Call]:
    """Rotation of queries and keys, (tokens, heads + kv_heads, head_dim)."""
    tokens, dim = request["tokens"], request["head_dim"]
    dtype = dtype_of(request)
    x = _numbers(tokens, request["heads"] + request["kv_heads"], dim, dtype=dtype, device=device)
    angle = torch.rand(tokens, 1, dim // 2, device=device) * 2 * torch.pi
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    if device.type == "cuda":
        from servecast.calibration.device.triton_small import rotate

        return [lambda: rotate(x, cos, sin)]

    def call() -> Any:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    return [call]


def activation(request: Request, device: torch.device) -> list[Call]:
    """SiLU of the gate times the rest, (tokens, 2 x intermediate)."""
    shape = (request["tokens"], 2 * request["intermediate"])
    x = _numbers(*shape, dtype=dtype_of(request), device=device)
    gated = _silu_times(device)
    return [lambda: gated(x)]


def _silu_times(device: torch.device) -> Callable[[Any], Any]:
    if device.type == "cuda":
        from servecast.calibration.device.triton_small import silu_times

        return silu_times

    def call(x: Any) -> Any:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return call


def kv_write(request: Request, device: torch.device) -> list[Call]:
    """Keys and values of (tokens, kv_heads, head_dim) into scattered slots of a cache."""
    tokens = request["tokens"]
    shape = (request["kv_heads"], request["head_dim"])
    dtype = dtype_of(request)
    cache = torch.zeros(2, 4 * tokens, *shape, dtype=dtype, device=device)
    new = _numbers(2, tokens, *shape, dtype=dtype, device=device)
    slots = torch.randperm(4 * tokens)[:tokens].to(device)
    return [lambda: cache.index_copy_(1, slots, new)]


def embedding(request: Request, device: torch.device) -> list[Call]:
    """Rows of (vocab, hidden) for `tokens` random tokens."""
    dtype = dtype_of(request)
    table = torch.zeros(request["vocab"], request["hidden"], dtype=dtype, device=device)
    tokens = torch.randint(0, request["vocab"], (request["tokens"],), device=device)
    return [lambda: functional.embedding(tokens, table)]


def sampling(request: Request, device: torch.device) -> list[Call]:
    """A token of each row of (tokens, vocab) logits: greedy, or top-k and top-p."""
    shape = (request["tokens"], request["vocab"])
    logits = _numbers(*shape, dtype=dtype_of(request), device=device)
    if request.get("greedy", True):
        return [lambda: logits.float().argmax(-1)]

    def call() -> Any:
        values, order = logits.float().sort(dim=-1, descending=True)
        chances = values.softmax(-1)
        chances[:, 50:] = 0.0
        chances = torch.where(chances.cumsum(-1) - chances > 0.9, 0.0, chances)
        return order.gather(
            -1, (chances / torch.empty_like(chances).exponential_()).argmax(-1, True)
        )

    return [call]


def copy(request: Request, device: torch.device) -> list[Call]:
    """`bytes` in pieces of `block_bytes`, within the device, to it or from it."""
    blocks = max(1, request["bytes"] // request["block_bytes"])
    size = request["block_bytes"]
    pinned = bool(request.get("pinned")) and device.type == "cuda"
    here, there = {
        "device": (device, device),
        "to_device": (torch.device("cpu"), device),
        "from_device": (device, torch.device("cpu")),
    }[request["kind"]]

    def side(place: torch.device) -> list[Any]:
        pin = pinned and place.type == "cpu"
        return [
            torch.zeros(size, dtype=torch.uint8, device=place, pin_memory=pin)
            for _ in range(blocks)
        ]

    pairs = list(zip(side(here), side(there), strict=True))

    def call() -> None:
        for source, target in pairs:
            target.copy_(source, non_blocking=pinned)

    return [call]


def launch(request: Request, device: torch.device) -> list[Call]:
    """A kernel with nothing to do, `kernels` times in a row."""
    x = torch.zeros(1, device=device)
    return [lambda: x.add_(1.0)] * int(request.get("kernels", 64))


BUILDERS: dict[str, Builder] = {
    "gemm": gemm,
    "experts": experts,
    "prefill": prefill,
    "decode": decode,
    "packed": packed,
    "norm": norm,
    "rope": rope,
    "activation": activation,
    "kv_write": kv_write,
    "embedding": embedding,
    "sampling": sampling,
    "copy": copy,
    "launch": launch,
}


def chain(request: Request, device: torch.device, builders: Mapping[str, Builder]) -> list[Call]:
    """All `parts` one after another, `repeat` times: a layer, or a model, as one measurement."""
    built = [builders[part["op"]](part, device) for part in request["parts"]]
    turns = [0] * len(built)

    def call() -> None:
        for _ in range(request.get("repeat", 1)):
            for at, calls in enumerate(built):
                turns[at] = (turns[at] + 1) % len(calls)
                calls[turns[at]]()

    return [call]
