"""What may be varied: any key of a scenario, and factors of its load."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from servecast.costmodels.errors import InputError
from servecast.scenarios.load import first_problem
from servecast.scenarios.schema import Scenario
from servecast.scenarios.yamlfile import dotted

#: Factors that are not keys: what they are called, and what they do.
LOAD_FACTORS = {
    "load": "multiplies rates (clients of a closed loop)",
    "prompt": "multiplies prompt lengths",
    "output": "multiplies output lengths",
    "burstiness": "coefficient of variation of the gaps between arrivals; Poisson is 1",
}

RATE_KEYS = ("rate_per_s", "off_rate_per_s")


def change(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """The scenario with dotted keys set and load factors applied, checked like a file.

    Raises InputError naming the key and its value.
    """
    tree = scenario.model_dump(exclude_none=True)
    for key, value in changes.items():
        if key in LOAD_FACTORS:
            _apply_factor(tree, key, value)
        else:
            _set(tree, key, value)
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        path, message = first_problem(error, tree)
        told = ", ".join(f"{key}={value}" for key, value in changes.items())
        raise InputError(f"{told}: {dotted(path)}: {message}") from None


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    node: Any = tree
    for step in path:
        node = node.setdefault(step, {})
        if not isinstance(node, dict):
            raise InputError(f"{key}: {step} is not a block of keys")
    if value is None:
        node.pop(last, None)
    else:
        node[last] = value


def _apply_factor(tree: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{name}: expected a number above 0, got {value!r}")
    workload = tree["workload"]
    arrivals = workload["arrivals"]
    if name == "prompt":
        workload["input_scale"] = workload.get("input_scale", 1.0) * value
    elif name == "output":
        workload["output_scale"] = workload.get("output_scale", 1.0) * value
    elif name == "burstiness":
        if arrivals["kind"] not in ("poisson", "gamma", "constant"):
            raise InputError(f"burstiness: does not apply to arrivals of kind {arrivals['kind']}")
        arrivals["kind"] = "gamma"
        arrivals["cv"] = float(value)
    elif arrivals["kind"] == "trace":
        arrivals["rate_scale"] = arrivals.get("rate_scale", 1.0) * value
    elif arrivals["kind"] == "closed_loop":
        arrivals["concurrency"] = max(1, round(arrivals["concurrency"] * value))
    elif arrivals["kind"] == "burst":
        arrivals["requests"] = max(1, round(arrivals["requests"] * value))
    else:
        for block in (arrivals, *arrivals.get("stages", ())):
            for key in RATE_KEYS:
                if key in block:
                    block[key] *= value
