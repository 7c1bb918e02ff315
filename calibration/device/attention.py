"""Attention over a paged KV cache in PyTorch, and what it should give.

Layout: keys and values (blocks, block_size, kv_heads, head_dim); a block table (sequences,
blocks a sequence) of block numbers, in no order, as a server's are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Paged:
    """Operands of one call.

    Attributes
    ----------
    query : (sequences, query_len, heads, head_dim), the last tokens of each sequence
    keys, values : (blocks, block_size, kv_heads, head_dim)
    table : (sequences, most blocks), int32
    contexts : (sequences,), int32: tokens in KV, the queries' own included
    """

    query: Any
    keys: Any
    values: Any
    table: Any
    contexts: Any

    @property
    def block_size(self) -> int:
        return int(self.keys.shape[1])


def random_paged(
    contexts: list[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    query_len: int = 1,
    dtype: Any = torch.float32,
    kv_dtype: Any = None,
    device: Any = "cpu",
    generator: Any = None,
) -> Paged:
    """Fresh random operands, KV of the queries' format or of `kv_dtype`; blocks are scattered over
    the cache.

    Raises ValueError for a sequence shorter than its queries.
    """
    if min(contexts) < query_len:
        raise ValueError(f"a context of {min(contexts)} is shorter than {query_len} queries")
    blocks = [-(-context // block_size) for context in contexts]
    most, total = max(blocks), sum(blocks)

    def numbers(*shape: int, kind: Any = dtype) -> Any:
        if generator is not None:
            return torch.randn(*shape, generator=generator).to(device, kind)
        return torch.randn(*shape, dtype=dtype, device=device).to(kind)

    order = torch.randperm(total, generator=generator).to(torch.int32)
    table = torch.zeros(len(contexts), most, dtype=torch.int32)
    start = 0
    for row, count in enumerate(blocks):
        table[row, :count] = order[start : start + count]
        start += count
    return Paged(
        query=numbers(len(contexts), query_len, heads, head_dim),
        keys=numbers(total, block_size, kv_heads, head_dim, kind=kv_dtype or dtype),
        values=numbers(total, block_size, kv_heads, head_dim, kind=kv_dtype or dtype),
        table=table.to(device),
        contexts=torch.tensor(contexts, dtype=torch.int32, device=device),
    )


def gathered(paged: Paged) -> Any:
    """PyTorch's own attention over the gathered blocks, (sequences, query_len, heads, head_dim)."""
    sequences, query_len, heads, dim = paged.query.shape
    kv_heads = paged.keys.shape[2]
    length = paged.table.shape[1] * paged.block_size
    picked = paged.table.long()
    keys, values = (
        side[picked].to(paged.query.dtype).reshape(sequences, length, kv_heads, dim).transpose(1, 2)
        for side in (paged.keys, paged.values)
    )
    positions = torch.arange(length, device=paged.query.device)
    newest = (
        paged.contexts[:, None] - query_len + torch.arange(query_len, device=paged.query.device)
    )
    seen = positions <= newest[:, :, None]
    out = scaled_dot_product_attention(
        paged.query.transpose(1, 2),
        keys,
        values,
        attn_mask=seen[:, None],
        enable_gqa=heads != kv_heads,
    )
    return out.transpose(1, 2)


def reference(paged: Paged) -> Any:
    """The same in float64, one sequence and head at a time."""
    sequences, query_len, heads, dim = paged.query.shape
    group = heads // paged.keys.shape[2]
    out = torch.empty(paged.query.shape, dtype=torch.float64)
    for row in range(sequences):
        context = int(paged.contexts[row])
        blocks = paged.table[row].long()[: -(-context // paged.block_size)]
        keys, values = (
            side[blocks].flatten(0, 1)[:context].double().cpu()
            for side in (paged.keys, paged.values)
        )
        for head in range(heads):
            for position in range(query_len):
                last = context - query_len + position + 1
                query = paged.query[row, position, head].double().cpu()
                scores = keys[:last, head // group] @ query / dim**0.5
                out[row, position, head] = scores.softmax(0) @ values[:last, head // group]
    return out


@dataclass(frozen=True)
class Packed:
    """Operands of one call for a whole batch in one row, as engines without a kernel for paged
    attention have it: every query meets the keys of all sequences, and a mask keeps them apart.

    Attributes
    ----------
    query : (1, heads, new, head_dim)
    fresh : (2, new, kv_heads, head_dim), keys and values of the new tokens
    cache : (2, slots, kv_heads, head_dim)
    slots : (new,), where the new tokens go
    read : (context,), slots of all sequences, new tokens included
    mask : (1, 1, new, context), added to the scores
    """

    query: Any
    fresh: Any
    cache: Any
    slots: Any
    read: Any
    mask: Any


def random_packed(
    new: int,
    context: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any = torch.float32,
    device: Any = "cpu",
) -> Packed:
    """Fresh random operands; each query sees an equal share of the keys, in a row.

    Raises ValueError for fewer keys than queries.
    """
    if context < new:
        raise ValueError(f"{context} keys are fewer than {new} queries")

    def numbers(*shape: int) -> Any:
        return torch.randn(*shape, device=device).to(dtype)

    seen = torch.arange(context, device=device) * new // context
    apart = seen != torch.arange(new, device=device)[:, None]
    mask = torch.zeros(new, context, dtype=dtype, device=device)
    mask.masked_fill_(apart, torch.finfo(dtype).min)
    order = torch.randperm(context, device=device)
    return Packed(
        query=numbers(1, heads, new, head_dim),
        fresh=numbers(2, new, kv_heads, head_dim),
        cache=numbers(2, context, kv_heads, head_dim),
        slots=order[:new],
        read=order,
        mask=mask[None, None],
    )


def packed(operands: Packed) -> Any:
    """(1, heads, new, head_dim): new keys and values are written, all are read, and repeated for
    each query head, as SDPA with a mask has no grouped heads on every device."""
    group = operands.query.shape[1] // operands.cache.shape[2]
    keys, values = (
        side.index_copy_(0, operands.slots, fresh)
        .index_select(0, operands.read)
        .transpose(0, 1)
        .unsqueeze(0)
        for side, fresh in zip(operands.cache, operands.fresh, strict=True)
    )
    if group > 1:
        keys, values = (side.repeat_interleave(group, dim=1) for side in (keys, values))
    return scaled_dot_product_attention(operands.query, keys, values, attn_mask=operands.mask)


def prefill(query: Any, keys: Any, values: Any) -> Any:
    """A chunk (1, heads, new, head_dim) over all of (1, kv_heads, context + new, head_dim)."""
    new, length = query.shape[2], keys.shape[2]
    mask = None if new == length else causal_lower_right(new, length)
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
