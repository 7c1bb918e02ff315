"""Where speculation pays: numbers of drafts against whatever else is varied, load above all.

Every point stands against the one without drafts that differs in nothing else. It is as many times
as fast as that one's mean end-to-end time is longer. Where it is slower there is one of three
reasons: the pool that draft weights and KV leave is short; a round gives too few tokens for what it
costs even where the load is least; or a round has come to cost more plain steps than there, because
verified positions are no longer free.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from servecast.reports.stats import mean_interval
from servecast.scenarios.factors import LOAD_FACTORS
from servecast.scenarios.sweep import Result

KEY = "engine.speculative_config.num_speculative_tokens"

#: The pool is short where it holds requests back for so much more of the time than without drafts.
POOL_FELT = 0.05

Changes = Mapping[str, Any]
Served = Sequence[tuple[Changes, Sequence[Result] | None]]


def draft_map(served: Served) -> dict[str, Any] | None:
    """The map of a grid that varies the number of drafts; None for any other, or without 0.

    Parameters
    ----------
    served : changes of each point, and its results seed by seed (None where it does not run)

    Returns
    -------
    `{rows, best, break_even, words}`. A row is one setting of the other keys: `{changes, load,
    points, best}`, its points `{tokens, speedup, lo, hi, acceptance_length, round_cost, cause}`
    (`round_cost` in plain steps; `cause` is None, "memory", "acceptance" or "verification").
    `break_even` is, by number of drafts, the load factor at which it stops to pay, between loads
    that were tried; "always" or "never" where none of them is. `words` say it in lines.
    """
    if not served or KEY not in served[0][0]:
        return None
    groups: dict[str, list[tuple[Changes, Sequence[Result]]]] = {}
    for changes, results in served:
        if results is not None:
            others = {key: value for key, value in changes.items() if key != KEY}
            groups.setdefault(repr(others), []).append((changes, results))
    rows = [row for group in groups.values() if (row := _row(group)) is not None]
    if not rows:
        return None
    rows.sort(key=lambda row: (row["load"] is None, row["load"] or 0.0))
    _name_causes(rows)
    break_even = _break_even(rows)
    return {"rows": rows, "break_even": break_even, "words": _words(rows, break_even)}


def _row(group: Sequence[tuple[Changes, Sequence[Result]]]) -> dict[str, Any] | None:
    plain = next((results for changes, results in group if changes[KEY] == 0), None)
    if plain is None:
        return None
    found = (_point(changes[KEY], plain, results) for changes, results in group)
    points = [point for point in found if point is not None]
    points.sort(key=lambda point: point["tokens"])
    others = {key: value for key, value in group[0][0].items() if key != KEY}
    load = others.get("load")
    return {
        "changes": others,
        "load": float(load) if load is not None else None,
        "points": points,
        "best": max(points, key=lambda point: point["speedup"])["tokens"] if points else None,
    }


def _point(
    tokens: int, plain: Sequence[Result], results: Sequence[Result]
) -> dict[str, Any] | None:
    def each(name: str, found: Sequence[Result]) -> list[float | None]:
        return [result["summary"][f"{name}_s"]["mean"] for result in found]

    pairs = list(zip(each("e2e", plain), each("e2e", results), strict=True))
    ratios = [without / own for without, own in pairs if without and own]
    if len(ratios) < len(pairs):
        return None
    low, high = mean_interval(ratios)
    length, cost = None, None
    if tokens:
        lengths = [r["summary"]["speculation"]["mean_acceptance_length"] for r in results]
        gaps = zip(each("tpot", plain), each("tpot", results), strict=True)
        gained = [without / own for without, own in gaps if without and own]
        known = [value for value in lengths if value is not None]
        if known and gained:
            length = float(np.mean(known))
            cost = length / float(np.mean(gained))
    return {
        "tokens": tokens,
        "speedup": float(np.mean(ratios)),
        "lo": low,
        "hi": high,
        "acceptance_length": length,
        "round_cost": cost,
        "pool_felt": _pool_felt(plain, results),
        "cause": None,
    }


def _pool_felt(plain: Sequence[Result], results: Sequence[Result]) -> bool:
    """Whether the pool holds requests back that it did not hold back without drafts."""

    def mean(found: Sequence[Result], read: Any) -> float:
        return float(np.mean([read(result) for result in found]))

    waits = [mean(found, lambda r: r["pressure"]["kv"]) for found in (plain, results)]
    lost = [mean(found, lambda r: r["summary"]["preemptions"]) for found in (plain, results)]
    sent = mean(results, lambda r: r["summary"]["requests"]["sent"])
    return waits[1] > waits[0] + POOL_FELT or lost[1] > lost[0] + POOL_FELT * sent


def _name_causes(rows: Sequence[dict[str, Any]]) -> None:
    """Of every point that is slower, against the row of the least load."""
    least = {point["tokens"]: point for point in rows[0]["points"]}
    for row in rows:
        for point in row["points"]:
            length, cost = point["acceptance_length"], point["round_cost"]
            if not point["tokens"] or point["speedup"] >= 1.0:
                continue
            low = least.get(point["tokens"])
            low_cost = None if low is None else low["round_cost"]
            if point["pool_felt"] and (cost is None or length is None or cost <= length):
                point["cause"] = "memory"
            elif low_cost is not None and length is not None and length <= low_cost:
                point["cause"] = "acceptance"
            elif point["pool_felt"] and low_cost is not None and cost <= 1.1 * low_cost:
                point["cause"] = "memory"
            else:
                point["cause"] = "verification"


def _break_even(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By number of drafts: where its speed-up crosses 1 for good, on a straight line over load."""
    if len(rows) < 2 or any(row["load"] is None or set(row["changes"]) != {"load"} for row in rows):
        return {}
    found: dict[str, Any] = {}
    for tokens in sorted({p["tokens"] for row in rows for p in row["points"] if p["tokens"]}):
        line = [
            (row["load"], point["speedup"])
            for row in rows
            for point in row["points"]
            if point["tokens"] == tokens
        ]
        if all(speedup >= 1 for _, speedup in line):
            found[str(tokens)] = "always"
        elif all(speedup < 1 for _, speedup in line):
            found[str(tokens)] = "never"
        else:
            for (load, before), (next_load, after) in reversed(list(pairwise(line))):
                if (before >= 1) != (after >= 1):
                    share = (before - 1) / (before - after)
                    found[str(tokens)] = round(load + share * (next_load - load), 3)
                    break
    return found


CAUSES = {
    "memory": "memory: the pool that the draft leaves holds requests back",
    "acceptance": "acceptance: a round gives too few tokens for what it costs at any load",
    "verification": "verification cost: verified positions are no longer free",
}


def _words(rows: Sequence[Mapping[str, Any]], break_even: Mapping[str, Any]) -> list[str]:
    words = []
    for tokens, load in break_even.items():
        if load not in ("always", "never"):
            words.append(f"{tokens} drafts stop paying at load x{load:g}")
    never = [tokens for tokens, load in break_even.items() if load == "never"]
    always = [tokens for tokens, load in break_even.items() if load == "always"]
    if never:
        words.append(f"never pays at these loads: {', '.join(never)} drafts")
    if always:
        words.append(f"pays at all these loads: {', '.join(always)} drafts")
    for row in rows:
        slow = [point for point in row["points"] if point["cause"] is not None]
        if not slow:
            continue
        worst = min(slow, key=lambda point: point["speedup"])
        told = f"{_label(row)}: {worst['tokens']} drafts are x{worst['speedup']:.2f} as fast; "
        told += CAUSES[worst["cause"]]
        if worst["round_cost"] is not None:
            told += (
                f" (a round takes {worst['round_cost']:.2f} plain steps and gives "
                f"{worst['acceptance_length']:.2f} tokens)"
            )
        words.append(told)
    return words


def _label(row: Mapping[str, Any]) -> str:
    changes = row["changes"]
    if not changes:
        return "as it is"
    return ", ".join(
        f"{key} x{value:g}" if key in LOAD_FACTORS else f"{key.rpartition('.')[2]} {value}"
        for key, value in changes.items()
    )
