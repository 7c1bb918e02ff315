"""`servecast init`: a scenario from a pasted `vllm serve` line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.scenarios.schema import Engine

#: Short forms of `vllm serve`.
SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-q": "quantization"}

#: Flags that say where to listen and how to load and log: neither schedule nor time depend on them.
HARMLESS = frozenset(
    {
        "api_key",
        "chat_template",
        "disable_log_requests",
        "disable_log_stats",
        "download_dir",
        "enable_auto_tool_choice",
        "host",
        "load_format",
        "port",
        "reasoning_parser",
        "revision",
        "served_model_name",
        "tokenizer",
        "tool_call_parser",
        "trust_remote_code",
        "uvicorn_log_level",
    }
)

#: vLLM reads 16k as 16,000 and 16K as 16,384.
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass
class ServeLine:
    """A `vllm serve` line taken apart.

    Attributes
    ----------
    engine : flags that the simulation knows, with their values
    harmless : flags that change nothing here
    unknown : flags that may change something and are not modelled
    """

    model: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    harmless: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def parse_line(words: Sequence[str]) -> ServeLine:
    """Take a pasted line apart; raises InputError without a model or with a bad value."""
    line = ServeLine()
    rest = [word for word in words if word != "\\"]
    # What stands before the model: variables, the program, its sub-command or module.
    while rest and (
        rest[0] in ("vllm", "serve", "python", "python3", "-m")
        or rest[0].startswith("vllm.entrypoints")
        or ("=" in rest[0] and not rest[0].startswith("-"))
    ):
        rest.pop(0)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if line.model:
                raise InputError(f"vllm serve: {word!r} is neither a flag nor the value of one")
            line.model = word
            continue
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--") and rest[0] not in SHORT:
            values.append(rest.pop(0))
            if _name(flag) in Engine.model_fields or _name(flag) == "model":
                break
        _take(line, flag, values)
    if not line.model:
        raise InputError("vllm serve: no model in the line")
    return line


def _name(flag: str) -> str:
    return SHORT.get(flag) or flag.lstrip("-").replace("-", "_")


def _take(line: ServeLine, flag: str, values: list[str]) -> None:
    name = _name(flag)
    if name == "model" and values:
        line.model = values[0]
        return
    negated = name.startswith("no_") and name[3:] in Engine.model_fields
    name = name[3:] if negated else name
    if name in Engine.model_fields:
        boolean = "bool" in str(Engine.model_fields[name].annotation)
        if boolean and values and values[0].lower() not in ("true", "false"):
            # The flag takes no value: what follows is the model.
            _place(line, values)
            values = []
        if not values and not boolean:
            raise InputError(f"vllm serve: {flag} needs a value")
        line.engine[name] = (not negated) if not values else _value(flag, values[0])
    else:
        (line.harmless if name in HARMLESS else line.unknown).append(" ".join([flag, *values]))


def _place(line: ServeLine, values: list[str]) -> None:
    if line.model:
        raise InputError(f"vllm serve: {values[0]!r} is neither a flag nor the value of one")
    line.model = values[0]


def _value(flag: str, text: str) -> Any:
    if text[-1:] in SUFFIXES and text[:-1].replace(".", "", 1).isdigit():
        return round(float(text[:-1]) * SUFFIXES[text[-1]])
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"vllm serve: {flag} {text!r}: not a value") from None


def scenario_text(
    line: ServeLine,
    *,
    hardware: str,
    rate_per_s: float,
    input_tokens: int,
    output_tokens: int,
    requests: int,
) -> str:
    """A scenario file for a line, a device and a rate.

    Raises InputError for a model or a device that is not known.
    """
    model, device = load_model(line.model), load_hardware(hardware)
    longest = line.engine.get("max_model_len") or model.max_position_embeddings
    if not isinstance(longest, int) or input_tokens + output_tokens >= longest:
        raise InputError(
            f"--input-tokens {input_tokens} and --output-tokens {output_tokens} do not fit "
            f"max_model_len {longest}"
        )
    most_in = max(input_tokens, 3 * longest // 4)
    most_out = max(output_tokens, longest - most_in)
    name = f"{model.name.rpartition('/')[2]}-{device.name}".lower()
    engine = yaml.safe_dump(line.engine, default_flow_style=True, width=1000).strip()
    lines = [
        f"name: {name}",
        f"model: {model.name}",
        f"hardware: {device.name}",
        f"engine: {engine}",
        *(f"# not modelled: {flag}" for flag in line.unknown),
        "workload:",
        f"  arrivals: {{kind: poisson, rate_per_s: {rate_per_s:g}, requests: {requests}}}",
        "  lengths:  # medians as asked for; the tails are those of chat",
        "    kind: lognormal",
        f"    input_tokens: {{median: {input_tokens}, sigma: 1.0, max: {most_in}}}",
        f"    output_tokens: {{median: {output_tokens}, sigma: 0.7, max: {most_out}}}",
        "sla: {ttft_p95_s: 1.0, itl_p99_s: 0.1}",
        "",
    ]
    return "\n".join(lines)
