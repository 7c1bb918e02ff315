"""A pasted `vllm serve` line taken apart, whatever launched it."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.graphs import sizes_up_to
from servecast.costmodels.quantization import is_known
from servecast.costmodels.reading import read_lenient
from servecast.costmodels.versions import LATEST, parse_version
from servecast.scenarios import flags
from servecast.scenarios.draft_flags import read_speculation
from servecast.scenarios.load import engine_problem
from servecast.scenarios.yamlfile import parse as parse_yaml

#: vLLM reads 16k as 16,000 and 16K as 16,384.
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

#: A file of flags is no larger.
MAX_CONFIG_BYTES = 1_000_000

#: `vllm/vllm-openai:v0.11.0`: what follows such a word are flags.
IMAGE = re.compile(r"^[\w.:/-]*vllm[\w./-]*(?::([\w.-]+))?(?:@sha256:\w+)?$")

#: Options of `docker run` and kin that take a value, which no image name is.
DOCKER_VALUES = flags.names_of(
    """
    -v -e -p -u -w -h --volume --env --publish --gpus --name --ipc --shm-size --network
    --runtime --user --entrypoint --mount --ulimit --device --restart --env-file --hostname
    --memory --cpus --platform --workdir --add-host --security-opt --cap-add --label
    """
)

#: Other names of number formats.
DTYPES = {"half": "float16", "float": "float32"}

#: No batch that is captured is larger.
MOST_CAPTURED = 65_536

VARIABLE = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)


@dataclass
class ServeLine:
    """What a line asks for.

    Attributes
    ----------
    engine : keys of the scenario's `engine`, with their values
    auto_length : `--max-model-len auto`: as long as fits
    replicas : of `--data-parallel-size`, or of the manifest
    hardware : named beside the line (a node selector), if it was
    env : variables set before the line or beside it
    harmless : (flag as written, why) that changes nothing here
    unmodelled : (flag as written, why it matters)
    unknown : flags that vLLM is not known to have
    """

    model: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    auto_length: bool = False
    replicas: int = 1
    hardware: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    harmless: list[tuple[str, str]] = field(default_factory=list)
    unmodelled: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def parse_line(
    words: Sequence[str], folder: Path | None = None, env: Mapping[str, str] | None = None
) -> ServeLine:
    """Take a line apart, word by word as a shell would pass it.

    Parameters
    ----------
    words : from variables and launcher to the last flag; `\\` at a line's end is dropped
    folder : where the file of `--config` is looked for; the current one by default
    env : variables that are set beside the line

    Raises InputError without a model, for a value that a flag cannot have, and for a config
    file that cannot be read.
    """
    line = ServeLine(env=dict(env or {}))
    rest = _launched(line, [word for word in words if word not in ("\\", "\\\n")])
    given: dict[str, Any] = {}
    written: dict[str, str] = {}
    _read_flags(line, rest, given, written)
    if "config" in given:
        path = (folder or Path()) / str(given.pop("config"))
        for name, value in _config_file(path).items():
            both = isinstance(value, dict) and isinstance(given.get(name), dict)
            given[name] = {**value, **given[name]} if both else given.get(name, value)
            written.setdefault(name, f"{path.name}: {name.replace('_', '-')}")
    for short, key in flags.SPECULATIVE.items():
        if short in given:
            whole = given.setdefault("speculative_config", {})
            if isinstance(whole, dict):
                whole[key] = given.pop(short)
                written.setdefault("speculative_config", written.get(short, short))
    for name, value in given.items():
        _take(line, name, value, written.get(name, name))
    _environment(line)
    if not line.model:
        raise InputError("vllm serve: no model in the line")
    return line


def until_shell(words: Sequence[str]) -> Sequence[str]:
    """Words up to where a shell would end the command or send its output elsewhere."""
    for index, word in enumerate(words):
        if re.match(r"^(&&|\|\|?|;|&|[&\d]?>)", word):
            return words[:index]
        if word.endswith(";"):
            return [*words[:index], word[:-1]]
    return words


def _launched(line: ServeLine, words: list[str]) -> list[str]:
    """Model and flags, without what launches vLLM; variables and an image's tag are kept."""
    words = _unquoted(words)
    while words and words[0] in ("$", "#", ">"):
        words = words[1:]
    start = _server(words)
    if start is not None:
        _container(line, words[:start])
        words = list(until_shell(words[start:]))
    else:
        words = list(until_shell(words))
        if words and words[0] in ("docker", "podman", "nerdctl", "sudo"):
            words = _container(line, words)
    while words:
        if not _variable(line, words[0]) and not LAUNCHER.search(words[0]):
            break
        words = words[1:]
    return words


#: Words before the model that only say what runs.
LAUNCHER = re.compile(
    r"^(serve|exec|nohup|env|time|-m|vllm\.entrypoints\S*)$|(^|/)(vllm|python3?|api_server\.py)$"
)


def _unquoted(words: list[str]) -> list[str]:
    """Words, with a command that came as one quoted word (`bash -c "..."`) taken apart."""
    if len(words) == 1 or any(COMMAND.search(word) for word in words):
        parts = [
            split_words(word) if len(words) == 1 or COMMAND.search(word) else [word]
            for word in words
        ]
        return [word for part in parts for word in part]
    return words


#: A command inside one word.
COMMAND = re.compile(r"\bvllm\s+serve\s|vllm\.entrypoints\.\S+\s")


def split_words(text: str) -> list[str]:
    """Words as a shell would part them; at blanks where quotes do not match."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        return text.split()


def _server(words: Sequence[str]) -> int | None:
    """Where vLLM's server is named, whatever runs it."""
    for index, (word, after) in enumerate(pairwise([*words, ""])):
        if word.rpartition("/")[2] == "vllm" and after == "serve":
            return index
        if re.search(r"^vllm\.entrypoints\.|(^|/)api_server\.py$", word):
            return index
    return None


def _variable(line: ServeLine, word: str) -> bool:
    """The word sets a variable, which is kept."""
    found = VARIABLE.match(word)
    if found is not None:
        line.env[found[1]] = found[2].removesuffix(";")
    return found is not None


def _container(line: ServeLine, words: list[str]) -> list[str]:
    """`docker run OPTIONS IMAGE FLAGS`: the flags; variables and the image's tag are kept."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        value = rest[0] if rest else ""
        if word in ("-e", "--env"):
            _variable(line, value)
        elif word.startswith(("--env=", "-e")):
            _variable(line, word.removeprefix("--env=").removeprefix("-e"))
        if word in DOCKER_VALUES and rest:
            rest.pop(0)
        elif not word.startswith("-") and not _variable(line, word):
            image = IMAGE.match(word)
            if image and ("/" in word or ":" in word or value.startswith("-")):
                take_image(line, image[1])
                return rest
    return []


def take_image(line: ServeLine, tag: str | None) -> None:
    """The release that an image's tag names, if it names one."""
    try:
        line.engine.setdefault("vllm_version", str(parse_version(tag or "")))
    except InputError:
        if tag and re.match(r"v?\d+\.\d", tag):
            line.unmodelled.append((f"image {tag}", f"taken as {LATEST}"))


def _read_flags(
    line: ServeLine, rest: list[str], given: dict[str, Any], written: dict[str, str]
) -> None:
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or _is_number(word):
            if line.model:
                raise InputError(f"vllm serve: {word!r} is neither a flag nor the value of one")
            line.model = word
            continue
        flag, equals, value = word.partition("=")
        if re.fullmatch(r"-O(\d|\{.*)", word, re.DOTALL):
            level = word[2:]
            flag, equals, value = "-O" if level.isdigit() else "-cc", "=", level
        elif flag.startswith("-O."):
            flag = "-cc" + flag[2:]
        name, _, inside = flags.canonical(flag).partition(".")
        name = flags.SAME.get(name, name)
        name = flags.full_name(name) if word.startswith("--") else name
        negated = name.startswith("no_") and _is_boolean(flags.full_name(name[3:]))
        name = flags.full_name(name[3:]) if negated else name
        values = [value] if equals else _values(name, rest)
        shown = " ".join([flag, *values]) if not equals else word
        if _is_boolean(name):
            given[name] = _boolean(flag, values, negated)
        elif not any(values):
            if name in flags.MAPPED or name in flags.READ:
                raise InputError(f"vllm serve: {flag} needs a value")
            given[name] = None
        elif inside or name in flags.JSON_FLAGS:
            given[name] = _deeper(given.get(name), inside, _json_value(flag, " ".join(values)))
        elif name in flags.MANY:
            given[name] = [_value(flag, text) for text in values]
        else:
            given[name] = _value(flag, values[0])
        written[name] = shown


def _is_boolean(name: str) -> bool:
    return flags.is_switch(name)


def _values(name: str, rest: list[str]) -> list[str]:
    """Words that belong to a flag: none for a switch, one for most, many for a few."""
    if _is_boolean(name):
        return [rest.pop(0)] if rest and rest[0].lower() in ("true", "false") else []
    known = name in flags.MAPPED or name in flags.READ or name in flags.WHY_HARMLESS
    most = len(rest) if name in flags.MANY else 1
    found: list[str] = []
    while rest and len(found) < most and (not rest[0].startswith("-") or _is_number(rest[0])):
        if not (known or name in flags.WHY_MATTERS) and _looks_like_model(rest[0]):
            break
        found.append(rest.pop(0))
    return found


def _looks_like_model(word: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", word) is not None


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _boolean(flag: str, values: list[str], negated: bool) -> bool:
    if not values:
        return not negated
    if values[0].lower() not in ("true", "false"):
        raise InputError(f"vllm serve: {flag} {values[0]!r}: expected true, false or nothing")
    return (values[0].lower() == "true") != negated


def _value(flag: str, text: str) -> Any:
    """A number with a suffix, else what YAML makes of the word."""
    if text[-1:] in SUFFIXES and re.fullmatch(r"\d{1,15}(\.\d{1,15})?", text[:-1]):
        return round(float(text[:-1]) * SUFFIXES[text[-1]])
    try:
        return parse_yaml(text, lambda _line: f"vllm serve: {flag}").value
    except InputError:
        return text


def _json_value(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if text.lstrip().startswith(("{", "[")):
            raise InputError(f"vllm serve: {flag}: not JSON: {_short(text)}") from None
        return _value(flag, text)


def _deeper(old: Any, inside: str, value: Any) -> Any:
    """`--flag.a.b value` into what the flag has so far."""
    for key in reversed(inside.split(".") if inside else []):
        value = {key: value}
    if isinstance(old, dict) and isinstance(value, dict):
        return {**old, **{k: _deeper(old.get(k), "", v) for k, v in value.items()}}
    return value


def _config_file(path: Path) -> dict[str, Any]:
    """The flags of a `--config` file, by name."""
    try:
        text = read_lenient(path, MAX_CONFIG_BYTES)
    except InputError as error:
        raise InputError(f"--config {error}") from None
    return flags_of_config(text, str(path))


def flags_of_config(text: str, where: str) -> dict[str, Any]:
    """Flags as a YAML mapping; raises InputError for anything else."""
    document = parse_yaml(text, lambda line: f"{where}:{line}")
    if not isinstance(document.value, dict):
        raise InputError(f"{where}: expected flags and their values")
    found: dict[str, Any] = {}
    for key, value in document.value.items():
        name = flags.canonical(str(key))
        if name.startswith("no_") and _is_boolean(name[3:]):
            name, value = name[3:], value is False
        elif _is_boolean(name) and not isinstance(value, bool):
            raise InputError(f"{where}: {key}: expected true or false, got {_short(str(value))}")
        if name in flags.JSON_FLAGS and isinstance(value, str):
            value = _json_value(str(key), value)
        elif isinstance(value, str):
            value = _value(str(key), value)
        found[name] = value
    return found


def _take(line: ServeLine, name: str, value: Any, shown: str) -> None:
    """One flag to where it belongs."""
    if name == "max_model_len" and value in (-1, "auto"):
        line.auto_length = True
    elif name == "swap_space" and value == 0:
        line.harmless.append((shown, "no host memory to swap to, as with V1"))
    elif name == "quantization" and not is_known(str(value)):
        line.unmodelled.append((shown, "the checkpoint's own scheme is taken"))
    elif name in flags.MAPPED:
        line.engine[name] = _engine_value(name, value, shown)
    elif name == "model":
        # The word beside `serve` goes before a flag or a file.
        line.model = line.model or str(value)
    elif name in flags.READ:
        _read(line, name, value, shown)
    elif name in flags.WHY_HARMLESS:
        line.harmless.append((shown, flags.WHY_HARMLESS[name]))
    elif name in flags.WHY_MATTERS:
        if value is not False:
            line.unmodelled.append((shown, flags.WHY_MATTERS[name]))
    else:
        line.unknown.append(shown)


def _engine_value(name: str, value: Any, shown: str) -> Any:
    """As the scenario takes it; raises InputError for a value that it does not."""
    if name == "dtype":
        value = DTYPES.get(value, value)
    if name in ("gpu_memory_utilization", "swap_space", "cpu_offload_gb", "watermark"):
        value = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if name == "cudagraph_capture_sizes" and not isinstance(value, list):
        value = [value]
    if name == "kv_cache_dtype":
        value = str(value)
    problem = engine_problem({name: value})
    if problem is not None:
        raise InputError(f"vllm serve: {shown}: {problem}")
    return value


def _read(line: ServeLine, name: str, value: Any, shown: str) -> None:
    """Flags that become something else."""
    if name == "data_parallel_size":
        if not isinstance(value, int) or not 1 <= value <= 10_000:
            raise InputError(f"vllm serve: {shown}: expected a whole number of at least 1")
        line.replicas = value
        if value > 1:
            line.engine["data_parallel_size"] = value
    elif name == "max_cudagraph_capture_size":
        line.engine.setdefault("cudagraph_capture_sizes", _sizes_up_to(value, shown))
    elif name == "cuda_graph_sizes":
        sizes = value if isinstance(value, list) else [value]
        line.engine["cudagraph_capture_sizes"] = (
            _sizes_up_to(sizes[0], shown) if len(sizes) == 1 else _capture_sizes(sizes, shown)
        )
    elif name in ("rope_scaling", "rope_theta"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number if name == "rope_theta" else isinstance(value, dict)):
            wanted = "a number" if name == "rope_theta" else "a JSON object"
            raise InputError(f"vllm serve: {shown}: expected {wanted}")
        line.engine.setdefault("hf_overrides", {})[name] = value
    elif name == "optimization_level":
        if value == 0:
            line.engine["enforce_eager"] = True
        elif value == 1:
            line.unmodelled.append((shown, "it leaves out the graphs of decodes; counted here"))
    elif name == "limit_mm_per_prompt":
        limits = list(value.values()) if isinstance(value, dict) else []
        if limits and not any(limits):
            line.engine["language_model_only"] = True
        else:
            line.unmodelled.append((shown, flags.WHY_MATTERS["media_io_kwargs"]))
    elif name == "generation_config":
        if value in ("auto", "vllm"):
            line.engine[name] = value
        else:
            line.unmodelled.append((shown, flags.WHY_MATTERS["override_generation_config"]))
    elif name == "hf_overrides":
        if not isinstance(value, dict):
            raise InputError(f"vllm serve: {shown}: expected a JSON object")
        line.engine["hf_overrides"] = {**line.engine.get("hf_overrides", {}), **value}
    elif name == "speculative_config":
        config, notes = read_speculation(value, shown)
        if config is not None:
            line.engine["speculative_config"] = config
        line.unmodelled.extend(notes)
    elif name == "compilation_config":
        _compilation(line, value, shown)


def _sizes_up_to(largest: Any, shown: str) -> list[int]:
    """vLLM's capture sizes up to a largest one."""
    if not isinstance(largest, int) or not 1 <= largest <= MOST_CAPTURED:
        raise InputError(f"vllm serve: {shown}: expected a whole number, 1 to {MOST_CAPTURED}")
    return list(sizes_up_to(largest))


def _capture_sizes(sizes: list[Any], shown: str) -> Any:
    whole = all(type(size) is int for size in sizes)
    ascending = sorted(set(sizes)) if whole else sizes
    return _engine_value("cudagraph_capture_sizes", ascending, shown)


def _compilation(line: ServeLine, value: Any, shown: str) -> None:
    """Capture sizes and the mode of the graphs; the rest is told."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"level": value}
    if not isinstance(value, dict):
        raise InputError(f"vllm serve: {shown}: expected a JSON object or a level")
    known = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_mode"}
    if value.get("level") == 0:
        line.engine["enforce_eager"] = True
    elif value.get("mode") == 0:
        line.unmodelled.append((shown, "kernels are compiled here"))
    sizes = value.get("cudagraph_capture_sizes")
    if sizes is not None and not isinstance(sizes, list):
        raise InputError(f"vllm serve: {shown}: cudagraph_capture_sizes: expected a list")
    if isinstance(sizes, list):
        line.engine["cudagraph_capture_sizes"] = _capture_sizes(sizes, shown)
    elif value.get("max_cudagraph_capture_size") is not None:
        _read(line, "max_cudagraph_capture_size", value["max_cudagraph_capture_size"], shown)
    mode = str(value.get("cudagraph_mode") or "").upper()
    if mode == "NONE":
        line.engine["enforce_eager"] = True
    elif mode and mode not in ("FULL_AND_PIECEWISE", "0"):
        line.unmodelled.append((f"cudagraph_mode {mode}", "graphs are FULL_AND_PIECEWISE here"))
    others = sorted(set(map(str, value)) - known - {"mode", "level"})
    if others:
        line.unmodelled.append(
            (f"--compilation-config {', '.join(others)}", flags.WHY_MATTERS["kernel_config"])
        )


def _environment(line: ServeLine) -> None:
    """Variables that change memory or schedule."""
    deduct = line.env.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    if deduct in ("0", "1"):
        line.engine["estimate_cudagraphs"] = deduct == "1"
    longest = line.engine.get("max_model_len")
    if line.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1" and longest is not None:
        line.engine.setdefault("hf_overrides", {}).setdefault("max_position_embeddings", longest)
    v1 = line.env.get("VLLM_USE_V1")
    if v1 in ("0", "1"):
        line.engine["vllm_use_v1"] = v1 == "1"
    if v1 == "0":
        line.unmodelled.append(("VLLM_USE_V1=0", "memory is V0's, scheduling V1's"))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 80 else text[:77] + "...")
