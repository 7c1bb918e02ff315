"""Predict ten published serving runs of vLLM on H100 and print the errors, stage by stage.

    python benchmarks/vllm_h100.py [--generic] [--path DIR]

The runs: Llama-2-7B on one H100 SXM and CodeLlama-34B on two, inference-perf at constant rates
(inference-sim/training, folder default_args, commit ed5c1d2). Its client counts two gaps a token,
so the time between tokens is (E2E - TTFT) / (output tokens - 1). Prompts are ten in each of ten
groups, drawn again and again. Overloaded runs are left out. Kernel times are those of the bundled
h100-sxm profile, or generic efficiencies with `--generic`; nothing is fitted to the runs, and what
client and HTTP add to TTFT is not modelled.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from servecast.calibration.profile import GENERIC, Profile
from servecast.calibration.store import load_profile
from servecast.scenarios.build import build
from servecast.scenarios.load import load_scenario
from servecast.scenarios.workload import build_requests

DEFAULT = Path(__file__).parents[2] / "shared" / "validation" / "vllm-h100"

#: Of a stage, so many seconds are simulated: the load is steady.
SECONDS = 300

SCENARIO = """
name: stage
model: {model}
hardware: h100-sxm
engine:
  tensor_parallel_size: {tensor_parallel}
  max_num_seqs: {max_num_seqs}
  max_num_batched_tokens: {max_num_batched_tokens}
  max_model_len: {max_model_len}
  gpu_memory_utilization: 0.9
  vllm_version: 0.15.0
workload:
  arrivals: {{kind: constant, rate_per_s: {rate}, requests: {requests}}}
  lengths: {{kind: fixed, input_tokens: {question}, output_tokens: {output_tokens_max}}}
  prefixes: {{groups: 10, prefix_tokens: {prefix}, prompts_per_group: 10}}
"""


@dataclass(frozen=True)
class Means:
    """Mean seconds of a stage."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def measured_means(row: Mapping[str, str]) -> Means:
    ttft_s, e2e_s = float(row["ttft_s_mean"]), float(row["e2e_s_mean"])
    return Means(ttft_s, (e2e_s - ttft_s) / (int(row["output_tokens_max"]) - 1), e2e_s)


def predicted_means(row: Mapping[str, str], configs: Path, profile: Profile) -> Means:
    prefix = int(row["system_prompt_tokens"])
    rate = float(row["stage_rate_per_s"])
    text = SCENARIO.format(
        **{key: value for key, value in row.items() if key not in ("model", "rate")},
        model=configs / f"{row['model'].rpartition('/')[2]}.config.json",
        rate=rate,
        requests=round(rate * SECONDS),
        prefix=prefix,
        question=round(float(row["prompt_len_mean"])) - prefix,
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "scenario.yaml"
        path.write_text(text)
        loaded = load_scenario(path)
        deployment = build(loaded, profile)
        table = build_requests(loaded.scenario, path.parent, 0, print)
    requests = deployment.simulate(table).trace.requests
    sent, first, last = (
        requests[f"{name}_ns"] / 1e9 for name in ("arrival", "first_token", "finish")
    )
    gaps = int(row["output_tokens_max"]) - 1
    return Means(
        float(np.mean(first - sent)),
        float(np.mean(last - first)) / gaps,
        float(np.mean(last - sent)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--generic", action="store_true", help="without measured kernels")
    parser.add_argument("--path", type=Path, default=DEFAULT, help="folder of measured.csv")
    arguments = parser.parse_args()
    path = arguments.path / "measured.csv"
    if not path.is_file():
        sys.exit(f"vllm_h100: {path}: not there")
    kernels = None if arguments.generic else load_profile("h100-sxm").kernels()
    profile = replace(GENERIC, kernels=kernels)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [r for r in csv.DictReader(file) if int(r["stage"]) >= 0]
    off: list[tuple[float, float, float]] = []
    for row in rows:
        if "reasoning" in row["experiment"]:
            continue
        real = measured_means(row)
        ours = predicted_means(row, arguments.path, profile)
        ttft, tpot, e2e = (
            getattr(ours, field.name) / getattr(real, field.name) - 1 for field in fields(Means)
        )
        off.append((ttft, tpot, e2e))
        name = f"{row['experiment'].split('-', 2)[2]} {float(row['stage_rate_per_s']):g}/s"
        print(
            f"{name:34} TTFT {1e3 * ours.ttft_s:5.1f} for {1e3 * real.ttft_s:5.1f} ms, "
            f"TPOT {1e3 * ours.tpot_s:5.2f} for {1e3 * real.tpot_s:5.2f} ms ({tpot:+.1%}), "
            f"E2E {e2e:+.1%}"
        )
    absolute = np.abs(np.array(off))
    for name, column in zip(("TTFT", "TPOT", "E2E"), absolute.T, strict=True):
        print(f"{name}: median error {np.median(column):.1%}, worst {column.max():.1%}")


if __name__ == "__main__":
    main()
