"""All-reduce over several processes: NCCL between GPUs, gloo on a CPU."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from servecast.calibration.device.timing import Timing, noise

ROUNDS = 30
WARM = 5


def all_reduce(ranks: int, sizes: list[int], device_type: str) -> dict[int, Timing]:
    """Timing of a sum over `ranks` processes, by bytes of the message.

    Raises RuntimeError where there are not so many GPUs.
    """
    if device_type == "cuda" and torch.cuda.device_count() < ranks:
        raise RuntimeError(f"{ranks} ranks on {torch.cuda.device_count()} GPUs")
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = 29_500 + os.getpid() % 10_000
    workers = [
        context.Process(target=_rank, args=(rank, ranks, sizes, device_type, port, results))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise RuntimeError("a rank failed")
    found: dict[int, Timing] = results.get()
    return found


def _rank(
    rank: int, ranks: int, sizes: list[int], device_type: str, port: int, results: Any
) -> None:
    backend = "nccl" if device_type == "cuda" else "gloo"
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
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
