"""From a file and `--set` overrides to a checked Scenario; every error is one line.

An error names the place (file and line, or the override), the key in full and the value:
`scenario.yaml:7: engine.max_num_sqs: unknown key (did you mean max_num_seqs?)`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_bytes
from servecast.scenarios.schema import Engine, Scenario
from servecast.scenarios.yamlfile import MAX_DEPTH, Document, KeyPath, dotted, one_line, parse

MAX_BYTES = 1_000_000

_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a block of keys",
    "model_attributes_type": "a block of keys",
    "dict_type": "a block of keys",
    "tuple_type": "a list",
    "string_too_short": "some text",
    "too_short": "a list of at least one",
    "string_pattern_mismatch": "a percentile such as p50 or p99.9",
}


@dataclass(frozen=True)
class LoadedScenario:
    """A scenario and where it came from.

    Attributes
    ----------
    scenario : checked
    path : the file, as given; its folder is the base of relative paths
    sha256 : of the file's bytes and the overrides, hexadecimal
    """

    scenario: Scenario
    path: Path
    sha256: str


def load_scenario(path: str | Path, overrides: Sequence[str] = ()) -> LoadedScenario:
    """Read, override and check one scenario.

    Parameters
    ----------
    path : a YAML file of at most `MAX_BYTES`
    overrides : `key=value` each, with dotted keys and YAML values, applied in order

    Raises
    ------
    InputError : in one line that names place, key and value
    """
    path = Path(path)
    content = read_bytes(path, MAX_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text") from None
    document = parse(text, lambda line: f"{path}:{line}")
    if not isinstance(document.value, dict):
        raise InputError(f"{path}:1: expected a block of keys, got {_shown(document.value)}")
    for override in overrides:
        document = _override(document, override)
    digest = hashlib.sha256(content)
    for override in overrides:
        digest.update(f"\n--set {override}".encode(errors="surrogateescape"))
    return LoadedScenario(_validate(document, str(path)), path, digest.hexdigest())


def scenario_of(text: str, source: str) -> LoadedScenario:
    """A scenario that no file holds; `source` names it in errors.

    Raises InputError as `load_scenario` does.
    """
    document = parse(text, lambda _line: source)
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return LoadedScenario(_validate(document, source), Path(source), digest)


def engine_problem(keys: dict[str, Any]) -> str | None:
    """What is wrong with keys of `engine`, in words; None if they can stand in a scenario."""
    try:
        Engine.model_validate(keys)
    except ValidationError as errors:
        path, message = first_problem(errors, keys)
        return ": ".join(filter(None, (dotted(path[1:]), message)))
    return None


def to_json_schema() -> dict[str, Any]:
    """The JSON schema of a scenario, for editors."""
    schema = Scenario.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _override(document: Document, override: str) -> Document:
    """The document with one `key=value` set; lists and blocks on the way are copied."""
    place = f"--set {one_line(override)}"
    key, equals, text = override.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps) or len(steps) > MAX_DEPTH:
        raise InputError(f"{place}: expected key=value with a dotted key")
    new = parse(text, lambda _line: place).value

    def assign(node: Any, depth: int) -> Any:
        if depth == len(steps):
            return new
        step = steps[depth]
        where = dotted(tuple(steps[: depth + 1]))
        if isinstance(node, list):
            if not (step.isascii() and step.isdigit() and len(step) < 9 and int(step) < len(node)):
                raise InputError(f"{place}: {where}: the list has items 0 to {len(node) - 1}")
            index = int(step)
            return [*node[:index], assign(node[index], depth + 1), *node[index + 1 :]]
        if node is not None and not isinstance(node, dict):
            raise InputError(f"{place}: {where}: the key above holds {_shown(node)}, not a block")
        return {**(node or {}), step: assign((node or {}).get(step), depth + 1)}

    value = assign(document.value, 0)
    path = _as_path(value, steps)
    marks = {at: mark for at, mark in document.marks.items() if at[: len(path)] != path}
    for depth in range(1, len(path)):
        marks.setdefault(path[:depth], place)
    return Document(value, {**marks, path: place})


def _as_path(tree: Any, steps: Sequence[str]) -> KeyPath:
    path: list[str | int] = []
    for step in steps:
        key: str | int = int(step) if isinstance(tree, list) else step
        path.append(key)
        tree = tree[key]
    return tuple(path)


def _validate(document: Document, source: str) -> Scenario:
    try:
        return Scenario.model_validate(document.value)
    except ValidationError as errors:
        path, message = first_problem(errors, document.value)
    place = next(
        (document.marks[path[:n]] for n in range(len(path), 0, -1) if path[:n] in document.marks),
        f"{source}:1",
    )
    raise InputError(": ".join(filter(None, (place, dotted(path), message))))


def first_problem(errors: ValidationError, tree: Any) -> tuple[KeyPath, str]:
    """Where in `tree` the first problem lies, and what it is, in words."""
    problems = errors.errors(include_url=False)
    # A misspelt key is also a missing one: the misspelling is what helps.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    path = _key_path(tree, first["loc"])
    message = _message(first, path)
    if first["type"] == "at_key":
        path = (*path, first["ctx"]["key"])
    elif first["type"].startswith("union_tag"):
        path = (*path, "kind")
    # Each of the kinds that a value may be has its own complaint about it.
    places = len({_key_path(tree, problem["loc"]) for problem in problems})
    more = f" (and {places - 1} more)" if places > 1 else ""
    return path, message + more


def _key_path(tree: Any, loc: KeyPath) -> KeyPath:
    """pydantic's location without what is no key: names of union members, `[key]`."""
    path: list[str | int] = []
    for step in loc:
        if isinstance(step, int):
            # An item that is missing from a list of fixed length has no value.
            inside = isinstance(tree, list | tuple) and step < len(tree)
            tree = tree[step] if inside else None
        elif isinstance(tree, dict) and step in tree:
            tree = tree[step]
        elif step == "[key]" or (isinstance(tree, dict) and step == tree.get("kind")):
            continue
        elif tree is not None and not isinstance(tree, dict):
            # Only a block has keys.
            continue
        else:
            tree = None
        path.append(step)
    return tuple(path)


def _message(problem: Any, path: KeyPath) -> str:
    kind, ctx, value = problem["type"], problem.get("ctx", {}), problem["input"]
    if kind == "missing":
        return "required key is missing"
    if kind == "extra_forbidden":
        return "unknown key" + _suggestion(str(path[-1]), _known_keys(problem["loc"]))
    if kind == "at_key":
        return str(ctx["message"])
    if kind == "value_error":
        return str(ctx["error"])
    if kind == "union_tag_not_found":
        return "required key is missing"
    if kind == "union_tag_invalid":
        known = [name.strip(" '") for name in ctx["expected_tags"].split(",")]
        return f"unknown kind {_shown(ctx['tag'])}" + _suggestion(str(ctx["tag"]), known)
    if kind == "literal_error":
        return f"must be {ctx['expected']}, got {_shown(value)}"
    if kind == "finite_number":
        return f"must be finite, got {_shown(value)}"
    if kind in _BOUNDS:
        relation, limit = _BOUNDS[kind]
        return f"must be {relation} {_shown(_whole(ctx[limit]))}, got {_shown(value)}"
    if kind in _EXPECTED:
        unit = " (the unit is in the key's name)" if _has_unit(kind, value) else ""
        return f"expected {_EXPECTED[kind]}, got {_shown(value)}{unit}"
    return f"{problem['msg']}, got {_shown(value)}"


def _has_unit(kind: str, value: Any) -> bool:
    """Whether a number was expected and came with a unit, such as `20/s`."""
    return kind in ("int_type", "float_type") and isinstance(value, str) and value[:1].isdigit()


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _shown(value: Any) -> str:
    """A value in an error: short, on one line, as YAML would have it."""
    if isinstance(value, dict):
        return "a block of keys"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(word: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches  # only when something is wrong

    close = get_close_matches(word[:100], known, 1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]}?)"
    return f" (known: {', '.join(known)})" if known else ""


def _known_keys(loc: KeyPath) -> list[str]:
    """Keys that may stand beside the one at `loc`, read from the JSON schema."""
    root = to_json_schema()
    node: dict[str, Any] = root
    for step in loc[:-1]:
        found = (_step(option, step, root) for option in _options(node, root))
        node = next((option for option in found if option is not None), {})
    return [key for option in _options(node, root) for key in option.get("properties", ())]


def _options(node: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas a value may match, with references followed; a tagged union stays whole."""
    if "$ref" in node:
        target = root["$defs"][node["$ref"].rpartition("/")[2]]
        return [target]
    return [o for choice in node.get("anyOf", ()) for o in _options(choice, root)] or [node]


def _step(node: dict[str, Any], step: str | int, root: dict[str, Any]) -> dict[str, Any] | None:
    tags = node.get("discriminator", {}).get("mapping", {})
    if step in tags:
        return {"$ref": tags[step]}
    below = node.get("items") if isinstance(step, int) else node.get("properties", {}).get(step)
    return below if isinstance(below, dict) else None
