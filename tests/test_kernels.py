"""Measured kernel times: lines, grids, fits on shapes left out, profiles as files, imports."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import small_csvs
from typer.testing import CliRunner

from servecast.calibration import aiconfigurator, llmservingsim
from servecast.calibration.fit import Rows, fit_family, fit_grid, fit_matrices, held_out
from servecast.calibration.profile import GENERIC
from servecast.calibration.store import (
    load_profile,
    profile_facts,
    profile_names,
    profile_text,
)
from servecast.costmodels.catalogue import hardware_names, load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.graphs import capture_sizes
from servecast.costmodels.kernels import (
    Curve,
    Grid,
    Kernels,
    Tail,
    Unpacking,
    experts_form_s,
    experts_met,
    gemm_form_s,
    without_tiles,
)
from servecast.costmodels.lines import Lines, straight, through
from servecast.costmodels.roofline import VECTOR_STEPS, Roofline
from servecast.costmodels.shape import StepShape
from servecast.costmodels.specs import Parallelism
from servecast.reports.latencies import value_at
from servecast.reports.metrics import SPAN_METRICS
from servecast.scenarios.build import build
from servecast.scenarios.cli import app
from servecast.scenarios.load import load_scenario
from servecast.scenarios.measured import completed, kernels_on, of_the_device, profile_of
from servecast.scenarios.points import Point
from servecast.scenarios.run import run

SHARED = Path(__file__).parents[1].parent / "shared"
TABLES = SHARED / "kernels/aiconfigurator/parquet"
H100 = load_hardware("h100-sxm")
PROFILE = load_profile("h100-sxm")

SCENARIO = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: {hardware}
profile: {profile}
engine: {{max_model_len: 8192}}
workload:
  arrivals: {{kind: poisson, rate_per_s: 2, requests: 40}}
  lengths: {{kind: fixed, input_tokens: 200, output_tokens: 50}}
"""


# --- lines


points = st.lists(
    st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1.0)), min_size=2, unique_by=lambda p: p[0]
).map(sorted)


@given(points, st.lists(st.integers(0, 2 * 10**6), min_size=1, max_size=40))
def test_lines_are_the_same_for_one_and_for_many_and_never_fall(
    found: list[tuple[int, float]], counts: list[int]
) -> None:
    lines = through(*zip(*found, strict=True))
    many = lines.at_all(np.array(sorted(counts)))
    assert many.tolist() == [lines.at(count) for count in sorted(counts)]
    assert (np.diff(many) >= -1e-9).all()


def test_lines_pass_through_their_points() -> None:
    lines = through([1.0, 10.0, 100.0], [2.0, 3.0, 12.0])
    assert [lines.at(count) for count in (1, 10, 100)] == pytest.approx([2, 3, 12])
    assert lines.at(200) == pytest.approx(22)  # the last slope goes on
    assert straight(1.0, 2.0).at(3) == 7.0
    assert through([1, 2, 3], [5.0, 4.0, 6.0]).at(2) == pytest.approx(4.5)  # a dip is levelled


def test_what_is_no_line() -> None:
    for counts in ([1.0], [2.0, 1.0], [1.0, 1.0]):
        with pytest.raises(ValueError, match="ascending"):
            through(counts, [1.0] * len(counts))


# --- grids and curves


def test_a_grid_holds_at_its_points_between_them_and_past_its_edges() -> None:
    grid = Grid(((1.0, 4.0), (2.0, 8.0)), np.array([[0.0, 1.0], [2.0, 3.0]]))
    assert grid.factor(1, 2) == 1.0
    assert grid.factor(4, 8) == 8.0
    assert grid.factor(2, 2) == 2.0  # half-way, in logarithms
    assert grid.factor(100, 0.1) == grid.factor(4, 2)
    both = grid.factor(np.array([1.0, 2.0]), 8)
    assert both.tolist() == [float(grid.factor(1, 8)[0]), float(grid.factor(2, 8)[0])]


@given(st.tuples(*[st.floats(0.01, 1e5)] * 3))
def test_one_point_of_a_grid_is_what_many_are(at: tuple[float, ...]) -> None:
    axes = ((1.0, 4.0, 9.0), (2.0, 8.0), (3.0,))
    grid = Grid(axes, np.random.default_rng(1).normal(size=(3, 2, 1)))
    assert grid.at(*at) == pytest.approx(float(grid.factor(*at)[0]))
    assert grid.at_last(5.0).at(*at[:2]) == pytest.approx(grid.at(*at[:2], 5.0))
    assert grid.at(0.0, 2.0, 3.0) == grid.at(1.0, 2.0, 3.0)


def test_a_curve_grows_with_its_size_past_the_end() -> None:
    curve = Curve((1.0, 4.0), (1.0, 2.0))
    assert [curve.at(size) for size in (0.1, 1, 2, 4, 8)] == pytest.approx(
        [1, 1, math.sqrt(2), 2, 4]
    )


# --- the step


def rooflines(
    name: str, ranks: int = 1, hardware: str = "h100-sxm", profile: str = "h100-sxm"
) -> Roofline:
    return Roofline(
        model=load_model(name),
        hardware=load_hardware(hardware),
        parallel=Parallelism(ranks, 1),
        host_s=1e-3,
        cuda_graph_sizes=capture_sizes(256, 8192),
        measured=load_profile(profile).kernels(),
    )


STEPS = [
    rooflines("Llama-3.1-8B"),
    rooflines("Llama-3.1-70B", 4),
    rooflines("gemma-3-12b"),
    rooflines("Mixtral-8x7B", 2),
    rooflines("DeepSeek-V3", 8, "h200-sxm"),
    rooflines("Llama-3.1-8B", 1, "l40s", "l40s"),
    rooflines("Llama-3.1-8B", 1, "rtx-pro-6000", "rtx-pro-6000"),
]


@given(st.sampled_from(STEPS), st.integers(1, 300), st.integers(1, 3000), st.integers(1, 200))
def test_decodes_alone_cost_what_a_step_of_them_does(
    roofline: Roofline, decodes: int, each: int, steps: int
) -> None:
    """One at a time, as an array, and as steps by part: the same nanoseconds."""
    decode = roofline.decode(decodes)
    context = decodes * each
    many = decode.steps_ns(context, VECTOR_STEPS + steps)
    one_by_one = [decode.steps_ns(context + i * decodes, 1)[0] for i in range(VECTOR_STEPS + steps)]
    assert list(many) == one_by_one
    assert list(decode.steps_ns(context, VECTOR_STEPS)) == one_by_one[:VECTOR_STEPS]
    part = roofline.step(StepShape((), decodes, decodes, context, decodes))
    assert one_by_one[0] == pytest.approx(part.total_s * 1e9, abs=2)
    assert sorted(one_by_one) == one_by_one


@given(st.sampled_from(STEPS), st.integers(1, 300), st.integers(1, 8000))
def test_no_decode_reads_faster_than_the_datasheet(
    roofline: Roofline, decodes: int, each: int
) -> None:
    """Though the tables' kernels do, on tensors that fit into a cache."""
    cost = roofline.step(StepShape((), decodes, decodes, decodes * each, decodes))
    assert cost.total_s >= cost.bytes / roofline.hardware.memory_bandwidth_bytes_per_s


@given(st.sampled_from(STEPS), st.integers(1, 4000), st.integers(0, 20_000))
def test_a_longer_chunk_and_a_longer_context_take_no_less(
    roofline: Roofline, new: int, before: int
) -> None:
    def seconds(new: int, before: int) -> float:
        return roofline.step(StepShape(((new, before),), 0, 0, 0, 1)).attention_prefill_s

    assert 0 < seconds(new, before) <= seconds(new + 1, before)
    assert seconds(new, before) <= seconds(new, before + 1)


def test_what_was_not_measured_is_priced_by_efficiencies() -> None:
    empty = Kernels("nothing")
    model, sizes = load_model("Llama-3.1-8B"), capture_sizes(256, 8192)
    shape = StepShape(((100, 0),), 8, 8, 8000, 9)
    bare = Roofline(model=model, hardware=H100, cuda_graph_sizes=sizes)
    none = Roofline(model=model, hardware=H100, cuda_graph_sizes=sizes, measured=empty)
    assert none.step(shape).attention_decode_s == bare.step(shape).attention_decode_s
    assert none.step(shape).attention_prefill_s == bare.step(shape).attention_prefill_s


def test_a_deployment_s_lines_pass_through_what_was_measured() -> None:
    """Rows of the tables of vLLM 0.24 on H100: seconds of one kernel."""
    kernels = PROFILE.kernels()
    prefill = kernels.prefill_lines(H100, 16, 32, 8.0, 4.0 * 32 * 128)
    decode = kernels.decode_lines(H100, 16, 64, 8, 4.0, 2 * 8 * 128 * 2.0)
    assert prefill is not None and decode is not None
    for new, seconds in ((256, 17.6e-6), (1024, 34.6e-6), (4096, 266.0e-6), (8192, 888.5e-6)):
        assert prefill.at(new * (new + 1) / 2) == pytest.approx(seconds, rel=0.1)
    for context, seconds in ((512, 69.5e-6), (2048, 186.7e-6), (8192, 688.2e-6)):
        assert decode.at(64 * context) == pytest.approx(seconds, rel=0.1)


def test_more_kv_heads_than_were_measured_are_more_sequences() -> None:
    kernels = PROFILE.kernels()
    wide = kernels.decode_lines(H100, 16, 4, 32, 1.0, 32 * 512.0)
    many = kernels.decode_lines(H100, 16, 16, 8, 1.0, 8 * 512.0)
    assert wide is not None and many is not None
    assert wide.at(4 * 1000) == pytest.approx(many.at(16 * 1000), rel=1e-9)


def beside_a_prompt(tmp_path: Path, hardware: str, model: str, **engine: Any) -> float:
    """What 64 decodes take in a step with a prompt, over what they take alone."""
    path = tmp_path / "scenario.yaml"
    text = SCENARIO.replace("profile: {profile}", "").replace("meta-llama/Llama-3.1-8B", model)
    path.write_text(text.format(hardware=hardware))
    changes = [f"engine.{key}={json.dumps(value)}" for key, value in engine.items()]
    cost = build(load_scenario(path, changes)).cost
    alone = cost.step(StepShape((), 64, 64, 64_000, 64)).attention_decode_s
    return cost.step(StepShape(((500, 0),), 64, 64, 64_000, 65)).attention_decode_s / alone


@pytest.mark.parametrize(
    ("hardware", "model", "engine", "least", "most"),
    [
        ("rtx-4090", "Llama-3.1-8B", {}, 1.9, 2.2),
        ("rtx-pro-6000", "Llama-3.1-8B", {}, 1.4, 1.8),
        # As long as heads are read by themselves, nothing is lost.
        ("a100-sxm-80gb", "Llama-2-7b-chat-hf", {"max_model_len": 4096}, 1.0, 1.0),
        ("a100-sxm-80gb", "Llama-3.1-8B", {}, 1.4, 1.8),
        ("a100-sxm-80gb", "Llama-3.1-8B", {"vllm_version": "0.7.3"}, 1.0, 1.0),
        ("h100-sxm", "Llama-3.1-8B", {}, 1.0, 1.0),
        ("b200", "Llama-3.1-8B", {}, 1.0, 1.0),
    ],
)
def test_decodes_beside_a_prompt_take_longer_in_flashattention_2(
    tmp_path: Path, hardware: str, model: str, engine: dict[str, Any], least: float, most: float
) -> None:
    found = beside_a_prompt(tmp_path, hardware, model, **engine)
    assert least - 1e-9 <= found <= most + 1e-9


@pytest.mark.parametrize(
    ("hardware", "model"),
    [
        ("h100-sxm", "Llama-3.1-8B-AWQ"),
        ("a100-sxm-80gb", "Llama-3.1-8B-AWQ"),
        ("a100-sxm-80gb", "Llama-3.1-8B-FP8"),
        ("rtx-4090", "Llama-3.1-8B-GPTQ"),
    ],
)
def test_unpacking_helps_few_tokens_and_costs_many(
    tmp_path: Path, hardware: str, model: str
) -> None:
    def seconds(name: str, tokens: int) -> float:
        path = tmp_path / "scenario.yaml"
        text = SCENARIO.replace("profile: {profile}", "").replace("meta-llama/Llama-3.1-8B", name)
        path.write_text(text.format(hardware=hardware))
        deployment = build(load_scenario(path))
        assert ("as experts unpack them" in deployment.profile.label) is (name == model)
        return deployment.cost.step(StepShape(((tokens, 0),), 0, 0, 0, 1)).gemm_s

    assert seconds(model, 1) < 0.75 * seconds("Llama-3.1-8B", 1)
    assert seconds(model, 2048) > 1.05 * seconds("Llama-3.1-8B", 2048)


def test_one_slow_kernel_does_not_slow_all_matrices() -> None:
    """A library's bad choice for one row is no sign of what memory gives."""
    axes = ((1.0, 8.0), (4096.0, 16384.0), (4096.0, 16384.0))
    values = np.zeros((2, 2, 2))
    values[0, 1, 1] = 1.0  # twice as long
    kernels = Kernels("x", gemm={"16bit": Grid(axes, values)})
    lines = kernels.gemm_lines(H100, "16bit", 16384, 4096, 16.0)
    assert lines is not None
    form = gemm_form_s(np.array([8.0]), 16384, 4096, H100.peak_flops_per_s(), 3.35e12)
    assert lines.at(8) == pytest.approx(float(form[0]), rel=1e-6)


# --- fits


def synthetic(efficiency: Any) -> Rows:
    m, n, k = (
        axis.ravel().astype(float)
        for axis in np.meshgrid(2 ** np.arange(13), 2 ** np.arange(9, 16), 2 ** np.arange(9, 16))
    )
    form = gemm_form_s(m, n, k, H100.peak_flops_per_s(), H100.memory_bandwidth_bytes_per_s)
    return Rows({"m": m, "n": n, "k": k}, form * efficiency(m, n, k), form)


def test_a_smooth_law_is_found_again_on_shapes_left_out() -> None:
    rows = synthetic(lambda m, n, k: 1.2 * (m * n / k) ** 0.05)
    family = fit_family("gemm", rows)
    assert family.rows == len(rows.seconds)
    assert family.p95 < 0.01
    factor = family.grid.factor(*rows.shape.values())
    assert factor == pytest.approx(rows.seconds / rows.form_s, rel=1e-6)


def test_how_a_library_cuts_is_found_by_what_it_leaves_out() -> None:
    """Times that rise with every 256th row, and then are level."""
    m = np.array([1, 2, 4, 16, 64, 256, 257, 400, 512, 513, 700, 768, 769, 1024, 1025, 2048, 2049])
    m, n, k = (
        axis.ravel().astype(float)
        for axis in np.meshgrid(m, 2 ** np.arange(11, 14), 2 ** np.arange(11, 14))
    )
    peak, bandwidth = H100.peak_flops_per_s(), H100.memory_bandwidth_bytes_per_s
    seconds = 1.3 * gemm_form_s(m, n, k, peak, bandwidth, tile_rows=256)
    family = fit_matrices(Rows({"m": m, "n": n, "k": k}, seconds, seconds), "16bit", H100)
    assert family.tile_rows == 256 and family.p95 < 0.01
    kernels = Kernels("x", gemm={"16bit": family.grid}, tiles={"16bit": family.tile_rows})
    lines = kernels.gemm_lines(H100, "16bit", 4096, 4096, 16.0)
    assert lines is not None
    assert lines.at(600) == pytest.approx(lines.at(768), rel=0.02)
    assert lines.at(769) > 1.2 * lines.at(768)


def test_narrow_matrices_alone_are_no_fit() -> None:
    few = np.array([1.0, 2.0])
    rows = Rows({"m": few, "n": 0 * few + 64, "k": 0 * few + 64}, few, few)
    with pytest.raises(InputError, match="no rows of gemm kernels"):
        fit_matrices(rows, "16bit", H100)


def test_a_law_that_no_shape_tells_is_seen_to_fail() -> None:
    noise = np.random.default_rng(1)
    rows = synthetic(lambda m, n, k: np.exp(noise.normal(0, 0.5, m.shape)))
    axes = {name: tuple(np.unique(column)) for name, column in rows.shape.items()}
    assert held_out(rows, axes).median > 0.2


def test_gaps_are_filled_from_their_neighbours() -> None:
    rows = synthetic(lambda m, n, k: 2.0 + 0 * m)
    some = rows.take((rows.shape["n"] != rows.shape["k"]) | (rows.shape["m"] > 8))
    axes = {name: tuple(np.unique(column)) for name, column in rows.shape.items()}
    assert fit_grid(some, axes).values == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no rows"):
        fit_grid(rows.take(np.zeros(len(rows.seconds), bool)), axes)


def test_a_point_of_one_shape_says_nothing_of_another() -> None:
    """Where more was measured of one shape, another's gaps are filled from its own points."""
    rows = synthetic(lambda m, n, k: np.where(n == n.max(), 4.0, 1.0) * (1.0 + 0 * m))
    m, n = rows.shape["m"], rows.shape["n"]
    # All tokens of one width; of the others the first and the last.
    some = rows.take((n == n.max()) | (m == m.min()) | (m == m.max()))
    axes = {name: tuple(np.unique(column)) for name, column in rows.shape.items()}
    own = np.unique(n) < n.max()
    filled = fit_grid(some, axes, ("m",)).values[:, own]
    assert filled == pytest.approx(0.0)
    assert np.abs(fit_grid(some, axes).values[:, own]).max() > 1.5


def test_gaps_of_a_device_are_filled_from_what_is_nearest() -> None:
    """A lone point far away says less than two neighbours, or than a near one."""
    grid = np.array([2.0**power for power in range(9)])
    m, n = (column.ravel() for column in np.meshgrid(grid, grid, indexing="ij"))
    k = np.ones(len(m))
    # Every other row of m, whole; of the third and the last one point that is unlike the rest.
    whole = np.isin(m, grid[:8:2]) & (m != grid[2])
    lone = ((m == grid[2]) | (m == grid[8])) & (n == 1.0)
    form = 1e-6 * np.ones(len(m))
    rows = Rows({"m": m, "n": n, "k": k}, np.where(lone, 8.0, 1.0) * form, form)
    axes = {"m": tuple(grid), "n": tuple(grid), "k": (1.0, 2.0)}
    filled = fit_grid(rows.take(whole | lone), axes, ()).values[..., 0]
    assert filled[2, 0] == filled[8, 0] == pytest.approx(3.0)
    assert np.abs(filled[2, 4:]).max() < 0.3
    assert np.abs(filled[8, 6:]).max() < 0.5
    # Along one axis after another the lone points stand for their rows.
    assert fit_grid(rows.take(whole | lone), axes).values[2, 6, 0] == pytest.approx(3.0)


# --- profiles


@pytest.mark.parametrize("name", profile_names())
def test_the_bundled_profiles(name: str) -> None:
    profile = load_profile(name)
    assert profile.hardware in hardware_names()
    assert profile.source["licence"] in ("Apache-2.0", "MIT")
    for family in profile.families.values():
        assert family.rows > 0 and 0 < family.median < family.p95
        assert list(family.residuals) == sorted(family.residuals)
    assert "measured on" in profile.kernels().label
    json.dumps(profile_facts(profile))


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(profile_text(PROFILE))
    again = load_profile(str(path))
    assert profile_text(again) == profile_text(PROFILE)
    assert repr(again.kernels()) == repr(PROFILE.kernels())
    other = replace(PROFILE.kernels(), small_kernel_s=1e-6)
    assert repr(other) != repr(PROFILE.kernels())


TEXT = profile_text(load_profile("rtx-4090"))


@given(st.integers(0, len(TEXT)), st.integers(0, 400), st.text(max_size=12))
def test_a_damaged_profile_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, length: int, other: str
) -> None:
    path = tmp_path_factory.mktemp("p") / "p.yaml"
    path.write_bytes((TEXT[:at] + other + TEXT[at + length :]).encode("utf-8", "replace"))
    try:
        load_profile(str(path)).kernels()
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format: 1", "format: 2", "expected format: 1"),
        ("rows: 648", "rows: many", "not a profile"),
        ("median: ", "median: .nan #", "errors must be numbers"),
        ("small_kernel_s: ", "small_kernel_s: -", "expected 0 to 1"),
        ("rows: 648", "rows: .inf", "not a profile: OverflowError"),
        ("gemm 16bit:", "gemm:", "not a family of kernels"),
        ("gemm 16bit:", "gemm 17bit:", "not a family of kernels"),
        ("decode 16:", "decode abc:", "not a family of kernels"),
        ("residuals: [", "residuals: [0.0, ", "expected 20 residuals"),
        ("tile_rows: 128", "tile_rows: 0", "expected 1 to 4096"),
        ("tile_rows: 128", "tile_rows: [64]", "not a profile"),
        ("m: [1, 2,", "m: [2, 1,", "ascending"),
        ("      ", "      x ", "not a profile"),
    ],
)
def test_what_is_no_profile(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        load_profile(str(path))


def test_profiles_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'h101' is not known; one of a100"):
        load_profile("h101")
    with pytest.raises(InputError, match="cannot be read"):
        load_profile(str(tmp_path / "none.yaml"))


# --- scenarios


def write(folder: Path, profile: str, hardware: str = "h100-sxm") -> Path:
    path = folder / "s.yaml"
    path.write_text(SCENARIO.format(profile=profile, hardware=hardware))
    return path


@pytest.mark.parametrize(
    ("profile", "hardware", "label"),
    [
        ("h100-sxm", "h100-sxm", "kernels measured on NVIDIA H100 80GB HBM3"),
        ("null", "h100-sxm", "kernels measured on NVIDIA H100 80GB HBM3"),
        ("null", "h100-pcie", "HBM3 (aiconfigurator tables of vLLM 0.24.0), scaled to h100-pcie"),
    ],
)
def test_a_scenario_names_its_profile_or_has_its_devices(
    tmp_path: Path, profile: str, hardware: str, label: str
) -> None:
    deployment = build(load_scenario(write(tmp_path, profile, hardware)))
    assert label in deployment.profile.label
    assert "uncalibrated" not in deployment.profile.label
    generic = build(load_scenario(write(tmp_path, "generic", hardware)))
    assert "uncalibrated" in generic.profile.label


@pytest.mark.parametrize(
    ("hardware", "nearest"),
    [
        ("a100-sxm-40gb", "a100-sxm-80gb"),
        ("a30", "a100-sxm-80gb"),
        ("h100-pcie", "h100-sxm"),
        ("gh200-96gb", "h100-sxm"),
        ("b300", "b200"),
        ("gb300", "gb200"),
        ("l4", "l40s"),
        ("rtx-3090", "l40s"),
        ("rtx-6000-ada", "l40s"),
        ("rtx-5090", "rtx-pro-6000"),
        ("t4", None),
        ("mi300x", None),
        ("cpu", None),
    ],
)
def test_other_devices_borrow_from_their_nearest_relative(
    hardware: str, nearest: str | None
) -> None:
    assert profile_of(None, load_hardware(hardware)) == nearest


#: Large enough that a launch is little beside them.
MATRICES = ((4096, 14336), (6144, 8192), (24576, 4096), (28672, 4096), (32768, 4096), (10240, 8192))


@pytest.mark.parametrize(
    "name", [name for name in hardware_names() if profile_of(None, load_hardware(name))]
)
def test_no_device_reads_weights_faster_than_its_memory(name: str) -> None:
    """Own kernels or borrowed ones, in any format; those in 16 bits not much slower than where
    they were measured."""
    hardware = load_hardware(name)
    found = load_profile(profile_of(None, hardware) or "")
    kernels = kernels_on(completed(found, hardware), hardware)
    owner = load_hardware(found.hardware)
    theirs = kernels_on(found, owner)
    for compute, bits in (("16bit", 16.0), ("fp8", 8.0), ("int4", 4.25)):
        for n, k in MATRICES:
            lines = kernels.gemm_lines(hardware, compute, n, k, bits)
            if lines is None:
                continue
            read_s = n * k * bits / 8 / hardware.memory_bandwidth_bytes_per_s
            assert min(lines.at(m) for m in (1, 2, 8, 32, 64)) > 0.99 * read_s
            if compute == "16bit":
                other = theirs.gemm_lines(owner, compute, n, k, bits)
                assert other is not None
                ratio = owner.memory_bandwidth_bytes_per_s / hardware.memory_bandwidth_bytes_per_s
                assert lines.at(1) < 1.2 * ratio * other.at(1)


@pytest.mark.parametrize("name", ["a10g", "rtx-3090", "a100-sxm-80gb"])
def test_a_device_without_units_for_fp8_takes_it_for_storage(name: str) -> None:
    """Few tokens gain by fewer bytes, whatever the profile's own device computes in fp8."""
    hardware = load_hardware(name)
    found = completed(load_profile(profile_of(None, hardware) or ""), hardware)
    kernels = kernels_on(found, hardware)
    assert not hardware.has_units("fp8") and not kernels.has_gemm("fp8", 8.0)
    stored = kernels.gemm_lines(hardware, "fp8", 28672, 4096, 8.0)
    plain = kernels.gemm_lines(hardware, "16bit", 28672, 4096, 16.0)
    assert stored is not None and plain is not None
    assert stored.at(1) < 0.8 * plain.at(1)


def test_another_form_has_the_same_times() -> None:
    grid, rows = load_profile("l40s").families["gemm 16bit"].grid, 128
    hardware = load_hardware("l40s")
    tiled, whole = (
        Kernels("x", gemm={"16bit": own}, tiles={"16bit": tile_rows})
        for own, tile_rows in ((grid, rows), (without_tiles(grid, "16bit", rows, hardware), 1))
    )
    for m in grid.axes[0]:
        one, two = (k.gemm_lines(hardware, "16bit", 4096, 8192, 16.0) for k in (tiled, whole))
        assert one is not None and two is not None
        assert one.at(m) == pytest.approx(two.at(m), rel=1e-9)


def test_what_a_profile_has_not_measured_is_its_devices(tmp_path: Path) -> None:
    """Whatever the file is called; and its errors count too."""
    own = load_profile("rtx-4090")
    families = {name: own.families[name] for name in ("decode 16", "prefill 16")}
    paths = [tmp_path / "mine.yaml", tmp_path / "rtx-4090.yaml"]
    for path in paths:
        path.write_text(profile_text(replace(own, families=families)))
        found = completed(load_profile(str(path)), load_hardware("rtx-4090"))
        assert set(found.families) == set(own.families)
        assert found.families["gemm 16bit"] == own.families["gemm 16bit"]
    assert repr(kernels_on(found, load_hardware("rtx-4090")).mixed[16]) == repr(
        own.kernels().mixed[16]
    )


def test_a_file_of_a_catalogues_name_with_other_figures_is_another_device() -> None:
    hardware = load_hardware("l40s")
    slower = replace(hardware, fp8_flops_per_s=None)
    found = load_profile("l40s")
    assert of_the_device(found, replace(hardware, memory_bytes=1)) and not of_the_device(
        found, slower
    )
    kernels = kernels_on(completed(found, slower), slower)
    assert "fp8" not in kernels.gemm and not kernels.tiles
    assert kernels.unpacks(slower, "fp8", 8.0)


def test_an_own_devices_profile_unpacks_too() -> None:
    """Of a device that is in no catalogue."""
    hardware = replace(load_hardware("rtx-4090"), name="mycard")
    found = replace(load_profile("rtx-4090"), hardware="mycard")
    kernels = kernels_on(completed(found, hardware), hardware)
    assert kernels.unpacks(hardware, "int4", 4.25) and kernels.tiles


@pytest.mark.parametrize("widest", [1024, 4096, 16384])
def test_a_floor_of_small_matrices_is_not_that_of_large_ones(widest: int) -> None:
    """Kernels that are as the form says stay so, however narrow those measured are."""
    grid = Grid(((1.0, 64.0), (256.0, widest), (256.0, widest)), np.zeros((2, 2, 2)))
    lines = Kernels("x", gemm={"16bit": grid}).gemm_lines(H100, "16bit", 16384, 16384, 16.0)
    assert lines is not None
    peak, bandwidth = H100.peak_flops_per_s(), H100.memory_bandwidth_bytes_per_s
    form = gemm_form_s(np.array([1.0]), 16384, 16384, peak, bandwidth)
    assert lines.at(1) == pytest.approx(float(form[0]))


@pytest.mark.parametrize("name", ["rtx-4090", "rtx-pro-6000-llmservingsim", "h100-sxm"])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (6144, 4096)])
def test_between_two_measured_tokens_time_is_between_theirs(name: str, n: int, k: int) -> None:
    """An edge of the form is none where the next row measured does not show it."""
    profile = load_profile(name)
    kernels = profile.kernels()
    lines = kernels.gemm_lines(load_hardware(profile.hardware), "16bit", n, k, 16.0)
    assert lines is not None
    axis = kernels.gemm["16bit"].axes[0]
    for before, after in pairwise(axis):
        low, high = sorted((lines.at(before), lines.at(after)))
        for m in np.linspace(before, after, 9):
            assert low * (1 - 1e-9) <= lines.at(float(m)) <= high * (1 + 1e-9)


@pytest.mark.parametrize(("name", "most"), [("rtx-4090", 2048), ("h100-sxm", 16384)])
def test_beyond_what_was_measured_matrices_grow_as_their_form(name: str, most: int) -> None:
    """However close the last tokens measured are to each other."""
    hardware = load_hardware(name)
    lines = load_profile(name).kernels().gemm_lines(hardware, "16bit", 28672, 4096, 16.0)
    assert lines is not None
    for times in (2, 4, 10, 50):
        assert lines.at(times * most) == pytest.approx(times * lines.at(most), rel=0.03)


def test_kernels_are_named_by_all_that_they_hold() -> None:
    grid = Grid(((1.0, 2.0),), np.zeros(2))
    other = Grid(((1.0, 4.0),), np.zeros(2))
    names = {
        repr(Kernels("x", decode={16: grid})),
        repr(Kernels("x", mixed={16: grid})),
        repr(Kernels("x", mixed={16: other})),
        repr(Kernels("x", tail=Tail(64.0, {8: 1.0}, {}))),
        repr(Kernels("x", tail=Tail(64.0, {8: 0.5}, {}))),
        repr(Kernels("x", unpacking=Unpacking(grid, grid, grid))),
        repr(Kernels("x", unpacking=Unpacking(grid, grid, other))),
        repr(Kernels("x", unpacking=Unpacking(other, grid, grid))),
    }
    assert len(names) == 8


def test_another_devices_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="h100-sxm was measured on h100-sxm, not on h100-pcie"):
        build(load_scenario(write(tmp_path, "h100-sxm", "h100-pcie")))
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "vendor: NVIDIA\nkind: gpu\nmemory_gib: 80\nmemory_bandwidth_gb_per_s: 3000\n"
        "bf16_tflops: 900\nlink_gb_per_s: 450\nhost_link_gb_per_s: 63\nsource: me\n"
    )
    own = build(load_scenario(write(tmp_path, "h100-sxm", "mine.yaml"))).profile.label
    assert "scaled to" in own


def test_a_coefficient_that_is_off_moves_the_measured_kernels_that_it_stands_for(
    tmp_path: Path,
) -> None:
    loaded = load_scenario(write(tmp_path, "h100-sxm"))
    slow = replace(GENERIC, efficiency=replace(GENERIC.efficiency, gemm_bandwidth=0.60))
    as_measured, slower = (build(loaded, base).cost for base in (GENERIC, slow))
    few, many = StepShape((), 1, 1, 100, 1), StepShape(((8192, 0),), 0, 0, 0, 1)
    assert slower.step(few).gemm_s > 1.25 * as_measured.step(few).gemm_s
    # Norms and activations move, and nothing else.
    assert slower.step(many).gemm_s < 1.15 * as_measured.step(many).gemm_s
    assert slower.step(few).attention_decode_s == as_measured.step(few).attention_decode_s


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            [
                "model=mistralai/Mixtral-8x7B-v0.1",
                "engine.tensor_parallel_size=8",
                "hardware=rtx-4090",
                "profile=rtx-4090",
            ],
            "experts",
        ),
        (
            ["engine.tensor_parallel_size=2", "hardware=rtx-4090", "profile=rtx-4090"],
            "all-reduce of 2 ranks",
        ),
        (["engine.kv_cache_dtype=int4_g64"], "attention over int4_g64 KV"),
        (["model=Qwen/Qwen3.5-27B"], "recurrent layers"),
    ],
)
def test_the_label_says_what_is_not_measured(tmp_path: Path, changes: list[str], part: str) -> None:
    label = build(load_scenario(write(tmp_path, "h100-sxm"), changes)).profile.label
    assert part in label and "uncalibrated" in label


def test_the_files_of_a_scenario_name_its_results(tmp_path: Path) -> None:
    """A point is kept under what its profile and boot log hold, not under their names."""
    (tmp_path / "mine.yaml").write_text(TEXT)
    path = write(tmp_path, "mine.yaml", "rtx-4090")
    first = Point(load_scenario(path).scenario, path, 0).key
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.yaml").write_text(TEXT.replace("small_kernel_s: 2", "small_kernel_s: 3"))
    moved = write(other, "mine.yaml", "rtx-4090")
    assert Point(load_scenario(moved).scenario, moved, 0).key != first
    with pytest.raises(InputError, match="'nope' is not known"):
        build(load_scenario(path, ["profile=nope"]))


# --- imports


def parquet(folder: Path, name: str, **columns: list[Any]) -> None:
    rows = max(map(len, columns.values()))
    shared = {"device": ["NVIDIA X"] * rows, "version": ["0.24.0"] * rows}
    pq.write_table(pyarrow.table({**columns, **shared}), folder / f"{name}_perf.parquet")


def small_system(folder: Path) -> None:
    """Tables as aiconfigurator writes them, of a device at half its datasheet."""
    ms, ns, ks = zip(
        *((m, n, k) for m in (1, 64, 4096) for n in (1024, 4096) for k in (1024, 4096)), strict=True
    )
    form = gemm_form_s(
        np.array(ms, float),
        np.array(ns, float),
        np.array(ks, float),
        H100.peak_flops_per_s(),
        H100.memory_bandwidth_bytes_per_s,
    )
    parquet(
        folder,
        "gemm",
        gemm_dtype=["bfloat16"] * len(ms),
        m=list(ms),
        n=list(ns),
        k=list(ks),
        latency=(2e3 * form).tolist(),
    )
    attention = {
        "num_heads": [8, 8, 8],
        "num_key_value_heads": [2, 2, 2],
        "head_dim": [128] * 3,
        "kv_cache_dtype": ["bfloat16"] * 3,
        "attn_dtype": ["bfloat16"] * 3,
        "latency": [0.01, 0.02, 0.04],
    }
    parquet(
        folder,
        "context_attention",
        batch_size=[1] * 3,
        isl=[64, 512, 2048],
        step=[0] * 3,
        **attention,
    )
    parquet(
        folder,
        "generation_attention",
        batch_size=[1, 8, 64],
        isl=[1] * 3,
        step=[99, 99, 99],
        **attention,
    )
    parquet(
        folder,
        "custom_allreduce",
        num_gpus=[2, 2, 2],
        message_size=[128, 1024, 65536],
        backend=["vllm_graph", "vllm_graph", "vllm_eager"],
        latency=[0.005, 0.006, 0.02],
    )


def test_tables_of_aiconfigurator(tmp_path: Path) -> None:
    folder = tmp_path / "h100_sxm"
    folder.mkdir()
    small_system(folder)
    out = tmp_path / "p.yaml"
    result = CliRunner().invoke(
        app,
        ["calibrate", str(tmp_path), "--from", "aiconfigurator", "--out", str(out), "--json"],
        catch_exceptions=False,
    )
    assert json.loads(result.stdout)["families"]["gemm 16bit"]["rows"] == 12
    profile = load_profile(str(out))
    assert profile.device == "NVIDIA X"
    assert profile.families["gemm 16bit"].grid.values == pytest.approx(1.0)  # twice the form
    assert profile.all_reduce[2].sizes == (256.0, 2048.0)


@pytest.mark.parametrize("name", ["gemm", "context_attention", "custom_allreduce"])
def test_damaged_tables_of_aiconfigurator(tmp_path: Path, name: str) -> None:
    small_system(tmp_path)
    path = tmp_path / f"{name}_perf.parquet"
    for content in (b"", b"PAR1xxxx", path.read_bytes()[:-9]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"{name}_perf\.parquet: not a table"):
            aiconfigurator.fit_system(tmp_path, H100, "x")


def test_tables_of_llmservingsim(tmp_path: Path) -> None:
    small_csvs(tmp_path)
    hardware = load_hardware("rtx-4090")
    profile = llmservingsim.fit_system(tmp_path / "RTX4090", hardware, "x")
    assert profile.small is not None and profile.sampling is not None
    assert profile.small.seconds == pytest.approx((4 * 2e-6, 4 * 513e-6))
    assert profile.sampling.at(64 * 128_256) == pytest.approx(84e-6)
    rows = {name: family.rows for name, family in profile.families.items()}
    assert rows == {"gemm 16bit": 19, "prefill 16": 3, "decode 16": 6, "mixed 16": 1}
    assert profile.families["mixed 16"].grid.values == pytest.approx(1.0)
    lines = profile.kernels().gemm_lines(hardware, "16bit", 4096, 14336, 16.0)
    assert isinstance(lines, Lines)
    assert lines.at(64) == pytest.approx(164e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,1,nan\n"),
        ("dense.csv", "layer,tokens\nqkv_proj,1\n"),
        ("attention.csv", "\x00\x00"),
        ("attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,0\n"),
        ("per_sequence.csv", "layer,sequences,time_us\nlm_head,x,1\n"),
    ],
)
def test_damaged_tables_of_llmservingsim(tmp_path: Path, name: str, text: str) -> None:
    (small_csvs(tmp_path) / name).write_text(text)
    with pytest.raises(InputError, match=name):
        llmservingsim.fit_system(tmp_path / "RTX4090", load_hardware("rtx-4090"), "x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --from aiconfigurator"),
        (["{}", "--from", "nobody"], "--from nobody: not known"),
        (["{}/none", "--from", "aiconfigurator"], "no folder of tables"),
        (["{}", "--from", "aiconfigurator"], "--system: name one of a100_sxm"),
        (["{}", "--from", "aiconfigurator", "--system", "x"], "name its device"),
        (["{}", "--from", "aiconfigurator", "--system", "l40s"], "no tables of l40s"),
        (["{}", "--show", "h100-sxm"], "--show: takes neither tables"),
        (["--show", "h101"], "'h101' is not known"),
    ],
)
def test_what_calibrate_cannot_do(tmp_path: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *(word.format(tmp_path) for word in words)])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_a_profile_can_be_shown() -> None:
    result = CliRunner().invoke(app, ["calibrate", "--show", "rtx-4090"], catch_exceptions=False)
    assert "MIT" in result.stdout and "decode 16" in result.stdout


@pytest.mark.skipif(not TABLES.exists(), reason="shared kernel tables not here")
def test_the_bundled_h100_is_what_its_tables_give() -> None:
    again = aiconfigurator.fit_system(TABLES / "h100_sxm", H100, "h100-sxm")
    assert profile_text(again) == profile_text(PROFILE)


# --- experts


def test_experts_are_met_once_each_at_most() -> None:
    met = experts_met(np.array([1.0, 2.0, 1e6]), 64.0, 4.0)
    assert met[0] == pytest.approx(4.0)
    assert 4.0 < met[1] < 8.0
    assert met[2] == pytest.approx(64.0)


def test_experts_of_a_model_left_out_are_predicted_from_the_others() -> None:
    """A law in the form's own terms: three models of other widths and numbers of experts."""
    rng = np.random.default_rng(1)
    m = np.exp2(rng.uniform(0, 13, 900))
    model = rng.integers(0, 3, 900)
    width, experts = np.array([2e6, 4e6, 8e6])[model], np.array([64.0, 128.0, 64.0])[model]
    met = experts_met(m, experts, 8.0)
    form, _ = experts_form_s(m, width, met, 8.0, 1e15, 3e12)
    shape = {"rows": m * 8.0 / met, "intermediate": width / 4096, "met": met}
    family = fit_family("experts", Rows(shape, 1.5 * form, form, model))
    assert family.rows == 900
    assert family.p95 < 0.01
    assert family.grid.factor(4.0, 1024.0, 32.0)[0] == pytest.approx(1.5)


def test_measured_experts_are_both_matrices_once(tmp_path: Path) -> None:
    changes = ["model=Qwen/Qwen3-30B-A3B", "engine.max_model_len=4096"]
    deployment = build(load_scenario(write(tmp_path, "h100-sxm"), changes))
    assert "uncalibrated" not in deployment.profile.label
    kernels, model = deployment.profile.kernels, deployment.model
    assert kernels is not None and model.moe is not None
    moe = model.moe
    lines = kernels.experts_lines(
        deployment.hardware, "16bit", 16.0, model.hidden_size, moe.intermediate_size, 128, 8
    )
    assert isinstance(lines, Lines)
    for tokens in (1, 64, 512):
        step = deployment.cost.step(StepShape((), tokens, tokens, 100 * tokens, tokens))
        experts_s = moe.layers * lines.at(tokens)
        assert experts_s < step.moe_s < 1.5 * experts_s  # the router is in it too


# --- how sure a run is


def interval_of(tmp_path: Path, hardware: str, profile: str, *changes: str) -> Any:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.format(hardware=hardware, profile=profile))
    return run(load_scenario(path, list(changes))).summary


def test_a_run_says_what_its_kernels_leave_open(tmp_path: Path) -> None:
    summary = interval_of(tmp_path, "h100-sxm", "h100-sxm")
    for name, (low, high) in summary["calibration_interval"].items():
        assert low <= value_at(summary, SPAN_METRICS[name]) <= high
    low, high = summary["calibration_interval"]["tpot_mean_s"]
    # Thirteen per cent is unsure whatever the kernels.
    assert math.exp(-0.3) < low / summary["tpot_s"]["mean"] < math.exp(-0.12)
    assert math.exp(0.12) < high / summary["tpot_s"]["mean"] < math.exp(0.3)
    assert "calibration_interval" not in interval_of(tmp_path, "h100-sxm", "generic")
    many = "workload.arrivals.requests=5001"
    assert "calibration_interval" not in interval_of(tmp_path, "h100-sxm", "h100-sxm", many)


def test_sums_over_pcie_are_less_sure(tmp_path: Path) -> None:
    """Whether devices reach each other's memory is not known."""

    def width(ranks: int) -> float:
        changes = f"engine.tensor_parallel_size={ranks}"
        summary = interval_of(tmp_path, "rtx-pro-6000", "rtx-pro-6000", changes)
        low, high = summary["calibration_interval"]["tpot_mean_s"]
        return math.log(high / low)

    assert width(2) > 1.1 * width(1)
