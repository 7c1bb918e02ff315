"""What-if: the grid of changes, and what may be said of it."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from servecast.costmodels.errors import InputError
from servecast.reports.whatif_console import render_whatif
from servecast.reports.whatif_html import render_whatif_report
from servecast.scenarios.explain import explain, step_seconds
from servecast.scenarios.knobs import parse_vary
from servecast.scenarios.load import LoadedScenario, load_scenario
from servecast.scenarios.paired import told_apart
from servecast.scenarios.points import Point, evaluate
from servecast.scenarios.store import Store
from servecast.scenarios.sweep import Sweep
from servecast.scenarios.whatif import whatif

SMALL = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: rtx-4090
engine: {max_model_len: 4096, max_num_seqs: 16}
workload:
  arrivals: {kind: poisson, rate_per_s: 6, requests: 60}
  lengths:
    kind: uniform
    input_tokens: {min: 50, max: 600}
    output_tokens: {min: 5, max: 60}
sla: {ttft_p95_s: 1, e2e_p95_s: 3}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> LoadedScenario:
    path = tmp_path_factory.mktemp("whatif") / "small.yaml"
    path.write_text(SMALL)
    return load_scenario(path)


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return Sweep(Store(None))


def ask(loaded: LoadedScenario, sweep: Sweep, *vary: str, n: int = 3) -> dict[str, Any]:
    return whatif(loaded, [parse_vary(text, "--vary") for text in vary], n, sweep)


# ---------------------------------------------------------------- laws


def test_varying_nothing_changes_nothing(small: LoadedScenario, sweep: Sweep) -> None:
    """Common random numbers: the difference is zero, and so is its interval."""
    result = ask(small, sweep, "load=1", "hardware=rtx-4090")
    (point,) = result["points"]
    assert point["same_as_base"]
    assert point["explanation"] == []
    assert point["metrics"] == result["base"]["metrics"]
    for delta in point["deltas"].values():
        assert delta["mean"] == delta["lo"] == delta["hi"] == 0
    (note,) = result["notes"]
    assert note.startswith("load and hardware: no effect on this load")
    assert result["runs"] == 3  # equal scenarios are run once


def test_an_empty_grid_says_so(small: LoadedScenario, sweep: Sweep) -> None:
    result = ask(small, sweep)
    assert result["points"] == []
    assert result["notes"] == ["nothing is varied: only the base was run (--vary key=value,value)"]


def test_a_knob_that_does_nothing_is_told(small: LoadedScenario, sweep: Sweep) -> None:
    alone = ask(small, sweep, "engine.swap_space=2,8")
    assert alone["notes"][0].startswith("engine.swap_space: no effect on this load")
    beside = ask(small, sweep, "engine.swap_space=2,8", "load=1,4")
    assert beside["notes"][0].startswith("engine.swap_space: no effect on this load, 2, 8 give")


def test_more_load_never_improves_an_overloaded_server(small: LoadedScenario, sweep: Sweep) -> None:
    result = ask(small, sweep, "load=4..8")
    e2e = [point["metrics"]["e2e_mean_s"] for point in result["points"]]
    assert e2e == sorted(e2e)
    assert e2e[0] > result["base"]["metrics"]["e2e_mean_s"]
    first = result["points"][-1]["explanation"][0]
    assert first["what"] == "queueing"
    assert "all sequence slots were taken" in first["text"]


def test_a_faster_device_is_better_beyond_its_interval(small: LoadedScenario, sweep: Sweep) -> None:
    (point,) = ask(small, sweep, "hardware=h100-sxm")["points"]
    for name in ("ttft_p95_s", "e2e_mean_s", "tpot_mean_s"):
        assert point["deltas"][name]["hi"] < 0
    assert {entry["what"] for entry in point["explanation"]} >= {"decode"}


def test_replicas_may_fail(small: LoadedScenario, sweep: Sweep) -> None:
    result = ask(small, sweep, "replicas=1,2", "failure={at_s: 2, replicas: 1},null", "load=8")
    alone, _, lamed, whole = result["points"]
    assert "would leave none" in alone["error"]
    assert alone["deltas"] == {}
    assert whole["metrics"]["e2e_mean_s"] < lamed["metrics"]["e2e_mean_s"]


# ---------------------------------------------------------------- what is refused


def test_what_does_not_start_is_an_answer(small: LoadedScenario, sweep: Sweep) -> None:
    result = ask(small, sweep, "model=meta-llama/Llama-3.1-70B,meta-llama/Llama-3.1-8B", n=1)
    large, same = result["points"]
    assert large["error"].startswith("meta-llama/Llama-3.1-70B on 1 x rtx-4090 does not start")
    assert same["error"] is None
    assert result["notes"][-1].startswith("one replication")
    assert same["deltas"]["goodput_per_s"]["lo"] is None


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        (["engine.max_num_sqs=3"], "did you mean max_num_seqs"),
        (["engine.max_num_seqs=4,many"], "engine.max_num_seqs=many"),
        (["load=1,-2"], "load: expected a number above 0"),
        (["load=1..100", "prompt=1..100"], "10,000 points x 3 replications"),
        (["load=1", "load=2"], "given twice"),
    ],
)
def test_a_wrong_grid_is_one_line(
    small: LoadedScenario, sweep: Sweep, vary: list[str], words: str
) -> None:
    with pytest.raises(InputError, match="--vary") as error:
        ask(small, sweep, *vary)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- explanations


def test_stages_and_parts_add_up(small: LoadedScenario) -> None:
    summary = evaluate(Point(small.scenario, small.path, 0))["summary"]
    tokens = summary["output_tokens_per_s"] * summary["duration_s"]
    parts = sum(step_seconds(summary, part, 1) or 0 for part in summary["step_time_share"])
    share = summary["step_time_share"]
    waiting = share["host"] + share["swap"]
    busy = summary["utilisation"]["device_busy"] * summary["duration_s"] / (1 - waiting)
    assert parts * tokens == pytest.approx(busy)


def test_only_what_can_be_told_is_explained(small: LoadedScenario, sweep: Sweep) -> None:
    base = [evaluate(Point(small.scenario, small.path, seed)) for seed in range(3)]
    assert explain(base, base, (1, 1)) == []
    for point in ask(small, sweep, "load=2,4")["points"]:
        ranks = [entry["rank"] for entry in point["explanation"]]
        assert ranks == sorted(ranks, reverse=True)
        assert all(told_apart(entry["delta"]) for entry in point["explanation"])


# ---------------------------------------------------------------- what is shown


def test_the_result_is_json_and_both_renderings_show_it(
    small: LoadedScenario, sweep: Sweep
) -> None:
    models = "model=meta-llama/Llama-3.1-70B,meta-llama/Llama-3.1-8B"
    result = ask(small, sweep, "load=1,4", models)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    file = io.StringIO()
    Console(file=file, width=80).print(render_whatif(result))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for words in ("load x4", "goodput/s", "no start", "✗ 0/3", "queueing", "measured on"):
        assert words in text, words
    report = render_whatif_report(result)
    assert report == render_whatif_report(result)
    assert "<script" not in report
    assert "http" not in report.replace("http://www.w3.org", "")
    for words in ("SLA by point", "Both keys together", "does not run", "<svg", "Change against"):
        assert words in report, words


def test_a_name_is_never_markup(tmp_path: Path, sweep: Sweep) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(SMALL.replace("name: small", "name: '<script>[bold]'"))
    result = ask(load_scenario(path), sweep, "load=2", n=1)
    assert "<script" not in render_whatif_report(result)
    file = io.StringIO()
    Console(file=file, width=80).print(render_whatif(result))
    assert "<script>[bold]" in file.getvalue()
