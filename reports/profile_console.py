"""A profile of measured kernels on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render_profile(profile: Mapping[str, Any]) -> RenderableType:
    """What was measured, and each family's errors on shapes that the fit did not see."""
    source = profile["source"]
    head = Text(f"{profile['device']} ({profile['hardware']}): {source['what']}", "bold")
    lines = [Text(f"{key}: {value}", "dim") for key, value in source.items() if key != "what"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("family", "rows", "grid", "median error", "p95"):
        table.add_column(title, justify="left" if title == "family" else "right")
    for name, family in profile["families"].items():
        table.add_row(
            name,
            f"{family['rows']:,}",
            " x ".join(map(str, family["grid"])),
            f"{family['median']:.1%}" if family["residuals"] else "not known",
            f"{family['p95']:.1%}" if family["residuals"] else "",
        )
    ranks = ", ".join(map(str, profile["all_reduce_ranks"])) or "none"
    return Group(
        head,
        *lines,
        table,
        Text("Errors are on whole coordinates left out of the fit.", "dim"),
        Text(f"all-reduce measured for {ranks} ranks"),
        *_beside(profile),
        *_against(profile),
    )


def _against(profile: Mapping[str, Any]) -> list[RenderableType]:
    """How far another profile of the device is, if one was named."""
    other = profile.get("against")
    if other is None:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("operator", "shapes", "time over theirs", "median difference", "p95"):
        table.add_column(title, justify="left" if title == "operator" else "right")
    for row in other["operators"]:
        table.add_row(
            row["name"],
            f"{row['points']:,}",
            f"{row['ratio']:.2f}",
            f"{row['median']:.1%}",
            f"{row['p95']:.1%}",
        )
    return [Text(f"Against {other['profile']} ({other['what']})", "bold"), table]


def _beside(profile: Mapping[str, Any]) -> list[RenderableType]:
    """What was measured of an engine, block sizes, wholes and uneven contexts, where it was."""
    lines: list[RenderableType] = []
    if profile["host"] is not None:
        host = profile["host"]
        lines.append(
            Text(
                f"host of {host['engine']}: {1e3 * host['step_s']:.3g} ms a step, "
                f"{1e6 * host['sequence_s']:.3g} us a sequence"
                + ("" if host["layer_s"] is None else f", {1e6 * host['layer_s']:.3g} us a layer")
            )
        )
    for key, words in (
        ("block_factor", "decode attention by block size"),
        ("query_factor", "decode attention by query tokens"),
        ("whole_factor", "layers over the sum of their parts, by tokens"),
    ):
        if profile[key]:
            told = ", ".join(f"{size}: {value:.2f}" for size, value in profile[key].items())
            lines.append(Text(f"{words}: {told}"))
    if profile["tail"] is not None:
        tail = profile["tail"]
        told = ", ".join(f"{size}: {share:.2f}" for size, share in tail["alone"].items())
        lines.append(
            Text(
                f"uneven contexts: memory feeds {tail['streams']:.0f} KV heads at once; share of "
                f"the tail by KV heads of decodes alone: {told or 'not measured'}"
            )
        )
    lines += [Text(f"{name}: {value:.4g}", "dim") for name, value in profile["extras"].items()]
    return lines
