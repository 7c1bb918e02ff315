"""Speculative decoding in a run: closed forms, conservation, common luck, and every policy."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_laws import loads

from servecast.calibration.acceptance import replay
from servecast.costmodels.shape import ConstantCost, CostModel, StepCost, StepShape
from servecast.costmodels.speculative import Link, Speculative
from servecast.sim.acceptance import (
    FIRST,
    Acceptance,
    Draws,
    Hierarchical,
    Mean,
    Process,
    RecordedLengths,
    iid,
    tokens_a_round,
)
from servecast.sim.plan import SchedulerLimits
from servecast.sim.request import RequestTable
from servecast.sim.speculation import AdaptiveTokens, Goodput, Speculation
from servecast.sim.trace import COMPLETED, REFUSED, Trace
from servecast.sim.world import simulate

METHODS = ("draft_model", "eagle", "ngram")


def table(requests: int, output: int = 200, *, prompt: int = 20, gap_ns: int = 0) -> RequestTable:
    zeros = np.zeros(requests, np.int64)
    return RequestTable(
        arrival_ns=np.arange(requests) * gap_ns,
        prompt_tokens=zeros + prompt,
        output_tokens=zeros + output,
        priority=zeros,
        klass=zeros,
        segment_id=np.arange(requests) + 1,
    )


def limits(method: str = "eagle", k: int = 4, **changes: Any) -> SchedulerLimits:
    plain = SchedulerLimits(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        block_size=16,
        num_gpu_blocks=4000,
        max_model_len=4096,
        spec_method=method,
        num_speculative_tokens=k,
    )
    return replace(plain, **changes)


def speculation(
    *processes: Process, k: int = 4, classes: int = 1, seed: int = 0, **changes: Any
) -> Speculation:
    shares = tuple((1.0, process) for process in processes)
    plain = Speculation(Acceptance((shares,) * classes), seed, tokens=k, depth=k)
    return replace(plain, **changes)


class DraftFor:
    """Drafting that takes so long for each pass."""

    def __init__(self, pass_s: float) -> None:
        self.pass_s = pass_s

    def draft(self, shape: StepShape, verify_s: float) -> tuple[float, float, float]:
        return self.pass_s * len(shape.draft_passes), 0.0, 0.0


def serve(load: RequestTable, bounds: SchedulerLimits, how: Speculation, cost: CostModel) -> Trace:
    return simulate(load, bounds, cost, speculation=how).trace


def totals(trace: Trace) -> tuple[int, int, int]:
    names = ("draft_rounds", "draft_tokens", "accepted_tokens")
    return tuple(int(trace.requests[name].sum()) for name in names)  # type: ignore[return-value]


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_iid_emits_what_the_closed_form_says(alpha: float, k: int) -> None:
    trace = serve(table(100), limits(k=k), speculation(iid(alpha), k=k), ConstantCost(0.01))
    # The last rounds of a request are cut by its length: those that were not are full rounds.
    full = [(accepted, n) for drafts, accepted, n in trace.accepted if drafts == k]
    rounds = sum(n for _, n in full)
    emitted = 1 + sum(accepted * n for accepted, n in full) / rounds
    spread = np.sqrt(sum((1 + a - emitted) ** 2 * n for a, n in full) / rounds)
    assert emitted == pytest.approx(tokens_a_round(alpha, k), abs=4 * spread / rounds**0.5)


@pytest.mark.parametrize(("alpha", "k", "share"), [(0.8, 4, 0.1), (0.6, 2, 0.3), (0.3, 6, 0.2)])
def test_the_speed_up_of_leviathan_with_constant_costs(alpha: float, k: int, share: float) -> None:
    """(1 - alpha^(k+1)) / ((1 - alpha)(c k + 1)): arXiv 2211.17192, theorem 3.8."""
    load = table(40, 2000, gap_ns=10**14)
    step_s = 0.01
    plain = simulate(load, limits(k=0, spec_method=None), ConstantCost(step_s)).trace
    cost = Speculative(ConstantCost(step_s), DraftFor(share * step_s), hides_host=False)
    trace = serve(load, limits(k=k), speculation(iid(alpha), k=k), cost)

    def decoding(run: Trace) -> float:
        return float((run.requests["finish_ns"] - run.requests["first_token_ns"]).sum())

    expected = tokens_a_round(alpha, k) / (share * k + 1)
    assert decoding(plain) / decoding(trace) == pytest.approx(expected, rel=0.02)


def test_rounds_of_recorded_lengths_are_those_of_their_replay() -> None:
    rng = np.random.default_rng(0)
    rows = tuple(rng.integers(1, 9, 150) for _ in range(7))
    process = RecordedLengths(rows)
    trace = serve(table(7, 151), limits(k=5), speculation(process, k=5), ConstantCost(0.01))
    for request, row in enumerate(rows):
        # The first token comes from the prompt; the rounds cover the others.
        assert trace.requests["draft_rounds"][request] == len(replay(row, 5).rounds)


def test_the_mean_leaves_nothing_to_luck() -> None:
    trace = serve(table(10, 251), limits(k=4), speculation(Mean(1.5), k=4), ConstantCost(0.01))
    assert len(set(trace.requests["accepted_tokens"].tolist())) == 1
    assert {accepted for _, accepted, _ in trace.accepted} == {1, 2}
    rounds, _, accepted = totals(trace)
    assert accepted / rounds == pytest.approx(1.5, abs=0.02)


# ---------------------------------------------------------------- laws


@given(loads(), st.sampled_from(METHODS), st.integers(1, 5), st.floats(0, 1), st.booleans())
@settings(deadline=None, max_examples=40)
def test_nothing_is_lost_and_time_goes_forward(
    load: tuple[RequestTable, SchedulerLimits],
    method: str,
    k: int,
    alpha: float,
    policies: bool,
) -> None:
    """Every request ends with its tokens, accepted ones among them; the pool ends empty."""
    requests, bounds = load
    bounds = replace(
        bounds,
        spec_method=method,
        num_speculative_tokens=k,
        max_num_batched_tokens=max(bounds.max_num_batched_tokens, 16),
        async_scheduling=bounds.async_scheduling and method != "ngram",
    )
    how = speculation(
        replace(iid(alpha), match=0.5 if method == "ngram" else 1.0),
        k=k,
        lookup=method == "ngram",
        min_tokens=30 if policies else 0,
        disable_by_batch_size=5 if policies else None,
        adaptive=AdaptiveTokens(3, 0.8, 0.5, 1, k) if policies else None,
        min_running=2 if policies else 0,
        longest=200 if policies else None,
        goodput=not policies and k > 3,
    )
    cost = Speculative(ConstantCost(0.003), DraftFor(0.0004), hides_host=False)
    trace = serve(requests, bounds, how, cost)
    rows = trace.requests
    assert len(rows["request"]) == len(requests)
    done = rows["status"] == COMPLETED
    assert set(rows["status"][~done]) <= {REFUSED}
    cut = np.minimum(requests.output_tokens, 256 - requests.prompt_tokens)
    np.testing.assert_array_equal(rows["output_tokens"][done], cut[done])
    assert (rows["accepted_tokens"] <= rows["draft_tokens"]).all()
    # A round emits one token more than it accepts, and no more than are asked for.
    assert (rows["draft_rounds"][done] < rows["output_tokens"][done].clip(2)).all()
    # Every token is somebody's first, or was decoded in some step.
    given = int(trace.steps["decoded_tokens"].sum()) + int((rows["first_token_ns"] >= 0).sum())
    assert given == int(rows["output_tokens"].sum())
    assert (trace.steps["decode_tokens"] >= trace.steps["decodes"]).all()
    assert (rows["finish_ns"][done] >= rows["first_token_ns"][done]).all()
    assert (rows["first_token_ns"][done] > rows["arrival_ns"][done]).all()
    again = serve(requests, bounds, how, cost)
    for name, column in rows.items():
        np.testing.assert_array_equal(column, again.requests[name])


def test_more_drafts_never_need_more_rounds_of_the_same_luck() -> None:
    process = Hierarchical((0.7, 0.6, 0.5), (-1.0, 1.0), 0.2)
    before = None
    for k in (1, 2, 4, 8):
        trace = serve(table(50), limits(k=k), speculation(process, k=k), ConstantCost(0.01))
        rounds = trace.requests["draft_rounds"]
        assert before is None or (rounds <= before).all()
        before = rounds


def test_luck_is_a_request_s_own() -> None:
    """However many there are, in whatever order they are asked for, and whatever k is."""
    process = Hierarchical((0.7, 0.6), (-1.0, 1.0), 0.2)
    acceptance = Acceptance((((1.0, process),),))
    few = Draws(acceptance, table(5), 3, seed=4)
    many = Draws(acceptance, table(600), 6, seed=4)
    for request in (4, 0, 2):
        short, long = few.take(request)[0], many.take(request)[0]
        assert short == bytes(min(entry, 4) for entry in long)
    other = Draws(acceptance, table(5), 3, seed=5)
    assert other.take(0) != Draws(acceptance, table(5), 3, seed=4).take(0)


def test_easy_and_hard_requests_differ_and_iid_ones_do_not() -> None:
    def spread(process: Process) -> float:
        trace = serve(table(200, 400), limits(), speculation(process), ConstantCost(0.01))
        return float(np.std(trace.requests["accepted_tokens"] / trace.requests["draft_rounds"]))

    assert spread(Hierarchical((0.6,), (-2.0, 2.0))) > 3 * spread(iid(0.6))


def test_domains_are_drawn_by_weight() -> None:
    acceptance = Acceptance((((3.0, iid(1.0)), (1.0, iid(0.0))),))
    how = Speculation(acceptance, 0, tokens=4, depth=4)
    rows = serve(table(2000, 20), limits(max_num_seqs=512), how, ConstantCost(0.01)).requests
    assert float((rows["accepted_tokens"] > 0).mean()) == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    "process", [iid(0.8), Mean(2.4), RecordedLengths((np.array([4, 2, 5, 3]),))]
)
def test_warmth_lowers_acceptance(process: Process) -> None:
    uniforms = np.random.default_rng(1).random((FIRST + 4, 4000))
    starts, requests = np.array([0, 2000]), np.array([0, 1])
    cold = process.accepted(uniforms, starts, requests)
    warm = process.warmed(0.7).accepted(uniforms, starts, requests)
    assert warm.sum() < cold.sum()
    assert process.warmed(0.0).accepted(uniforms, starts, requests).max() == 0


def test_lookups_draft_where_they_match() -> None:
    """Every round that accepts matched; of the others a share did."""

    def drafted(match: float) -> tuple[int, int, int]:
        how = speculation(replace(iid(0.3), match=match), lookup=True)
        return totals(serve(table(50), limits("ngram"), how, ConstantCost(0.01)))

    never, half, always = drafted(0.0), drafted(0.5), drafted(1.0)
    assert never[0] < half[0] < always[0]
    assert never[2] == half[2] == always[2]
    # Without a match for nothing, every round accepts something.
    assert never[2] >= never[0]


# ---------------------------------------------------------------- policies


def test_no_drafts_above_a_batch_below_another_and_for_short_sequences() -> None:
    how = speculation(iid(0.5))
    load = table(8)
    always = totals(serve(load, limits(), how, ConstantCost(0.01)))
    for changes in (
        {"disable_by_batch_size": 7},
        {"min_running": 9},
        {"min_tokens": 220},
    ):
        assert totals(serve(load, limits(), replace(how, **changes), ConstantCost(0.01)))[0] == 0
    longer = replace(how, min_tokens=120)
    assert 0 < totals(serve(load, limits(), longer, ConstantCost(0.01)))[0] < always[0]
    assert totals(serve(load, limits(), replace(how, min_running=2), ConstantCost(0.01)))[0] > 0


def test_drafts_by_batch_size() -> None:
    how = speculation(iid(0.5), schedule=((1, 4, 3), (5, 64, 1)))
    trace = serve(table(8), limits(), how, ConstantCost(0.01))
    assert {drafts for drafts, _, _ in trace.accepted} <= {1, 2, 3}
    few = serve(table(3), limits(), how, ConstantCost(0.01))
    assert max(drafts for drafts, _, _ in few.accepted) == 3


def test_some_requests_speculate_and_others_do_not() -> None:
    load = replace(table(40), klass=np.arange(40) % 2, class_names=("chat", "code"), wait_limits=())
    how = speculation(iid(0.6), classes=2, eligible=(True, False))
    rows = serve(load, limits(), how, ConstantCost(0.01)).requests
    assert (rows["draft_tokens"][0::2] > 0).all()
    assert (rows["draft_tokens"][1::2] == 0).all()
    assert rows["finish_ns"][0::2].max() < rows["finish_ns"][1::2].min()


@pytest.mark.parametrize(("alpha", "final"), [(1.0, 8), (0.0, 4)])
def test_adaptive_drafts_follow_their_request(alpha: float, final: int) -> None:
    how = speculation(iid(alpha), k=6, adaptive=AdaptiveTokens())
    trace = serve(table(4, 600), limits(k=8), how, ConstantCost(0.01))
    drafts = {drafts: n for drafts, _, n in trace.accepted}
    # From 6, a step a window of 10 rounds and the one under way: 6, 7, 8, ... or 6, 5, 4, ...
    assert drafts[6] == 4 * 11
    assert max(drafts, key=lambda k: drafts[k]) == final


def test_adaptive_drafts_stay_where_acceptance_is_between_the_bounds() -> None:
    how = speculation(Mean(4.0), k=6, adaptive=AdaptiveTokens())
    trace = serve(table(4, 400), limits(k=8), how, ConstantCost(0.01))
    assert {drafts for drafts, _, _ in trace.accepted if drafts >= 5} == {6}


def test_goodput_drafts_as_much_as_pays() -> None:
    class Growing:
        """A verification costs by its tokens."""

        def __init__(self, token_s: float) -> None:
            self.token_s = token_s

        def step(self, shape: StepShape) -> StepCost:
            return StepCost(gemm_s=0.01 + self.token_s * shape.decode_tokens)

    free, dear = Goodput(6, Growing(0.0)), Goodput(6, Growing(0.02))  # type: ignore[arg-type]
    assert free.tokens(8, 1000) == 6
    assert dear.tokens(8, 1000) == 0
    rejecting = Goodput(6, Growing(0.0001))  # type: ignore[arg-type]
    for _ in range(2000):
        rejecting.see(6, 1)
    # The second and later positions were never accepted: they only cost.
    assert rejecting.tokens(1, 1000) == 1


def test_goodput_is_never_far_from_the_best_fixed_number() -> None:
    class Linear(ConstantCost):
        def step(self, shape: StepShape) -> StepCost:
            return StepCost(gemm_s=0.01 + 0.0004 * shape.decode_tokens)

    cost = Speculative(Linear(0.01), DraftFor(0.0005), hides_host=False)
    load = table(60, 300)

    def seconds(how: Speculation, k: int) -> float:
        return serve(load, limits(k=k), how, cost).end_ns / 1e9

    fixed = [seconds(speculation(iid(0.7), k=k), k) for k in range(1, 7)]
    chosen = seconds(speculation(iid(0.7), k=6, goodput=True), 6)
    assert chosen <= 1.05 * min(fixed)


def test_a_tree_is_verified_whole_and_accepted_by_depth() -> None:
    how = speculation(iid(1.0), k=12, depth=3)
    trace = serve(table(10, 401), limits("eagle", 12), how, ConstantCost(0.01))
    rounds, drafts, accepted = totals(trace)
    assert rounds == 10 * 100 and drafts == 12 * rounds and accepted == 3 * rounds


# ---------------------------------------------------------------- on a device of its own


def own_device(alpha: float, verify_s: float, pass_s: float, k: int = 4) -> float:
    cost = Speculative(
        ConstantCost(verify_s), DraftFor(pass_s), hides_host=False, link=Link(0.001, 1e12)
    )
    how = speculation(iid(alpha), k=k, ahead=True)
    rows = serve(table(1, 1001), limits("draft_model", k), how, cost).requests
    rounds = int(rows["draft_rounds"][0])
    return float(rows["finish_ns"][0] - rows["first_token_ns"][0]) / 1e9 / rounds


def test_drafts_made_ahead_are_hidden_while_they_hold() -> None:
    # All accepted, and the next token foreseen: the longer of both, and the link.
    assert own_device(1.0, 0.02, 0.002) == pytest.approx(0.02 + 0.001, rel=0.02)
    assert own_device(1.0, 0.02, 0.01) == pytest.approx(0.04 + 0.001, rel=0.02)
    # None accepted: the verdict goes over the link, then the draft is made and comes back.
    assert own_device(0.0, 0.02, 0.002) == pytest.approx(0.02 + 0.008 + 0.002, rel=0.02)


def test_a_tree_made_ahead_is_kept_where_all_of_its_depth_is_accepted() -> None:
    cost = Speculative(
        ConstantCost(0.02), DraftFor(0.002), hides_host=False, link=Link(0.001, 1e12)
    )
    ends = []
    for alpha in (1.0, 0.0):
        how = speculation(iid(alpha), k=6, depth=3, ahead=True)
        rows = serve(table(1, 401), limits("draft_model", 6), how, cost).requests
        ends.append(int(rows["finish_ns"][0]) / int(rows["draft_rounds"][0]))
    assert ends[0] < 0.85 * ends[1]


def test_speculation_and_its_limits_go_together() -> None:
    for bounds, how in ((limits(), None), (limits(spec_method=None), speculation(iid(0.5)))):
        with pytest.raises(ValueError, match="go together"):
            simulate(table(1), bounds, ConstantCost(0.01), speculation=how)


@pytest.mark.parametrize("method", METHODS)
def test_the_quick_walk_is_the_whole_walk(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding wants up first changes nothing but the time that planning takes."""
    from servecast.sim.scheduler import Scheduler

    load = table(60, 90, prompt=70, gap_ns=3_000_000)
    bounds = limits(method, 3, num_gpu_blocks=60, max_num_batched_tokens=100)
    how = speculation(iid(0.6), k=3)

    def run() -> Sequence[Any]:
        trace = serve(load, bounds, how, ConstantCost(0.004))
        return [*trace.requests.values(), trace.steps["running"], trace.steps["kv_blocks"]]

    quick = run()
    monkeypatch.setattr(Scheduler, "_walk_together", lambda self, plan: False)
    for a, b in zip(quick, run(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert sum(quick[8]) > 0  # preemptions: the pool was short
