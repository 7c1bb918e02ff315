"""Pages of a kernel profile and of predictions beside measured runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from pages import Page

from servecast.reports.profile_figures import profile_figures, write_pngs
from servecast.reports.profile_html import profile_page
from servecast.reports.units import seconds
from servecast.reports.validation_html import validation_page

NASTY = "<script>alert('x')</script> & \"[bold]\" $x$"

FAMILIES = ("gemm 16bit", "gemm fp8", "prefill 16", "decode 16")

#: Datasheet: FLOP/s by compute type, bytes/s.
PEAKS, BANDWIDTH = {"16bit": 1e15, "fp8": 2e15}, 3e12

METRICS = ("ttft_s", "tpot_s", "e2e_s")

Table = dict[str, np.ndarray[Any, Any]]


def facts(*families: str, **changes: Any) -> dict[str, Any]:
    """As `calibration.store.profile_facts` has them."""
    family = {
        "rows": 1234,
        "grid": [3, 4, 5],
        "median": 0.032,
        "p95": 0.138,
        "residuals": np.linspace(-0.1, 0.15, 20).tolist(),
    }
    base = {
        "name": "mine",
        "hardware": "h100-sxm",
        "device": "A device",
        "source": {"what": "tables of mine", "by": "me", "licence": "Apache-2.0"},
        "small_kernel_s": 2.5e-6,
        "all_reduce_ranks": [2, 4],
        "families": {name: dict(family) for name in families},
    }
    return base | changes


def crossed(**axes: Any) -> Table:
    """Every combination of the coordinates, timed with some noise."""
    grid = np.meshgrid(*axes.values(), indexing="ij")
    table = {name: column.ravel() for name, column in zip(axes, grid, strict=True)}
    form = 2e-6 + 1e-8 * np.prod(list(table.values()), axis=0) ** 0.5
    noise = np.random.default_rng(0).lognormal(0.3, 0.05, len(form))
    return table | {"form_s": form, "fitted_s": 1.35 * form, "seconds": form * noise}


def measured() -> dict[str, Table]:
    """Rows of `FAMILIES`."""
    gemm = crossed(m=2 ** np.arange(12), n=[512, 1024, 2048], k=[512, 4096, 8192])
    return {
        "gemm 16bit": gemm,
        "gemm fp8": {**gemm, "seconds": gemm["seconds"] * 0.7},
        "prefill 16": crossed(new=[16, 128, 1024, 8192], heads=[8, 16, 32], group=[1, 4]),
        "decode 16": crossed(
            sequences=[1, 8, 64], context=2 ** np.arange(4, 12), kv_heads=[4, 8], group=[4]
        ),
    }


def by_block() -> Table:
    return crossed(
        sequences=[1, 32], context=[256, 1024, 4096], kv_heads=[8], group=[4],
        block_size=[16, 32, 64],
    )  # fmt: skip


def draw(rows: dict[str, Table], **changes: Any) -> dict[str, Figure]:
    return profile_figures(facts(*FAMILIES, **changes), rows, PEAKS, BANDWIDTH)


def dots(figure: Figure) -> list[int]:
    """Measured points of each axes."""
    return [
        sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o")
        for axes in figure.axes
    ]


# ---------------------------------------------------------------- figures of a profile


def test_every_family_has_its_figure() -> None:
    figures = draw(measured())
    assert list(figures) == ["roofline", *FAMILIES, "residuals"]
    axes = {name: len(figure.axes) for name, figure in figures.items()}
    assert axes == {"roofline": 1, "gemm 16bit": 6, "gemm fp8": 6, "prefill 16": 1,
                    "decode 16": 1, "residuals": 4}  # fmt: skip


def test_pairs_go_from_small_to_large_and_show_every_m() -> None:
    figure = draw(measured())["gemm 16bit"]
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles[0] == "n 512, k 512"
    assert titles[-1] == "n 2,048, k 8,192"
    sizes = [np.prod([int(x) for x in re.findall(r"\d+", t.replace(",", ""))]) for t in titles]
    assert sizes == sorted(sizes)
    assert dots(figure) == [12] * 6


def test_points_are_the_measured_shares_and_lines_the_fitted_ones() -> None:
    rows = measured()["gemm 16bit"]
    axes = draw({"gemm 16bit": rows})["gemm 16bit"].axes[0]
    here = (rows["n"] == 512) & (rows["k"] == 512)
    points, line = axes.lines
    assert np.array_equal(points.get_xdata(), rows["m"][here])
    assert np.allclose(points.get_ydata(), (rows["form_s"] / rows["seconds"])[here])
    assert np.allclose(line.get_ydata(), 1 / 1.35)


def test_the_roofline_is_the_datasheets() -> None:
    (axes,) = draw({"gemm 16bit": measured()["gemm 16bit"]})["roofline"].axes
    points, roof = axes.lines
    assert len(points.get_xdata()) <= 12 * 9
    along, up = (np.asarray(values) for values in (roof.get_xdata(), roof.get_ydata()))
    assert np.allclose(up, np.minimum(along * BANDWIDTH, PEAKS["16bit"]))


def test_a_hundred_thousand_rows_stay_few_dots() -> None:
    rows = crossed(m=np.arange(1, 401), n=256 * np.arange(1, 17), k=256 * np.arange(1, 17))
    assert len(rows["seconds"]) > 100_000
    figures = profile_figures(facts("gemm 16bit"), {"gemm 16bit": rows}, PEAKS, BANDWIDTH)
    assert dots(figures["roofline"])[0] < 2500
    assert len(profile_page(facts("gemm 16bit"), figures)) < 600_000


@pytest.mark.parametrize(("peak", "bandwidth"), [(None, 3e12), (1e15, None), (None, None)])
def test_unknown_peaks_leave_their_roof_out(peak: float | None, bandwidth: float | None) -> None:
    rows = {"gemm 16bit": measured()["gemm 16bit"]}
    figures = profile_figures(facts("gemm 16bit"), rows, {"16bit": peak}, bandwidth)
    assert len(figures["roofline"].axes[0].lines) == (1 if peak is bandwidth is None else 2)
    Page(profile_page(facts("gemm 16bit"), figures))


def test_attention_is_drawn_at_usual_heads() -> None:
    figures = draw(measured())
    assert "KV heads 8" in figures["decode 16"].axes[0].get_title("left")
    assert "queries a KV head 4" in figures["prefill 16"].axes[0].get_title("left")
    assert dots(figures["decode 16"]) == [3 * 8]
    assert dots(figures["prefill 16"]) == [3 * 4]


def test_several_block_sizes_get_a_panel() -> None:
    figure = draw({"decode 16": by_block()})["decode 16"]
    assert dots(figure) == [2 * 3, 3 * 3]
    assert "block 16" in figure.axes[0].get_title("left")
    one = {name: column[by_block()["block_size"] == 16] for name, column in by_block().items()}
    assert len(draw({"decode 16": one})["decode 16"].axes) == 1


def test_errors_are_bars_of_rows_and_outlines_of_what_was_left_out() -> None:
    def stairs(rows: dict[str, Table]) -> list[int]:
        return [len(axes.patches) for axes in draw(rows)["residuals"].axes]

    assert stairs(measured()) == [2] * 4
    assert stairs({}) == [1] * 4
    assert stairs({"gemm fp8": measured()["gemm fp8"]}) == [1, 2, 1, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_hardly_any_rows_do_no_harm(count: int) -> None:
    tables = measured() | {"decode 16": by_block(), "moe 16bit": crossed(m=[1, 2])}
    rows = {
        name: {key: column[:count] for key, column in table.items()}
        for name, table in tables.items()
    }
    figures = draw(rows)
    assert set(figures) == {"residuals"} | ({"roofline", *FAMILIES} if count else set())
    Page(profile_page(facts(*FAMILIES), figures))


def test_rows_that_are_no_numbers_are_left_out() -> None:
    rows = measured()["prefill 16"]
    rows["seconds"][:3] = [0, np.nan, np.inf]
    table = draw({"prefill 16": rows})["prefill 16"]
    assert dots(table)[0] <= 3 * 4


def test_columns_beside_the_shape_do_not_count() -> None:
    rows = measured()["prefill 16"]
    count = len(rows["seconds"])
    more = rows | {"context": np.zeros(count), "kernel": np.full(count, "a name")}
    assert dots(draw({"prefill 16": more})["prefill 16"]) == [3 * 4]


def test_pngs_are_whole_and_always_the_same(tmp_path: Path) -> None:
    rows = {"decode 16": by_block()}
    paths = write_pngs(draw(rows), tmp_path / "a")
    assert [path.name for path in paths] == ["decode-16.png", "residuals.png"]
    assert sorted(paths) == sorted((tmp_path / "a").iterdir())
    again = write_pngs(draw(rows), tmp_path / "b")
    for path, other in zip(paths, again, strict=True):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.read_bytes() == other.read_bytes()


# ---------------------------------------------------------------- page of a profile


def test_profile_page_is_whole_and_alone() -> None:
    html = profile_page(facts(*FAMILIES), draw(measured()))
    assert html == profile_page(facts(*FAMILIES), draw(measured()))
    alone(html)
    text = Page(html).text
    for word in (
        "tables of mine", "Apache-2.0", "A device", "3 \N{MULTIPLICATION SIGN} 4", "3.2 %",
        "13.8 %", "2, 4 ranks", "2.50 µs", "Decode attention, 16-bit KV", *FAMILIES,
    ):  # fmt: skip
        assert word in text
    assert "not kept" not in text
    assert html.count("<svg") == 6


def test_profile_page_says_which_rows_it_lacks() -> None:
    told = Page(profile_page(facts(*FAMILIES), draw({}))).text
    assert "Raw rows are not kept with this profile" in told
    assert "Dots are measured" not in told
    rows = {name: table for name, table in measured().items() if name != "gemm fp8"}
    told = Page(profile_page(facts(*FAMILIES), draw(rows))).text
    assert "Raw rows of gemm fp8 are not kept" in told


def test_profile_page_of_nothing() -> None:
    empty = facts(source={"what": "none"}, all_reduce_ranks=[])
    figures = profile_figures(empty, {}, {}, None)
    assert figures == {}
    assert "None was measured" in Page(profile_page(empty, figures)).text


def test_noise_is_a_column_where_it_was_measured() -> None:
    told = facts(*FAMILIES)
    assert "Noise" not in Page(profile_page(told, {})).text
    told["families"]["gemm fp8"]["noise"] = 0.0123
    text = Page(profile_page(told, {})).text
    assert "Noise" in text
    assert "1.2 %" in text


def test_names_of_a_profile_are_escaped() -> None:
    nasty = facts(NASTY, name=NASTY, device=NASTY, hardware=NASTY, source={NASTY: NASTY})
    html = profile_page(nasty, profile_figures(nasty, {}, {}, None))
    assert "<script" not in html
    assert Page(html).text.count(NASTY) >= 6


# ---------------------------------------------------------------- page of a validation


def row(case: str, metric: str, value: float, error: float, known: bool = True) -> dict[str, Any]:
    predicted = value * (1 + error)
    return {
        "case": case,
        "metric": metric,
        "measured": value,
        "predicted": predicted,
        "error": error,
        "lo": 0.9 * predicted if known else None,
        "hi": 1.1 * predicted if known else None,
        "inside": abs(error) < 0.1 if known else None,
    }


def answer(*cases: str, known: bool = True) -> dict[str, Any]:
    """As `scenarios.validate.validate` has it."""
    sizes = zip(METRICS, (0.2, 0.02, 5), strict=True)
    stats = [
        (f"{metric} {stat}", size) for metric, size in sizes for stat in ("mean", "p50", "p99")
    ]
    rows = [
        row(case, name, size * (1 + place), 0.01 * (place + 1) * (-1) ** place, known)
        for place, case in enumerate(cases)
        for name, size in stats
    ]
    found = {}
    for name, _ in stats:
        off = [r["error"] for r in rows if r["metric"] == name]
        inside = [r["inside"] for r in rows if r["metric"] == name]
        found[name] = {
            "values": len(off),
            "median_error": float(np.median(np.abs(off))),
            "worst_error": float(np.max(np.abs(off))),
            "median_signed_error": float(np.median(off)),
            "inside": float(np.mean(inside)) if known else None,
        }
    inside = [r["inside"] for r in rows]
    return {"rows": rows, "metrics": found, "inside": float(np.mean(inside)) if known else None}


def latencies(n: int, seed: int = 0) -> Table:
    rng = np.random.default_rng(seed)
    return {"ttft_s": rng.lognormal(-2, 1, n), "tpot_s": rng.lognormal(-4, 0.2, n),
            "e2e_s": rng.lognormal(1, 0.5, n)}  # fmt: skip


def over_time(n: int) -> Table:
    moments = np.linspace(0, 100, n)
    return {"t_s": moments, "running": 20 + np.sin(moments), "waiting": np.zeros(n),
            "kv_share": np.linspace(0, 0.9, n)}  # fmt: skip


def overlay(case: str, n: int = 300, whole: bool = True, moments: int = 160) -> dict[str, Any]:
    return {
        "case": case,
        "measured": latencies(n) if whole else None,
        "predicted": latencies(n, seed=1),
        "timeline": over_time(moments),
        "measured_timeline": over_time(9 * moments) if whole else None,
    }


def alone(html: str) -> None:
    page = Page(html)
    assert not page.tags & {"script", "link", "img", "image", "iframe"}
    assert all(address.startswith("#") for address in page.addresses)
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "url(http" not in html
    assert "@import" not in html


def test_validation_page_is_whole_and_alone() -> None:
    found = answer("first", "second")
    overlays = [overlay("first"), overlay("second", whole=False)]
    html = validation_page(found, overlays)
    assert html == validation_page(found, overlays)
    alone(html)
    text = Page(html).text
    for word in ("18 measured values of 2 cases", "first", "second", "n = 300, measured 300",
                 "Requests running", "only statistics were measured"):  # fmt: skip
        assert word in text
    for r in found["rows"]:
        assert f"{seconds(r['lo'])} to {seconds(r['hi'])}" in text
        assert seconds(r["predicted"]) in text
    # The scatter, and six panels of each case.
    assert html.count("<svg") == 1 + 2 * 6


def test_measured_statistics_are_marked_where_requests_are_not_known() -> None:
    def texts(whole: bool) -> list[str]:
        html = validation_page(answer("one"), [overlay("one", whole=whole)])
        svg = re.findall(r'<svg[^>]*aria-label="one: cumulative[^>]*>.*?</svg>', html)
        assert len(svg) == 3
        return re.findall(r">([^<>]+)</text>", "".join(svg))

    assert [texts(False).count(name) for name in ("mean", "P50", "P99", "measured")] == [3, 3, 3, 0]
    assert [texts(True).count(name) for name in ("mean", "P50", "P99", "measured")] == [0, 0, 0, 3]


def test_the_whole_table_starts_with_the_worst() -> None:
    html = validation_page(answer("small", "medium", "large"), [])
    table = html[html.index("Every value") :]
    places = [table.index(f"<td>{name}</td>") for name in ("large", "medium", "small")]
    assert places == sorted(places)


def test_many_cases_get_figures_for_the_first_only() -> None:
    names = [f"case-{number:03}" for number in range(138)]
    html = validation_page(answer(*names), [overlay(name, n=50) for name in names])
    alone(html)
    text = Page(html).text
    assert "Figures are of the first 12 of 138 cases" in text
    assert html.count("<svg") == 1 + 12 * 6
    assert all(html.count(f"<td>{name}</td>") == 9 for name in names)
    assert html.count("<h2>case-") == 12
    assert len(html) < 2_000_000


def test_without_intervals_there_is_no_coverage() -> None:
    text = Page(validation_page(answer("one", known=False), [overlay("one")])).text
    assert "No intervals" in text
    assert "outside" not in text
    assert "no intervals" in text


@pytest.mark.parametrize("n", [0, 1])
def test_hardly_any_requests_do_no_harm(n: int) -> None:
    for whole in (True, False):
        found = validation_page(answer("one"), [overlay("one", n=n, whole=whole, moments=n)])
        text = Page(found).text
        assert ("nothing to measure" in text) == (n == 0)
        assert ("not recorded" in text) == (n == 0)


def test_parts_of_a_time_line_may_be_missing() -> None:
    known = overlay("one")
    del known["measured_timeline"]["kv_share"], known["timeline"]["waiting"]
    known["measured"]["ttft_s"][:5] = np.nan
    known["measured_timeline"]["running"][3] = np.nan
    text = Page(validation_page(answer("one"), [known])).text
    assert "n = 300, measured 295" in text


def test_validation_page_of_nothing() -> None:
    nothing = {"rows": [], "metrics": {}, "inside": None}
    assert "Nothing was measured" in Page(validation_page(nothing, [])).text
    Page(validation_page(nothing, [overlay("one")]))


def test_names_of_cases_are_escaped() -> None:
    html = validation_page(answer(NASTY), [overlay(NASTY, n=5)])
    assert "<script" not in html
    assert NASTY in Page(html).text
