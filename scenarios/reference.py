"""The scenario reference in Markdown, made from the JSON schema."""

from collections.abc import Iterator
from typing import Any

HEAD = """# Scenario reference

Made by `servecast schema --markdown`; do not edit. A scenario is one YAML file, read strictly: an
unknown key, a wrong type, NaN or a value out of range is an error that names file, line and key.
Relative paths start at the scenario's own folder. Units stand in the names: `_s` seconds, `_tokens`
tokens, `_per_s` per second. Keys in **bold** are required.
"""

RANGES = (
    ("minimum", ">="),
    ("exclusiveMinimum", ">"),
    ("maximum", "<="),
    ("exclusiveMaximum", "<"),
)


def to_markdown(schema: dict[str, Any]) -> str:
    """One section for each block of keys, the scenario itself first."""
    blocks = [(schema["title"], schema), *schema["$defs"].items()]
    return HEAD + "".join("\n" + "\n".join(_section(*block)) + "\n" for block in blocks)


def _section(name: str, block: dict[str, Any]) -> Iterator[str]:
    yield f"## {name}\n"
    if "description" in block:
        yield block["description"].replace("\n", " ") + "\n"
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    required = block.get("required", [])
    for key, field in block.get("properties", {}).items():
        title = f"**`{key}`**" if key in required else f"`{key}`"
        default = "" if key in required else _default(field)
        yield f"| {title} | {_value(field)} | {default} | {_text(field)} |"


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return "" if default is None else f"`{default}`"


def _text(field: dict[str, Any]) -> str:
    return str(field.get("description", "")).replace("|", "\\|").replace("\n", " ")


def _value(field: dict[str, Any]) -> str:
    """What may stand there, in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    for several in ("anyOf", "oneOf"):
        if several in field:
            options = [_value(o) for o in field[several] if o.get("type") != "null"]
            return " or ".join(dict.fromkeys(options))
    kind = field.get("type", "")
    if kind == "array":
        return f"list of {_value(field.get('items', {}))}"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"name: {_value(inner)}" if isinstance(inner, dict) else "name: number"
    words = {"integer": "whole number", "boolean": "true or false", "string": "text"}
    bounds = " and ".join(f"{sign} {field[key]:g}" for key, sign in RANGES if key in field)
    return f"{words.get(kind, kind)} {bounds}".strip()
