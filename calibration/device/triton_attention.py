"""Decode attention over a paged KV cache as a Triton kernel.

One program a sequence and KV head: it takes all query heads of the group and all query positions
at once, walks the sequence's block table, and keeps a running softmax (Milakov and Gimelshein,
"Online normalizer calculation for softmax", arXiv 1805.02867).
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

from servecast.calibration.device.attention import Paged

#: A matrix product in Triton has at least so many rows and columns.
LEAST_ROWS = 16

#: Read when Triton is imported, as Triton itself does.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _decode_kernel(
    query,
    keys,
    values,
    table,
    contexts,
    out,
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
    in_float32: tl.constexpr,
):
    compute: tl.constexpr = tl.float32 if in_float32 else query.dtype.element_ty
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    context = tl.load(contexts + sequence)
    # A row is a query position and a head of the group.
    row = tl.arange(0, rows_padded)
    position, head = row // group, kv_head * group + row % group
    real = row < query_len * group
    lane = tl.arange(0, dim_padded)
    inside = lane < dim
    at = ((sequence * query_len + position) * heads + head)[:, None] * dim + lane[None, :]
    q = tl.load(query + at, mask=real[:, None] & inside[None, :], other=0.0).to(compute)
    last = context - query_len + position
    best = tl.full((rows_padded,), -1.0e30, tl.float32)
    norm = tl.zeros((rows_padded,), tl.float32)
    total = tl.zeros((rows_padded, dim_padded), tl.float32)
    for start in range(0, context, tile):
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
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def paged_attention(paged: Paged) -> Any:
    """Attention of every sequence's last tokens, (sequences, query_len, heads, head_dim).

    KV in fp8 (e4m3) is read as it is and computed in the queries' format.
    """
    sequences, query_len, heads, dim = paged.query.shape
    kv_heads = paged.keys.shape[2]
    rows = query_len * heads // kv_heads
    out = torch.empty_like(paged.query)
    _decode_kernel[(sequences, kv_heads)](
        paged.query,
        paged.keys,
        paged.values,
        paged.table,
        paged.contexts,
        out,
        dim**-0.5,
        paged.table.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        query_len=query_len,
        dim=dim,
        dim_padded=max(LEAST_ROWS, triton.next_power_of_2(dim)),
        rows_padded=max(LEAST_ROWS, triton.next_power_of_2(rows)),
        block_size=paged.block_size,
        tile=max(LEAST_ROWS, min(64, triton.next_power_of_2(paged.block_size))),
        # The interpreter keeps bfloat16 as bare bits, and would multiply those.
        in_float32=INTERPRETED,
    )
    return out
