"""Where speculation pays: numbers of drafts against whatever else is varied, load above all.

Every point stands against the one without drafts that differs in nothing else. It is as many times
as fast as that one's mean end-to-end time is longer. Where it is slower there is one of these
reasons: the pool that draft weights and KV leave is short; a round gives too few tokens for what it
costs even where the load is least; or a round has come to cost more plain steps than there, because
verified positions are no longer free. Where no round was made at all it is drafting: the drafter's
prefill, or a schedule that cannot run ahead of the output.
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

PAYS = ("below", "above", "always", "never")

Changes = Mapping[str, Any]
Served = Sequence[tuple[Changes, Sequence[Result] | None]]


def draft_map(served: Served) -> dict[str, Any] | None:
    """The map of a grid that varies the number of drafts; None for any other, or without 0.

    Parameters
    ----------
    served : changes of each point, and its results seed by seed (None where it does not run)

    Returns
    -------
    `{rows, axis, break_even, words}`. A row is one setting of the other keys: `{changes, at,
    points, best}`, its points `{tokens, speedup, lo, hi, tokens_a_step, step_cost, cause}`
    (`tokens_a_step` of a sequence, `step_cost` in plain steps; `cause` is None, "memory",
    "acceptance", "verification" or "drafting"). Where one other key is varied, over numbers, it is
    the `axis` and `at` its value. `break_even` is, by number of drafts, `{at, pays}`: the value at
    which it turns for the last time, between values that were tried, and whether it pays "below"
    or "above"; "always" or "never" with `at` None where it does not turn. `words` say it in lines.
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
    axis = _axis(rows)
    if axis is not None:
        for row in rows:
            row["at"] = float(row["changes"][axis])
        rows.sort(key=lambda row: row["at"])
    _name_causes(rows)
    break_even = _break_even(rows) if axis is not None and len(rows) > 1 else {}
    words = _words(rows, break_even, axis or "")
    return {"rows": rows, "axis": axis, "break_even": break_even, "words": words}


def _axis(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The one other key, if its values are numbers."""
    keys = list(rows[0]["changes"])
    values = [row["changes"].get(keys[0]) for row in rows] if len(keys) == 1 else [None]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return keys[0] if numbers else None


def _row(group: Sequence[tuple[Changes, Sequence[Result]]]) -> dict[str, Any] | None:
    plain = next((results for changes, results in group if changes[KEY] == 0), None)
    if plain is None:
        return None
    found = (_point(changes[KEY], plain, results) for changes, results in group)
    points = [point for point in found if point is not None]
    points.sort(key=lambda point: point["tokens"])
    others = {key: value for key, value in group[0][0].items() if key != KEY}
    return {
        "changes": others,
        "at": None,
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
        lengths = [r["summary"]["speculation"]["tokens_a_step"] for r in results]
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
        "tokens_a_step": length,
        "step_cost": cost,
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
    """Of every point that is slower, against the row of the least load among those that differ in
    nothing else."""
    for row in rows:
        alike = [other for other in rows if _rest(other) == _rest(row)]
        first = min(alike, key=lambda other: float(other["changes"].get("load", row["at"] or 0.0)))
        least = {point["tokens"]: point["step_cost"] for point in first["points"]}
        for point in row["points"]:
            if point["tokens"] and point["speedup"] < 1.0:
                point["cause"] = _cause(point, least.get(point["tokens"]))


def _rest(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row is beside its load."""
    if row["at"] is not None and "load" not in row["changes"]:
        return {}
    return {key: value for key, value in row["changes"].items() if key != "load"}


def _cause(point: Mapping[str, Any], least_cost: float | None) -> str:
    length, cost = point["tokens_a_step"], point["step_cost"]
    if point["pool_felt"] and (cost is None or cost <= length):
        return "memory"
    if cost is None:
        return "drafting"
    if least_cost is not None and length <= least_cost:
        return "acceptance"
    if point["pool_felt"] and least_cost is not None and cost <= 1.1 * least_cost:
        return "memory"
    return "verification"


def _break_even(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By number of drafts: where its speed-up crosses 1 for the last time, on a straight line."""
    found: dict[str, dict[str, Any]] = {}
    for tokens in sorted({p["tokens"] for row in rows for p in row["points"] if p["tokens"]}):
        line = [
            (row["at"], point["speedup"])
            for row in rows
            for point in row["points"]
            if point["tokens"] == tokens
        ]
        turn: dict[str, Any] = {"at": None, "pays": "always" if line[-1][1] >= 1 else "never"}
        for (at, before), (following, after) in pairwise(line):
            if (before >= 1) != (after >= 1):
                share = (before - 1) / (before - after)
                where = round(at + share * (following - at), 3)
                turn = {"at": where, "pays": "below" if before >= 1 else "above"}
        found[str(tokens)] = turn
    return found


CAUSES = {
    "drafting": "drafting: its own prefill, or a schedule that cannot run ahead of the output",
    "memory": "memory: the pool that the draft leaves holds requests back",
    "acceptance": "acceptance: a round gives too few tokens for what it costs at any load",
    "verification": "verification cost: verified positions are no longer free",
}


def _words(
    rows: Sequence[Mapping[str, Any]], break_even: Mapping[str, Mapping[str, Any]], axis: str
) -> list[str]:
    words = []
    by = {how: [k for k, turn in break_even.items() if turn["pays"] == how] for how in PAYS}
    for how, verb in (("below", "stop"), ("above", "start")):
        for tokens in by[how]:
            where = _label({"changes": {axis: break_even[tokens]["at"]}})
            words.append(f"{tokens} drafts {verb} paying at {where}")
    if by["never"]:
        words.append(f"never pays here: {', '.join(by['never'])} drafts")
    if by["always"]:
        words.append(f"pays everywhere here: {', '.join(by['always'])} drafts")
    for row in rows:
        slow = [point for point in row["points"] if point["cause"] is not None]
        if not slow:
            continue
        worst = min(slow, key=lambda point: point["speedup"])
        told = f"{_label(row)}: {worst['tokens']} drafts are x{worst['speedup']:.2f} as fast; "
        told += CAUSES[worst["cause"]]
        if worst["step_cost"] is not None:
            told += (
                f" (a step takes {worst['step_cost']:.2f} plain ones and gives a sequence "
                f"{worst['tokens_a_step']:.2f} tokens)"
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
