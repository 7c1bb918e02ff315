"""CUDA graphs: the batch sizes that vLLM captures, to which it pads a step."""

from bisect import bisect_left
from collections.abc import Sequence

from servecast.costmodels.versions import LATEST, Version

#: Largest capture size by default; 1,024 on data-centre Blackwell from 0.28.
DEFAULT_MAX_CAPTURE = 512

#: Blackwell's larger sizes, and the two limits among the sizes, came with this release.
LARGE_SINCE = Version(0, 28)

#: Above 256 sizes step by 16 from this release; before, by 8.
COARSE_SINCE = Version(0, 11, 1)

#: Decode-only steps get graphs of their own (FULL_AND_PIECEWISE) from this release.
FULL_SINCE = Version(0, 11)

#: Twice max_num_seqs bounds the sizes from this release.
BOUNDED_SINCE = Version(0, 10)


def capture_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_capture: int = DEFAULT_MAX_CAPTURE,
    version: Version = LATEST,
    *,
    decode_tokens: int = 1,
) -> tuple[int, ...]:
    """Sizes in tokens, ascending: 1, 2, 4, by 8 below 256, by 16 from there.

    Up to min(2 * max_num_seqs * decode_tokens, max_capture), where a sequence that decodes brings
    `decode_tokens`: one, and the drafts that it verifies. As many sequences as those sizes are
    captured then too, if they fit. With `max_num_seqs` and `max_num_batched_tokens`
    among them where they fit (vllm/config/vllm.py, `_set_cudagraph_sizes`, 0.32).
    """
    if version < LARGE_SINCE:
        max_capture = min(max_capture, DEFAULT_MAX_CAPTURE)
    widest = 2 * max_num_seqs * decode_tokens
    ceiling = min(widest, max_capture) if version >= BOUNDED_SINCE else max_capture
    top = min(ceiling, max_num_batched_tokens)
    sizes = set(sizes_up_to(top, version))
    if version >= LARGE_SINCE:
        if max_num_batched_tokens <= top:
            sizes.add(max_num_batched_tokens)
        if decode_tokens == 1 and max_num_seqs <= min(ceiling, max_num_batched_tokens):
            sizes.add(max_num_seqs)
    if decode_tokens > 1:
        batches = {*sizes_up_to(min(max_num_seqs, max_capture), version), max_num_seqs}
        sizes |= {n * decode_tokens for n in batches if n * decode_tokens <= top}
    return tuple(sorted(sizes))


def sizes_up_to(largest: int, version: Version = LATEST) -> tuple[int, ...]:
    """1, 2, 4, by 8 below 256, by 16 from there, as far as `largest`."""
    coarse = 16 if version >= COARSE_SINCE else 8
    ladder = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, coarse))
    return tuple(size for size in ladder if size <= largest)


def v0_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """V0 captured decodes alone: 1, 2, 4, by 8, up to the batch, and no more than 256."""
    top = -(-max_num_seqs // 8) * 8 if max_num_seqs > 4 else max_num_seqs
    return tuple(size for size in (1, 2, 4, *range(8, 257, 8)) if size <= top)


def graph_count(sizes: Sequence[int], max_num_seqs: int, version: Version = LATEST) -> int:
    """Graphs captured: one for mixed steps at each size, one more for pure decode."""
    decode = sum(size <= max_num_seqs for size in sizes) if version >= FULL_SINCE else 0
    return len(sizes) + decode


def padded_tokens(tokens: int, sizes: Sequence[int]) -> int:
    """Tokens that the device computes: the next capture size, or `tokens` beyond the last."""
    index = bisect_left(sizes, tokens)
    return sizes[index] if index < len(sizes) else tokens
