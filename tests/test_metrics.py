"""Metrics: laws of samples and summaries, then a run small enough to work out by hand."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from servecast.costmodels.shape import NS_PER_S, PARTS
from servecast.reports.metrics import RunFacts, merge_replications, summarise
from servecast.reports.quantiles import WeightedSample
from servecast.reports.timeline import arrival_groups, timeline
from servecast.sim.trace import COMPLETED, REFUSED, REQUEST_COLUMNS, STEP_COLUMNS, TIMED_OUT, Trace

Row = dict[str, Any]

FACTS = RunFacts(
    name="small",
    model="a/model",
    hardware="a-device",
    devices=2,
    block_size=16,
    kv_bytes_per_token=1000.0,
    memory={
        "weights_bytes": 10,
        "activation_bytes": 2,
        "graph_bytes": 1,
        "other_bytes": 1,
        "kv_bytes": 20,
        "total_bytes": 40,
    },
    peak_flops_per_s=100.0,
    bandwidth_bytes_per_s=50.0,
    version="1",
    scenario_sha256="0" * 64,
    calibration="measured",
    seed=7,
)

KEYS = [
    *("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s", "requests"),
    *("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"),
    *("output_tokens_per_s_per_device", "duration_s"),
    *("preemptions", "prefix_hit_tokens", "kv", "memory", "utilisation", "step_time_share"),
    *("output_tokens_per_s_per_user", "sla", "goodput_per_s", "provenance"),
]


def make_trace(
    requests: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    gaps: dict[float, int],
    **changes: Any,
) -> Trace:
    """A trace from rows in seconds; what a row leaves out is 0, or -1 for a time."""

    def table(columns: tuple[str, ...], rows: list[Row]) -> dict[str, Any]:
        def value(row: Row, name: str) -> int:
            if name.endswith("_ns"):
                return round(row.get(name.removesuffix("_ns"), -1 / NS_PER_S) * NS_PER_S)
            return int(row.get(name, 0))

        return {name: np.array([value(row, name) for row in rows], np.int64) for name in columns}

    parts = {f"{part}_s": np.array([row.get(part, 0.0) for row in steps]) for part in PARTS}
    values: dict[str, Any] = {
        "requests": table(REQUEST_COLUMNS, requests),
        "steps": table(STEP_COLUMNS, steps) | parts,
        "gap_ns": np.array([round(gap * NS_PER_S) for gap in gaps], np.int64),
        "gap_count": np.array(list(gaps.values()), np.int64),
        "flops": 0.0,
        "bytes": 0.0,
        "kv_blocks": 10,
        "end_ns": 0,
        "class_names": ("default",),
    }
    return Trace(**{**values, **changes})


def request(
    arrival: float, admitted: float, first: float, finish: float, **row: int
) -> dict[str, Any]:
    times = {"arrival": arrival, "admitted": admitted, "first_token": first, "finish": finish}
    return {"prompt_tokens": 10, "output_tokens": 5, **times, **row}


def small_trace(**changes: Any) -> Trace:
    """Three requests complete in ten seconds, one is refused, one given up."""
    requests = [
        request(0, 0, 1, 5, request=0),
        request(1, 2, 4, 6, request=1, preemptions=2, prefix_hit_tokens=4, klass=1),
        request(2, 2, 3, 3, request=2, output_tokens=1),
        {"request": 3, "arrival": 3, "prompt_tokens": 99, "status": REFUSED},
        {"request": 4, "arrival": 4, "admitted": 5, "finish": 10, "status": TIMED_OUT, "klass": 1},
    ]
    steps = [
        {"start": 0, "end": 2, "steps": 1, "kv_blocks": 4, "running": 1, "prefill_tokens": 20,
         "gemm": 1.5, "host": 0.5},
        {"start": 3, "end": 6, "steps": 4, "kv_blocks": 8, "running": 2, "decodes": 2,
         "waiting": 1, "gemm": 1.0, "attention_decode": 2.0, "preemptions": 2},
    ]  # fmt: skip
    return make_trace(requests, steps, {0.5: 3, 1.0: 5}, flops=250.0, bytes=100.0, **changes)


def idle_trace() -> Trace:
    """One request, refused; no step ran."""
    return make_trace([{"arrival": 1, "status": REFUSED}], [], {})


# ---------------------------------------------------------------- laws


@given(
    st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 40)), min_size=1, max_size=30),
    st.one_of(st.sampled_from([0, 50, 90, 95, 99, 100]), st.floats(0, 100)),
)
def test_percentile_is_numpys_of_the_sample_written_out(
    pairs: list[tuple[int, int]], percent: float
) -> None:
    values, counts = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    sample = WeightedSample(values, counts)
    written_out = np.repeat(values, counts)
    assert sample.n == len(written_out)
    if sample.n:
        assert sample.percentile(percent) == np.percentile(written_out, percent)
        assert sample.mean() == pytest.approx(written_out.mean(), rel=1e-12)
    else:
        with pytest.raises(ValueError, match="of 0 values"):
            sample.percentile(percent)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=40), st.randoms())
def test_a_sample_has_no_order(values: list[int], random: Any) -> None:
    ordered = WeightedSample(np.array(sorted(values)))
    random.shuffle(values)
    shuffled = WeightedSample(np.array(values))
    assert ordered.mean() == shuffled.mean()
    assert [ordered.percentile(p) for p in range(101)] == [
        shuffled.percentile(p) for p in range(101)
    ]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Runs with every outcome; times keep the order arrival, admission, first token, finish."""
    rows = []
    for number in range(draw(st.integers(1, 12))):
        arrival, queue, prefill, decode = (draw(st.integers(0, 50)) / 4 for _ in range(4))
        status = draw(st.sampled_from([COMPLETED, COMPLETED, REFUSED, TIMED_OUT]))
        row = request(
            arrival, arrival + queue, arrival + queue + prefill, arrival + queue + prefill + decode,
            request=number, output_tokens=draw(st.integers(1, 9)), klass=draw(st.integers(0, 1)),
        ) | {"status": status}  # fmt: skip
        if status == REFUSED:
            row |= {name: -1 / NS_PER_S for name in ("admitted", "first_token", "finish")}
        rows.append(row)
    now, steps = 0.0, []
    for _ in range(draw(st.integers(0, 10))):
        start = now + draw(st.integers(0, 4)) / 8
        now = start + draw(st.integers(1, 8)) / 8
        host = (now - start) / 4
        steps.append(
            {
                "start": start, "end": now, "steps": draw(st.integers(1, 5)),
                "running": draw(st.integers(1, 4)), "waiting": draw(st.integers(0, 4)),
                "kv_blocks": draw(st.integers(0, 10)), "decodes": draw(st.integers(0, 4)),
                "prefill_tokens": draw(st.integers(0, 100)),
                "preemptions": draw(st.integers(0, 2)),
                "host": host, "gemm": now - start - host,
            }
        )  # fmt: skip
    gaps = draw(st.dictionaries(st.integers(1, 50).map(lambda n: n / 64), st.integers(1, 9)))
    return make_trace(rows, steps, gaps, class_names=("a", "b"))


@given(traces())
@settings(deadline=None)
def test_a_summary_is_plain_numbers_that_add_up(trace: Trace) -> None:
    facts = replace(FACTS, sla={"ttft_p95_s": 5.0, "timeout_rate": 0.1}, price_per_hour=1.0)
    summary = summarise(trace, facts)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summarise(trace, facts) == summary
    requests = summary["requests"]
    outcomes = requests["completed"] + requests["failed"] + requests["timed_out"]
    assert requests["sent"] == outcomes == len(trace.requests["request"])
    shares = summary["step_time_share"]
    assert sum(shares.values()) == pytest.approx(1 if len(trace.steps["steps"]) else 0)
    for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s", "itl_s"):
        block = summary[name]
        if block["n"]:
            assert 0 <= block["p50"] <= block["p90"] <= block["p95"] <= block["p99"] <= block["max"]
        else:
            assert [value for key, value in block.items() if key != "n"] == [None] * 6
    assert summary["ttft_s"]["n"] == summary["e2e_s"]["n"] == requests["completed"]
    classes = summary["classes"].values()
    assert sum(entry["ttft_s"]["n"] for entry in classes) == requests["completed"]
    for key in ("sent", "completed", "failed", "timed_out"):
        assert sum(entry["requests"][key] for entry in classes) == requests[key]
    assert sum(entry["goodput_per_s"] for entry in classes) <= summary["requests_per_s"] + 1e-12


@given(traces(), st.integers(1, 40))
@settings(deadline=None)
def test_a_timeline_loses_nothing(trace: Trace, bins: int) -> None:
    line = timeline(trace, bins)
    steps = trace.steps
    if line is None:
        assert not len(steps["start_ns"])
        return
    width = np.diff(line.edges_s)
    spans_s = (steps["end_ns"] - steps["start_ns"]) / NS_PER_S
    assert (line.prefill_tokens_per_s * width).sum() == pytest.approx(steps["prefill_tokens"].sum())
    for name in ("running", "waiting"):
        over_time = (getattr(line, name) * width).sum()
        assert over_time == pytest.approx((steps[name] * spans_s).sum())
    assert line.preemptions.sum() == steps["preemptions"].sum()
    assert line.kv_share_peak.max() == pytest.approx(steps["kv_blocks"].max() / trace.kv_blocks)
    assert (line.kv_share_peak >= line.kv_share).all()


@given(traces())
@settings(deadline=None)
def test_groups_over_time_are_of_completed_requests(trace: Trace) -> None:
    groups = arrival_groups(trace)
    completed = int((trace.requests["status"] == COMPLETED).sum())
    assert groups.size == completed  # too few for a second group
    assert len(groups.arrival_s) == (1 if completed else 0)
    block = summarise(trace, FACTS)["ttft_s"]
    assert [*groups.ttft_s["p95"]] == ([pytest.approx(block["p95"])] if completed else [])


# ---------------------------------------------------------------- by hand


def test_keys_are_those_of_summary_json() -> None:
    summary = summarise(small_trace(), FACTS)
    assert list(summary) == KEYS
    assert list(summary["ttft_s"]) == ["n", "mean", "p50", "p90", "p95", "p99", "max"]
    assert list(summary["step_time_share"]) == list(PARTS)
    pool = ["blocks", "block_size", "tokens", "bytes_per_token", "peak_use", "mean_use", "fill"]
    assert list(summary["kv"]) == pool
    assert summary["provenance"] == {
        "version": "1",
        "scenario_sha256": "0" * 64,
        "calibration": "measured",
        "seed": 7,
    }


def test_latencies_of_a_small_run() -> None:
    summary = summarise(small_trace(), FACTS)
    # first tokens after 1, 3 and 1 s; one request of a single token has no gap
    assert summary["ttft_s"] == {
        "n": 3, "mean": pytest.approx(5 / 3), "p50": 1, "p90": pytest.approx(2.6),
        "p95": pytest.approx(2.8), "p99": pytest.approx(2.96), "max": 3,
    }  # fmt: skip
    assert (summary["tpot_s"]["n"], summary["tpot_s"]["mean"]) == (2, 0.75)
    assert (summary["e2e_s"]["p50"], summary["e2e_s"]["max"]) == (5, 5)
    assert (summary["queue_s"]["p50"], summary["queue_s"]["max"]) == (0, 1)
    assert (summary["itl_s"]["n"], summary["itl_s"]["p50"]) == (8, 1)
    assert summary["itl_s"]["mean"] == pytest.approx((3 * 0.5 + 5) / 8)


def test_rates_and_use_of_a_small_run() -> None:
    summary = summarise(small_trace(), FACTS)
    assert summary["duration_s"] == 10  # the client that gave up was the last
    assert summary["requests"] == {"sent": 5, "completed": 3, "failed": 1, "timed_out": 1}
    assert summary["requests_per_s"] == pytest.approx(0.3)
    assert summary["output_tokens_per_s"] == pytest.approx(1.1)
    assert summary["total_tokens_per_s"] == pytest.approx(4.1)
    assert (summary["preemptions"], summary["prefix_hit_tokens"]) == (2, 4)
    assert (summary["kv"]["tokens"], summary["kv"]["peak_use"]) == (160, 0.8)
    # 5 s of steps, half a second of them waiting for the host
    assert summary["utilisation"] == {
        "device_busy": pytest.approx(0.45),
        "mfu": pytest.approx(0.25),
        "bandwidth": pytest.approx(0.2),
    }
    assert summary["step_time_share"]["attention_decode"] == pytest.approx(0.4)


def test_cost_is_that_of_all_devices() -> None:
    summary = summarise(small_trace(), replace(FACTS, price_per_hour=18.0))
    assert summary["cost"]["price_per_hour"] == 36
    # ten seconds are ten cents, for 11 tokens out and 30 in
    assert summary["cost"]["per_million_output_tokens"] == pytest.approx(0.1 / 11 * 1e6)
    assert summary["cost"]["per_million_tokens"] == pytest.approx(0.1 / 41 * 1e6)


def test_clauses_are_upper_limits_that_may_be_reached() -> None:
    sla = {"ttft_max_s": 3.0, "ttft_p50_s": 0.99, "timeout_rate": 0.2, "failure_rate": 0.1}
    verdict = summarise(small_trace(), replace(FACTS, sla=sla))["sla"]
    assert [clause["clause"] for clause in verdict["clauses"]] == list(sla)
    assert [clause["value"] for clause in verdict["clauses"]] == [3.0, 1.0, 0.2, 0.2]
    assert [clause["met"] for clause in verdict["clauses"]] == [True, False, True, False]
    assert verdict["met"] is False


@pytest.mark.parametrize("clause", ["ttft_p42_s", "speed_p95_s", "rate"])
def test_an_unknown_clause_is_named(clause: str) -> None:
    with pytest.raises(ValueError, match=clause):
        summarise(small_trace(), replace(FACTS, sla={clause: 1.0}))


def test_no_clauses_no_verdict() -> None:
    assert summarise(small_trace(), FACTS)["sla"] == {"clauses": [], "met": None}


def test_nothing_completed_meets_no_latency_clause() -> None:
    summary = summarise(idle_trace(), replace(FACTS, sla={"ttft_p95_s": 1.0}, price_per_hour=1.0))
    assert summary["ttft_s"] == dict.fromkeys(summary["ttft_s"]) | {"n": 0}
    assert summary["sla"]["met"] is False
    assert summary["duration_s"] == summary["requests_per_s"] == 0
    assert summary["cost"]["per_million_output_tokens"] is None


def test_no_gaps_break_no_limit_on_gaps() -> None:
    trace = make_trace([request(0, 0, 1, 1, output_tokens=1)], [], {})
    summary = summarise(trace, replace(FACTS, sla={"itl_p99_s": 0.1, "tpot_p99_s": 0.1}))
    assert summary["itl_s"]["n"] == summary["tpot_s"]["n"] == 0
    assert summary["sla"]["met"] is True


def test_goodput_counts_requests_within_every_limit() -> None:
    facts = replace(FACTS, sla={"ttft_p95_s": 2.0, "e2e_p95_s": 5.0, "ttft_mean_s": 0.1})
    classes = summarise(small_trace(class_names=("chat", "batch")), facts)["classes"]
    assert list(classes) == ["chat", "batch"]
    # of chat two are good and one was refused; of batch one was late and one given up
    assert classes["chat"]["goodput_per_s"] == pytest.approx(0.2)
    assert classes["chat"]["goodput_share"] == pytest.approx(2 / 3)
    assert classes["batch"]["goodput_per_s"] == 0


def test_calibration_label() -> None:
    assert FACTS.calibrated
    assert not replace(FACTS, calibration="datasheet peaks (uncalibrated)").calibrated


# ---------------------------------------------------------------- replications


def replicas(change: Callable[[dict[str, Any], int], None], n: int) -> dict[str, Any]:
    summaries = []
    for number in range(n):
        summary = summarise(small_trace(), replace(FACTS, sla={"ttft_p95_s": 9.0}))
        change(summary, number)
        summaries.append(summary)
    return merge_replications(summaries)


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=12))
@settings(deadline=None)
def test_intervals_are_students(values: list[float]) -> None:
    merged = replicas(lambda s, i: s["ttft_s"].update(p95=values[i]), len(values))
    interval = merged["replications"]["ttft_p95_s"]
    assert interval["mean"] == pytest.approx(np.mean(values))
    error = stats.sem(values)
    if error > 1e-9:
        lo, hi = stats.t.interval(0.95, len(values) - 1, np.mean(values), error)
        assert (interval["lo"], interval["hi"]) == (
            pytest.approx(max(0, lo), abs=1e-9),
            pytest.approx(hi),
        )


@given(st.lists(st.booleans(), min_size=2, max_size=12))
@settings(deadline=None)
def test_share_of_met_slas_is_binomial(met: list[bool]) -> None:
    merged = replicas(lambda s, i: s["sla"].update(met=met[i]), len(met))
    interval = merged["replications"]["sla_met"]
    exact = stats.binomtest(sum(met), len(met)).proportion_ci(0.95, method="exact")
    assert (interval["lo"], interval["hi"]) == (pytest.approx(exact.low), pytest.approx(exact.high))


def test_merged_is_the_first_summary_and_its_intervals() -> None:
    first = summarise(small_trace(), FACTS)
    merged = merge_replications([first, first])
    assert {key: value for key, value in merged.items() if key != "replications"} == first
    assert merged["replications"]["n"] == 2
    assert merged["replications"]["ttft_p50_s"] == {"mean": 1, "lo": 1, "hi": 1}
    assert "sla_met" not in merged["replications"]
    json.dumps(merged, allow_nan=False)


def test_one_replication_has_no_interval() -> None:
    merged = merge_replications([summarise(small_trace(), FACTS)])
    assert merged["replications"]["ttft_p50_s"] == {"mean": 1, "lo": None, "hi": None}
    with pytest.raises(ValueError, match="no replications"):
        merge_replications([])


def test_a_replication_without_a_value_leaves_none() -> None:
    merged = replicas(lambda s, i: s["itl_s"].update(p99=None if i else 1.0), 3)
    assert merged["replications"]["itl_p99_s"] == {"mean": None, "lo": None, "hi": None}
