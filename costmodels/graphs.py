"""CUDA graphs: the batch sizes that vLLM captures, to which it pads a step."""

from bisect import bisect_left
from collections.abc import Sequence

#: Largest capture size by default; 1,024 on data-centre Blackwell.
DEFAULT_MAX_CAPTURE = 512


def capture_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, max_capture: int = DEFAULT_MAX_CAPTURE
) -> tuple[int, ...]:
    """Sizes in tokens, ascending: 1, 2, 4, by 8 below 256, by 16 from there.

    Up to min(2 * max_num_seqs, max_capture), with `max_num_seqs` and `max_num_batched_tokens`
    among them where they fit (vllm/config/vllm.py, `_set_cudagraph_sizes`, 0.32).
    """
    ceiling = min(2 * max_num_seqs, max_capture)
    top = min(ceiling, max_num_batched_tokens)
    sizes = {1, 2, 4, *range(8, min(top + 1, 256), 8), *range(256, top + 1, 16)}
    if max_num_batched_tokens <= top:
        sizes.add(max_num_batched_tokens)
    if max_num_seqs <= min(ceiling, max_num_batched_tokens):
        sizes.add(max_num_seqs)
    return tuple(sorted(size for size in sizes if size <= top))


def padded_tokens(tokens: int, sizes: Sequence[int]) -> int:
    """Tokens that the device computes: the next capture size, or `tokens` beyond the last."""
    index = bisect_left(sizes, tokens)
    return sizes[index] if index < len(sizes) else tokens
