"""SRAM devices: placement, laws of the pipeline, published speeds, and scenarios on them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_laws import assert_same_run, loads
from typer.testing import CliRunner

from servecast.calibration.fabric import (
    Point,
    bundled_fabric,
    fit_fabric,
    fit_of,
    held_against,
    read_points,
)
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import BFLOAT16
from servecast.costmodels.quantization import with_quantization
from servecast.costmodels.shape import StepShape
from servecast.costmodels.wafer import FabricConstants, Wafer, place, terms_of
from servecast.costmodels.weights import weight_bytes
from servecast.scenarios.build import build
from servecast.scenarios.cli import app
from servecast.scenarios.load import load_scenario
from servecast.scenarios.run import run
from servecast.sim.plan import SchedulerLimits
from servecast.sim.request import RequestTable
from servecast.sim.world import simulate

WSE3, GROQ = load_hardware("cerebras-wse3"), load_hardware("groq-lpu")
CONSTANTS = bundled_fabric().constants


def wafer(name: str, units: int | None = None, hardware: Any = WSE3) -> Wafer:
    model = load_model(name)
    placement = place(model, hardware, BFLOAT16, units, tokens=4096)
    return Wafer(model, hardware, placement, CONSTANTS)


SMALL = wafer("meta-llama/Llama-3.1-8B", 1)
MODELS = (SMALL, wafer("meta-llama/Llama-3.1-70B", 4), wafer("openai/gpt-oss-20b"))


# ---------------------------------------------------------------- placement


@pytest.mark.parametrize(
    ("name", "units", "tokens"),
    [("meta-llama/Llama-3.1-8B", 1, 213_000), ("meta-llama/Llama-3.1-70B", 4, 106_500)],
)
def test_what_weights_leave_is_kv(name: str, units: int, tokens: int) -> None:
    """44 GB a wafer less the weights, over the KV of a token: nothing is kept back."""
    model = load_model(name)
    found = place(model, WSE3, BFLOAT16, units)
    assert found.kv_tokens == pytest.approx(tokens, rel=0.01)
    assert found.unit_bytes * units == pytest.approx(weight_bytes(model), rel=0.01)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B", "Qwen/Qwen3-30B-A3B"])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_regions_share_the_cores_of_their_wafer(name: str, extra: int) -> None:
    model = load_model(name)
    units = place(model, WSE3, BFLOAT16).units + extra
    found = place(model, WSE3, BFLOAT16, units)
    assert len(found.stages) == model.num_layers + 1
    layers = found.stages[:-1]
    head = found.stages[-1]
    assert sum(s.places for s in layers) + units * head.places <= WSE3.cores * units * 1.01
    share = [s.places / s.weight_bytes for s in layers]
    assert max(share) <= 1.2 * min(share)
    assert found.crossings == (0 if units == 1 else units)


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    huge = load_model("meta-llama/Llama-3.1-405B")
    with pytest.raises(InputError, match=r"812 GB and needs 21 x cerebras-wse3 .*, 1 given"):
        place(huge, WSE3, BFLOAT16, 1)
    assert place(huge, WSE3, BFLOAT16).units == 21
    assert place(huge, WSE3, BFLOAT16, 21).kv_tokens > 100_000
    with pytest.raises(InputError, match="needs cores"):
        place(huge, replace(WSE3, cores=0), BFLOAT16)


@pytest.mark.parametrize("method", ["fp8", "awq"])
def test_fewer_bits_leave_more_kv_and_are_never_slower(method: str) -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    small = with_quantization(model, method)
    placed = place(small, WSE3, BFLOAT16, 1)
    assert placed.kv_tokens > SMALL.placement.kv_tokens
    priced = Wafer(small, WSE3, placed, CONSTANTS)
    assert priced.latency_s <= SMALL.latency_s * (1 + 1e-9)
    assert priced.stage_s <= SMALL.stage_s * (1 + 1e-9)


def test_chips_are_one_fabric() -> None:
    """A layer of Groq's lies on several chips, and there is no wafer to leave."""
    found = place(load_model("meta-llama/Llama-2-70b-hf"), GROQ, BFLOAT16, tokens=4096)
    assert 576 <= found.units <= 700  # 138 GB of weights over 230 MB
    assert found.crossings == 0
    assert found.stages[0].places > 5


# ---------------------------------------------------------------- laws of the pipeline


@given(st.sampled_from(MODELS), st.integers(1, 300), st.integers(1, 4000), st.integers(1, 60))
@settings(deadline=None)
def test_steps_are_priced_alike_one_by_one_and_together(
    model: Wafer, decodes: int, each: int, steps: int
) -> None:
    priced = model.decode(decodes)
    context = decodes * each
    many = priced.steps_ns(context, steps)
    one_by_one = [int(priced.steps_ns(context + j * decodes, 1)[0]) for j in range(steps)]
    assert many.tolist() == one_by_one
    assert abs(int(many[0]) - priced.cost(context).total_ns) <= 1


@given(
    st.sampled_from(MODELS),
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 3000)), max_size=3),
    st.integers(0, 200),
    st.integers(1, 2000),
    st.integers(1, 100),
)
@settings(deadline=None)
def test_more_work_never_takes_less_time(
    model: Wafer, prefills: list[tuple[int, int]], decodes: int, each: int, more: int
) -> None:
    if not prefills and not decodes:
        return
    shape = StepShape(tuple(prefills), decodes, decodes, decodes * each, decodes + len(prefills))
    time_s = model.step(shape).total_s
    assert time_s > 0
    for bigger in (
        shape._replace(prefills=(*prefills, (more, 0)), sampled=shape.sampled + 1),
        shape._replace(decode_context_tokens=shape.decode_context_tokens + more)
        if decodes
        else shape,
        shape._replace(
            decodes=decodes + more,
            decode_tokens=decodes + more,
            decode_context_tokens=(decodes + more) * each,
            sampled=shape.sampled + more,
        ),
    ):
        assert model.step(bigger).total_s >= time_s * (1 - 1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_a_token_s_latency_is_flat_until_the_stages_are_full(model: Wafer) -> None:
    def gap_s(decodes: int) -> float:
        return float(model.decode(decodes).steps_ns(100 * decodes, 1)[0]) / 1e9

    slots = model.slots
    assert gap_s(int(slots)) == pytest.approx(gap_s(1), rel=0.01)
    assert gap_s(int(2 * slots) + 1) == pytest.approx(2 * gap_s(1), rel=0.1)
    # Then the slowest stage decides: tokens a second stay what they are.
    rates = [n / gap_s(n) for n in (int(3 * slots), int(6 * slots))]
    assert rates[0] == pytest.approx(rates[1], rel=0.02)


def test_the_constants_add_up_to_the_latency() -> None:
    for name, units in (("meta-llama/Llama-3.1-8B", 1), ("meta-llama/Llama-3.1-70B", 4)):
        model = load_model(name)
        terms = terms_of(model, WSE3, place(model, WSE3, BFLOAT16, units))
        assert wafer(name, units).latency_s == pytest.approx(terms.seconds(CONSTANTS), rel=1e-9)


@given(loads())
@settings(deadline=None, max_examples=30)
def test_fast_forward_equals_stepped(load: tuple[RequestTable, SchedulerLimits]) -> None:
    table, limits = load
    runs = [
        simulate(table, limits, SMALL, fast_forward=fast, aggregate=fast, private_runs=fast).trace
        for fast in (True, False)
    ]
    assert_same_run(*runs)


# ---------------------------------------------------------------- published speeds


def test_fitted_points_come_out_and_the_others_lie_in_what_is_left_open(shared: Path) -> None:
    points, notes = read_points(shared / "hardware" / "points.csv")
    assert len(points) >= 9 and len(notes) <= 2
    rows = held_against(bundled_fabric(), points)
    for row in rows:
        if row["fitted"]:
            assert row["predicted"] == pytest.approx(row["measured"], rel=0.1)
        assert row["inside"], row
    assert sum(row["fitted"] for row in rows) == 2


def test_a_fit_has_its_points_and_no_more_certainty_than_they_give() -> None:
    truth = FabricConstants(6e-6, 30.0, 400.0, 5e-5)

    def point(name: str, units: int) -> Point:
        asked = Point("cerebras-wse3", name, units, 1.0)
        return replace(asked, tokens_per_s=1 / asked.terms().seconds(truth))

    known = [
        point("meta-llama/Llama-3.1-8B", 1),
        point("meta-llama/Llama-3.1-70B", 4),
        point("Qwen/Qwen3-32B", 2),
        point("meta-llama/Llama-3.1-405B", 21),
        point("Qwen/Qwen3-14B", 1),
    ]
    widths = []
    other = point("Qwen/Qwen2-72B", 5).terms()
    for count in (1, 2, 5):
        fit = fit_fabric(known[:count], "mine", "made up")
        for own in known[:count]:
            assert own.terms().seconds(fit.constants) == pytest.approx(own.seconds, rel=0.05)
        low, high = fit.range_s(other)
        assert low <= other.seconds(truth) <= high
        widths.append(high / low)
    assert widths[0] > widths[1] > widths[2]


def test_speeds_that_nothing_explains_are_refused() -> None:
    fast = Point("cerebras-wse3", "meta-llama/Llama-3.1-8B", 1, 1e6)
    with pytest.raises(InputError, match="more than its arithmetic and bytes allow"):
        fit_fabric([fast], "mine", "made up")
    slow = replace(fast, tokens_per_s=100.0)
    with pytest.raises(InputError, match="no constants come nearer"):
        fit_fabric([slow, replace(slow, tokens_per_s=1000.0)], "mine", "made up")


@pytest.mark.parametrize("factor", [0.91, 1.0, 1.09])
@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B"])
def test_what_is_left_open_holds_every_fit_to_speeds_that_round_to_the_same(
    name: str, factor: float
) -> None:
    """Of a token for one user, and of the stage that many wait for."""
    fit, found = bundled_fabric(), wafer(name)
    moved = [replace(p, tokens_per_s=p.tokens_per_s * factor) for p in fit.points]
    other = fit_fabric(moved, "moved", "made up").constants

    def times(constants: FabricConstants) -> tuple[float, float]:
        priced = Wafer(load_model(name), WSE3, found.placement, constants)
        return priced.latency_s, priced.stage_s

    model = load_model(name)
    stages = [
        terms_of(model, WSE3, replace(found.placement, stages=(stage,), crossings=0))
        for stage in found.placement.stages
    ]
    slowest = max(stages, key=lambda terms: terms.seconds(fit.constants))
    ends = fit.ends(terms_of(model, WSE3, found.placement), slowest)
    for kind, value in enumerate(times(other)):
        span = [times(constants)[kind] for constants in ends]
        assert min(span) * 0.999 <= value <= max(span) * 1.001


def test_a_prompt_of_any_length_takes_a_stage_more_for_each_token() -> None:
    seconds = np.array(
        [SMALL.step(StepShape(((n, 0),), 0, 0, 0, 1)).total_s for n in range(1, 100)]
    )
    assert seconds[0] == pytest.approx(SMALL.latency_s, rel=1e-3)
    assert np.diff(seconds) == pytest.approx(SMALL.stage_s, rel=0.01)


def test_points_of_one_s_own(tmp_path: Path) -> None:
    path, out = tmp_path / "points.csv", tmp_path / "mine.yaml"
    head = "system,model,devices,output_tok_s_per_user,spec_decode\n"
    path.write_text(
        head
        + "Cerebras CS-3 (WSE-3),Llama-3.1-8B,1,2500,no\n"
        + "Cerebras CS-3 (WSE-3),Llama-3.1-70B,4,700,no\n"
        + "Cerebras CS-3 (WSE-3),Llama-3.1-8B,1,6000,yes\n"
        + "Nobody,Llama-3.1-8B,1,6000,no\n"
    )
    words = ["calibrate", "--from", "points", str(path), "--out", str(out), "--json"]
    found = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert [row["fitted"] for row in found["points"]] == [True, True, False]
    assert "left out" in found["notes"][0]
    fit = fit_of(str(out))
    assert fit is not None
    assert fit.points[0].terms().seconds(fit.constants) == pytest.approx(1 / 2500, rel=0.01)
    for bad, message in (
        ("system,model\nx,y\n", "no column output_tok_s_per_user"),
        (head + "Cerebras WSE-3,Llama-3.1-8B,1,fast,no\n", "points.csv:2: output_tok_s_per_user"),
        (head + "Cerebras WSE-3,Llama-3.1-8B,1,1800,yes\n", "no speed without drafts"),
        (head + "Cerebras WSE-3,Llama-3.1-8B,1,1800,not stated\n", "no speed without drafts"),
        (head + "Cerebras WSE-3,Llama-3.1-8B,0,1800,no\n", "points.csv:2: devices: expected"),
        (head + "Cerebras WSE-3,Llama-3.1-8B,1.5,1800,no\n", "points.csv:2: devices: expected"),
        (head + "Cerebras WSE-3,Llama-3.1-405B,1,969,no\n", "points.csv:2: left out: .* needs 21"),
        (head + "h100-sxm,Llama-3.1-8B,1,108,no\n", "h100-sxm is no SRAM device"),
    ):
        path.write_text(bad)
        result = CliRunner().invoke(app, words)
        assert re.search(message, str(result.exception))
    path.write_text("system,model,devices,output_tok_s_per_user\ncs3, Llama-3.1-8B,1.0,1800\n")
    assert read_points(path)[0] == [Point("cerebras-wse3", "Llama-3.1-8B", 1, 1800.0)]


# ---------------------------------------------------------------- scenarios

SCENARIO = """
name: wafer
model: meta-llama/Llama-3.1-8B
hardware: cerebras-wse3
workload:
  arrivals: {kind: closed_loop, concurrency: 1, requests: 20}
  lengths: {kind: fixed, input_tokens: 512, output_tokens: 512}
sla: {tpot_p95_s: 0.001}
"""


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wafer") / "wafer.yaml"
    path.write_text(SCENARIO)
    return path


def test_one_user_of_8b_gets_the_published_speed(scenario: Path) -> None:
    summary = run(load_scenario(scenario)).summary
    assert summary["tpot_s"]["mean"] == pytest.approx(1 / 1800, rel=0.1)
    assert summary["itl_s"]["mean"] == pytest.approx(1 / 1800, rel=0.1)
    assert summary["output_tokens_per_s_per_user"] == pytest.approx(1800, rel=0.1)
    low, high = summary["calibration_interval"]["tpot_mean_s"]
    assert low < 1 / 1800 < high
    assert "extrapolated" in summary["provenance"]["calibration"]
    pipeline = summary["pipeline"]
    assert pipeline["stages"] == 33 and 0 < pipeline["fill"] < 0.1
    assert summary["kv"]["tokens"] == pytest.approx(213_000, rel=0.01)


def test_users_do_not_slow_one_another_until_the_slots_are_taken(scenario: Path) -> None:
    gaps = []
    for clients in (1, 8, 16, 64, 128):
        changes = (
            f"workload.arrivals.concurrency={clients}",
            f"workload.arrivals.requests={2 * clients}",
            "workload.lengths.input_tokens=32",
        )
        gaps.append(run(load_scenario(scenario, changes)).summary["tpot_s"]["mean"])
    assert gaps[1] == pytest.approx(gaps[0], rel=0.05)
    assert gaps[2] == pytest.approx(gaps[0], rel=0.05)
    assert gaps[3] > 1.7 * gaps[0] and gaps[4] == pytest.approx(2 * gaps[3], rel=0.15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("model=meta-llama/Llama-3.1-405B", "wafers=1"), "needs 21 x cerebras-wse3"),
        (("hardware=h100-sxm", "wafers=2"), "wafers: h100-sxm is no SRAM device"),
        (("wafers=0",), "wafers: must be at least 1, got 0$"),
        (("wafers=33",), "it lies on 32 x cerebras-wse3 at most, 33 given"),
        (("engine.boot_log=log",), "engine.boot_log: cerebras-wse3"),
        (("engine.cpu_offload_gb=8",), "engine.cpu_offload_gb: cerebras-wse3"),
        (("profile=generic",), "profile: cerebras-wse3"),
        (("engine.kv_cache_memory_bytes=1000000000",), "7,629 tokens"),
        (("engine.tensor_parallel_size=2",), "takes wafers, not ranks"),
        (("profile=h100-sxm",), "profile: h100-sxm is none of an SRAM device"),
        (("wafers=1", "engine.max_model_len=131072", "model=Qwen/Qwen3-14B"), "max_model_len"),
    ],
)
def test_what_an_sram_device_refuses(
    scenario: Path, changes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build(load_scenario(scenario, changes))


def test_wafers_follow_the_model_and_the_longest_request(scenario: Path) -> None:
    def units(*changes: str) -> int:
        return build(load_scenario(scenario, changes)).devices

    assert units() == units("wafers=auto") == 1
    assert units("model=meta-llama/Llama-3.1-70B") == 4
    assert units("model=meta-llama/Llama-3.1-70B", "engine.max_model_len=131072") == 5
    assert units("model=meta-llama/Llama-3.1-70B", "wafers=6") == 6


def test_speculation_and_sizing_work_on_a_wafer(scenario: Path, tmp_path: Path) -> None:
    drafts = "engine.speculative_config={method: draft_model, model: meta-llama/Llama-3.2-1B, "
    changes = (f"{drafts}num_speculative_tokens: 4, acceptance: {{kind: iid, alpha: 0.8}}}}",)
    summary = run(load_scenario(scenario, changes)).summary
    assert summary["speculation"]["mean_acceptance_length"] == pytest.approx(3.36, rel=0.05)
    assert summary["speculation"]["speedup"]["tpot"] > 1
    # A draft's weights lie beside the target's, and its KV beside the target's 131,072 bytes.
    assert summary["memory"]["weights_bytes"] == pytest.approx(16.06e9 + 2.47e9, rel=0.005)
    left_bytes = 44e9 - summary["memory"]["weights_bytes"]
    assert summary["kv"]["tokens"] == pytest.approx(left_bytes / (131_072 + 32_768), rel=0.001)
    closed, opened = (
        "closed_loop, concurrency: 1, requests: 20",
        "poisson, rate_per_s: 20, requests: 99",
    )
    text = SCENARIO.replace(closed, opened)
    path = tmp_path / "size.yaml"
    path.write_text(text)
    words = ["size", str(path), "--knobs", "max_num_seqs=8,32,64", "--json"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["best"] is not None and found["devices"] == 1 and not found["sensitivity"]
    path.write_text(text + "wafers: 2\n")
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(result.stdout)["devices"] == 2
    path.write_text(text)
    vary = [
        "whatif",
        str(path),
        "--vary",
        "wafers=1,2",
        "--vary",
        "hardware=cerebras-wse3",
        "--json",
    ]
    points = json.loads(CliRunner().invoke(app, vary, catch_exceptions=False).stdout)["points"]
    assert all(point["error"] is None for point in points)


def test_the_report_names_stages_and_slots_instead_of_mfu(scenario: Path, tmp_path: Path) -> None:
    words = ["run", str(scenario), "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    page = (tmp_path / "out" / "report.html").read_text()
    for text in (told, page):
        assert "MFU" not in text
        assert "slots filled" in " ".join(text.split())
    assert "Slowest stage" in page


def test_the_second_device_of_the_kind_is_the_same_model(scenario: Path) -> None:
    changes = ("hardware=groq-lpu", "model=meta-llama/Llama-2-7b-hf", "engine.max_model_len=4096")
    summary = run(load_scenario(scenario, changes)).summary
    low, high = summary["calibration_interval"]["tpot_mean_s"]
    assert low < 1 / 750 < high  # published for it, and in no fit
    assert summary["pipeline"]["wafers"] > 59
    assert np.isfinite(summary["tpot_s"]["mean"])
