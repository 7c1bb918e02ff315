"""Acceptance of drafts: closed forms, what a fit gives back, and requests it did not see."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from servecast.calibration.acceptance import (
    Decay,
    Recorded,
    fit_decay,
    fit_hierarchical,
    fit_iid,
    hold_out,
    read_lengths,
    replay,
    rounds_of,
)
from servecast.costmodels.errors import InputError
from servecast.scenarios.cli import app
from servecast.sim.acceptance import PROBABILITIES, Hierarchical, iid, tokens_a_round

SHARED = Path(__file__).parents[2] / "shared" / "speculation"


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


@given(st.floats(0.05, 0.95), st.integers(1, 8), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_iid_rounds_have_the_length_of_the_closed_form(alpha: float, k: int, seed: int) -> None:
    (rounds,) = rounds_of(iid(alpha), k, 40_000, 1, generator(seed))
    error = float(rounds.std()) / len(rounds) ** 0.5
    assert float(rounds.mean()) == pytest.approx(tokens_a_round(alpha, k), abs=5 * error)
    assert fit_iid([Recorded(rounds)], k).rates[0] == pytest.approx(alpha, abs=0.02)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(1, 8))
def test_a_replay_covers_its_text_in_rounds_of_at_most_k_and_one(
    lengths: list[int], k: int
) -> None:
    rounds = replay(np.array(lengths), k).rounds
    assert rounds.max() <= k + 1
    starts = np.concatenate([[0], rounds.cumsum()[:-1]])
    assert rounds.sum() >= len(lengths) > starts[-1]
    assert [min(lengths[at], k + 1) for at in starts] == rounds.tolist()


@given(st.integers(1, 400), st.integers(0, 50))
@settings(deadline=None)
def test_a_request_ends_with_the_round_that_has_its_last_token(tokens: int, seed: int) -> None:
    model = Hierarchical((0.7, 0.5, 0.4), tuple(np.linspace(-2, 2, 50)), 0.3)
    rounds, other = rounds_of(model, 3, tokens, 2, generator(seed))
    assert rounds.min() >= 1 and rounds.max() <= 4
    assert rounds.sum() >= tokens > rounds[:-1].sum()
    assert other.sum() >= tokens > other[:-1].sum()
    assert rounds.tolist() == rounds_of(model, 3, tokens, 2, generator(seed))[0].tolist()


def test_a_fit_gives_back_what_the_requests_were_drawn_from() -> None:
    quality = 0.6 * np.sqrt(2) * np.interp(PROBABILITIES, [0, 1], [-1.2, 1.2])
    truth = Hierarchical((0.7, 0.6, 0.5), tuple(quality))
    source = generator(3)
    requests = [
        Recorded(rounds_of(truth, 3, int(source.integers(200, 600)), 1, source)[0])
        for _ in range(200)
    ]
    found = fit_hierarchical(requests, 3)
    assert np.allclose(found.rates, truth.rates, atol=0.04)
    assert np.std(found.quality) == pytest.approx(np.std(quality), rel=0.2)
    assert found.persistence < 0.05
    assert found.depth >= 0.75


def test_rounds_that_repeat_are_seen() -> None:
    truth = Hierarchical((0.4, 0.6), persistence=0.5)
    source = generator(4)
    requests = [Recorded(rounds) for rounds in rounds_of(truth, 2, 500, 100, source)]
    assert fit_hierarchical(requests, 2).persistence == pytest.approx(0.5, abs=0.06)


@given(st.floats(0.1, 0.95), st.integers(1, 8))
def test_no_decay_is_iid(alpha: float, k: int) -> None:
    assert Decay(alpha, 1.0).tokens_a_round(k) == pytest.approx(tokens_a_round(alpha, k))


@given(st.floats(0.3, 0.95), st.floats(0.6, 1.0))
@settings(deadline=None, max_examples=30)
def test_a_decay_comes_out_of_its_curve(first: float, decay: float) -> None:
    truth = Decay(first, decay)
    found = fit_decay({k: truth.tokens_a_round(k) for k in (1, 2, 3, 5, 8)})
    for k in (1, 4, 8):
        assert found.tokens_a_round(k) == pytest.approx(truth.tokens_a_round(k), rel=1e-3)


def test_what_is_no_curve() -> None:
    for curve in ({}, {3: 2.0}, {1: 2.5, 2: 2.6}, {1: 0.5, 2: 1.0}):
        with pytest.raises(InputError, match="two lengths or more"):
            fit_decay(curve)


@pytest.mark.skipif(not SHARED.exists(), reason="shared measured acceptance not here")
def test_published_curves_are_a_first_rate_and_a_decay() -> None:
    curves: dict[tuple[str, str], dict[int, float]] = {}
    with (SHARED / "golden_acceptance_length.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            curve = curves.setdefault((row["model"], row["thinking_mode"]), {})
            length = float(row["acceptance_length_incl_bonus"])
            curve[int(row["num_speculative_tokens"])] = length
    assert len(curves) >= 5
    for curve in curves.values():
        model = fit_decay(curve)
        for k, length in curve.items():
            assert model.tokens_a_round(k) == pytest.approx(length, rel=0.05)


@pytest.mark.skipif(not SHARED.exists(), reason="shared measured acceptance not here")
@pytest.mark.parametrize("seed", [0, 1])
def test_half_of_recorded_requests_predict_the_other_half(seed: int) -> None:
    found = hold_out(read_lengths(SHARED / "acc_len_gsm8k.jsonl"), 5, 0.5, seed)
    for method, most in (("eagle", 0.03), ("ngram", 0.05)):
        rows = found[method]
        ours, theirs = rows["hierarchical"], rows["observed"]
        assert ours["mean"] == pytest.approx(theirs["mean"], rel=most)
        for stat in ("p5", "p50", "p95"):
            low, high = rows["interval"][stat]
            near = abs(ours[stat] / theirs[stat] - 1) < 0.08
            assert near or low <= ours[stat] <= high, (method, stat)


def write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command(tmp_path: Path) -> None:
    source = generator(5)
    rows = [{"acc_len_eagle": source.integers(1, 6, 80).tolist()} for _ in range(20)]
    path = str(write(tmp_path, rows))
    words = ["fit-acceptance", path, "--k", "4", "--json"]
    whole = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert len(whole["methods"]["eagle"]["hierarchical"]["rates"]) == 4
    held = CliRunner().invoke(app, [*words, "--holdout", "0.5"], catch_exceptions=False).stdout
    eagle = json.loads(held)["methods"]["eagle"]
    for model in ("observed", "hierarchical", "iid"):
        assert set(eagle[model]) == {"mean", "p5", "p50", "p95"}
    assert held == CliRunner().invoke(app, [*words, "--holdout", "0.5"]).stdout
    for more in ([], ["--holdout", "0.5"]):
        shown = CliRunner().invoke(app, [*words[:-1], *more], catch_exceptions=False).stdout
        assert "observed" in shown and "iid" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request with acc_len_"),
        ("{}\n", "no request with acc_len_"),
        ('{"acc_len_a": [1, 0]}\n', "1: not recorded acceptance"),
        ('{"acc_len_a": [1, 2]}\n{"acc_len_a": [1.5]}\n', "2: not recorded acceptance"),
        ('{"acc_len_a": [[1]]}\n', "1: not recorded acceptance"),
        ('{"acc_len_a": "12"}\n', "1: not recorded acceptance"),
        ("[1]\n", "1: not recorded acceptance"),
        ('{"acc_len_a": [1', "1: not recorded acceptance"),
    ],
)
def test_what_is_no_recorded_acceptance(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_lengths(path)


@pytest.mark.parametrize("share", ["0.01", "0.99", "1.5", "-1", "nan"])
def test_a_part_must_be_left(tmp_path: Path, share: str) -> None:
    path = write(tmp_path, [{"acc_len_a": [1, 2, 1]}] * 4)
    result = CliRunner().invoke(app, ["fit-acceptance", str(path), "--holdout", share])
    assert isinstance(result.exception, InputError)
    assert "--holdout" in str(result.exception)
