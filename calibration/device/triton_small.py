"""The small kernels of a decoder layer in Triton, one launch each, as servers fuse them."""

from typing import Any

import torch
import triton
import triton.language as tl

EPSILON = 1e-5

#: Numbers of a row that a program takes at a time.
CHUNK = 1024

#: Heads of a token that a program rotates.
HEADS = 16


@triton.jit
def _add_norm_kernel(x, rest, weight, width: tl.constexpr, padded: tl.constexpr, eps: tl.constexpr):
    at = tl.arange(0, padded)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width + at
    total = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(rest + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(rest + row, total.to(rest.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, 0) / width + eps)
    own = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row, (total * scale * own).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    x, cos, sin, heads: tl.constexpr, half: tl.constexpr, padded: tl.constexpr, some: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * some + tl.arange(0, some), tl.arange(0, padded)
    inside = (head < heads)[:, None] & (at < half)[None, :]
    left = (token * heads + head)[:, None] * 2 * half + at[None, :]
    a = tl.load(x + left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + left + half, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * half + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
    tl.store(x + left, (a * c - b * s).to(x.dtype.element_ty), mask=inside)
    tl.store(x + left + half, (b * c + a * s).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _silu_kernel(x, out, width: tl.constexpr, chunk: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * chunk + tl.arange(0, chunk)
    inside = at < width
    gate = tl.load(x + token * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + at, result.to(out.dtype.element_ty), mask=inside)


def add_norm(x: Any, rest: Any, weight: Any) -> None:
    """x and the residual, both (tokens, hidden), in place: the sum into the residual, its RMS norm
    into x."""
    tokens, width = x.shape
    padded = triton.next_power_of_2(width)
    _add_norm_kernel[(tokens,)](x, rest, weight, width=width, padded=padded, eps=EPSILON)


def rotate(x: Any, cos: Any, sin: Any) -> None:
    """Queries and keys (tokens, heads, head_dim) in place, by (tokens, head_dim / 2)."""
    tokens, heads, dim = x.shape
    half = dim // 2
    some, padded = min(HEADS, triton.next_power_of_2(heads)), triton.next_power_of_2(half)
    grid = (tokens, triton.cdiv(heads, some))
    _rotate_kernel[grid](x, cos, sin, heads=heads, half=half, padded=padded, some=some)


def silu_times(x: Any) -> Any:
    """SiLU of the first half of (tokens, 2 x intermediate), times the second."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    _silu_kernel[(tokens, triton.cdiv(width, CHUNK))](x, out, width=width, chunk=CHUNK)
    return out
