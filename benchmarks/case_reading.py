"""A case file as measured points: what was measured, and what is said of each.

These shapes of `results` are read: rows that bring their own command line; variants, each a list
of stages of rising rate or a block of figures; `{columns, rows}`, where a column is a setting or a
metric, with the variant in its name (`ttft_fp8_s`); and a block of single figures.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from case_scenario import CasePoint, Json, NotRead, Setting, point_of
from case_words import Flags, flags_of, metric_of, model_of, not_modelled, squeezed

from servecast.scenarios.schema import Engine

#: A stage that sends less than this share of what it was asked to is held by its clients.
HELD_BACK = 0.97


def read_case(case: Json) -> list[CasePoint]:
    """All points of a case, in the file's order; equal loads behind a knee once.

    Raises NotRead where the file's results have no shape that is known.
    """
    return [point_of(setting) for setting in _settings(case)]


def why_not(case: Json) -> str | None:
    """Why nothing of a case is simulated, or None."""
    if "start-up only" in _text(case.get("workload")):
        return "start-up memory: held by the boot logs, not by a load"
    texts = " ".join(_text(case.get(key)) for key in ("kind", "model"))
    engine = _text(case.get("engine"))
    if "vLLM" not in engine:
        texts += " " + engine
    flags = case.get("flags")
    return not_modelled(texts + " " + (flags if isinstance(flags, str) else ""))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_text(part)}" for key, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return "" if value is None else str(value)


def _settings(case: Json) -> Iterator[Setting]:
    results = case.get("results")
    base = Setting(
        label="",
        group="",
        measured={},
        device_text=_text(case.get("hardware")),
        model_text=_text(case.get("model")),
        flags=flags_of(_for_all(case.get("flags"))),
        workload_text=_text(case.get("workload")),
        engine_text=_text(case.get("engine")),
        flags_text=_text(case.get("flags")),
    )
    if isinstance(results, list) and all("flags" in row for row in results):
        yield from _command_rows(base, results)
    elif isinstance(results, list):
        columns = list(dict.fromkeys(key for row in results for key in row))
        rows = [[row.get(key) for key in columns] for row in results]
        yield from _table(base, {"columns": columns, "rows": rows})
    elif not isinstance(results, dict):
        raise NotRead(f"results of another shape: {type(results).__name__}")
    elif results.get("columns", [""])[0] == "metric":
        for number, variant in enumerate(results["columns"][1:], start=1):
            figures = {row[0]: row[number] for row in results["rows"]}
            yield _variant(base, case, variant, figures)
    elif "columns" in results:
        yield from _table(base, results)
    elif all(isinstance(rows, list) and "requested_rps" in rows[0] for rows in results.values()):
        yield from _stages(base, case, results)
    elif all(isinstance(figures, dict) for figures in results.values()):
        for variant, figures in results.items():
            yield _variant(base, case, variant, figures)
    else:
        yield replace(base, label="as measured", measured=_figures(results), facts=results)


def _variant(base: Setting, case: Json, variant: str, figures: Json) -> Setting:
    """A block or a column of figures under one name, whose flags a block of flags may give."""
    own = _own_flags(case.get("flags"), variant)
    if own is None:
        flags = replace(base.flags, engine=base.flags.engine | _variant_flags(base, variant))
    else:
        flags = flags_of(own)
    return replace(
        base, label=variant, measured=_figures(figures), flags=flags, facts=dict(figures)
    )


def _own_flags(given: Any, variant: str) -> str | None:
    """A variant's flags from a block of them; `same flags` are those of the first that has any."""
    if not isinstance(given, dict):
        return None
    words = str(given.get(variant, ""))
    if words.startswith("same"):
        return next(str(text) for text in given.values() if not str(text).startswith("same"))
    return words


def _for_all(flags: Any) -> str:
    """Flags of every point: those of `KV case --kv-cache-dtype fp8` are one row's."""
    return re.sub(r"\w+ case [^,;]*", "", flags) if isinstance(flags, str) else ""


def _command_rows(base: Setting, rows: list[Json]) -> Iterator[Setting]:
    for row in rows:
        command = row["flags"]
        served = re.search(r"(?:vllm serve|--model)[ =](\S+)", command)
        own = re.sub(r"^.*?vllm serve \S+", "", command)
        names = (row.get("label", "").strip("# "), row.get("variant"))
        words = " ".join(filter(None, names))
        shown = " ".join((words, served[1].rpartition("/")[2] if served else "", own)).split()
        yield replace(
            base,
            label=" ".join(shown),
            measured=_figures(row),
            model_text=served[1] if served else base.model_text,
            flags=_joined(flags_of(own), flags_of(row.get("variant") or "")),
            engine_text=f"{base.engine_text} | {command}",
            facts=row,
        )


def _joined(one: Flags, other: Flags) -> Flags:
    """`other` wins: a variant's own label over a command line copied from its neighbour."""
    return Flags(one.engine | other.engine, one.choices | other.choices, one.others + other.others)


def _stages(base: Setting, case: Json, results: Mapping[str, list[Json]]) -> Iterator[Setting]:
    """Stages below the knee are open loops, those above all the same closed loop."""
    engines = dict(re.findall(r"(\w+): ([^;]+)", base.engine_text))
    for variant, rows in results.items():
        own = _own_flags(case.get("flags"), variant)
        free = [row for row in rows if row["achieved_send_rps"] >= HELD_BACK * row["requested_rps"]]
        held = [row for row in rows if row not in free][-1:]
        for number_, row in enumerate([*free, *held]):
            kind = "saturated" if row in held else f"stage {number_}"
            yield replace(
                base,
                label=f"{variant}: {kind}, {row['requested_rps']:g}/s asked",
                group="saturated" if row in held else variant,
                measured=_figures(row),
                flags=base.flags if own is None else flags_of(own),
                engine_text=engines.get(variant, base.engine_text),
                facts=row | {"held": row in held},
            )


def _table(base: Setting, results: Json) -> Iterator[Setting]:
    """Cells of one row and one variant make a point; figures beside the table hold for all rows."""
    for row in results["rows"]:
        cells = dict(zip(results["columns"], row, strict=True))
        facts = {key: value for key, value in cells.items() if metric_of(key) is None}
        variants: dict[str, dict[str, float]] = {}
        for key, value in cells.items():
            found = metric_of(key)
            if found and isinstance(value, int | float):
                variants.setdefault(found[2], {})[found[0]] = value * found[1]
        for variant, measured in variants.items():
            beside = {
                found[0]: values[variant]
                for key, values in results.items()
                if isinstance(values, dict) and variant in values and (found := metric_of(key))
            }
            yield _table_point(base, facts, variant, measured | beside)


def _table_point(
    base: Setting, facts: Json, variant: str, measured: Mapping[str, float]
) -> Setting:
    own: Json = {}
    words = []
    for key, value in facts.items():
        if isinstance(value, int | float):
            words.append(f"{key} {value}")
            if key in Engine.model_fields:
                own[key] = value
        elif value is not None:
            words.append(str(value))
    label = " ".join(filter(None, (*words, variant)))
    device = str(facts["gpu"]) if "gpu" in facts else base.device_text
    method = f"{facts.get('method', '')} {facts.get('stage', '')}".strip()
    model = _alternative(base.model_text, variant, str(facts.get("stage", "")))
    if re.search(r"KV[ -]?(cache)?[ -]*fp8", method, re.IGNORECASE):
        own["kv_cache_dtype"] = "fp8"
    concurrency = re.fullmatch(r"c(\d+)", variant)
    # Variants of a row are compared with one another; rows with the first of their device or model.
    group = " ".join(words) if variant else device
    return replace(
        base,
        label=label,
        group=group if model == base.model_text or "stage" in facts else model,
        measured=measured,
        device_text=device,
        model_text=f"{model} {facts.get('method', '')}".strip(),
        flags=replace(base.flags, engine=base.flags.engine | own | _variant_flags(base, variant)),
        facts=facts | ({"concurrency": int(concurrency[1])} if concurrency else {}),
    )


def _alternative(model: str, variant: str, stage: str) -> str:
    """The one of several models, `A / B / C`, that a column's name or a row's stage means."""
    models = model.split(" / ")
    if len(models) == 1 or not (variant or stage):
        return model
    if stage:
        return next((m for m in models if set(m.split()) & set(stage.split())), stage)
    if variant and sum(model_of(m) is not None for m in models) > 1:
        return next((m for m in models if _means(variant, m)), variant)
    return model


def _means(variant: str, text: str) -> bool:
    """`llama405` means `Llama-3.1-405B FP8`: its letters and its digits are in there."""
    parts = re.findall(r"[a-z]+|\d+", variant.lower())
    return all(part in squeezed(text) for part in parts)


def _variant_flags(base: Setting, variant: str) -> Json:
    """What a column's variant sets: one of a flag's alternatives, on and off, eager and graph."""
    if variant in ("eager", "graph"):
        return {"enforce_eager": variant == "eager"}
    for key, values in base.flags.choices.items():
        if variant in map(str, values):
            return {key: values[list(map(str, values)).index(variant)]}
        if variant in ("on", "off") and set(values) == {True, False}:
            return {key: variant == "on"}
    return {}


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a row; TPOT from its own E2E and TTFT where both are there.

    The TPOT that inference-perf recorded is half of what its own E2E, TTFT and tokens say.
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        metric = metric_of(key)
        if metric and isinstance(value, int | float) and metric[2] == "":
            found[metric[0]] = value * metric[1]
    if {"e2e_mean_s", "ttft_mean_s"} <= found.keys() and row.get("out_len"):
        found["tpot_mean_s"] = (found["e2e_mean_s"] - found["ttft_mean_s"]) / (row["out_len"] - 1)
    return found
