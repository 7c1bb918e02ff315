"""Random workloads for `servecast parity`: small ones that corner the rules, large ones that last.

Every feature that the scheduler claims is drawn independently of the others, so that their
combinations are met too. Equal seeds give equal workloads.
"""

import math
from random import Random
from typing import Any

Workload = dict[str, Any]


def random_workload(seed: int, *, large: bool = False) -> Workload:
    """A workload of `docs/parity.md`: 4 to 30 requests, or 60 to 250."""
    draw = Random(f"{seed} {'large' if large else 'small'}")
    config = _config(draw, large)
    mean_in, mean_out = draw.choice([(20, 10), (60, 30), (150, 60)] if large else [(60, 20)])
    count = draw.randrange(60, 250) if large else draw.randrange(4, 30)
    requests = _requests(draw, config, count, mean_in, mean_out)
    config["num_blocks"] = _blocks(draw, config, requests)
    return {"config": config, "requests": requests}


def _config(draw: Random, large: bool) -> dict[str, Any]:
    seqs = draw.choice([8, 16, 64, 256] if large else [1, 2, 4, 8, 16])
    max_model_len = draw.choice([512, 1024] if large else [128, 256])
    config: dict[str, Any] = {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": draw.choice([256, 1024, 4096] if large else [16, 32, 64, 300]),
        "block_size": draw.choice([8, 16, 32, 128] if large else [2, 4, 8, 16]),
        "max_model_len": max_model_len,
        "enable_prefix_caching": draw.random() < 0.7,
        "policy": draw.choice(["fcfs", "fcfs", "priority"]),
        "watermark": draw.choice([0.0, 0.0, 0.01, 0.1]),
        "long_prefill_token_threshold": draw.choice([0, 0, 0, max_model_len // 10]),
        "reserve_full_isl": draw.random() < 0.7,
        "async_scheduling": draw.random() < 0.4,
        "enable_chunked_prefill": draw.random() < 0.8,
    }
    if draw.random() < 0.5:
        methods = ["draft_model", "eagle"] + ["ngram"] * (not config["async_scheduling"])
        config["spec"] = {"method": draw.choice(methods), "k": draw.choice([1, 2, 3, 5])}
    k = config["spec"]["k"] if config.get("spec") else 0
    least = seqs * (1 + k)
    if not config["enable_chunked_prefill"]:
        # vLLM asks for it, and a draft model takes input positions of its own.
        least = max(least, max_model_len + seqs)
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], least)
    return config


def _requests(
    draw: Random, config: dict[str, Any], count: int, mean_in: int, mean_out: int
) -> list[dict[str, Any]]:
    longest = config["max_model_len"] - 1
    heads = [
        [500_000 + 1000 * head + j for j in range(draw.randrange(1, longest))] for head in range(3)
    ]
    sharing = draw.choice([0.0, 0.3, 0.9])
    gap = draw.choice([0.0, 0.5, 2.0, 10.0])
    at = 0.0
    requests = []
    for i in range(count):
        at += draw.expovariate(1 / gap) if gap else 0.0
        request: dict[str, Any] = {
            "id": f"r{i}",
            "arrival": int(at),
            "output_len": _length(draw, mean_out, 2 * longest),
        }
        if draw.random() < sharing:
            head = draw.choice(heads)
            tail = [600_000 + 1000 * i + j for j in range(draw.choice([0, 0, 1, mean_in]))]
            prompt = head[: draw.randrange(1, len(head) + 1)] + tail
            request["prompt"] = prompt[:longest]
        else:
            request["prompt_len"] = _length(draw, mean_in, longest)
        if config["policy"] == "priority":
            request["priority"] = draw.randrange(3)
        if config.get("spec"):
            k = config["spec"]["k"]
            request["accept"] = [draw.randrange(k + 1) for _ in range(7)]
            if config["spec"]["method"] == "ngram" and draw.random() < 0.5:
                request["drafts"] = [draw.randrange(k + 1) for _ in range(5)]
        requests.append(request)
    return requests


def _length(draw: Random, mean: int, most: int) -> int:
    return max(1, min(most, round(draw.lognormvariate(math.log(mean), 0.8))))


def _blocks(draw: Random, config: dict[str, Any], requests: list[dict[str, Any]]) -> int:
    """Enough for one request of full length, and from there to more than all need at once."""
    size = config["block_size"]
    least = -(-config["max_model_len"] // size) + 1
    whole = sum(
        -(-(len(r.get("prompt", ())) + r.get("prompt_len", 0) + r["output_len"]) // size)
        for r in requests
    )
    wanted = min(whole, config["max_num_seqs"] * whole // len(requests))
    # The watermark must leave room for the one request that runs alone.
    least = math.ceil(least / (1 - config["watermark"])) + 1
    return int(least + draw.choice([0, 1, wanted // 8, wanted // 3, 2 * wanted]))
