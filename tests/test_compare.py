"""A and B on the same arrivals: which is better, how surely, and from which load on."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from servecast.costmodels.errors import InputError
from servecast.reports.whatif_console import render_compare
from servecast.reports.whatif_html import render_compare_report
from servecast.scenarios.canary import split
from servecast.scenarios.compare import compare
from servecast.scenarios.load import LoadedScenario, load_scenario
from servecast.scenarios.paired import difference, probability_better
from servecast.scenarios.store import Store
from servecast.scenarios.sweep import Sweep

SMALL = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: l40s
engine: {max_model_len: 4096, max_num_seqs: 16}
workload:
  arrivals: {kind: poisson, rate_per_s: 6, requests: 50}
  lengths:
    kind: uniform
    input_tokens: {min: 50, max: 600}
    output_tokens: {min: 5, max: 60}
sla: {ttft_p95_s: 1, e2e_p95_s: 3}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return Sweep(Store(None))


@pytest.fixture(scope="module")
def base(path: Path) -> LoadedScenario:
    return load_scenario(path)


@pytest.fixture(scope="module")
def faster(path: Path, base: LoadedScenario, sweep: Sweep) -> dict[str, Any]:
    return compare(base, load_scenario(path, ["hardware=h100-sxm"]), 4, sweep, 0.2)


def by_name(result: dict[str, Any]) -> dict[str, Any]:
    return {row["metric"]: row for row in result["metrics"]}


# ---------------------------------------------------------------- laws


def test_a_is_as_good_as_a(base: LoadedScenario, sweep: Sweep) -> None:
    result = compare(base, base, 3, sweep)
    for row in result["metrics"]:
        assert row["delta"]["mean"] == row["delta"]["lo"] == row["delta"]["hi"] == 0
        assert row["p_b_better"] == (0.5 if row["better"] else None)
    assert result["verdict"] == "A and B serve this load exactly alike, in every replication."
    assert result["differs"] == result["explanation"] == result["notes"] == []
    assert result["parting"]["load"] is None
    assert result["parting"]["below"] == 8


def test_a_strictly_faster_device_is_better(faster: dict[str, Any]) -> None:
    rows = by_name(faster)
    for name in ("ttft_p50_s", "ttft_p95_s", "tpot_mean_s", "e2e_mean_s", "e2e_p95_s"):
        assert rows[name]["p_b_better"] > 0.99, name
        assert rows[name]["delta"]["hi"] < 0
    assert faster["differs"][0] == {"key": "hardware", "a": "l40s", "b": "h100-sxm"}
    # And what vLLM chooses otherwise on that hardware.
    assert faster["differs"][1]["key"] == "engine.max_num_batched_tokens"
    assert faster["verdict"].startswith("B ")


def test_swapping_the_sides_swaps_the_answer(
    path: Path, base: LoadedScenario, sweep: Sweep, faster: dict[str, Any]
) -> None:
    rows = by_name(faster)
    turned = by_name(compare(load_scenario(path, ["hardware=h100-sxm"]), base, 4, sweep))
    for name, row in turned.items():
        assert row["delta"]["mean"] == pytest.approx(-rows[name]["delta"]["mean"])
        if row["p_b_better"] is not None:
            assert row["p_b_better"] + rows[name]["p_b_better"] == pytest.approx(1)


def test_they_part_where_the_slower_one_breaks(faster: dict[str, Any]) -> None:
    parting = faster["parting"]
    assert 1 <= parting["below"] < parting["load"] <= 8
    assert parting["load"] / parting["below"] < 1.1
    for entry in parting["loads"]:
        assert bool(entry["parted"]) == (entry["load"] >= parting["load"])


def test_the_interval_covers_the_truth() -> None:
    """95 % of paired intervals hold the true difference, whatever noise the pair shares."""
    rng = np.random.default_rng(0)
    covered, sure = [], []
    for _ in range(2000):
        shared = rng.normal(0, 10, 5)
        a, b = shared + rng.normal(3, 1, 5), shared + rng.normal(4, 1, 5)
        delta = difference(a.tolist(), b.tolist())
        assert delta is not None and delta["lo"] is not None and delta["hi"] is not None
        covered.append(delta["lo"] <= 1 <= delta["hi"])
        sure.append(probability_better(a.tolist(), b.tolist(), 1))
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    assert np.mean(np.array(sure) > 0.5) > 0.85


def test_probability_and_interval_agree() -> None:
    a, b = [1.0, 2.0, 4.0], [2.0, 2.5, 4.1]
    up, down = (probability_better(a, b, better) for better in (1, -1))
    assert up is not None and down is not None
    assert up + down == pytest.approx(1)
    delta = difference(a, b)
    assert delta is not None and delta["lo"] is not None
    assert (up > 0.975) == (delta["lo"] > 0)
    assert probability_better([1.0], [2.0], 1) is None
    assert probability_better([1.0, 2.0], [2.0, 3.0], 1) == 1


# ---------------------------------------------------------------- what is compared


def test_other_loads_and_limits_are_noted(path: Path, base: LoadedScenario, sweep: Sweep) -> None:
    other = load_scenario(path, ["workload.arrivals.rate_per_s=7", "sla.ttft_p95_s=2"])
    notes = compare(base, other, 1, sweep)["notes"]
    assert [note.partition(":")[0] for note in notes] == [
        "the workloads differ",
        "the SLAs differ",
        "one replication",
    ]


def test_what_does_not_start_is_the_verdict(path: Path, base: LoadedScenario, sweep: Sweep) -> None:
    large = load_scenario(path, ["model=meta-llama/Llama-3.1-70B"])
    result = compare(base, large, 2, sweep)
    assert result["verdict"].startswith("B does not run: meta-llama/Llama-3.1-70B on 1 x l40s")
    assert result["metrics"] == []
    assert "does not run" in render_compare_report(result)


# ---------------------------------------------------------------- canary


def test_a_canary_gets_its_share_and_nothing_is_lost(table: Any) -> None:
    load = table(np.arange(4000.0), np.arange(4000) + 1, 5)
    rest, canary = split(load, 0.05, seed=3)
    assert len(rest) + len(canary) == 4000
    assert len(canary) == pytest.approx(200, abs=50)
    both = np.concatenate([rest.prompt_tokens, canary.prompt_tokens])
    np.testing.assert_array_equal(np.sort(both), load.prompt_tokens)
    again = split(load.head(1000), 0.05, seed=3)[1]
    np.testing.assert_array_equal(again.prompt_tokens, canary.prompt_tokens[: len(again)])


def test_a_canary_keeps_sessions_and_clients_whole(table: Any) -> None:
    turn = np.arange(300) % 3
    after = np.where(turn > 0, np.arange(300) - 1, -1)
    load = table(np.arange(300) // 3, 10, 5, after=after, think_ns=np.zeros(300, np.int64))
    for part in split(load, 0.3, seed=1):
        assert part.after is not None
        assert len(part) % 3 == 0
        own = np.arange(len(part))
        np.testing.assert_array_equal(part.after, np.where(own % 3 > 0, own - 1, -1))
    clients = [
        part.concurrency for part in split(table(np.zeros(99), 1, 1, concurrency=8), 0.25, 0)
    ]
    assert clients == [6, 2]


def test_a_canary_is_lightly_loaded(faster: dict[str, Any]) -> None:
    canary = faster["canary"]
    assert canary["a"]["requests"] + canary["b"]["requests"] == 50
    assert (
        canary["b"]["metrics"]["e2e_mean_s"]["mean"] < canary["a"]["metrics"]["e2e_mean_s"]["mean"]
    )


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_canary_is_a_share(base: LoadedScenario, sweep: Sweep, share: float) -> None:
    with pytest.raises(InputError, match="--canary"):
        compare(base, base, 1, sweep, share)


def test_a_canary_without_requests_is_refused(base: LoadedScenario, sweep: Sweep) -> None:
    with pytest.raises(InputError, match="of 50 requests one side gets none"):
        compare(base, base, 1, sweep, 1e-6)


# ---------------------------------------------------------------- what is shown


def test_the_result_is_json_and_both_renderings_show_it(faster: dict[str, Any]) -> None:
    assert json.loads(json.dumps(faster, allow_nan=False)) == faster
    file = io.StringIO()
    Console(file=file, width=80).print(render_compare(faster))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for words in ("hardware l40s | h100-sxm", "P(B better)", "> 99.9 %", "they part", "canary"):
        assert words in text, words
    report = render_compare_report(faster)
    assert report == render_compare_report(faster)
    assert "<script" not in report
    for words in ("Verdict", "P(B better)", "Where they part", "Canary: 20.0 %", "<svg"):
        assert words in report, words
