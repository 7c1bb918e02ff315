"""Predictions beside measured runs: cases, intervals, and what the shared runs give."""

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from servecast.calibration.fit import PROBABILITIES
from servecast.calibration.measured import CLIENT_PATH_S
from servecast.calibration.spread import BORROWED_SPREAD, MODEL_SPREAD, UNKNOWN_SIGMA, step_spread
from servecast.calibration.store import KernelProfile, load_profile
from servecast.costmodels.catalogue import load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.quantization import with_quantization
from servecast.scenarios.cli import app
from servecast.scenarios.validate import load_case, validate

SHARED = Path(__file__).parents[1].parent / "shared/validation/llmservingsim"
PROMPTS = SHARED.parents[1] / "traces/sharegpt/sharegpt-llama-3.1-8b-300-sps10_lengths.csv"

SCENARIO = """
name: small
model: meta-llama/Llama-3.1-8B
hardware: h100-sxm
engine: {max_model_len: 8192}
workload:
  arrivals: {kind: poisson, rate_per_s: 4, requests: 60}
  lengths: {kind: fixed, input_tokens: 400, output_tokens: 50}
"""

CASE = """
scenario: s.yaml
measured:
  ttft_s: {mean: 0.02, p95: 0.03}
  e2e_s: {p50: 0.4}
"""


def case(folder: Path, text: str = CASE) -> Path:
    (folder / "s.yaml").write_text(SCENARIO)
    path = folder / "mine.case.yaml"
    path.write_text(text)
    return path


def test_every_measured_value_is_predicted_with_an_interval(tmp_path: Path) -> None:
    answer = validate([load_case(case(tmp_path))], "h100-sxm")
    rows = answer["rows"]
    assert [row["metric"] for row in rows] == ["ttft_s mean", "ttft_s p95", "e2e_s p50"]
    for row in rows:
        assert row["case"] == "mine"
        assert row["lo"] <= row["predicted"] <= row["hi"]
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        assert row["inside"] == (row["lo"] <= row["measured"] <= row["hi"])
    assert answer["inside"] == sum(row["inside"] for row in rows) / 3
    assert answer["metrics"]["ttft_s mean"]["values"] == 1


def test_without_a_profile_there_is_no_interval(tmp_path: Path) -> None:
    answer = validate([load_case(case(tmp_path))], "generic")
    assert answer["inside"] is None
    assert all(row["lo"] is None and row["hi"] is None for row in answer["rows"])


def test_a_client_sees_its_own_path_too(tmp_path: Path) -> None:
    engine = validate([load_case(case(tmp_path))], "h100-sxm")["rows"][0]
    client = validate([load_case(case(tmp_path, f"client: true\n{CASE}"))], "h100-sxm")["rows"][0]
    assert client["predicted"] == pytest.approx(engine["predicted"] + CLIENT_PATH_S)


def test_a_prediction_is_held_against_itself(tmp_path: Path) -> None:
    """What is predicted, given as measured, has no error; slower kernels, one of their size."""
    first = validate([load_case(case(tmp_path))], "h100-sxm")["rows"]
    values = {row["metric"]: row["predicted"] for row in first}
    text = f"scenario: s.yaml\nmeasured: {{e2e_s: {{p50: {values['e2e_s p50']!r}}}}}\n"
    row = validate([load_case(case(tmp_path, text))], "h100-sxm")["rows"][0]
    assert row["error"] == 0.0 and row["inside"]


def test_the_command(tmp_path: Path) -> None:
    path = str(case(tmp_path))
    words = ["validate", path, "--profile", "h100-sxm"]
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    rows = json.loads(result.stdout)
    assert {"case", "metric", "measured", "predicted", "error", "lo", "hi"} <= set(rows[0])
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "inside the 90 % interval" in shown and "ttft p95" in shown
    bare = CliRunner().invoke(app, ["validate", path, "--profile", "generic"]).stdout
    assert "No intervals" in bare


# --- how wide


def with_errors(sigma: float) -> KernelProfile:
    """The H100 profile, its residuals normal with a standard deviation."""
    profile = load_profile("h100-sxm")
    normal = NormalDist(0.0, sigma)
    residuals = tuple(normal.inv_cdf(percent / 100) for percent in PROBABILITIES)
    families = {k: replace(f, residuals=residuals) for k, f in profile.families.items()}
    return replace(profile, families=families)


def test_the_width_is_that_of_independent_kernels() -> None:
    model = load_model("Llama-3.1-8B")
    attention = {"attention_decode_s": 1.0}
    both = {"gemm_s": 1.0, **attention}

    def kernels(sigma: float, parts_s: dict[str, float]) -> float:
        """Without what is unsure beside them."""
        whole = step_spread(with_errors(sigma), model, 1, 16, parts_s)
        return math.sqrt(whole**2 - MODEL_SPREAD**2)

    alone = kernels(0.1, attention)
    assert alone == pytest.approx(1.645 * 0.1, rel=0.05)
    matrices = kernels(0.1, {"gemm_s": 1.0})
    assert alone / 2 < matrices < alone  # four matrices, of which the largest is a half
    assert kernels(0.1, both) == pytest.approx(math.hypot(alone, matrices) / 2)
    assert kernels(0.2, attention) == pytest.approx(2 * alone)


def test_borrowed_kernels_are_less_sure() -> None:
    model, parts_s = load_model("Llama-3.1-8B"), {"gemm_s": 1.0}
    own, borrowed = (
        step_spread(with_errors(0.1), model, 1, 16, parts_s, borrowed=other)
        for other in (False, True)
    )
    assert borrowed == pytest.approx(math.hypot(own, BORROWED_SPREAD))


def test_what_was_not_measured_is_no_surer_than_what_was() -> None:
    model = load_model("Llama-3.1-8B")
    unmeasured = step_spread(with_errors(0.1), model, 1, 4, {"attention_decode_s": 1.0})
    assert unmeasured == pytest.approx(math.hypot(MODEL_SPREAD, 1.645 * UNKNOWN_SIGMA), rel=1e-3)
    four_bit = with_quantization(model, "awq")
    matrices = {"gemm_s": 1.0}
    assert step_spread(load_profile("a100-sxm-80gb"), four_bit, 1, 16, matrices) > step_spread(
        load_profile("a100-sxm-80gb"), model, 1, 16, matrices
    )
    assert step_spread(with_errors(0.1), model, 1, 16, {"sampling_s": 1.0}) == MODEL_SPREAD
    assert step_spread(with_errors(0.1), model, 1, 16, {}) == 0.0


# --- time lines


def test_a_time_line_is_drawn_beside_the_prediction(tmp_path: Path) -> None:
    path = case(tmp_path, f"timeline: t.csv\n{CASE}")
    (tmp_path / "t.csv").write_text("t,running,waiting,kv_cache_pct\n1,2,0,50\n2,3,1,0\n")
    found = load_case(path)
    assert found.timeline is not None
    assert found.timeline["running"].tolist() == [2.0, 3.0]
    assert found.timeline["kv_share"].tolist() == [0.5, 0.0]
    (tmp_path / "t.csv").write_text("t,running,waiting,kv_cache_pct\n1,2,0,0\n")
    unrecorded = load_case(path).timeline
    assert unrecorded is not None and "kv_share" not in unrecorded
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["validate", str(path), "--out", str(out)])
    assert result.exit_code == 0
    assert "Requests running" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t,running,waiting\n",
        "t,running\n1,2\n",
        "t,running,waiting\n1,x,2\n",
        "t,running,waiting\n1,nan,0\n",
    ],
)
def test_what_is_no_time_line(tmp_path: Path, text: str) -> None:
    path = case(tmp_path, f"timeline: t.csv\n{CASE}")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=r"t\.csv: not a time line"):
        load_case(path)


# --- bad cases


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected scenario and measured"),
        ("scenario: s.yaml\n", "measured: expected requests, or metrics"),
        ("scenario: 3\nmeasured: {}\n", "scenario: expected a file"),
        ("a: 1\n", "a: unknown key"),
        (f"client: yes please\n{CASE}", "client: expected true or false"),
        (f"timeline: 3\n{CASE}", "timeline: expected a file"),
        ("scenario: s.yaml\nmeasured: {itl_s: {mean: 1}}\n", "measured.itl_s: expected one of"),
        ("scenario: s.yaml\nmeasured: {ttft_s: {mean: 0}}\n", "measured.ttft_s.mean: expected"),
        ("scenario: s.yaml\nmeasured: {ttft_s: {mean: .nan}}\n", "expected mean, p50"),
        ("scenario: s.yaml\nmeasured: {ttft_s: {p42: 1.0}}\n", "measured.ttft_s.p42: expected"),
        ("scenario: s.yaml\nmeasured: {requests: none.jsonl}\n", "none.jsonl: cannot be read"),
        ("scenario: s.yaml\nmeasured: {requests: a, e2e_s: 1}\n", "no metrics beside"),
        ("scenario: none.yaml\nmeasured: {ttft_s: {mean: 1}}\n", "none.yaml: cannot be read"),
        ("scenario: [\n", "mine.case.yaml"),
    ],
)
def test_what_is_no_case(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_case(case(tmp_path, text))
    with pytest.raises(InputError, match="cannot be read"):
        load_case(tmp_path / "none.yaml")


@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("utf-8", "replace"))))
def test_any_case_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("c") / "c.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        load_case(path)
    except InputError as error:
        assert str(path) in str(error)


# --- the shared runs, blind


@pytest.mark.skipif(not PROMPTS.exists(), reason="shared measured runs not here")
@pytest.mark.parametrize(
    ("run", "profile", "engine", "tpot", "ttft"),
    [
        (
            "RTX4090",
            "rtx-4090",
            "max_num_seqs: 256, max_model_len: 32768, num_gpu_blocks_override: 2588",
            *(0.035, 0.05),
        ),
        ("RTXPRO6000", "rtx-pro-6000-llmservingsim", "max_num_seqs: 128", 0.02, 0.10),
    ],
)
def test_a_run_is_predicted_from_kernels_of_the_same_card(
    tmp_path: Path, run: str, profile: str, engine: str, tpot: float, ttft: float
) -> None:
    requests = SHARED / f"{run}-Llama-3.1-8B/vllm/requests.jsonl"
    (tmp_path / "s.yaml").write_text(
        "name: replay\nmodel: meta-llama/Llama-3.1-8B\n"
        f"hardware: {profile.removesuffix('-llmservingsim')}\nprofile: {profile}\n"
        f"engine: {{{engine}, max_num_batched_tokens: 2048, gpu_memory_utilization: 0.9}}\n"
        f"workload: {{arrivals: {{kind: trace, path: {PROMPTS}}}, sampling: {{temperature: 0}}}}\n"
    )
    path = tmp_path / "c.yaml"
    path.write_text(f"scenario: s.yaml\nmeasured: {{requests: {requests}}}\n")
    answer: dict[str, Any] = validate([load_case(path)])
    worst = {row["metric"]: abs(row["error"]) for row in answer["rows"]}
    stats = ("mean", "p50", "p99")
    assert max(worst[f"tpot_s {stat}"] for stat in stats) < tpot
    assert max(worst[f"e2e_s {stat}"] for stat in stats) < 0.04
    assert max(worst[f"ttft_s {stat}"] for stat in stats) < ttft
    assert answer["inside"] >= 0.85
