"""How fast the simulator is, beside its own stepped reference, in one run.

    python benchmarks/speed.py [--quick]

Each load runs in a process of its own: `servecast run` whole, output tables included, for
requests per CPU second and peak memory; then the simulation alone, fast and stepped, on a tenth of
the requests. Stepped means that every step is an event and visits every sequence; with speculation
every step does anyway, and `servecast run` serves the load without it too.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARED = Path(__file__).parents[2] / "shared"

FIXED = "lengths: {kind: fixed, input_tokens: 512, output_tokens: 128}"
SCENARIO = """
name: speed
model: meta-llama/Llama-3.1-8B
hardware: h100-sxm
engine:
  {{max_num_seqs: 256, max_num_batched_tokens: 2048, block_size: 16, enable_prefix_caching: true}}
workload:
  arrivals: {arrivals}
  {lengths}
"""

#: Name: arrivals, lengths, overrides. REQUESTS stands for how many.
LOADS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "reference (20/s)": ("{kind: constant, rate_per_s: 20, requests: REQUESTS}", FIXED, ()),
    "5/s": ("{kind: constant, rate_per_s: 5, requests: REQUESTS}", FIXED, ()),
    "60/s": ("{kind: constant, rate_per_s: 60, requests: REQUESTS}", FIXED, ()),
    "Poisson 20/s": ("{kind: poisson, rate_per_s: 20, requests: REQUESTS}", FIXED, ()),
    "no prefix caching": (
        "{kind: constant, rate_per_s: 20, requests: REQUESTS}",
        FIXED,
        ("engine.enable_prefix_caching=false",),
    ),
    "1024 seqs, saturated": (
        "{kind: constant, rate_per_s: 200, requests: REQUESTS}",
        FIXED,
        ("engine.max_num_seqs=1024",),
    ),
    "speculation, k = 4": (
        "{kind: constant, rate_per_s: 20, requests: REQUESTS}",
        FIXED,
        ("engine.speculative_config={method: eagle3, num_speculative_tokens: 4}",),
    ),
    "Azure conversation": (
        f"{{kind: trace, path: {SHARED}/traces/azure-2023/AzureLLMInferenceTrace_conv.csv, "
        "limit: REQUESTS}",
        "",
        ("engine.max_num_batched_tokens=8192",),
    ),
}


def whole(path: Path, overrides: tuple[str, ...]) -> tuple[float, float]:
    """CPU seconds and peak MB of `servecast run` with its tables written, in this process."""
    from servecast.reports.tables import write_requests, write_steps
    from servecast.scenarios.load import load_scenario
    from servecast.scenarios.run import run

    result = run(load_scenario(path, overrides))
    write_requests(result.trace, path.parent / "requests.parquet")
    write_steps(result.trace, path.parent / "steps.parquet")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time(), usage.ru_maxrss / 1024


def alone(path: Path, overrides: tuple[str, ...]) -> tuple[float, float, int]:
    """CPU seconds of the simulation, fast and stepped, and the steps that it made."""
    from servecast.scenarios.build import build, speculation_for
    from servecast.scenarios.load import load_scenario
    from servecast.scenarios.workload import build_requests
    from servecast.sim.world import simulate

    loaded = load_scenario(path, overrides)
    deployment = build(loaded)
    table = build_requests(loaded.scenario, path.parent, 0, print)
    seconds = []
    steps = 0
    for fast in (True, False):
        start = time.process_time()
        run = simulate(
            table,
            deployment.limits,
            deployment.cost,
            speculation=speculation_for(deployment, loaded.scenario, path.parent, 0),
            fast_forward=fast,
            aggregate=fast,
            private_runs=fast,
        )
        seconds.append(time.process_time() - start)
        steps = int(run.trace.steps["steps"].sum())
    return seconds[0], seconds[1], steps


def child(kind: str, path: Path, overrides: tuple[str, ...]) -> None:
    print(*(whole if kind == "whole" else alone)(path, overrides))


def measure(kind: str, load: str, requests: int) -> list[float]:
    arrivals, lengths, overrides = LOADS[load]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "scenario.yaml"
        text = SCENARIO.format(arrivals=arrivals, lengths=lengths)
        path.write_text(text.replace("REQUESTS", str(requests)))
        command = [sys.executable, __file__, "--child", kind, str(path), *overrides]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()[-3:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, path, *overrides = arguments.child
        child(kind, Path(path), tuple(overrides))
        return
    requests = 10_000 if arguments.quick else 100_000
    print(
        f"{'load':22}{'requests':>9}{'req/CPU s':>11}{'peak MB':>9}"
        f"{'fast, req/s':>13}{'stepped':>9}{'ratio':>7}{'steps/s':>11}"
    )
    for load in LOADS:
        n = min(requests, 19_366) if load.startswith("Azure") else requests
        if load.startswith("Azure") and not SHARED.is_dir():
            print(f"{load:22} skipped: ../shared is not beside this clone")
            continue
        cpu_s, peak_mb = measure("whole", load, n)[-2:]
        fast_s, stepped_s, steps = measure("alone", load, n // 10)
        print(
            f"{load:22}{n:>9}{n / cpu_s:>11,.0f}{peak_mb:>9.0f}{n / 10 / fast_s:>13,.0f}"
            f"{n / 10 / stepped_s:>9,.0f}{stepped_s / fast_s:>7.1f}{steps / fast_s:>11,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
