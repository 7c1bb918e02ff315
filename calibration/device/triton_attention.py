"""Decode attention over a paged KV cache as Triton kernels.

One program a sequence, KV head and part of the context: it takes all query heads of the group and
all query positions at once, walks its part of the sequence's block table, and keeps a running
softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867).
Where sequences are too few to fill a device their contexts are cut into parts, as FlashDecoding
does, and a second kernel puts these together.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from servecast.calibration.device.attention import Paged

#: A matrix product in Triton has at least so many rows and columns.
LEAST_ROWS = 16

#: Bytes of keys that one program holds at a time: with as many of values, and the next tile on its
#: way, they fit in the shared memory of every GPU since Ampere.
TILE_BYTES = 16 << 10
MOST_TILE = 128

#: Programs that a multiprocessor runs at once, about; and tokens that are worth a part of their
#: own.
PROGRAMS_PER_MULTIPROCESSOR = 2
LEAST_PART_TOKENS = 256
MOST_PARTS = 128

#: Rows from which a program has twice the threads: its sums would not fit into the registers.
MANY_ROWS = 128

#: Read when Triton is imported, as Triton itself does.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _part_kernel(
    query,
    keys,
    values,
    table,
    contexts,
    out,
    weights,
    scale,
    table_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    query_len: tl.constexpr,
    dim: tl.constexpr,
    dim_padded: tl.constexpr,
    rows_padded: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    parts: tl.constexpr,
    in_float32: tl.constexpr,
):
    compute: tl.constexpr = tl.float32 if in_float32 else query.dtype.element_ty
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = heads // kv_heads
    context = tl.load(contexts + sequence)
    # A row is a query position and a head of the group.
    row = tl.arange(0, rows_padded)
    position, head = row // group, kv_head * group + row % group
    real = row < query_len * group
    lane = tl.arange(0, dim_padded)
    inside = lane < dim
    at_row = (sequence * query_len + position) * heads + head
    at = at_row[:, None] * dim + lane[None, :]
    q = tl.load(query + at, mask=real[:, None] & inside[None, :], other=0.0).to(compute)
    last = context - query_len + position
    best = tl.full((rows_padded,), -1.0e30, tl.float32)
    norm = tl.zeros((rows_padded,), tl.float32)
    total = tl.zeros((rows_padded, dim_padded), tl.float32)
    length = tl.cdiv(tl.cdiv(context, parts), tile) * tile
    for start in range(part * length, tl.minimum((part + 1) * length, context), tile):
        token = start + tl.arange(0, tile)
        exists = token < context
        block = tl.load(table + sequence * table_stride + token // block_size, mask=exists, other=0)
        place = (block.to(tl.int64) * block_size + token % block_size) * kv_heads + kv_head
        kv_at = place[:, None] * dim + lane[None, :]
        kv_mask = exists[:, None] & inside[None, :]
        k = tl.load(keys + kv_at, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(compute)), input_precision="ieee") * scale
        scores = tl.where(token[None, :] <= last[:, None], scores, -1.0e30)
        above = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp(best - above)
        weight = tl.exp(scores - above[:, None])
        weight = tl.where(token[None, :] <= last[:, None], weight, 0.0)
        v = tl.load(values + kv_at, mask=kv_mask, other=0.0)
        weighted = tl.dot(weight.to(compute), v.to(compute), input_precision="ieee")
        total = total * shrink[:, None] + weighted
        norm = norm * shrink + tl.sum(weight, 1)
        best = above
    result = total / tl.maximum(norm, 1.0e-30)[:, None]
    out_at = (at_row * parts + part)[:, None] * dim + lane[None, :]
    out_mask = real[:, None] & inside[None, :]
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=out_mask)
    if parts > 1:
        # What the part weighs among all, as a logarithm; nothing where it saw no token.
        seen = tl.where(norm > 0.0, best + tl.log(tl.maximum(norm, 1.0e-30)), -1.0e30)
        tl.store(weights + at_row * parts + part, seen, mask=real)


@triton.jit
def _join_kernel(
    results,
    weights,
    out,
    dim: tl.constexpr,
    dim_padded: tl.constexpr,
    parts: tl.constexpr,
    parts_padded: tl.constexpr,
):
    at_row = tl.program_id(0)
    part = tl.arange(0, parts_padded)
    lane = tl.arange(0, dim_padded)
    there, inside = part < parts, lane < dim
    seen = tl.load(weights + at_row * parts + part, mask=there, other=-1.0e30)
    share = tl.where(there, tl.exp(seen - tl.max(seen, 0)), 0.0)
    at = (at_row * parts + part)[:, None] * dim + lane[None, :]
    result = tl.load(results + at, mask=there[:, None] & inside[None, :], other=0.0)
    joined = tl.sum(result * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + at_row * dim + lane, joined.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Plan:
    """How the work is cut up, all of it known when the kernels are compiled."""

    heads: int
    kv_heads: int
    query_len: int
    dim: int
    block_size: int
    tile: int
    parts: int

    @property
    def dim_padded(self) -> int:
        return max(LEAST_ROWS, triton.next_power_of_2(self.dim))

    @property
    def rows_padded(self) -> int:
        rows = self.query_len * self.heads // self.kv_heads
        return max(LEAST_ROWS, triton.next_power_of_2(rows))

    @property
    def part_constants(self) -> dict[str, Any]:
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "query_len": self.query_len,
            "dim": self.dim,
            "dim_padded": self.dim_padded,
            "rows_padded": self.rows_padded,
            "block_size": self.block_size,
            "tile": self.tile,
            "parts": self.parts,
            # The interpreter keeps bfloat16 as bare bits, and would multiply those.
            "in_float32": INTERPRETED,
        }

    @property
    def warps(self) -> int:
        return 8 if self.rows_padded >= MANY_ROWS else 4

    @property
    def join_constants(self) -> dict[str, int]:
        return {
            "dim": self.dim,
            "dim_padded": self.dim_padded,
            "parts": self.parts,
            "parts_padded": triton.next_power_of_2(self.parts),
        }


def plan(paged: Paged, parts: int) -> Plan:
    """Of a batch whose contexts are cut into so many parts each."""
    _, query_len, heads, dim = paged.query.shape
    row_bytes = max(LEAST_ROWS, triton.next_power_of_2(dim)) * paged.query.element_size()
    return Plan(
        heads=heads,
        kv_heads=paged.keys.shape[2],
        query_len=query_len,
        dim=dim,
        block_size=paged.block_size,
        tile=min(MOST_TILE, max(LEAST_ROWS, TILE_BYTES // row_bytes)),
        parts=parts,
    )


def parts_for(streams: int, longest: int, multiprocessors: int) -> int:
    """Parts of each context, so that all multiprocessors have work; a power of two, as each number
    of parts is a kernel of its own. `streams` are KV heads of all sequences."""
    idle = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors / streams
    most = min(idle, longest / LEAST_PART_TOKENS, float(MOST_PARTS))
    return 1 << max(0, int(most).bit_length() - 1)


def multiprocessors_of(device: torch.device) -> int:
    """Of a GPU; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def paged_attention(paged: Paged, parts: int = 1) -> Any:
    """Attention of every sequence's last tokens, (sequences, query_len, heads, head_dim).

    KV in fp8 (e4m3) is read as it is and computed in the queries' format.
    """
    own = plan(paged, parts)
    sequences, rows = len(paged.contexts), paged.query.shape[:3].numel()
    out = torch.empty_like(paged.query)
    results, weights = out, out
    if parts > 1:
        options = {"dtype": torch.float32, "device": out.device}
        results = torch.empty(rows, parts, own.dim, **options)
        weights = torch.empty(rows, parts, **options)
    _part_kernel[(sequences, own.kv_heads, parts)](
        paged.query,
        paged.keys,
        paged.values,
        paged.table,
        paged.contexts,
        results,
        weights,
        own.dim**-0.5,
        paged.table.stride(0),
        **own.part_constants,
        num_warps=own.warps,
    )
    if parts > 1:
        _join_kernel[(rows,)](results, weights, out, **own.join_constants)
    return out
