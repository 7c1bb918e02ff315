"""`servecast init`: a complete scenario from a pasted `vllm serve` line."""

from typing import Any

import yaml

from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.scenarios.serve import ServeLine


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

    Raises InputError for a model or a device that is not known, and for lengths that do not fit.
    """
    model = load_model(line.model, line.engine.get("hf_overrides"))
    device = load_hardware(hardware)
    longest = line.engine.get("max_model_len") or model.max_position_embeddings
    if not isinstance(longest, int) or input_tokens + output_tokens >= longest:
        raise InputError(
            f"--input-tokens {input_tokens} and --output-tokens {output_tokens} do not fit "
            f"max_model_len {longest}"
        )
    most_in = max(input_tokens, 3 * longest // 4)
    most_out = max(output_tokens, longest - most_in)
    name = f"{model.name.rpartition('/')[2]}-{device.name}".lower()
    lines = [
        f"name: {_quoted(name)}",
        f"model: {_quoted(line.model)}",
        f"hardware: {device.name}",
        *([f"replicas: {line.replicas}"] if line.replicas > 1 else []),
        *_engine(line.engine),
        *_comments("not modelled", line.unmodelled),
        *(f"# not known to vLLM 0.6 to 0.32: {_one_line(flag)}" for flag in line.unknown),
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


def minimal_text(line: ServeLine, hardware: str) -> str:
    """The smallest scenario of a line: enough to predict its start-up from."""
    scenario = {
        "name": "start-up",
        "model": line.model,
        "hardware": hardware,
        "engine": line.engine,
        "workload": {
            "arrivals": {"kind": "poisson", "rate_per_s": 1.0, "requests": 1},
            "lengths": {"kind": "fixed", "input_tokens": 1, "output_tokens": 1},
        },
    }
    return yaml.safe_dump(scenario, sort_keys=False)


def _engine(engine: dict[str, Any]) -> list[str]:
    """The engine block, a key a line where there are several."""
    if not engine:
        return ["engine: {}"]
    return [
        "engine:",
        *(f"  {line}" for line in _dumped(engine)),
    ]


def _dumped(engine: dict[str, Any]) -> list[str]:
    return [f"{key}: {_quoted(value)}" for key, value in engine.items()]


def _comments(label: str, entries: list[tuple[str, str]]) -> list[str]:
    return [f"# {label}: {_one_line(flag)} ({why})" for flag, why in entries]


def _one_line(text: str) -> str:
    """Fit for a comment."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= 160 else text[:157] + "..."


def _quoted(value: Any) -> str:
    """A value as YAML has it on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n...\n").rstrip("\n")
