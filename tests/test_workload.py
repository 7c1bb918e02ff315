"""Loads keep their laws: rates, common random numbers, sharing, sessions."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servecast.costmodels.errors import InputError
from servecast.scenarios.schema import Scenario
from servecast.scenarios.workload import build_requests
from servecast.sim.request import RequestTable
from servecast.sim.rng import stream

FIXED = {"kind": "fixed", "input_tokens": 512, "output_tokens": 128}
LOGNORMAL = {
    "kind": "lognormal",
    "input_tokens": {"median": 400, "sigma": 1.0},
    "output_tokens": {"mean": 200, "p95": 600, "max": 2000},
}


def build(
    arrivals: dict[str, Any], seed: int = 0, folder: Path = Path(), **workload: Any
) -> RequestTable:
    if arrivals["kind"] != "trace":
        workload.setdefault("lengths", FIXED)
    scenario = Scenario.model_validate(
        {
            "name": "test",
            "model": "m",
            "hardware": "h",
            "workload": {"arrivals": arrivals, **workload},
        }
    )
    table = build_requests(scenario, folder, seed, pytest.fail)
    check(table)
    return table


def check(table: RequestTable) -> None:
    """What holds for every load."""
    n = len(table)
    for column in (table.prompt_tokens, table.output_tokens, table.priority, table.klass):
        assert column.dtype == np.int64
        assert len(column) == n
    assert (np.diff(table.arrival_ns) >= 0).all()
    assert table.arrival_ns[0] >= 0
    assert table.prompt_tokens.min() >= 1
    assert table.output_tokens.min() >= 1
    assert 0 <= table.klass.min() <= table.klass.max() < len(table.class_names)
    assert table.segment_id.min() >= 1
    if table.shared is not None:
        shared = {segment for row in table.shared for segment, _ in row}
        assert not shared & set(table.segment_id.tolist())
        for row, prompt in zip(table.shared, table.prompt_tokens.tolist(), strict=True):
            ends = [0, *(end for _, end in row)]
            assert ends == sorted(set(ends))
            assert ends[-1] <= prompt
    if table.after is not None:
        assert (table.after < np.arange(n)).all()


def same(a: RequestTable, b: RequestTable) -> bool:
    columns = ("arrival_ns", "prompt_tokens", "output_tokens", "klass", "segment_id")
    equal = all(np.array_equal(getattr(a, c), getattr(b, c)) for c in columns)
    return equal and a.shared == b.shared


def seconds(table: RequestTable) -> np.ndarray[Any, np.dtype[np.float64]]:
    return table.arrival_ns / 1e9


# --- random numbers by name


def test_streams_are_named_and_repeatable() -> None:
    assert stream(3, "lengths").random(4).tolist() == stream(3, "lengths").random(4).tolist()
    assert stream(3, "lengths").random(4).tolist() != stream(3, "arrivals").random(4).tolist()
    assert stream(3, "lengths").random(4).tolist() != stream(4, "lengths").random(4).tolist()
    # A change of these numbers would change every published result.
    assert stream(0, "arrivals").integers(0, 1000, 4).tolist() == [257, 742, 679, 385]


@pytest.mark.parametrize("draw", ["random", "standard_exponential", "standard_gamma"])
def test_position_i_does_not_depend_on_how_many_are_drawn(draw: str) -> None:
    def drawn(*counts: int) -> list[float]:
        rng = stream(1, "test")
        arguments = (0.1,) if draw == "standard_gamma" else ()
        return [x for count in counts for x in getattr(rng, draw)(*arguments, count)]

    assert drawn(5, 1, 994) == drawn(1000)


# --- arrivals


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ({"kind": "poisson", "rate_per_s": 20}, 20),
        ({"kind": "gamma", "cv": 2.0, "rate_per_s": 20}, 20),
        ({"kind": "constant", "rate_per_s": 20}, 20),
        ({"kind": "on_off", "rate_per_s": 50, "off_rate_per_s": 5, "on_s": 10, "off_s": 20}, 20),
        ({"kind": "diurnal", "rate_per_s": 20, "period_s": 100, "amplitude": 0.8}, 20),
    ],
)
def test_rates_are_kept(arrivals: dict[str, Any], expected: float) -> None:
    """LAW: arrivals over time come to the rate, within four standard errors."""
    duration_s = 3000
    table = build({**arrivals, "duration_s": duration_s})
    mean = expected * duration_s
    cv = arrivals.get("cv", 0 if arrivals["kind"] == "constant" else 1)
    assert abs(len(table) - mean) <= 4 * cv * mean**0.5
    assert seconds(table)[-1] < duration_s
    counted = build({**arrivals, "requests": len(table)})
    assert same(counted, table)


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.integers(1, 50))
@settings(deadline=None)
def test_the_rate_only_stretches_time(rate: float, other: float, count: int) -> None:
    """LAW: the same gaps at every rate, in proportion."""
    a = build({"kind": "poisson", "rate_per_s": rate, "requests": count})
    b = build({"kind": "poisson", "rate_per_s": other, "requests": count})
    assert len(a) == len(b) == count
    np.testing.assert_allclose(seconds(a) * rate, seconds(b) * other, rtol=1e-6, atol=1e-6)


def test_a_longer_load_begins_like_a_shorter_one() -> None:
    long = build({"kind": "poisson", "rate_per_s": 3, "requests": 500}, lengths=LOGNORMAL)
    short = build({"kind": "poisson", "rate_per_s": 3, "duration_s": 50}, lengths=LOGNORMAL)
    for column in ("arrival_ns", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(long, column)[: len(short)], getattr(short, column))


def test_constant_is_evenly_spaced_from_zero() -> None:
    table = build({"kind": "constant", "rate_per_s": 8, "duration_s": 10})
    assert table.arrival_ns.tolist() == [i * 125_000_000 for i in range(80)]
    assert len(build({"kind": "constant", "rate_per_s": 0.1, "duration_s": 30})) == 3


def test_stages_follow_one_another() -> None:
    stages = [{"rate_per_s": 8, "duration_s": 600}, {"rate_per_s": 20, "duration_s": 60}]
    constant = seconds(build({"kind": "constant", "stages": stages}))
    assert (len(constant), (constant < 600).sum()) == (4800 + 1200, 4800)
    assert constant[4800] == 600.0
    np.testing.assert_allclose(np.diff(constant[4800:]), 0.05, atol=2e-9)
    poisson = seconds(build({"kind": "poisson", "stages": stages}))
    assert abs((poisson < 600).sum() - 4800) < 4 * 4800**0.5
    assert abs((poisson >= 600).sum() - 1200) < 4 * 1200**0.5


def test_gamma_has_its_coefficient_of_variation() -> None:
    gaps = np.diff(seconds(build({"kind": "gamma", "cv": 3, "rate_per_s": 1, "requests": 50_000})))
    assert gaps.std() / gaps.mean() == pytest.approx(3, rel=0.05)


def test_on_off_is_quiet_while_off() -> None:
    arrivals = {"kind": "on_off", "rate_per_s": 10, "on_s": 5, "off_s": 15, "requests": 1000}
    assert (seconds(build(arrivals)) % 20 <= 5).all()


def test_diurnal_peaks_where_it_is_told() -> None:
    arrivals = {"kind": "diurnal", "rate_per_s": 50, "period_s": 100, "amplitude": 1, "peak_s": 25}
    phase = seconds(build({**arrivals, "duration_s": 1000})) % 100
    counts, _ = np.histogram(phase, bins=[0, 25, 50, 75, 100])
    # The integral of 1 + cos over a quarter next to the peak, and next to the trough.
    high, low = 12_500 * (1 + 2 / np.pi), 12_500 * (1 - 2 / np.pi)
    np.testing.assert_allclose(counts, [high, high, low, low], rtol=0.05)


def test_bursts_arrive_together() -> None:
    table = build({"kind": "burst", "requests": 5, "size": 2, "interval_s": 3})
    assert seconds(table).tolist() == [0, 0, 3, 3, 6]
    assert not build({"kind": "burst", "requests": 5}).arrival_ns.any()


def test_a_closed_loop_thinks_between_requests() -> None:
    arrivals = {"kind": "closed_loop", "concurrency": 3, "requests": 5}
    table = build(arrivals)
    assert (len(table), table.concurrency, table.after, table.think_ns) == (5, 3, None, None)
    table = build({**arrivals, "think_time_s": 2})
    assert table.think_ns is not None
    assert table.think_ns.tolist() == [0, 0, 0, 2 * 10**9, 2 * 10**9]


@pytest.mark.parametrize(
    ("arrivals", "expected"),
    [
        ({"kind": "poisson", "rate_per_s": 1e-6, "duration_s": 1e-3}, "no request arrives"),
        ({"kind": "poisson", "rate_per_s": 1e6, "duration_s": 1e6}, "at most 10000000"),
        ({"kind": "constant", "rate_per_s": 1e-6, "requests": 100_000}, "146 years"),
    ],
)
def test_loads_that_cannot_be_are_refused(arrivals: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        build(arrivals)


# --- common random numbers


def test_one_setting_moves_nothing_else() -> None:
    """LAW: arrivals, lengths, classes and prefixes each have their own luck."""
    base: dict[str, Any] = {
        "lengths": LOGNORMAL,
        "classes": [{"name": "a", "weight": 1}, {"name": "b", "weight": 3, "priority": 5}],
        "prefixes": {"groups": 5, "prefix_tokens": 64},
    }
    poisson = {"kind": "poisson", "rate_per_s": 2, "requests": 300}
    table = build(poisson, **base)
    faster = build({**poisson, "rate_per_s": 7}, **base)
    other_lengths = build(poisson, **{**base, "lengths": FIXED})
    no_prefix = build(poisson, lengths=LOGNORMAL, classes=base["classes"])
    for column in ("prompt_tokens", "output_tokens", "klass"):
        assert np.array_equal(getattr(table, column), getattr(faster, column))
    assert table.shared == faster.shared == other_lengths.shared
    assert np.array_equal(table.arrival_ns, other_lengths.arrival_ns)
    assert np.array_equal(table.klass, other_lengths.klass)
    assert np.array_equal(table.prompt_tokens, no_prefix.prompt_tokens + 64)


def test_equal_seeds_give_equal_loads_and_others_do_not() -> None:
    poisson = {"kind": "poisson", "rate_per_s": 2, "requests": 50}
    assert same(build(poisson, 7, lengths=LOGNORMAL), build(poisson, 7, lengths=LOGNORMAL))
    assert not same(build(poisson, 7, lengths=LOGNORMAL), build(poisson, 8, lengths=LOGNORMAL))


# --- lengths

MANY = {"kind": "burst", "requests": 40_000}


def test_uniform_covers_its_range() -> None:
    span = {"min": 3, "max": 6}
    lengths = {"kind": "uniform", "input_tokens": span, "output_tokens": {"min": 9, "max": 9}}
    table = build(MANY, lengths=lengths)
    np.testing.assert_allclose(np.bincount(table.prompt_tokens)[3:], 10_000, rtol=0.05)
    assert set(table.output_tokens.tolist()) == {9}


def test_lognormal_has_its_moments() -> None:
    side = {"mean": 2000, "p95": 6000}
    table = build(MANY, lengths={"kind": "lognormal", "input_tokens": side, "output_tokens": side})
    for tokens in (table.prompt_tokens, table.output_tokens):
        assert tokens.mean() == pytest.approx(2000, rel=0.03)
        assert np.percentile(tokens, 95) == pytest.approx(6000, rel=0.04)
    side = {"median": 1000, "p95": 6000, "min": 500, "max": 3000}
    table = build(MANY, lengths={"kind": "lognormal", "input_tokens": side, "output_tokens": side})
    assert np.median(table.prompt_tokens) == pytest.approx(1000, rel=0.03)
    assert (table.prompt_tokens.min(), table.prompt_tokens.max()) == (500, 3000)


def test_empirical_meets_its_quantiles() -> None:
    quantiles = {"p0": 100, "p25": 396, "p50": 1020, "p99": 4142, "p100": 14050}
    lengths = {"kind": "empirical", "input_tokens": quantiles, "output_tokens": quantiles}
    tokens = build(MANY, lengths=lengths).prompt_tokens
    assert tokens.min() >= 100
    assert tokens.max() <= 14050
    for q, value in ((25, 396), (50, 1020), (99, 4142)):
        assert np.percentile(tokens, q) == pytest.approx(value, rel=0.05)


def test_a_trace_of_lengths_keeps_pairs(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival,input,output\n0,10,1\n1,20,2\n2,30,3\n")
    table = build(MANY, folder=tmp_path, lengths={"kind": "trace", "path": "t.csv"})
    assert (table.prompt_tokens == 10 * table.output_tokens).all()
    np.testing.assert_allclose(np.bincount(table.output_tokens)[1:], 40_000 / 3, rtol=0.05)


# --- classes


def test_classes_are_mixed_by_weight() -> None:
    table = build(
        MANY,
        classes=[
            {"name": "chat", "weight": 3, "priority": -1},
            {"name": "batch", "weight": 1, "lengths": {**FIXED, "input_tokens": 7}},
        ],
    )
    assert table.class_names == ("chat", "batch")
    np.testing.assert_allclose(np.bincount(table.klass) / 40_000, [0.75, 0.25], atol=0.01)
    assert (table.priority == np.where(table.klass == 0, -1, 0)).all()
    assert (table.prompt_tokens == np.where(table.klass == 0, 512, 7)).all()


# --- sharing


def test_fixed_prompts_are_drawn_again_and_again() -> None:
    prefixes = {"groups": 3, "prompts_per_group": 4, "prefix_tokens": 100}
    table = build({"kind": "burst", "requests": 500}, lengths=LOGNORMAL, prefixes=prefixes)
    assert table.shared is not None
    texts = set(table.shared)
    assert len(texts) == 12
    assert len({text[0] for text in texts}) == 3
    assert {text[0][1] for text in texts} == {100}
    for text, prompt in zip(table.shared, table.prompt_tokens.tolist(), strict=True):
        assert text[1][1] == prompt > 100


def test_without_fixed_prompts_only_the_prefix_is_shared() -> None:
    prefixes = {"groups": 3, "prefix_tokens": 100}
    table = build({"kind": "burst", "requests": 500}, prefixes=prefixes)
    assert table.shared is not None
    assert set(table.shared) == {((1, 100),), ((2, 100),), ((3, 100),)}
    assert (table.prompt_tokens == 612).all()
    assert len(set(table.segment_id.tolist())) == 500


def test_a_fixed_prompt_of_another_class_is_another_prompt() -> None:
    table = build(
        {"kind": "burst", "requests": 500},
        prefixes={"groups": 1, "prompts_per_group": 1, "prefix_tokens": 10},
        classes=[
            {"name": "a", "weight": 1},
            {"name": "b", "weight": 1, "lengths": {**FIXED, "input_tokens": 7}},
        ],
    )
    assert table.shared is not None
    assert set(table.shared) == {((1, 10), (2, 522)), ((1, 10), (3, 17))}


# --- sessions


def test_a_turn_begins_with_all_that_was_said() -> None:
    """LAW: prompt of a turn = prompt and output of the one before, and its own input."""
    table = build(
        {"kind": "poisson", "rate_per_s": 1, "requests": 20},
        lengths=LOGNORMAL,
        prefixes={"groups": 2, "prompts_per_group": 2, "prefix_tokens": 50},
        sessions={"turns": 3, "think_time_s": 4},
    )
    assert len(table) == 60
    assert table.after is not None
    assert table.think_ns is not None
    later = np.flatnonzero(table.after >= 0)
    before = table.after[later]
    assert later.tolist() == [i for i in range(60) if i % 3]
    assert (before == later - 1).all()
    said = table.prompt_tokens[before] + table.output_tokens[before]
    assert (table.prompt_tokens[later] > said).all()
    assert (table.segment_id[later] == table.segment_id[before]).all()
    assert len(set(table.segment_id.tolist())) == 20
    assert (table.think_ns == np.where(table.after >= 0, 4 * 10**9, 0)).all()
    assert table.shared is not None
    assert all(table.shared[i] == table.shared[i - 1] for i in later.tolist())


def test_turns_and_pauses_may_vary() -> None:
    table = build(
        {"kind": "burst", "requests": 5000},
        sessions={
            "turns": 4,
            "turns_distribution": "geometric",
            "think_time_s": 10,
            "think_time_distribution": "exponential",
        },
    )
    assert table.after is not None
    assert table.think_ns is not None
    assert len(table) / 5000 == pytest.approx(4, rel=0.05)
    assert (table.after < 0).sum() == 5000
    pauses = table.think_ns[table.after >= 0] / 1e9
    assert pauses.mean() == pytest.approx(10, rel=0.05)
    assert pauses.std() == pytest.approx(10, rel=0.05)


def test_clients_of_a_closed_loop_have_one_session_after_another() -> None:
    table = build(
        {"kind": "closed_loop", "concurrency": 2, "requests": 5, "think_time_s": 1},
        sessions={"turns": 2},
    )
    assert table.concurrency is None
    assert table.after is not None
    assert table.think_ns is not None
    assert table.after.tolist() == [-1, 0, -1, 2, 1, 4, 3, 6, 5, 8]
    assert (table.think_ns / 1e9).tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 1, 0]


def test_a_session_cannot_outgrow_the_clock_of_tokens() -> None:
    lengths = {**FIXED, "output_tokens": 1_000_000}
    with pytest.raises(InputError, match="grows beyond"):
        build({"kind": "burst", "requests": 1}, lengths=lengths, sessions={"turns": 20})


# --- replay


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 1000 * i, "input_length": 600 + i, "output_length": 5, "hash_ids": [0, i + 1]}
        for i in range(4)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(str(row).replace("'", '"') for row in rows))
    return tmp_path


def test_a_trace_brings_its_own_lengths_and_sharing(trace: Path) -> None:
    table = build({"kind": "trace", "path": "t.jsonl", "rate_scale": 2, "limit": 3}, folder=trace)
    assert seconds(table).tolist() == [0, 0.5, 1]
    assert table.prompt_tokens.tolist() == [600, 601, 602]
    assert table.shared == [((1, 512),)] * 3
    assert table.segment_id.tolist() == [2, 3, 4]


def test_given_lengths_replace_those_of_a_trace(trace: Path) -> None:
    table = build({"kind": "trace", "path": "t.jsonl"}, folder=trace, lengths=FIXED)
    assert set(table.prompt_tokens.tolist()) == {512}
    assert table.shared is None
    classes = [{"name": "a", "weight": 1, "lengths": FIXED}]
    assert build({"kind": "trace", "path": "t.jsonl"}, folder=trace, classes=classes).shared is None


@pytest.mark.parametrize("lengths", [FIXED, LOGNORMAL], ids=["fixed", "lognormal"])
def test_a_hundred_thousand_requests_are_quick(lengths: dict[str, Any]) -> None:
    scenario = {
        "name": "test",
        "model": "m",
        "hardware": "h",
        "workload": {
            "arrivals": {"kind": "poisson", "rate_per_s": 20, "requests": 100_000},
            "lengths": lengths,
        },
    }
    checked = Scenario.model_validate(scenario)
    started = time.process_time()
    build_requests(checked, Path(), 0, pytest.fail)
    assert time.process_time() - started < 0.6  # 0.2 s on an idle machine
