"""Profiles of another kind: constants of whole steps, by name or from a file with `kind: steps`."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from servecast.costmodels.affine import DraftConstants, StepConstants
from servecast.costmodels.errors import InputError
from servecast.costmodels.reading import read_bytes

HERE = Path(__file__).parent / "step_profiles"

MAX_BYTES = 1_000_000


def step_profile_names() -> tuple[str, ...]:
    """The bundled ones."""
    return tuple(sorted(path.stem for path in HERE.glob("*.yaml")))


def load_steps(name_or_path: str) -> StepConstants | None:
    """Constants by name or from a file; None where neither is a profile of this kind.

    Raises InputError for a file of this kind that cannot be read.
    """
    if name_or_path in step_profile_names():
        path = HERE / f"{name_or_path}.yaml"
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        return None
    head = read_bytes(path, MAX_BYTES * 10)
    if b"kind: steps" not in head[:200]:
        return None
    try:
        return _constants(yaml.safe_load(head.decode("utf-8")), path.stem)
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        text = " ".join(f"{type(error).__name__} {error}".split())
        raise InputError(f"{path}: not constants of steps: {text[:160]}") from None


def _constants(row: Mapping[str, Any], name: str) -> StepConstants:
    drafts = {
        str(method): DraftConstants(**_seconds(values, DraftConstants))
        for method, values in (row.get("drafts") or {}).items()
    }
    names = ("fixed_s", "token_s", "kv_token_s", "overhead_s")
    seconds = _seconds({key: row[key] for key in names}, StepConstants)
    return StepConstants(
        name=name,
        hardware=str(row["hardware"]),
        model=str(row["model"]),
        source=str(row["source"]),
        fixed_s=seconds["fixed_s"],
        token_s=seconds["token_s"],
        kv_token_s=seconds["kv_token_s"],
        overhead_s=seconds["overhead_s"],
        drafts=drafts,
    )


def _seconds(row: Mapping[str, Any], kind: type) -> dict[str, float]:
    known = {own.name for own in fields(kind)}
    found = {str(key): float(value) for key, value in row.items()}
    for key, value in found.items():
        if key not in known or not 0 <= value < 1e3:
            raise ValueError(f"{key}: {value}: expected a known key, and 0 to 1000")
    return found
