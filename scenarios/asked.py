"""What the words of a command ask for: a scenario file, a pasted line, a manifest or a log."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.quantization import is_known
from servecast.scenarios.bootlog import BootLog, read_boot_log
from servecast.scenarios.build import Setup, boot_log_of, set_up
from servecast.scenarios.init import minimal_text
from servecast.scenarios.load import engine_problem, load_scenario, scenario_of
from servecast.scenarios.manifests import line_of_file
from servecast.scenarios.serve import ServeLine, parse_line

#: Options of ours that may stand among vLLM's flags, and those that take no value.
OWN = frozenset({"hardware", "vllm-version", "boot-log"})
OWN_OF_INIT = OWN | {"rate", "input-tokens", "output-tokens", "requests", "output"}
OWN_SWITCHES = ("json",)


@dataclass(frozen=True)
class Asked:
    """What is to start.

    Attributes
    ----------
    log : what a real start logged, to compare with
    own : our options that stood among vLLM's flags
    notes : of flags that the prediction leaves out
    shortens : `--max-model-len auto`
    """

    setup: Setup
    log: BootLog | None
    own: Mapping[str, str]
    notes: tuple[str, ...] = ()
    shortens: bool = False


def own_options(
    words: Sequence[str], names: frozenset[str] = OWN
) -> tuple[list[str], dict[str, str]]:
    """Words without our own options, and these.

    >>> own_options(["vllm", "serve", "m", "--hardware", "l4", "--json"])
    (['vllm', 'serve', 'm'], {'hardware': 'l4', 'json': ''})
    """
    rest: list[str] = []
    own: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in {*names, *OWN_SWITCHES}:
            rest.append(word)
        elif name in OWN_SWITCHES:
            own[name] = ""
        elif equals or queue:
            own[name.replace("-", "_")] = value if equals else queue.pop(0)
        else:
            raise InputError(f"--{name} needs a value")
    return rest, own


def asked_line(
    words: Sequence[str],
    file: Path | None,
    service: str | None = None,
    names: frozenset[str] = OWN,
) -> tuple[ServeLine, dict[str, str]]:
    """The line of the words, or of a file, and our options among the words."""
    rest, own = own_options(words, names)
    if file is None:
        return parse_line(rest), own
    if rest:
        raise InputError(f"--from {file}: give either a file or a line, not {rest[0]!r} too")
    return line_of_file(file, service), own


def asked_setup(
    words: Sequence[str],
    options: Mapping[str, str | None],
    *,
    boot_log: Path | None = None,
    file: Path | None = None,
    service: str | None = None,
    overrides: Sequence[str] = (),
) -> Asked:
    """What is to start, and what to compare it with.

    A log also tells the release, where nothing else does; without a line it tells the flags.

    Raises InputError for whatever is missing or cannot be read.
    """
    rest, own = own_options(words)
    named = {key: value for key, value in options.items() if value is not None}
    named |= {key: value for key, value in own.items() if value}
    log_path = Path(named["boot_log"]) if "boot_log" in named else boot_log
    log = read_boot_log(log_path) if log_path is not None else None
    if file is None and len(rest) == 1 and rest[0].endswith((".yaml", ".yml")):
        extra = [
            f"{key if key == 'hardware' else 'engine.' + key}={named[key]}"
            for key in ("hardware", "vllm_version")
            if key in named
        ]
        loaded = load_scenario(rest[0], [*overrides, *extra])
        setup = set_up(loaded)
        return Asked(setup, log or boot_log_of(setup, loaded.path), own)
    if overrides:
        raise InputError("--set: changes keys of a scenario file; here, change the flags")
    if file is None and not rest and log is not None:
        line = line_of_log(log)
    else:
        line, _ = asked_line(rest, file, service)
    if "vllm_version" in named:
        line.engine["vllm_version"] = named["vllm_version"]
    elif log is not None and log.version is not None:
        line.engine.setdefault("vllm_version", str(log.version))
    hardware = named.get("hardware") or line.hardware
    if hardware is None:
        raise InputError("--hardware: name the device (`servecast models` lists them)")
    setup = set_up(scenario_of(minimal_text(line, hardware), "vllm serve"))
    notes = list(_left_out(line))
    plan = setup.plan
    if line.auto_length and plan.longest_tokens < plan.max_model_len:
        # vLLM shortens the length to what fits, if anything does.
        setup = setup.changed(max_model_len=max(1, plan.longest_tokens))
        notes.append(f"max_model_len: vLLM shortens it to {setup.memory.max_model_len:,} tokens")
    return Asked(setup, log, own, tuple(notes), line.auto_length)


def _left_out(line: ServeLine) -> Iterator[str]:
    yield from (f"{flag}: {why}" for flag, why in line.unmodelled)
    yield from (f"{flag}: no flag of vLLM that we know" for flag in line.unknown)


def line_of_log(log: BootLog) -> ServeLine:
    """The flags that a log shows; raises InputError where it does not name the model."""
    if log.model is None:
        raise InputError("--boot-log: names no model; give the line too")
    flags: dict[str, Any] = {
        "max_model_len": log.max_model_len,
        "gpu_memory_utilization": log.gpu_memory_utilization,
        "max_num_batched_tokens": log.max_num_batched_tokens,
        "max_num_seqs": log.max_num_seqs,
        "tensor_parallel_size": log.tensor_parallel_size,
        "pipeline_parallel_size": log.pipeline_parallel_size,
        "enforce_eager": log.enforce_eager,
        "enable_prefix_caching": log.enable_prefix_caching,
        "dtype": log.dtype,
        "kv_cache_dtype": log.kv_cache_dtype,
        "quantization": log.quantization,
    }
    given = {
        key: value
        for key, value in flags.items()
        if value is not None and engine_problem({key: value}) is None
    }
    if not is_known(str(given.get("quantization"))):
        given.pop("quantization", None)
    return ServeLine(model=log.model, engine=given)
