"""Hold the answer of `servecast size` against every point of its grid, simulated once.

    python benchmarks/exhaustive.py SCENARIO.yaml ... [--workers 2]

For each scenario: the best goodput of the whole grid (the scenario's load and seed) among the
points that meet the SLA, the goodput of the answer's point, and the simulated requests of each.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from servecast.scenarios.factors import change
from servecast.scenarios.load import load_scenario
from servecast.scenarios.points import Point
from servecast.scenarios.sizing import size
from servecast.scenarios.store import Store
from servecast.scenarios.sweep import Sweep


def hold(path: Path, workers: str) -> dict[str, Any]:
    """Sizes one scenario, then simulates its whole grid."""
    loaded = load_scenario(path)
    with Sweep(Store(None), workers) as sweep:
        answer = size(loaded, sweep)
    grid = [
        dict(zip(answer["knobs"], values, strict=True))
        for values in product(*answer["knobs"].values())
    ]
    runnable = []
    for changes in grid:
        try:
            runnable.append((changes, change(loaded.scenario, changes)))
        except ValueError:
            continue
    with Sweep(Store(None), workers) as sweep:
        points = [Point(scenario, path, loaded.scenario.seed) for _, scenario in runnable]
        results = list(sweep.run(points))
        spent = sweep.used_requests
    goodput = {}
    for (changes, _), result in zip(runnable, results, strict=True):
        if result["error"] is None:
            verdict = result["summary"]["sla"]["met"] is not False
            goodput[tuple(changes.values())] = (verdict, result["summary"]["goodput_per_s"])
    best_at = max(goodput, key=lambda at: goodput[at])
    ours = tuple(answer["best"]["changes"].values())
    return {
        "grid": len(grid),
        "best_at": dict(zip(answer["knobs"], best_at, strict=True)),
        "best": goodput[best_at],
        "ours_at": dict(zip(answer["knobs"], ours, strict=True)),
        "ours": goodput[ours],
        "default": answer["default"] and answer["default"]["goodput_per_s"],
        "work": answer["simulated_requests"] / spent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="+", type=Path)
    parser.add_argument("--workers", default="2")
    arguments = parser.parse_args()
    for path in arguments.scenarios:
        found = hold(path, arguments.workers)
        (met, best), (ours_met, ours) = found["best"], found["ours"]
        print(f"{path.stem}: grid of {found['grid']}")
        print(f"  best of the grid  {best:8.4f}/s met={met} {found['best_at']}")
        print(f"  servecast size    {ours:8.4f}/s met={ours_met} {found['ours_at']}")
        print(f"  short of the best {1 - ours / best:.2%}, with {found['work']:.1%} of the work")


if __name__ == "__main__":
    main()
