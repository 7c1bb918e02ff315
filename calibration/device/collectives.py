"""All-reduce over several processes: NCCL between GPUs, gloo on a CPU."""

import os
import queue
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from servecast.calibration.device.timing import Timing, noise

#: Ranks that say nothing for so long are given up: one of them may have died.
PATIENCE_S = 90.0

ROUNDS = 30
WARM = 5


def all_reduce(ranks: int, sizes: list[int], device_type: str) -> dict[int, Timing]:
    """Timing of a sum over `ranks` processes, by bytes of the message, launch and wait included.

    Raises RuntimeError where there are not so many GPUs, and where a rank fails.
    """
    if device_type == "cuda" and torch.cuda.device_count() < ranks:
        raise RuntimeError(f"{ranks} ranks on {torch.cuda.device_count()} GPUs")
    context = mp.get_context("spawn")
    results = context.Queue()
    port = 29_500 + os.getpid() % 10_000
    workers = [
        context.Process(
            target=_rank, args=(rank, ranks, sizes, device_type, port, results), daemon=True
        )
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        found: dict[int, Timing] = results.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise RuntimeError(f"{ranks} ranks gave no answer in {PATIENCE_S:.0f} s") from None
    finally:
        for worker in workers:
            worker.join(timeout=1.0)
            worker.kill()
    return found


def _rank(
    rank: int, ranks: int, sizes: list[int], device_type: str, port: int, results: Any
) -> None:
    backend = "nccl" if device_type == "cuda" else "gloo"
    where = f"tcp://127.0.0.1:{port}"
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
    found = {}
    for size in sizes:
        message = torch.ones(max(1, size // 2), dtype=torch.bfloat16, device=device)
        samples = []
        for turn in range(WARM + ROUNDS):
            message.fill_(1.0)
            dist.barrier()
            if device_type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            dist.all_reduce(message)
            if device_type == "cuda":
                torch.cuda.synchronize(device)
            if turn >= WARM:
                samples.append(time.perf_counter() - start)
        if not bool((message == ranks).all()):
            raise RuntimeError("an all-reduce gave a wrong sum")
        samples.sort()
        found[size] = Timing(samples[len(samples) // 2], noise(samples), len(samples))
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()
