"""Replay the two recorded vLLM runs of LLMServingSim and print the errors beside its own.

    python benchmarks/replay_llmservingsim.py [--match-tpot]

The runs: Llama-3.1-8B, 300 ShareGPT requests at 10/s, vLLM 0.19.0 (casys-kaist/LLMServingSim,
commit 5daddb21, MIT). The 4090's pool (2,588 blocks) is given, the PRO 6000's is predicted.
Efficiencies are the generic ones, nothing is fitted to these runs; `servecast validate` holds the
same runs against kernels measured on these GPUs (`benchmarks/cases.py`). `--match-tpot` shows what
is left when all efficiencies are scaled by one number, so that the mean gap between tokens is
right: the error of scheduling, memory and the shape of the cost.
"""

import argparse
import tempfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from servecast.calibration.measured import Latencies, errors, read_requests
from servecast.calibration.profile import GENERIC, Profile
from servecast.scenarios.build import build
from servecast.scenarios.load import load_scenario
from servecast.scenarios.workload import build_requests

DEFAULT = Path(__file__).parents[2] / "shared" / "validation" / "llmservingsim"

#: Folder, hardware, engine flags as recorded, and LLMServingSim's own errors (its summary.txt).
RUNS = (
    (
        "RTX4090-Llama-3.1-8B",
        "rtx-4090",
        "{max_num_seqs: 256, max_num_batched_tokens: 2048, max_model_len: 32768, "
        "gpu_memory_utilization: 0.9, num_gpu_blocks_override: 2588}",
        {
            "ttft_s": (0.006, 0.008, 0.003),
            "tpot_s": (0.002, 0.002, 0.009),
            "e2e_s": (0.005, 0.009, 0.004),
        },
    ),
    (
        "RTXPRO6000-Llama-3.1-8B",
        "rtx-pro-6000",
        "{max_num_seqs: 128, max_num_batched_tokens: 2048, gpu_memory_utilization: 0.9}",
        {
            "ttft_s": (-0.040, -0.086, -0.020),
            "tpot_s": (-0.010, -0.000, 0.006),
            "e2e_s": (-0.018, -0.012, -0.016),
        },
    ),
)

#: The load of both, beside the runs: lengths, and which blocks of 16 tokens prompts have in common.
#: The servers had their prefix cache on, and 8 % of the prompts' tokens were in it.
PROMPTS = "traces/sharegpt/sharegpt-llama-3.1-8b-300-sps10_lengths.csv"

MATCH_TRIES = 3

SCENARIO = """
name: {name}
model: meta-llama/Llama-3.1-8B
hardware: {hardware}
engine: {engine}
workload:
  arrivals: {{kind: trace, path: {path}}}
  sampling: {{temperature: 0}}
"""


def scaled(speed: float) -> Profile:
    """The generic profile with every kernel faster by `speed`."""
    generic = GENERIC.efficiency
    changes = {
        field.name: getattr(generic, field.name)
        * (1 / speed if field.name.endswith("_s") else speed)
        for field in fields(generic)
        if field.name != "label"
    }
    return replace(GENERIC, efficiency=replace(generic, **changes))


def load_of(folder: Path) -> Path:
    """The load of a recorded run: with what prompts share, where that is at hand."""
    prompts = folder.parents[2] / PROMPTS
    return prompts if prompts.exists() else folder / "vllm" / "requests.jsonl"


def replay(folder: Path, hardware: str, engine: str, profile: Profile) -> tuple[Latencies, int]:
    """Predicted latencies of a recorded run, and the blocks of the pool."""
    path = load_of(folder)
    with tempfile.TemporaryDirectory() as scratch:
        scenario = Path(scratch) / "scenario.yaml"
        scenario.write_text(
            SCENARIO.format(name=folder.name, hardware=hardware, engine=engine, path=path)
        )
        loaded = load_scenario(scenario)
        deployment = build(loaded, profile)
        table = build_requests(loaded.scenario, loaded.path.parent, 0, print)
    requests = deployment.simulate(table).trace.requests
    sent, first, last = (
        requests[f"{name}_ns"] / 1e9 for name in ("arrival", "first_token", "finish")
    )
    return (
        Latencies.from_times(sent, first, last, requests["output_tokens"].astype(np.float64)),
        deployment.memory.blocks,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match-tpot", action="store_true", help="scale the device's speed")
    parser.add_argument("--path", type=Path, default=DEFAULT, help="folder of the recorded runs")
    arguments = parser.parse_args()
    for name, hardware, engine, theirs in RUNS:
        folder = arguments.path / name
        measured = read_requests(folder / "vllm" / "requests.jsonl")
        speed = 1.0
        predicted, blocks = replay(folder, hardware, engine, GENERIC)
        for _ in range(MATCH_TRIES if arguments.match_tpot else 0):
            speed *= 1 + errors(measured, predicted)["tpot_s"]["mean"]
            predicted, blocks = replay(folder, hardware, engine, scaled(speed))
        print(f"{name}: {blocks} blocks, speed x {speed:.3f}")
        print(f"  {'':8}{'mean':>9}{'p50':>9}{'p99':>9}   LLMServingSim: mean, p50, p99")
        for metric, found in errors(measured, predicted).items():
            ours = "".join(f"{value:+9.1%}" for value in found.values())
            print(f"  {metric:8}{ours}   " + " ".join(f"{value:+.1%}" for value in theirs[metric]))


if __name__ == "__main__":
    main()
