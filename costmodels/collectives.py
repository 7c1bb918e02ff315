"""Time of messages between the devices of a replica: latency plus size over bandwidth.

Hockney's alpha-beta model. A ring all-reduce moves 2 (r - 1) / r of the message over each link,
an all-gather half of that (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009, section 3;
nccl-tests PERFORMANCE.md calls the quotient bus bandwidth).
"""


def all_reduce_s(
    message_bytes: float, ranks: int, link_bytes_per_s: float, latency_s: float
) -> float:
    """Seconds to sum a message over `ranks` devices; 0 for one.

    `link_bytes_per_s` is one direction. vLLM's one-shot kernels pay the latency once, not once
    a ring step.
    """
    if ranks == 1:
        return 0.0
    return latency_s + 2 * (ranks - 1) / ranks * message_bytes / link_bytes_per_s


def all_gather_s(
    message_bytes: float, ranks: int, link_bytes_per_s: float, latency_s: float
) -> float:
    """Seconds to bring `message_bytes`, a share on each of `ranks` devices, to all of them."""
    if ranks == 1:
        return 0.0
    return latency_s + (ranks - 1) / ranks * message_bytes / link_bytes_per_s


def send_s(message_bytes: float, link_bytes_per_s: float, latency_s: float) -> float:
    """Seconds to hand a message to the next pipeline stage."""
    return latency_s + message_bytes / link_bytes_per_s
