"""A sizing on a terminal and on a page, from results made up for the purpose."""

import io
import re
import shlex
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page
from rich.console import Console

from servecast.reports import sizing_words as words
from servecast.reports.sizing_console import render_sizing
from servecast.reports.sizing_figures import frontier, knee, load_panels, pareto, tornado
from servecast.reports.sizing_heatmap import goodput_range, heat_axes, heat_maps, with_twins
from servecast.reports.sizing_html import render_sizing_report

NASTY = "<script>alert('x')</script> & \"[bold]\" $x$"

SEQS, TOKENS, BLOCK = "engine.max_num_seqs", "engine.max_num_batched_tokens", "engine.block_size"
KNOBS = {SEQS: [16, 32, 64, 128, 256], TOKENS: [512, 2048, 8192], BLOCK: [16, 32]}

UNKNOWN = ("ttft_p95_s", "itl_p99_s", "tokens_per_s_per_device", "tokens_per_s_per_user",
           "preemptions", "kv_peak_use", "goodput_per_s", "met")  # fmt: skip

Result = dict[str, Any]


def point(changes: dict[str, Any], stage: str = "short") -> Result:
    """More slots and tokens serve more, until the gap between tokens is too long."""
    seqs, tokens = changes.get(SEQS, 64), changes.get(TOKENS, 2048)
    gap_s = 0.02 + seqs * 3e-4 + tokens * 1.2e-5
    goodput = 8 * seqs / (seqs + 8) * tokens / (tokens + 200) * (0.7 if gap_s > 0.1 else 1)
    return {
        "changes": changes, "stage": stage, "error": None, "goodput_per_s": goodput,
        "met": gap_s <= 0.1, "ttft_p95_s": 0.3, "itl_p99_s": gap_s,
        "tokens_per_s_per_device": 220 * goodput, "tokens_per_s_per_user": 1 / gap_s,
        "preemptions": 0, "kv_peak_use": seqs / 300,
    }  # fmt: skip


def unknown(changes: dict[str, Any], stage: str, error: str | None = None) -> Result:
    return {"changes": changes, "stage": stage, "error": error, **dict.fromkeys(UNKNOWN)}


def choice(changes: dict[str, Any], **differs: Any) -> Result:
    made = point(changes, "full")
    goodput = made["goodput_per_s"]
    return {
        **{key: made[key] for key in made if key not in ("stage", "error")},
        "engine": {key.removeprefix("engine."): value for key, value in changes.items()},
        "lo": goodput - 0.01, "hi": goodput + 0.01, "e2e_p95_s": 4.2,
        "output_tokens_per_s": 220 * goodput, "cost_per_million_output_tokens": 0.5, **differs,
    }  # fmt: skip


def knobs(seqs: int, tokens: int, block: int) -> dict[str, int]:
    return {SEQS: seqs, TOKENS: tokens, BLOCK: block}


def curve() -> list[Result]:
    loads = (0.5, 1.0, 1.5, 2.0, 3.0)
    ttft_s = (0.1, 0.3, 0.8, 3.0, 9.0)
    return [
        {"load": load, "rate_per_s": 8 * load, "goodput_per_s": min(8 * load, 13.0),
         "output_tokens_per_s": 220 * min(8 * load, 13.0), "ttft_p50_s": ttft / 2,
         "ttft_p95_s": ttft, "itl_p99_s": 0.05, "e2e_p95_s": 3 + 2 * ttft,
         "preemptions": 7 if load > 2 else 0, "met": load < 1.8}
        for load, ttft in zip(loads, ttft_s, strict=True)
    ]  # fmt: skip


def typical() -> Result:
    points = [point(dict(zip(KNOBS, values, strict=True))) for values in product(*KNOBS.values())]
    return {
        "scenario": "chat", "objective": "goodput", "knobs": KNOBS,
        "best": choice(knobs(64, 2048, 16)), "runner_up": choice(knobs(32, 2048, 16)),
        "default": choice(knobs(256, 8192, 16)), "default_error": None,
        "binding": "sequence slots: all 64 were taken", "block_size": "it decides nothing here",
        "headroom": {"load": 1.75, "breaks": "ttft_p95_s"},
        "cliff": {"load": 3.0, "preemptions": 7},
        "sla": [
            {"clause": "ttft_p95_s", "limit": 1.0, "value": 0.3, "probability": 1.0,
             "lo": 0.61, "hi": 1.0},
            {"clause": "failure_rate", "limit": 0.01, "value": 0.0, "probability": 1.0,
             "lo": 0.61, "hi": 1.0},
        ],
        "sensitivity": [
            {"what": "memory bandwidth of dense layers", "low": 0.36, "high": 0.27, "base": 0.3},
            {"what": "host time of a step", "low": 0.29, "high": 0.31, "base": 0.3},
        ],
        "sensitivity_metric": "ttft_p95_s", "curve": curve(), "points": points, "devices": 1,
        "price_per_hour": 2.95, "simulated_requests": 41_200, "exhaustive_requests": 450_000,
        "points_simulated": 57, "version": "1.2", "notes": [],
        "vllm_command": "vllm serve a/model-8B --max-num-seqs 64 --max-num-batched-tokens 2048 "
        "--block-size 16 --gpu-memory-utilization 0.9 --no-enable-prefix-caching",
        "calibration": "datasheet peaks (uncalibrated)",
    }  # fmt: skip


def infeasible() -> Result:
    result = typical()
    for made in (*result["points"], result["best"], result["runner_up"], result["default"]):
        made["met"] = False
    result["sla"][0] |= {"value": 1.4, "probability": 0.0, "lo": 0.0, "hi": 0.39}
    return result | {
        "headroom": {"load": 0.0, "breaks": "ttft_p95_s"},
        "cliff": {"load": 0.75, "preemptions": 3},
        "curve": [row | {"met": False} for row in curve()],
    }


def single_knob() -> Result:
    values = KNOBS[SEQS]
    return typical() | {
        "knobs": {SEQS: values}, "points": [point({SEQS: value}) for value in values],
        "best": choice({SEQS: 64}, cost_per_million_output_tokens=None), "runner_up": None,
        "default": choice({SEQS: 256}), "headroom": {"load": 4.0, "breaks": None},
        "cliff": {"load": None, "preemptions": 0}, "price_per_hour": None,
        "calibration": "measured on the device", "notes": ["block_size does nothing"],
    }  # fmt: skip


def mostly_errors() -> Result:
    result = typical()
    points = [
        p if p["changes"][TOKENS] == 2048
        else unknown(p["changes"], "screened", f"does not start: {NASTY}")
        if p["changes"][SEQS] > 64
        else unknown(p["changes"], "same as engine.max_num_seqs 32")
        for p in result["points"]
    ]  # fmt: skip
    return result | {"points": points, "default": None, "default_error": "does not start"}


def bare() -> Result:
    """No SLA, nothing around the answer, no intervals, one point that serves nothing."""
    best = choice(knobs(64, 2048, 16), goodput_per_s=0.0, lo=None, hi=None, met=None,
                  tokens_per_s_per_user=None, itl_p99_s=None, kv_peak_use=None)  # fmt: skip
    return typical() | {
        "best": best, "runner_up": None, "default": best, "sla": [], "curve": [],
        "points": [], "sensitivity": [], "headroom": {"load": None, "breaks": None},
        "cliff": {"load": None, "preemptions": 0}, "exhaustive_requests": 0,
    }  # fmt: skip


def four_knobs() -> Result:
    result = typical()
    dtypes = {"engine.kv_cache_dtype": ["auto", "fp8"]}
    points = [
        p | {"changes": {**p["changes"], "engine.kv_cache_dtype": dtype},
             "goodput_per_s": p["goodput_per_s"] + (dtype == "fp8")}
        for p in result["points"] for dtype in ("auto", "fp8")
    ]  # fmt: skip
    return result | {"knobs": KNOBS | dtypes, "points": points}


RESULTS: dict[str, Callable[[], Result]] = {
    made.__name__: made
    for made in (typical, infeasible, single_knob, mostly_errors, bare, four_knobs)
}


@pytest.fixture(params=RESULTS)
def result(request: pytest.FixtureRequest) -> Result:
    return RESULTS[request.param]()


def on_terminal(result: Result) -> str:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(render_sizing(result))
    return out.getvalue()


def as_a_shell_reads(command: str) -> list[str]:
    """Words of a command over several lines."""
    return shlex.split(command.replace("\\\n", ""))


# ---------------------------------------------------------------- words


@given(
    st.lists(st.tuples(st.sampled_from(["--a", "--long-flag", "--json"]),
                       st.text(alphabet="ab1 {}\"'$-", max_size=30)), max_size=8),
    st.integers(1, 90),
)  # fmt: skip
def test_a_command_on_several_lines_is_the_same_command(
    flags: list[tuple[str, str]], width: int
) -> None:
    command = shlex.join(["vllm", "serve", "a/model", *(word for flag in flags for word in flag)])
    lines = list(words.command_lines(command, width))
    assert as_a_shell_reads("\n".join(lines)) == shlex.split(command)
    assert all(line.endswith(" \\") for line in lines[:-1])


@pytest.mark.parametrize(
    ("probability", "told"),
    [
        (None, "-"),
        (0.0, "0 %"),
        (0.001, "< 1 %"),
        (0.98, "98 %"),
        (0.999, "> 99 %"),
        (1.0, "100 %"),
    ],
)
def test_what_is_not_certain_is_not_told_as_certain(probability: float | None, told: str) -> None:
    assert words.chance(probability) == told


def test_the_answer_says_yes_or_no_and_against_what() -> None:
    assert words.answer(typical()).startswith("Yes: with these flags 1 device serves 6.48 of 8.00")
    assert "vLLM's defaults, which miss the SLA" in words.answer(typical())
    assert "grow by 75 % before P95 time to first token" in words.answer(typical())
    told = words.answer(infeasible())
    assert told.startswith("No: none of the 30 settings simulated meets the SLA")
    assert "P95 time to first token is 1.40 s where 1.00 s is allowed" in told
    assert "where vLLM's defaults do not start" in words.answer(mostly_errors())
    assert "as vLLM's defaults already do" in words.answer(bare())
    assert "SLA" not in words.answer(bare())
    fast = typical()
    fast["best"]["goodput_per_s"] = fast["default"]["goodput_per_s"] = 8.1
    assert "serves all 8.10 requests a second within the SLA, about as many" in words.answer(fast)


@pytest.mark.parametrize(
    ("load", "breaks", "told"),
    [(1.8, "ttft_p95_s", "may grow by 80 %"), (0.7, "itl_p99_s", "only up to × 0.7"),  # noqa: RUF001
     (0.0, "itl_p99_s", "even at × 0.5"), (4.0, None, "no limit breaks up to × 4"),  # noqa: RUF001
     (None, None, "no limit breaks up to × 1.5")],  # noqa: RUF001
)  # fmt: skip
def test_headroom(load: float | None, breaks: str | None, told: str) -> None:
    headroom = {"load": load, "breaks": breaks}
    assert told in words.headroom(typical() | {"headroom": headroom})


@pytest.mark.parametrize(
    ("load", "told"),
    [(3.0, "200 % above this one, after the SLA breaks"), (1.5, "50 % above"),
     (1.5, "before the SLA breaks"), (0.75, "has begun"), (None, "no preemption up to × 3")],  # noqa: RUF001
)  # fmt: skip
def test_cliff(load: float | None, told: str) -> None:
    assert told in words.cliff(typical() | {"cliff": {"load": load, "preemptions": 7}})


def test_how_the_runner_up_stands_to_the_best() -> None:
    best = {"goodput_per_s": 8.0, "lo": 7.9, "hi": 8.1, "met": True}
    for goodput, half, met, told in (
        (7.95, 0.1, True, "either will do"),
        (7.0, 0.1, True, "is worse"),
        (7.5, 0.6, True, "cannot be told apart"),
        (8.9, 0.1, True, "serves more"),
        (8.9, 0.1, False, "misses the SLA"),
    ):
        other = {"goodput_per_s": goodput, "lo": goodput - half, "hi": goodput + half, "met": met}
        assert told in words.distance({"best": best, "runner_up": other})
    assert "no runner-up" in words.distance({"best": best, "runner_up": None})


# ---------------------------------------------------------------- terminal


def test_terminal_is_one_screen_of_80_columns(result: Result) -> None:
    lines = on_terminal(result).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 34
    assert lines[0].startswith("vllm serve a/model-8B --max-num-seqs 64")


def test_terminal_names_all_that_a_decision_needs() -> None:
    told = " ".join(on_terminal(typical()).split())
    for word in (
        "✓ ttft_p95 300 ms, limit 1.00 s; P(met) 100 % (61 % to 100 %)", "6.48 (6.47 to 6.49)",
        "runner-up", "max_num_seqs 32", "defaults", "sequence slots", "headroom", "cliff",
        "it decides nothing here", "memory bandwidth of dense layers", "uncalibrated",
        "57 points simulated, 41,200 requests", "of the 450,000",
    ):  # fmt: skip
        assert word in told


def test_terminal_says_what_misses() -> None:
    told = on_terminal(infeasible())
    assert "✗ ttft_p95" in told
    assert "No: none" in told
    assert "do not start" in on_terminal(mostly_errors())
    assert "block_size does nothing" in on_terminal(single_knob())


# ---------------------------------------------------------------- figures


def test_axes_of_the_heat_maps_are_knobs_that_vary() -> None:
    assert heat_axes(typical()) == (SEQS, BLOCK, TOKENS)
    assert heat_axes(single_knob()) == (SEQS, None, None)
    one_block = typical() | {"knobs": KNOBS | {BLOCK: [16]}}
    assert heat_axes(one_block) == (SEQS, TOKENS, None)
    assert len(heat_maps(typical())) == len(KNOBS[TOKENS])


def test_heat_maps_show_every_goodput_and_the_best_of_knobs_beyond_three() -> None:
    drawn = "".join(svg for _, svg in heat_maps(typical()))
    for made in typical()["points"]:
        assert f">{made['goodput_per_s']:.2f}</text>" in drawn
    drawn = "".join(svg for _, svg in heat_maps(four_knobs()))
    assert f">{typical()['points'][0]['goodput_per_s'] + 1:.2f}</text>" in drawn


def test_only_missed_cells_are_hatched() -> None:
    for _, svg in heat_maps(infeasible()):
        assert "<pattern" in svg
    all_met = typical() | {"points": [p | {"met": True} for p in typical()["points"]]}
    for _, svg in heat_maps(all_met):
        assert "<pattern" not in svg


def test_a_setting_that_acts_as_another_shows_its_goodput() -> None:
    shown = {tuple(p["changes"].values()): p for p in with_twins(mostly_errors())}
    assert shown[16, 512, 16]["goodput_per_s"] is None, "its twin was not simulated either"
    points = [*typical()["points"][:3], unknown({**knobs(256, 512, 16)}, f"same as {SEQS} 16")]
    twin = with_twins(typical() | {"points": points})[-1]
    assert twin["goodput_per_s"] == points[0]["goodput_per_s"]
    assert twin["changes"] == knobs(256, 512, 16)
    drawn = "".join(svg for _, svg in heat_maps(typical() | {"points": points}))
    assert f">={points[0]['goodput_per_s']:.2f}</text>" in drawn


def test_equal_goodput_has_a_range() -> None:
    low, high = goodput_range(
        typical() | {"points": [p | {"goodput_per_s": 7.0} for p in typical()["points"]]}
    )
    assert low < 7.0 == high
    assert goodput_range(bare()) == (0.0, 1.0)


def test_knee_is_seen_only_inside_the_curve() -> None:
    assert knee(curve()) == 1.5
    assert knee(curve()[:2]) is None
    assert knee([]) is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1))
def test_frontier_is_what_no_other_beats(points: list[tuple[int, int]]) -> None:
    edge = frontier([(float(user), float(device)) for user, device in points])
    for user, device in points:
        beaten = any(u >= user and d >= device and (u, d) != (user, device) for u, d in points)
        assert beaten != ((user, device) in edge)


def test_figures_name_what_they_mark() -> None:
    drawn = dict(load_panels(typical()))
    ttft = drawn["Time to first token, P50, P95"]
    for name in ("knee", "SLA breaks", "cliff", "this load", "limit P95 1.00 s"):
        assert f">{name}</text>" in ttft
    assert "SLA breaks" not in "".join(svg for _, svg in load_panels(single_knob()))
    assert ">best</text>" in pareto(typical())
    assert ">defaults</text>" not in pareto(mostly_errors())
    assert "memory bandwidth of" in tornado(typical())
    assert ">360 ms</text>" in tornado(typical())
    assert "no coefficient" in tornado(bare())


def test_figures_are_small(result: Result) -> None:
    for _, svg in (*heat_maps(result), *load_panels(result)):
        assert len(svg) < 30_000


# ---------------------------------------------------------------- page


def test_page_is_whole_and_alone(result: Result) -> None:
    html = render_sizing_report(result)
    page = Page(html)
    assert len(html) < 600_000
    assert html == render_sizing_report(result)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert words.answer(result) in page.text
    assert result["calibration"] in page.text


def test_page_shows_the_command_as_a_shell_reads_it(result: Result) -> None:
    text = Page(render_sizing_report(result)).text
    command = text[text.index("vllm serve") :]
    told = as_a_shell_reads(command[: command.index("--no-enable-prefix-caching")])
    assert [*told, "--no-enable-prefix-caching"] == shlex.split(result["vllm_command"])


def test_points_stand_by_goodput_and_those_without_say_why() -> None:
    rows = re.findall(
        r"<tr>(<td>.*?)</tr>", render_sizing_report(typical()).split("<h2>Every point</h2>")[1]
    )
    shown = [float(row.split("<td>")[4].removesuffix("</td>")) for row in rows]
    told = sorted((made["goodput_per_s"] for made in typical()["points"]), reverse=True)
    assert shown == pytest.approx(told, rel=0.01)
    html = render_sizing_report(mostly_errors())
    text = Page(html).text
    assert "8 points that do not start" in text
    assert "12 points not simulated" in text
    assert text.count(NASTY) == 8
    assert "<script" not in html


def test_many_points_fold_and_stay_small() -> None:
    values = {
        SEQS: list(range(1, 51)),
        TOKENS: [512, 2048, 4096, 8192],
        BLOCK: [16, 32, 64, 128, 256],
    }
    points = [point(dict(zip(values, each, strict=True))) for each in product(*values.values())]
    html = render_sizing_report(typical() | {"knobs": values, "points": points})
    assert len(html) < 600_000
    assert "970 more" in Page(html).text
    assert html.count("<details>") == 1


def test_every_name_is_escaped() -> None:
    result = typical() | {
        "scenario": NASTY, "binding": NASTY, "block_size": NASTY, "calibration": NASTY,
        "version": NASTY, "objective": NASTY, "notes": [NASTY],
        "vllm_command": shlex.join(["vllm", "serve", NASTY]),
    }  # fmt: skip
    result["points"][0]["stage"] = NASTY
    result["sensitivity"][0]["what"] = NASTY
    html = render_sizing_report(result)
    assert "script" not in Page(html).tags
    assert "<script" not in html
    assert NASTY in on_terminal(result)


def test_a_calibrated_sizing_is_not_called_uncalibrated() -> None:
    assert "Calibrated step times" in Page(render_sizing_report(single_knob())).text
    assert "Uncalibrated step times" in Page(render_sizing_report(typical())).text
