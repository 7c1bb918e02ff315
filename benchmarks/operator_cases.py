"""Hold servecast against what operators measured: one JSON file a case.

    python benchmarks/operator_cases.py [--path DIR] [CASE ...]

For each case: what was measured and what comes out of the scenario that its text describes, with
generic efficiencies and nothing fitted; then, for the metric that the case turns on, each point's
ratio to the base of its group. `ratio` means within 10 % of the measured ratio, `order` that it
goes the same way (3 % either way is level), `wrong` that it does not. Where a case does not tell
its model, device or lengths, a stand-in serves, and no more than the order can be right. What
cannot be simulated is named with its reason. CASE is a file's name or a part of it; all by default.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from case_reading import read_case, why_not
from case_scenario import CasePoint, NotRead
from pydantic import ValidationError

from servecast.costmodels.versions import ASYNC_SINCE, parse_version
from servecast.scenarios.load import first_problem
from servecast.scenarios.points import Point, evaluate
from servecast.scenarios.schema import Scenario

DEFAULT = Path(__file__).parents[2] / "shared" / "validation" / "operator_cases"

#: Where relative paths of a scenario would start; no case has any.
CASE = Path("case.yaml")

#: Tried in place of a model's own longest request, where that alone overflows the pool.
SHORTER = (32_768, 16_384, 8192, 4096)

#: A ratio within this of the measured one is right; within that of 1 nothing moved.
RATIO_TOLERANCE = 0.10
LEVEL = 0.03

#: What points are compared by: of each row the first that they all have. An open loop serves what
#: arrives, so its rates say nothing.
HEADLINES = (
    ("total_tokens_per_s", "output_tokens_per_s", "requests_per_s", "decode_tokens_per_s"),
    ("tpot_mean_s", "itl_mean_s"),
    ("ttft_p50_s", "ttft_mean_s"),
    ("preemptions",),
    ("kv_tokens",),
)
OPEN_LOOPS = ("constant", "poisson")

#: What is printed, with unit and factor.
SHOWN = {
    "total_tokens_per_s": ("tok/s", 1.0),
    "output_tokens_per_s": ("out tok/s", 1.0),
    "requests_per_s": ("req/s", 1.0),
    "decode_tokens_per_s": ("decode tok/s", 1.0),
    "ttft_mean_s": ("TTFT ms", 1e3),
    "ttft_p50_s": ("TTFT p50 ms", 1e3),
    "ttft_p99_s": ("TTFT p99 ms", 1e3),
    "tpot_mean_s": ("TPOT ms", 1e3),
    "itl_mean_s": ("ITL ms", 1e3),
    "itl_p99_s": ("ITL p99 ms", 1e3),
    "e2e_p50_s": ("E2E p50 ms", 1e3),
    "e2e_p99_s": ("E2E p99 ms", 1e3),
    "preemptions": ("preemptions", 1.0),
    "running": ("running", 1.0),
    "kv_tokens": ("KV tokens", 1.0),
}


@dataclass(frozen=True)
class Outcome:
    """A point and what the simulation says of it.

    Attributes
    ----------
    simulated : metric to value; empty if it was not run
    skipped : why, in words
    """

    point: CasePoint
    simulated: dict[str, float]
    skipped: str = ""


@dataclass(frozen=True)
class Comparison:
    """One point's ratio to another; of a stand-in no more than the order can be right."""

    label: str
    base: str
    metric: str
    measured: float
    simulated: float
    stand_in: bool = False

    @property
    def verdict(self) -> str:
        if not self.simulated > 0:
            return "wrong"
        apart = abs(math.log(self.simulated / self.measured))
        if _side(self.measured) != _side(self.simulated) and apart > LEVEL:
            return "wrong"
        return "ratio" if apart <= RATIO_TOLERANCE and not self.stand_in else "order"


def _side(ratio: float) -> int:
    if abs(ratio - 1) <= LEVEL:
        return 0
    return 1 if ratio > 1 else -1


def run_point(point: CasePoint) -> Outcome:
    """Simulate one point of a case."""
    if point.scenario is None:
        return Outcome(point, {}, point.skipped)
    try:
        scenario = Scenario.model_validate(point.scenario)
    except ValidationError as errors:
        path, message = first_problem(errors, point.scenario)
        return Outcome(point, {}, f"{'.'.join(map(str, path))}: {message}")
    result = evaluate(Point(scenario, CASE, seed=0))
    for engine, note in _unstated(point, scenario) if result["error"] is not None else ():
        changed = scenario.engine.model_copy(update=engine)
        again = evaluate(Point(scenario.model_copy(update={"engine": changed}), CASE, seed=0))
        if again["error"] is None:
            point, result = replace(point, notes=(*point.notes, note)), again
            break
    if result["error"] is not None:
        return Outcome(point, {}, result["error"].removeprefix("case.yaml: "))
    return Outcome(point, metrics_of(result, scenario))


def metrics_of(result: Mapping[str, Any], scenario: Scenario) -> dict[str, float]:
    """The summary under the names of measured metrics."""
    summary = result["summary"]
    found = {
        f"{latency}_{statistic}_s": value
        for latency in ("ttft", "tpot", "itl", "e2e")
        for statistic, value in summary[f"{latency}_s"].items()
        if statistic != "n" and value
    }
    for metric in ("total_tokens_per_s", "output_tokens_per_s", "requests_per_s", "preemptions"):
        found[metric] = float(summary[metric])
    found["kv_tokens"] = float(summary["kv"]["tokens"])
    found["running"] = result["pressure"]["peak_running"]
    arrivals = scenario.workload.arrivals
    clients = getattr(arrivals, "concurrency", None) or getattr(arrivals, "requests", None)
    if clients and "itl_p50_s" in found:
        # Of steps that decode and do nothing else: most of them, so the median.
        found["decode_tokens_per_s"] = clients / found["itl_p50_s"]
    return found


def _unstated(point: CasePoint, scenario: Scenario) -> Iterator[tuple[dict[str, Any], str]]:
    """Flags that the operator must have set for it to start, and the case does not tell."""
    engine = scenario.engine
    if engine.vllm_version is not None:
        older = parse_version(engine.vllm_version) < ASYNC_SINCE
        now = {"vllm_version": None} | ({"async_scheduling": False} if older else {})
        yield now, f"does not start as {engine.vllm_version} counts memory: 0.32's count stands in"
    split: dict[str, Any] = {}
    if engine.tensor_parallel_size is None and point.devices > 1:
        split = {"tensor_parallel_size": point.devices}
        yield split, f"does not start on one device: tensor_parallel_size {point.devices} stands in"
    for length in SHORTER if engine.max_model_len is None else ():
        yield split | {"max_model_len": length}, f"does not start: max_model_len {length} stands in"


def headlines(outcomes: Sequence[Outcome]) -> list[str]:
    """The metrics that all these points have, measured and simulated."""
    common = set.intersection(*(o.point.measured.keys() & o.simulated.keys() for o in outcomes))
    scenarios = [outcome.point.scenario for outcome in outcomes if outcome.point.scenario]
    is_open = all(s["workload"]["arrivals"]["kind"] in OPEN_LOOPS for s in scenarios)
    rows = HEADLINES[1:] if is_open else HEADLINES
    chosen_ = (next((metric for metric in row if metric in common), None) for row in rows)
    return [metric for metric in chosen_ if metric is not None]


def compare(outcomes: Iterable[Outcome]) -> list[Comparison]:
    """Every simulated point against its group's base; in a sweep also against the one before.

    The base is the first point, among ways to store weights and KV the first that stores both in
    16 bits.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.simulated:
            groups.setdefault(outcome.point.group, []).append(outcome)
    found = []
    for members in groups.values():
        metrics = headlines(members)
        plain = [number for number, outcome in enumerate(members) if not _formats(outcome)]
        base = plain[0] if plain else 0
        pairs = [(base, other) for other in range(len(members)) if other != base]
        if len({_formats(outcome) for outcome in members}) == 1:
            pairs += [(i - 1, i) for i in range(2, len(members))]
        for i, j in pairs:
            found += [_against(members[i], members[j], metric) for metric in metrics]
    return found


def _formats(outcome: Outcome) -> str:
    """How weights and KV are stored, where that is not the model's own way."""
    engine = outcome.point.scenario["engine"] if outcome.point.scenario else {}
    stored = (engine.get("quantization"), engine.get("kv_cache_dtype"))
    return " ".join(name for name in stored if name not in (None, "auto"))


def _against(base: Outcome, other: Outcome, metric: str) -> Comparison:
    measured = other.point.measured[metric] / base.point.measured[metric]
    before, after = base.simulated[metric], other.simulated[metric]
    simulated = after / before if before else math.nan
    stand_in = any("stand" in note for note in (*base.point.notes, *other.point.notes))
    return Comparison(other.point.label, base.point.label, metric, measured, simulated, stand_in)


# ---------------------------------------------------------------- print


def show(name: str, case: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    print(f"{name}  {case.get('kind', '')}  [{case.get('source', '')}]")
    if "trust" in case:
        print(f"  trust: {case['trust']}")
    for outcome in outcomes:
        print(f"  {outcome.point.label or 'all'}")
        if outcome.skipped:
            print(f"      not simulated: {outcome.skipped}")
        for note in outcome.point.notes:
            print(f"      note: {note}")
        line = ", ".join(_figures(outcome))
        if line:
            print(f"      {line}")
    comparisons = compare(outcomes)
    for (label, base), pair in groupby(comparisons, key=lambda c: (c.label, c.base)):
        print(f"  {label}  over  {base}:")
        print("      " + ", ".join(map(_words, pair)))
    verdicts = [comparison.verdict for comparison in comparisons]
    if verdicts:
        counts = (f"{verdicts.count(word)} {word}" for word in ("ratio", "order", "wrong"))
        print(f"  = {', '.join(counts)}")
    print()


def _words(comparison: Comparison) -> str:
    unit = SHOWN[comparison.metric][0].removesuffix(" ms")
    return f"{unit} x{comparison.measured:.3g} -> x{comparison.simulated:.3g} {comparison.verdict}"


def _figures(outcome: Outcome) -> Iterable[str]:
    """`TTFT ms 31 -> 28 (-10 %)` for each metric that is known twice."""
    for metric, (unit, factor) in SHOWN.items():
        if metric in outcome.point.measured and metric in outcome.simulated:
            theirs, ours = outcome.point.measured[metric], outcome.simulated[metric]
            yield f"{unit} {theirs * factor:.4g} -> {ours * factor:.4g} ({ours / theirs - 1:+.0%})"


def chosen(folder: Path, wanted: Sequence[str]) -> list[Path]:
    """Case files in the order of their numbers."""
    files = sorted(folder.glob("*.json"), key=lambda path: (len(path.stem), path.stem))
    return [path for path in files if not wanted or any(word in path.stem for word in wanted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names, or parts of them")
    parser.add_argument("--path", type=Path, default=DEFAULT, help="folder of the case files")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    paths = chosen(arguments.path, arguments.cases)
    if not paths:
        parser.error(f"no such case in {arguments.path}")
    cases = {path.stem: json.loads(path.read_text()) for path in paths}
    with ProcessPoolExecutor(arguments.workers) as pool:
        running = {}
        for name, case in cases.items():
            reason, points = why_not(case), []
            try:
                points = [] if reason else read_case(case)
            except NotRead as unread:
                reason = str(unread)
            running[name] = reason, [pool.submit(run_point, point) for point in points]
        for name, (reason, futures) in running.items():
            skipped = [Outcome(CasePoint("", "", {}), {}, reason)] if reason else []
            show(name, cases[name], skipped or [future.result() for future in futures])


if __name__ == "__main__":
    main()
