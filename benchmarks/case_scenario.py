"""A measured setting as a scenario: model, device, flags and load in the schema's terms.

What a text does not say is filled by a stand-in, and said in a note; what the simulator does not
have raises `NotRead`.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from case_words import SHORT, Flags, device_of, model_of, not_modelled, number, quantization_of

from servecast.costmodels.errors import InputError
from servecast.costmodels.versions import LATEST, Version, parse_version

Json = dict[str, Any]

#: Stand-ins for what a case does not say; only orderings can be held against them.
UNKNOWN_DEVICE = "h100-sxm"
UNKNOWN_MODEL = "meta-llama/Llama-3.1-8B"

#: vLLM's benchmark takes ShareGPT prompts up to 1,024 tokens; answers are hardly ever longer. The
#: means are the cases', the standard deviations of the logarithm are assumed.
SHAREGPT_MEANS = (217.0, 201.0)
SHAREGPT_SIGMAS = (1.2, 1.0)
SHAREGPT_LIMIT = 1024

#: Before, `vllm bench serve` asked for a temperature of 0 where it was told none
#: (vllm-project/vllm, pull request 32723).
BENCH_SAMPLES_SINCE = Version(0, 15)

#: Requests of a closed loop whose number is not stated: enough that its ends do not count.
CLOSED_REQUESTS = 6000


class NotRead(Exception):
    """Why a point is not simulated, in words."""


@dataclass(frozen=True)
class CasePoint:
    """One measured configuration.

    Attributes
    ----------
    label : what tells it from the others of its case
    group : points of one group are compared with one another
    measured : metric to value, in seconds, tokens and rates a second
    scenario : the scenario as a mapping, or None with a reason in `skipped`
    notes : what was assumed
    devices : how many the case has, where it says so; only then can a model be split over them
    """

    label: str
    group: str
    measured: dict[str, float]
    devices: int = 1
    scenario: Json | None = None
    skipped: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What is known of a point before it becomes a scenario; `facts` are its row, as it stands."""

    label: str
    group: str
    measured: Mapping[str, float]
    device_text: str
    model_text: str
    flags: Flags
    workload_text: str
    engine_text: str
    flags_text: str = ""
    facts: Json = field(default_factory=dict)


def point_of(setting: Setting) -> CasePoint:
    """The setting with its scenario, or with the reason why it has none."""
    measured = {key: value for key, value in setting.measured.items() if value > 0}
    count = re.search(r"(\d+)x ", setting.device_text)
    devices = int(count[1]) if count else 1
    point = CasePoint(setting.label, setting.group, measured, devices)
    try:
        notes: list[str] = []
        scenario = _scenario(setting, notes)
        return replace(point, scenario=scenario, notes=tuple(notes))
    except NotRead as reason:
        return replace(point, skipped=str(reason))


def _scenario(setting: Setting, notes: list[str]) -> Json:
    if re.match(r"sim\b", setting.label):
        raise NotRead("figures of another simulator")
    words = f"{setting.label} {setting.engine_text.partition('|')[2]}"
    if "vLLM" not in setting.engine_text or "USE_V1=0" in setting.engine_text:
        words += " " + setting.engine_text
    if (reason := not_modelled(words)) is not None:
        raise NotRead(reason)
    engine = dict(setting.flags.engine)
    for key in setting.flags.others:
        if key not in ("model", "host", "port", *SHORT, "num_scheduler_steps"):
            notes.append(f"--{key.replace('_', '-')} has no counterpart and was left out")
    quantization = quantization_of(setting.model_text)
    if quantization and " " in quantization:
        raise NotRead(quantization)
    if quantization and "quantization" not in engine:
        engine["quantization"] = quantization
    _release(setting.engine_text, engine)
    workload = _workload(setting, notes)
    _pool_of(setting.flags_text, workload, engine, notes)
    release = parse_version(engine["vllm_version"]) if "vllm_version" in engine else LATEST
    if "greedy" in setting.workload_text or (
        "vllm bench" in setting.workload_text and release < BENCH_SAMPLES_SINCE
    ):
        workload["sampling"] = {"temperature": 0}
    return {
        "name": setting.label[:200] or "case",
        "model": _model(setting, notes),
        "hardware": _device(setting, notes),
        "engine": engine,
        "workload": workload,
    }


def _pool_of(text: str, workload: Json, engine: Json, notes: list[str]) -> None:
    """A pool that is given as so many of the load's own requests."""
    found = re.search(r"KV fits ~?(\d+) full requests", text)
    if found is None:
        return
    mean = sum(mean_tokens(workload["lengths"][part]) for part in ("input_tokens", "output_tokens"))
    engine["num_gpu_blocks_override"] = round(int(found[1]) * mean / 16)
    engine.setdefault("max_model_len", 2 * SHAREGPT_LIMIT)
    notes.append(f"a pool for {found[1]} requests of the mean length")


def mean_tokens(length: Any) -> float:
    """Mean of a length in the schema's terms, its cut left aside."""
    if isinstance(length, int):
        return float(length)
    return float(length["mean"] if "mean" in length else (length["min"] + length["max"]) / 2)


def _model(setting: Setting, notes: list[str]) -> str:
    text = setting.model_text
    if re.search(r"not (stated|in excerpt)|unknown", text):
        notes.append(f"model unknown: {UNKNOWN_MODEL} stands in")
        return UNKNOWN_MODEL
    found = model_of(text)
    if found is None:
        raise NotRead(f"model not in the catalogue: {text.strip()}")
    if found[1]:
        notes.append(f"{found[0]} stands in for {text.strip()}")
    return found[0]


def _device(setting: Setting, notes: list[str]) -> str:
    name = device_of(setting.device_text)
    if name is not None:
        return name
    if not re.search(r"not (stated|in excerpt)|unknown", setting.device_text):
        raise NotRead(f"device not in the catalogue: {setting.device_text}")
    notes.append(f"device unknown: {UNKNOWN_DEVICE} stands in")
    return UNKNOWN_DEVICE


def _release(engine_text: str, engine: Json) -> None:
    """The release of vLLM, whose defaults and memory then hold."""
    version = re.search(r"vLLM (?:V\d )?(\d+\.\d+(?:\.\d+)?)", engine_text)
    if version is not None:
        with suppress(InputError):
            engine.setdefault("vllm_version", str(parse_version(version[1])))


def _workload(setting: Setting, notes: list[str]) -> Json:
    workload = _lengths(setting, notes)
    return workload | {"arrivals": _arrivals(setting, notes)}


def _lengths(setting: Setting, notes: list[str]) -> Json:
    text, facts = setting.workload_text, setting.facts
    shared = re.search(
        r"(\d+) system prompts x (\d+) users.*?system (\d+) tok.*?question (\d+) tok"
        r".*?output (\d+)",
        text,
    )
    if shared:
        groups, users, common, question, output = map(int, shared.groups())
        # What was counted wins over what was asked for.
        own = round(facts["in_len"]) - common if "in_len" in facts else question
        return {
            "lengths": _fixed(own, round(facts.get("out_len", output))),
            "prefixes": {"groups": groups, "prefix_tokens": common, "prompts_per_group": users},
        }
    if "prefill" in facts:
        decode = re.search(r"([\d,]+) decode tokens", text)
        return {
            "lengths": _fixed(number(str(facts["prefill"])), number(decode[1] if decode else "1"))
        }
    if facts.get("in_tok") and facts.get("ok"):
        means = facts["in_tok"] / facts["ok"], facts["out_tok"] / facts["ok"]
        return {"lengths": _sharegpt(means) if "ShareGPT" in text else _fixed(*map(round, means))}
    if "ShareGPT" in text:
        return {"lengths": _sharegpt()}
    prefix = re.search(r"same ([\d,]+)-token system prompt", text)
    shared_part = {"groups": 1, "prefix_tokens": number(prefix[1])} if prefix else None
    return {"lengths": _stated_lengths(text, notes), "prefixes": shared_part}


def _stated_lengths(text: str, notes: list[str]) -> Json:
    tokens = r"~?([\d,.]+[Kk]?)"
    ratio = re.search(r"range-ratio (0\.\d+)", text)
    for pattern in (
        rf"in {tokens} / out {tokens}",
        rf"random {tokens} ?/ ?{tokens}",
        rf"{tokens} ?in ?/ ?{tokens} ?out",
    ):
        if (found := re.search(pattern, text)) is not None:
            prompt, output = map(number, found.groups())
            return _spread(prompt, output, float(ratio[1])) if ratio else _fixed(prompt, output)
    if (found := re.search(rf"same {tokens}-token system prompt", text)) is not None:
        notes.append("200 tokens after the prefix and 200 of output stand in")
        return _fixed(200, 200)
    if (found := re.search(rf"ISL=OSL={tokens}", text)) is not None:
        return _fixed(number(found[1]), number(found[1]))
    prompts = re.search(rf"{tokens}\+? token inputs", text)
    outputs = re.search(rf"{tokens} output tokens", text)
    if prompts is None and outputs is None:
        notes.append("lengths unknown: ShareGPT's stand in")
        return _sharegpt()
    notes.append("one of the two lengths unknown: 200 tokens stand in")
    return _fixed(number(prompts[1]) if prompts else 200, number(outputs[1]) if outputs else 200)


def _fixed(prompt: int, output: int) -> Json:
    return {"kind": "fixed", "input_tokens": prompt, "output_tokens": output}


def _spread(prompt: int, output: int, ratio: float) -> Json:
    """vLLM's random data set: evenly from (1 - ratio) to (1 + ratio) times the length."""

    def span(tokens: int) -> Json:
        return {"min": math.floor(tokens * (1 - ratio)), "max": math.ceil(tokens * (1 + ratio))}

    return {"kind": "uniform", "input_tokens": span(prompt), "output_tokens": span(output)}


def _sharegpt(means: tuple[float, float] = SHAREGPT_MEANS) -> Json:
    prompt, output = (
        {"mean": uncut_mean(mean, sigma, SHAREGPT_LIMIT), "sigma": sigma, "min": 4}
        | {"max": SHAREGPT_LIMIT}
        for mean, sigma in zip(means, SHAREGPT_SIGMAS, strict=True)
    )
    return {"kind": "lognormal", "input_tokens": prompt, "output_tokens": output}


def uncut_mean(mean: float, sigma: float, limit: float) -> float:
    """Mean of the lognormal whose draws, cut to `limit`, have this mean.

    E[min(X, L)] = E[X] F(z - sigma) + L (1 - F(z)) with z = (ln L - mu) / sigma.
    """
    normal = NormalDist()
    uncut = mean
    for _ in range(50):
        z = (math.log(limit / uncut) + sigma**2 / 2) / sigma
        cut = uncut * normal.cdf(z - sigma) + limit * (1 - normal.cdf(z))
        uncut *= mean / cut
    return uncut


def _arrivals(setting: Setting, notes: list[str]) -> Json:
    text, facts = setting.workload_text, setting.facts
    if "requested_rps" in facts:
        in_flight = re.search(r"= (\d+) in flight", text)
        if facts.get("held") and in_flight:
            return _closed(int(in_flight[1]), CLOSED_REQUESTS)
        rate = max(facts["achieved_send_rps"], 0.1)
        return {"kind": "constant", "rate_per_s": rate, "duration_s": 60.0}
    requests = _requests(setting)
    clients = _clients(setting)
    if clients is not None and re.search(r"\d repeats", text):
        return {"kind": "burst", "requests": clients}
    if clients is not None:
        return _closed(clients, requests or CLOSED_REQUESTS)
    if re.search(r"at once|rate inf", text):
        return {"kind": "burst", "requests": requests or 1000}
    if (rate := re.search(r"request rate (\d+(?:\.\d+)?)", text)) is not None:
        return {"kind": "poisson", "rate_per_s": float(rate[1]), "requests": requests or 1000}
    notes.append("load unknown: 1 request/s stands in")
    return {"kind": "poisson", "rate_per_s": 1.0, "requests": requests or 200}


def _clients(setting: Setting) -> int | None:
    """How many requests are in flight at most: a row's own column, or the case's words."""
    facts, text = setting.facts, setting.workload_text
    own = facts.get("concurrency") or facts.get("max_conc")
    if own is not None:
        return int(own)
    found = re.search(r"concurrency:? (\d+)", f"{text}; {setting.flags_text}")
    if found:
        return int(found[1])
    return 1 if re.search(r"single stream|batch 1|\b1 request\b", text) else None


def _closed(clients: int, requests: int) -> Json:
    return {"kind": "closed_loop", "concurrency": clients, "requests": requests}


def _requests(setting: Setting) -> int | None:
    """How many the generator sends; `50 prompts at c=1, 400 at c>1` by the row's concurrency."""
    text, facts = setting.workload_text, setting.facts
    if facts.get("ok"):
        return int(facts["ok"])
    alone = re.search(r"(\d+) prompts at c=1, (\d+) at c>1", text)
    if alone:
        return int(alone[1 if facts.get("concurrency") == 1 else 2])
    found = re.search(r"(\d[\d,]*)[ -](?:prompts|requests?)\b", text)
    return number(found[1]) if found and number(found[1]) > 1 else None
