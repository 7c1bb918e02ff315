"""`--speculative-config` of a pasted line: what of it a scenario takes, and what it leaves out."""

from collections.abc import Mapping
from typing import Any

from servecast.costmodels.catalogue import load_model
from servecast.costmodels.drafting import METHODS
from servecast.costmodels.errors import InputError
from servecast.scenarios.drafts import SpeculativeConfig
from servecast.scenarios.load import engine_problem

#: How the names of drafts tell their method, as vLLM reads them; the first that is there.
NAMED = ("eagle3", "eagle", "medusa", "mtp")

#: Keys that change neither schedule, time nor memory here.
HARMLESS = frozenset(
    {"revision", "code_revision", "rejection_sample_method", "draft_sample_method", "moe_backend"}
)

Notes = list[tuple[str, str]]


def read_speculation(value: Any, shown: str) -> tuple[dict[str, Any] | None, Notes]:
    """(`engine.speculative_config` or None, what is left out and why).

    Raises InputError for what is no such configuration.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"vllm serve: {shown}: expected a JSON object")
    notes: Notes = []
    given = {key: item for key, item in value.items() if item is not None}
    for key in sorted(given.keys() - SpeculativeConfig.model_fields.keys()):
        item = given.pop(key)
        if key not in HARMLESS:
            notes.append((f"speculative_config.{key} {item}", "not modelled"))
    method = _method(given)
    if method is not None and method not in METHODS:
        return None, [*notes, (shown, f"{method} is not simulated")]
    if method is not None:
        given["method"] = method
    if "num_speculative_tokens" not in given and method == "mtp":
        given["num_speculative_tokens"] = 1
    model = given.get("model")
    if method in ("medusa", "mtp", "ngram", "suffix"):
        # Heads and layers of their own shape, or none: there is no model to look up.
        given.pop("model", None)
    elif model is not None and not _is_known(str(model)):
        if method == "draft_model":
            return None, [*notes, (shown, f"{model} is not known; drafts are not simulated")]
        given.pop("model")
        notes.append((f"speculative_config.model {model}", "taken as a head of published shape"))
    problem = engine_problem({"speculative_config": given})
    if problem is not None:
        raise InputError(f"vllm serve: {shown}: {problem}")
    return given, notes


def _method(given: Mapping[str, Any]) -> str | None:
    method = given.get("method")
    if method is not None:
        name = str(method)
        if name.endswith("_mtp"):
            return "mtp"
        return "ngram" if name in ("[ngram]", "ngram_gpu") else name
    model = str(given.get("model") or "").lower()
    if model in ("ngram", "[ngram]"):
        return "ngram"
    named = next((word for word in NAMED if word in model), None)
    return named or ("draft_model" if model else None)


def _is_known(model: str) -> bool:
    try:
        load_model(model)
    except InputError:
        return False
    return True
