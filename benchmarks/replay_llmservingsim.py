"""Replay the two recorded vLLM runs of LLMServingSim and print the errors beside its own.

    python benchmarks/replay_llmservingsim.py [PATH_OF_shared/validation/llmservingsim]

The runs: Llama-3.1-8B, 300 ShareGPT requests at 10/s, vLLM 0.19.0 (casys-kaist/LLMServingSim,
commit 5daddb21, MIT). The 4090's pool (2,588 blocks) is given, the PRO 6000's is predicted.
Efficiencies are the generic ones, nothing is fitted to these runs.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from servecast.calibration.measured import Latencies, errors, read_requests
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

SCENARIO = """
name: {name}
model: meta-llama/Llama-3.1-8B
hardware: {hardware}
engine: {engine}
workload:
  arrivals: {{kind: trace, path: {path}}}
"""


def replay(folder: Path, hardware: str, engine: str) -> tuple[Latencies, int]:
    """Predicted latencies of a recorded run, and the blocks of the pool."""
    path = folder / "vllm" / "requests.jsonl"
    with tempfile.TemporaryDirectory() as scratch:
        scenario = Path(scratch) / "scenario.yaml"
        scenario.write_text(
            SCENARIO.format(name=folder.name, hardware=hardware, engine=engine, path=path)
        )
        loaded = load_scenario(scenario)
        deployment = build(loaded)
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
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    for name, hardware, engine, theirs in RUNS:
        measured = read_requests(root / name / "vllm" / "requests.jsonl")
        predicted, blocks = replay(root / name, hardware, engine)
        print(f"{name}: {blocks} blocks")
        print(f"  {'':8}{'mean':>9}{'p50':>9}{'p99':>9}   LLMServingSim: mean, p50, p99")
        for metric, found in errors(measured, predicted).items():
            ours = "".join(f"{value:+9.1%}" for value in found.values())
            print(f"  {metric:8}{ours}   " + " ".join(f"{value:+.1%}" for value in theirs[metric]))


if __name__ == "__main__":
    main()
