"""Strict YAML: plain values and where each was said, in one pass over the parser's events.

The scalars are those of YAML 1.2's core schema (`1e3` is a number, `on` is a word). Refused:
tags, duplicate keys, several documents, and what only an attack needs (deep nesting, many
aliases, aliases that expand). Nothing is built that the text does not spell out.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from servecast.costmodels.errors import InputError

MAX_DEPTH = 32
MAX_ALIASES = 100
#: Values in all, each alias counted as all it stands for.
MAX_VALUES = 200_000

#: Keys and list indices from the top down to a value.
KeyPath = tuple[str | int, ...]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]{1,40}")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(_[0-9]{3}){1,12}")
_REAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """A parsed text.

    Attributes
    ----------
    value : dicts, lists, str, int, float, bool and None
    marks : path of each value to where it stands, such as `chat.yaml:7`
    """

    value: Any
    marks: dict[KeyPath, str]


def parse(text: str, at: Callable[[int], str]) -> Document:
    """One YAML document.

    Parameters
    ----------
    text : the whole text
    at : line number, from 1, to the place named in marks and errors

    Raises
    ------
    InputError : not YAML, or not within the limits above; names place and key
    """
    try:
        builder = _Builder(yaml.parse(text, Loader=_LOADER), at)
        return Document(builder.document(), builder.marks)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        what = one_line(" ".join(filter(None, (error.context, error.problem))))
        raise InputError(f"{at(line)}: not valid YAML: {what}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{at(line)}: not valid YAML: {error.reason}") from None
    except UnicodeError:
        raise InputError(f"{at(1)}: not valid YAML: characters outside Unicode") from None


class _Builder:
    """Turns parser events into values; `size` of a value counts what it expands to."""

    def __init__(self, events: Iterator[Any], at: Callable[[int], str]) -> None:
        self.events = events
        self.at = at
        self.marks: dict[KeyPath, str] = {}
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.aliases = 0
        self.values = 0

    def document(self) -> Any:
        next(self.events)  # the stream's start
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        value = self.value(next(self.events), ())
        next(self.events)  # the document's end
        event = next(self.events)
        if not isinstance(event, yaml.StreamEndEvent):
            raise self.error(event, (), "a second document; give one only")
        return value

    def value(self, event: Any, path: KeyPath) -> Any:
        self.values += 1
        if len(path) > MAX_DEPTH:
            raise self.error(event, path[:3], f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, path)
        if event.tag is not None:
            raise self.error(event, path, f"tags are not accepted, got {event.tag!r}")
        before = self.values
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event.value) if event.implicit[0] else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self.sequence(path)
        else:
            value = self.mapping(path)
        if event.anchor is not None:
            self.anchors[event.anchor] = value, self.values - before + 1
        self.check_size(event, path)
        return value

    def alias(self, event: Any, path: KeyPath) -> Any:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise self.error(event, path, f"more than {MAX_ALIASES} aliases")
        if event.anchor not in self.anchors:
            raise self.error(event, path, f"alias *{event.anchor} has no anchor before it")
        value, size = self.anchors[event.anchor]
        self.values += size
        self.check_size(event, path)
        return value

    def check_size(self, event: Any, path: KeyPath) -> None:
        if self.values > MAX_VALUES:
            raise self.error(event, path[:3], f"expands to more than {MAX_VALUES} values")

    def sequence(self, path: KeyPath) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            here = (*path, len(items))
            self.marks[here] = self.at(event.start_mark.line + 1)
            items.append(self.value(event, here))
        return items

    def mapping(self, path: KeyPath) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = getattr(event, "value", None)
            if key is None:
                raise self.error(event, path, "a key must be one word")
            here = (*path, key)
            if key in items:
                first = self.marks[here]
                raise self.error(event, here, f"key given twice, first at {first}")
            self.marks[here] = self.at(event.start_mark.line + 1)
            items[key] = self.value(next(self.events), here)
        return items

    def error(self, event: Any, path: KeyPath, message: str) -> InputError:
        place = self.at(event.start_mark.line + 1)
        return InputError(": ".join(filter(None, (place, dotted(path), message))))


def dotted(path: KeyPath) -> str:
    """A path as `--set` takes it: `workload.arrivals.stages.0.rate_per_s`."""
    return one_line(".".join(map(str, path)))


def one_line(text: str) -> str:
    """Text fit for an error message: printable, and cut if very long."""
    printable = "".join(c if c.isprintable() else "?" for c in text)
    return printable if len(printable) <= 120 else printable[:117] + "..."


def _scalar(text: str) -> Any:
    """A plain word as YAML 1.2's core schema reads it; thousands may be parted by `_`."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _GROUPED.fullmatch(text):
        return int(text.replace("_", ""))
    if _REAL.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text
