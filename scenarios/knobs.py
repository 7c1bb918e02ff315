"""What a command line varies: `KEY=A,B,C`, with ranges."""

from collections.abc import Sequence
from typing import Any

import yaml

from servecast.costmodels.errors import InputError
from servecast.scenarios.factors import LOAD_FACTORS
from servecast.scenarios.schema import Engine, Scenario

#: Values of a factor that is named alone.
USUAL = {
    "load": (0.25, 0.5, 1, 2, 4, 8),
    "prompt": (0.5, 1, 2),
    "output": (0.5, 1, 2),
    "burstiness": (1, 2, 4),
}

#: Values of one range at most.
MOST_VALUES = 1000


def parse_vary(text: str, option: str) -> tuple[str, list[Any]]:
    """A key and the values it takes.

    Values are YAML, separated by commas outside brackets. `a..b` is a range of whole numbers,
    `a..b:step` one with a step; a leading x (`x1..x4`) is a habit of writing factors.
    A load factor alone stands for its usual values (`USUAL`).
    A bare engine flag (`max_num_seqs`) stands for `engine.max_num_seqs`, and so does a key in one
    (`speculative_config.num_speculative_tokens`).

    Raises InputError naming the option.
    """
    key, equals, listed = text.partition("=")
    key = key.strip()
    if not equals and key in USUAL:
        return key, list(USUAL[key])
    if not equals or not key or not listed.strip():
        raise InputError(f"{option} {text}: expected KEY=A,B,C")
    values: list[Any] = []
    for part in _split(listed):
        values.extend(_values(part.strip(), f"{option} {text}"))
    unique = []
    for value in values:
        if value not in unique:
            unique.append(value)
    return full_key(key), unique


def parse_knobs(texts: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The knobs of `servecast size`."""
    return dict(parse_vary(text, "--knobs") for text in texts)


def full_key(key: str) -> str:
    """A dotted key, with `engine.` before a flag."""
    block = key.partition(".")[0].replace("-", "_")
    if "." in key and block in Engine.model_fields:
        return f"engine.{block}.{key.partition('.')[2]}"
    if "." in key or key in LOAD_FACTORS or key in Scenario.model_fields:
        return key
    name = key.replace("-", "_")
    return f"engine.{name}" if name in Engine.model_fields else key


def _split(listed: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(listed):
        depth += letter in "[{"
        depth -= letter in "]}"
        if letter == "," and depth == 0:
            parts.append(listed[start:i])
            start = i + 1
    return [*parts, listed[start:]]


def _values(part: str, where: str) -> list[Any]:
    low, dots, rest = part.partition("..")
    if not dots:
        return [_scalar(part, where)]
    high, _, step = rest.partition(":")
    numbers = [_number(word.strip().removeprefix("x"), where) for word in (low, high, step or "1")]
    first, last, by = numbers
    if by <= 0 or last < first:
        raise InputError(f"{where}: {part}: a range goes up, by a step above 0")
    count = int((last - first) / by + 1e-9) + 1
    if count > MOST_VALUES:
        raise InputError(f"{where}: {part}: {count} values, at most {MOST_VALUES}")
    values = [first + i * by for i in range(count)]
    # 0.1 + 2 x 0.1 is 0.3.
    return [v if isinstance(v, int) else float(f"{v:.12g}") for v in values]


def _scalar(part: str, where: str) -> Any:
    if part[:1] == "x" and part[1:].replace(".", "", 1).isdigit():
        part = part[1:]
    try:
        return yaml.safe_load(part)
    except yaml.YAMLError:
        raise InputError(f"{where}: {part!r} is not a YAML value") from None


def _number(word: str, where: str) -> Any:
    value = _scalar(word, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: {word!r} is not a number")
    return value
