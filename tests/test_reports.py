"""What leaves the program: files that are whole, tables, a terminal, figures and a page."""

import heapq
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pages import Page
from rich.console import Console

from servecast.costmodels.shape import NS_PER_S, PARTS
from servecast.reports.console import render
from servecast.reports.figures import latency_cdfs, step_time, timelines
from servecast.reports.files import atomic_write, write_json, write_text
from servecast.reports.html import render_report
from servecast.reports.metrics import RunFacts, merge_replications, summarise
from servecast.reports.tables import write_requests, write_steps
from servecast.reports.units import dollars, percent, seconds, significant
from servecast.sim.trace import COMPLETED, REFUSED, REQUEST_COLUMNS, STEP_COLUMNS, TIMED_OUT, Trace

NASTY = "<script>alert('x')</script> & \"[bold]\" $x$"

FACTS = RunFacts(
    name="chat",
    model="a/model-8B",
    hardware="a-device",
    devices=1,
    block_size=16,
    kv_bytes_per_token=131072.0,
    memory={
        "weights_bytes": 15 << 30,
        "activation_bytes": 1 << 30,
        "graph_bytes": 1 << 29,
        "other_bytes": 1 << 28,
        "kv_bytes": 50 << 30,
        "total_bytes": 79 << 30,
    },
    peak_flops_per_s=1e15,
    bandwidth_bytes_per_s=3e12,
    version="1.2",
    scenario_sha256="ab" * 32,
    calibration="datasheet peaks (uncalibrated)",
    seed=3,
    sla={"ttft_p95_s": 0.5, "itl_p99_s": 0.1, "failure_rate": 0.001},
    price_per_hour=2.5,
    engine={"max_num_seqs": 256, "enable_prefix_caching": True, "num_gpu_blocks_override": None},
    warnings=("arrivals were out of order",),
)


def served(n: int, *, servers: int = 8, seed: int = 0, **changes: Any) -> Trace:
    """A day's load in small: `n` requests at a swinging rate before `servers` slots.

    Not a simulation of the engine; times keep their order, and queues come and go.
    """
    rng = np.random.default_rng(seed)
    rate = 2.2 * (1 + 0.8 * np.sin(np.linspace(0, 4 * np.pi, n)))
    arrival = np.cumsum(rng.exponential(1 / np.maximum(rate, 0.1))) if n else np.empty(0)
    output = rng.integers(1, 200, n)
    first_s, gap_s = rng.uniform(0.02, 0.4, n), rng.uniform(0.01, 0.05, n)
    free = [0.0] * servers
    admitted = np.empty(n)
    for i in range(n):
        admitted[i] = max(arrival[i], heapq.heappop(free))
        heapq.heappush(free, admitted[i] + first_s[i] + gap_s[i] * (output[i] - 1))
    first = admitted + first_s
    finish = first + gap_s * (output - 1)
    status = rng.choice([COMPLETED, REFUSED, TIMED_OUT], n, p=[0.96, 0.02, 0.02])
    refused = status == REFUSED
    times = {"arrival": arrival, "admitted": admitted, "first_token": first, "finish": finish}
    rows = {name: np.zeros(n, np.int64) for name in REQUEST_COLUMNS}
    for name, values in times.items():
        came = (values * NS_PER_S).astype(np.int64)
        rows[f"{name}_ns"] = came if name == "arrival" else np.where(refused, -1, came)
    rows |= {
        "request": np.arange(n),
        "prompt_tokens": rng.integers(10, 2000, n),
        "output_tokens": output,
        "klass": np.arange(n) % 2,
        "status": status.astype(np.int64),
    }
    values: dict[str, Any] = {
        "requests": rows,
        "steps": _steps(times, 0.25, rng),
        "gap_ns": (gap_s * NS_PER_S).astype(np.int64),
        "gap_count": output - 1,
        "flops": 1e15 * n,
        "bytes": 1e12 * n,
        "kv_blocks": 100,
        "end_ns": 0,
        "class_names": ("chat", NASTY),
    }
    return Trace(**{**values, **changes})


def _steps(times: dict[str, Any], width_s: float, rng: np.random.Generator) -> dict[str, Any]:
    end = float(times["finish"].max(initial=0))
    start = np.arange(0, end, width_s)
    begun, over = (
        np.searchsorted(np.sort(times[name]), start + width_s) for name in ("admitted", "finish")
    )
    running = begun - over
    busy = running > 0
    steps = {name: np.zeros(int(busy.sum()), np.int64) for name in STEP_COLUMNS}
    steps["start_ns"] = (start[busy] * NS_PER_S).astype(np.int64)
    steps["end_ns"] = steps["start_ns"] + round(width_s * NS_PER_S)
    arrived = np.searchsorted(np.sort(times["arrival"]), start + width_s)
    steps["waiting"] = np.maximum(arrived - begun, 0)[busy]
    steps |= {
        "steps": np.full(busy.sum(), 10),
        "running": running[busy],
        "decodes": running[busy],
        "prefill_tokens": rng.integers(0, 300, busy.sum()),
        "kv_blocks": np.minimum(running[busy] * 12, 100),
        "preemptions": (running[busy] > 7) * rng.integers(0, 2, busy.sum()),
    }
    split = rng.dirichlet(np.linspace(9, 0.1, len(PARTS)), busy.sum()) * width_s
    return steps | {f"{part}_s": split[:, i] for i, part in enumerate(PARTS)}


def at_once(trace: Trace) -> Trace:
    """The same, but all sent at time 0."""
    return replace(trace, requests=trace.requests | {"arrival_ns": np.zeros(200, np.int64)})


EMPTY = served(0)
TRACES: dict[str, Trace] = {
    "busy": served(3000),
    "burst": at_once(served(200)),
    "one": served(1, servers=1, seed=1),
    "single tokens": served(20, gap_count=np.zeros(20, np.int64)),
    "refused": replace(EMPTY, requests=served(1, seed=5).requests | {
        "status": np.array([REFUSED]), "finish_ns": np.array([-1])}),
}  # fmt: skip


@pytest.fixture(scope="module")
def busy() -> tuple[dict[str, Any], RunFacts, Trace]:
    trace = TRACES["busy"]
    return summarise(trace, FACTS), FACTS, trace


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "a" / "summary.json"
    write_text(path, "before")
    with pytest.raises(failure), atomic_write(path) as aside:
        aside.write_text("half")
        raise failure
    assert path.read_text() == "before"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_first_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_not_replaced_and_a_link_is_followed(tmp_path: Path) -> None:
    fifo, link, target = tmp_path / "fifo", tmp_path / "link", tmp_path / "target"
    os.mkfifo(fifo)
    with atomic_write(fifo) as aside:
        assert aside == fifo
    link.symlink_to(target)
    write_text(link, "text")
    assert link.is_symlink()
    assert target.read_text() == "text"


def test_json_keeps_order_and_text(tmp_path: Path) -> None:
    data = {"b": 1, "a": [1.5, None, "µ"]}
    write_json(tmp_path / "x.json", data)
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == data
    assert (tmp_path / "x.json").read_bytes().startswith(b'{\n  "b": 1')


# ---------------------------------------------------------------- tables


def test_requests_come_back(tmp_path: Path) -> None:
    trace = TRACES["busy"]
    write_requests(trace, tmp_path / "requests.parquet")
    table = pq.read_table(tmp_path / "requests.parquet")
    assert table.num_rows == len(trace.requests["request"])
    assert table["class"].to_pylist()[:2] == ["chat", NASTY]
    status = np.array(table["status"].to_pylist())
    assert (status == "refused").sum() == (trace.requests["status"] == REFUSED).sum()
    finish = table["finish_s"].to_numpy()
    assert (np.isnan(finish) == (status == "refused")).all()
    there = ~np.isnan(finish)
    assert (np.rint(finish[there] * NS_PER_S) == trace.requests["finish_ns"][there]).all()
    assert set(table["replica"].to_pylist()) == {0}
    for name in ("prompt_tokens", "output_tokens", "preemptions", "draft_tokens"):
        assert table[name].to_pylist() == trace.requests[name].tolist()


def test_steps_come_back(tmp_path: Path) -> None:
    trace = TRACES["busy"]
    write_steps(trace, tmp_path / "steps.parquet")
    table = pq.read_table(tmp_path / "steps.parquet")
    assert {"start_s", "end_s", "running", "kv_blocks", "gemm_s", "host_s"} <= set(
        table.column_names
    )
    assert table["gemm_s"].to_pylist() == trace.steps["gemm_s"].tolist()
    assert table["running"].to_pylist() == trace.steps["running"].tolist()


@pytest.mark.parametrize("write", [write_requests, write_steps])
def test_equal_traces_equal_bytes(write: Callable[[Trace, Path], None], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(served(500), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    write(EMPTY, tmp_path / "empty")
    assert pq.read_table(tmp_path / "empty").schema == pq.read_table(tmp_path / "a").schema


def test_tables_of_several_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servecast.reports.tables.ROW_GROUP", 128)
    write_requests(served(500), tmp_path / "x")
    assert pq.ParquetFile(tmp_path / "x").num_row_groups == 4
    assert pq.read_table(tmp_path / "x")["request"].to_pylist() == list(range(500))


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 s"), (2.3e-5, "23.0 µs"), (0.01234, "12.3 ms"), (1.0, "1.00 s"),
     (599.0, "599 s"), (600.0, "10.0 min"), (7200.0, "2.00 h")],
)  # fmt: skip
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_other_units() -> None:
    assert [percent(x) for x in (None, 0, 0.00012, 0.1234, 1)] == [
        "-", "0 %", "0.012 %", "12.3 %", "100.0 %"
    ]  # fmt: skip
    assert [dollars(x) for x in (None, 0.0312, 2.5, 2100)] == ["-", "$0.031", "$2.50", "$2,100.00"]
    assert [significant(x) for x in (0, 0.01234, 9.876, 12345.6)] == [
        "0", "0.0123", "9.88", "12,346"
    ]  # fmt: skip


# ---------------------------------------------------------------- terminal


def on_terminal(summary: dict[str, Any], facts: RunFacts) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(render(summary, facts))
    return out.getvalue()


@pytest.mark.parametrize("name", TRACES)
def test_terminal_shows_the_verdict_in_80_columns(name: str) -> None:
    text = on_terminal(summarise(TRACES[name], FACTS), FACTS)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("a/model-8B", "max_num_seqs 256", "ttft_p95", "uncalibrated", "out of order"):
        assert word in text


def test_terminal_marks_clauses_and_takes_names_as_they_are() -> None:
    facts = replace(FACTS, name=NASTY, sla={"ttft_p50_s": 1e-6, "e2e_max_s": 1e6})
    text = on_terminal(summarise(TRACES["busy"], facts), facts)
    assert "✗ ttft_p50" in text
    assert "✓ e2e_max" in text
    assert NASTY in text


def test_terminal_shows_intervals() -> None:
    summaries = [summarise(served(200, seed=seed), FACTS) for seed in range(3)]
    text = on_terminal(merge_replications(summaries), FACTS)
    assert "3 replications" in text
    assert re.search(r"Requests per second: \S+ \(\S+ to \S+\)", text)


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("name", TRACES)
def test_figures_are_small_and_always_the_same(name: str) -> None:
    trace = TRACES[name]
    drawn = latency_cdfs(trace, FACTS.sla) | timelines(trace)
    assert drawn == latency_cdfs(trace, FACTS.sla) | timelines(trace)
    for svg in drawn.values():
        assert svg.startswith("<svg")
        assert len(svg) < 25_000


def test_curves_mark_percentiles_and_limits() -> None:
    drawn = latency_cdfs(TRACES["busy"], FACTS.sla)
    for text in ("P50", "P95", "P99", "limit P95"):
        assert f">{text}</text>" in drawn["ttft"]
    assert "limit" not in drawn["e2e"]
    assert "nothing to measure" in latency_cdfs(TRACES["refused"], FACTS.sla)["ttft"]


def test_a_wide_distribution_gets_a_logarithmic_axis() -> None:
    narrow, wide = (
        latency_cdfs(TRACES["busy"], {"e2e_p95_s": limit})["e2e"] for limit in (20.0, 10_000.0)
    )
    assert "10,000 s" in wide
    assert "10,000 s" not in narrow


def test_bars_name_only_parts_that_took_time() -> None:
    svg = step_time({**dict.fromkeys(PARTS, 0.0), "gemm": 0.75, "host": 0.25})
    assert "75.0 %" in svg
    assert "Host overhead" in svg
    assert "MoE" not in svg
    assert "no step ran" in step_time(dict.fromkeys(PARTS, 0.0))


# ---------------------------------------------------------------- page


def test_page_is_whole_and_alone(busy: tuple[dict[str, Any], RunFacts, Trace]) -> None:
    html = render_report(*busy)
    page = Page(html)
    assert len(html) < 400_000
    assert html == render_report(*busy)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert all(address.startswith("#") for address in page.addresses)
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "url(http" not in html
    assert "@import" not in html


def test_page_says_what_was_simulated(busy: tuple[dict[str, Any], RunFacts, Trace]) -> None:
    summary, facts, _ = busy
    text = Page(render_report(*busy)).text
    for word in (
        facts.model, facts.hardware, "Uncalibrated", facts.scenario_sha256, "seed 3",
        "arrivals were out of order", "enable_prefix_caching", "SLA missed",
    ):  # fmt: skip
        assert word in text
    assert f"n = {summary['ttft_s']['n']:,}" in text
    assert seconds(summary["ttft_s"]["p95"]) in text


def test_every_name_is_escaped() -> None:
    facts = replace(
        FACTS, name=NASTY, model=NASTY, hardware=NASTY, version=NASTY, calibration=NASTY,
        scenario_sha256=NASTY, warnings=(NASTY,), engine={NASTY: NASTY},
    )  # fmt: skip
    trace = TRACES["busy"]
    html = render_report(summarise(trace, facts), facts, trace)
    page = Page(html)
    assert "script" not in page.tags
    assert "<script" not in html
    assert page.text.count(NASTY) >= 8


@pytest.mark.parametrize("name", TRACES)
def test_page_of_any_trace(name: str) -> None:
    trace = TRACES[name]
    for facts in (FACTS, replace(FACTS, sla={}, price_per_hour=None, engine={}, warnings=())):
        Page(render_report(summarise(trace, facts), facts, trace))


def test_page_of_replications_shows_intervals() -> None:
    traces = [served(300, seed=seed) for seed in range(3)]
    merged = merge_replications([summarise(trace, FACTS) for trace in traces])
    text = Page(render_report(merged, FACTS, traces[0])).text
    assert "over 3 seeds" in text
    assert "of 3 replications meet it" in text


def test_a_calibrated_run_is_not_called_uncalibrated() -> None:
    facts = replace(FACTS, calibration="measured on the device")
    trace = TRACES["one"]
    text = Page(render_report(summarise(trace, facts), facts, trace)).text
    assert "Calibrated step times" in text
    assert "Uncalibrated" not in text
