"""Models and hardware by name, from the two YAML files beside this module.

A file is read when a name is first asked for, and once. A user's own config.json or hardware
YAML goes through the same readers.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from servecast.costmodels.errors import InputError
from servecast.costmodels.hf_config import model_from_config
from servecast.costmodels.quantization import with_quantization
from servecast.costmodels.reading import MAX_BYTES, read_bytes, read_json
from servecast.costmodels.specs import HardwareSpec, ModelSpec

GIB = 2**30

HERE = Path(__file__).parent

#: Key of a hardware row: the field it fills, and the unit to multiply by.
HARDWARE_UNITS = {
    "memory_gib": ("memory_bytes", GIB),
    "memory_bandwidth_gb_per_s": ("memory_bandwidth_bytes_per_s", 1e9),
    "link_gb_per_s": ("link_bytes_per_s", 1e9),
    "host_link_gb_per_s": ("host_link_bytes_per_s", 1e9),
    "bf16_tflops": ("bf16_flops_per_s", 1e12),
    "fp16_tflops": ("fp16_flops_per_s", 1e12),
    "fp8_tflops": ("fp8_flops_per_s", 1e12),
    "int8_tflops": ("int8_flops_per_s", 1e12),
    "fp4_tflops": ("fp4_flops_per_s", 1e12),
    "power_w": ("power_w", 1.0),
    "price_per_hour": ("price_per_hour", 1.0),
    "multiprocessors": ("multiprocessors", 1),
    "compute_capability": ("compute_capability", 1.0),
    "block_size_multiple": ("block_size_multiple", 1),
    "default_block_size": ("default_block_size", 1),
    "max_cudagraph_capture_size": ("max_cudagraph_capture_size", 1),
    "cores": ("cores", 1),
    "hop_ns": ("hop_s", 1e-9),
    "word_ns": ("word_s", 1e-9),
}

HARDWARE_TEXT = ("vendor", "kind", "source")

#: No figure of a device is larger than this in its unit.
MOST = 1e9

WHOLE = (
    "memory_bytes",
    "multiprocessors",
    "block_size_multiple",
    "default_block_size",
    "max_cudagraph_capture_size",
    "cores",
)


#: What a checkpoint's folder holds.
CONFIG = "config.json"


def load_model(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """A bundled model by name (any case, with or without the organisation), a config.json, or a
    folder that holds one.

    A checkpoint of a bundled model under another organisation, or in a folder, is found by its
    last part, and its quantisation read from how that ends (`-FP8-dynamic`, `-AWQ`): its
    quantised layers are those of the usual checkpoint of the kind.

    `overrides` are keys of config.json in place of the model's own (vLLM's --hf-overrides).

    Raises InputError for an unknown name, with the nearest ones, and for a bad file.
    """
    changes = overrides or {}
    if name_or_path.endswith(".json"):
        return _model_from_file(Path(name_or_path), changes)
    if Path(name_or_path, CONFIG).is_file():
        return _model_from_file(Path(name_or_path, CONFIG), changes)
    known = _model_index()
    key = name_or_path.lower().rstrip("/")
    base, method = key.rpartition("/")[2], None
    if key not in known and base not in known:
        base, method = split_quantization(base)
    found = known.get(key) or known.get(base)
    if found is None:
        names = [full for full, _ in known.values()]
        raise InputError(_unknown("model", name_or_path, names, "a config.json"))
    name, config = found
    model = model_from_config(_merge(config, changes), name)
    if method is None:
        return model
    model = replace(with_quantization(model, method), name=name_or_path)
    if key.startswith(FP8_KV) and method in ("fp8", "nvfp4"):
        return replace(model, kv_cache_dtype="fp8")
    return model


#: Whose quantised checkpoints ask for fp8 KV too (`kv_cache_quant_algo` of their
#: hf_quant_config.json).
FP8_KV = "nvidia/"

#: How the names of quantised checkpoints end, and the method that `quantization:` calls it.
ENDINGS = (
    (r"[-_](?:fp8[-_]dynamic|fp8[-_]static[-_]per[-_]?tensor|fp8[-_]block|fp8)", "fp8"),
    (r"[-_](?:quantized[.-])?w8a8(?:[-_]int8)?", "compressed-tensors"),
    (r"[-_](?:quantized[.-])?w4a16(?:[-_]g128)?", "gptq"),
    (r"[-_](?:nvfp4a16|nvfp4)", "nvfp4"),
    (r"[-_](?:awq[-_]int4|awq[-_]4bit|int4[-_]awq|awq)", "awq"),
    (r"[-_]gptq[-_]int8", "gptq-int8"),
    (r"[-_](?:gptq[-_]int4|gptq[-_]4bit|gptq)(?:[-_]marlin)?", "gptq"),
    (r"[-_](?:int4[-_]autoround|autoround[-_]int4(?:[-_]mixed)?|autoround)", "gptq"),
    (r"[-_](?:unsloth[-_])?bnb[-_]4bit", "bitsandbytes"),
)


def split_quantization(name: str) -> tuple[str, str | None]:
    """A checkpoint's name without its ending, and the method; (name, None) without one.

    >>> split_quantization("llama-3.3-70b-instruct-fp8-dynamic")
    ('llama-3.3-70b-instruct', 'fp8')
    """
    for ending, method in ENDINGS:
        found = re.search(ending + "$", name.lower())
        if found is not None:
            return name[: found.start()], method
    return name, None


def load_hardware(name_or_path: str) -> HardwareSpec:
    """Bundled hardware by name (any case) or a YAML file with the keys of one row.

    Raises InputError for an unknown name, with the nearest ones, and for a bad file.
    """
    if name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        return _hardware(path.stem, _read_yaml(path), str(path))
    rows = _read_bundled("hardware.yaml")
    key = catalogue_name(name_or_path)
    if key not in rows:
        raise InputError(_unknown("hardware", name_or_path, rows, "a .yaml file"))
    return _hardware(key, rows[key], "hardware.yaml")


#: Words of a device's name as drivers, clouds and people write it, and the catalogue's name.
#: The first row whose words are all there decides.
WRITTEN_AS = (
    ("h100 nvl", ""),
    ("h100 pcie", "h100-pcie"),
    ("h100", "h100-sxm"),
    ("h200", "h200-sxm"),
    ("gh200", "gh200-96gb"),
    ("gb200", "gb200"),
    ("gb300", "gb300"),
    ("b200", "b200"),
    ("b300", "b300"),
    ("a100 40gb", "a100-sxm-40gb"),
    ("a100 pcie", "a100-pcie-80gb"),
    ("a100", "a100-sxm-80gb"),
    ("v100 32gb", "v100-sxm-32gb"),
    ("v100", "v100-sxm-16gb"),
    ("6000 ada", "rtx-6000-ada"),
    ("pro 6000", "rtx-pro-6000"),
    ("a6000", "rtx-a6000"),
    ("3090", "rtx-3090"),
    ("4090", "rtx-4090"),
    ("5090", "rtx-5090"),
    ("l40s", "l40s"),
    ("l4", "l4"),
    ("a10g", "a10g"),
    ("a10", "a10"),
    ("a30", "a30"),
    ("a40", "a40"),
    ("t4", "t4"),
    ("gb10", "gb10"),
    ("spark", "gb10"),
    ("mi300x", "mi300x"),
    ("mi325x", "mi325x"),
    ("mi355x", "mi355x"),
    ("mi250", "mi250"),
)


def catalogue_name(written: str) -> str:
    """The catalogue's name for a device as someone wrote it.

    >>> catalogue_name("NVIDIA GeForce RTX 4090"), catalogue_name("NVIDIA A100-SXM4-40GB")
    ('rtx-4090', 'a100-sxm-40gb')
    """
    key = written.strip().lower()
    if key in _read_bundled("hardware.yaml"):
        return key
    words = set(re.split(r"[^a-z0-9]+", re.sub(r"(\d) ?(gb|gib)\b", r"\1gb", key)))
    for asked, name in WRITTEN_AS:
        if name and words >= set(asked.split()):
            return name
    return key


def model_names() -> tuple[str, ...]:
    """Bundled models, aliases among them, in full."""
    return tuple(dict.fromkeys(name for name, _ in _model_index().values()))


def hardware_names() -> tuple[str, ...]:
    """Bundled hardware."""
    return tuple(_read_bundled("hardware.yaml"))


def published_parameters() -> dict[str, float]:
    """Published parameter counts of bundled models, to hold our counting against."""
    rows = _read_bundled("models.yaml").items()
    return {name: float(row["parameters"]) for name, row in rows if "parameters" in row}


@lru_cache(maxsize=1)
def _model_index() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Lower-case name, full and without its organisation: (full name, config)."""
    index: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for name, row in _read_bundled("models.yaml").items():
        for alias, changes in {name: {}, **row.get("aliases", {})}.items():
            entry = (alias, _merge(row["config"], changes))
            index[alias.lower()] = entry
            index[alias.lower().rpartition("/")[2]] = entry
    return index


def _merge(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`, nested mappings merged."""
    return dict(config) | {
        key: _merge(_block(config.get(key)), value) if isinstance(value, Mapping) else value
        for key, value in changes.items()
    }


def _block(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _model_from_file(path: Path, changes: Mapping[str, Any]) -> ModelSpec:
    """A config.json, with the hf_quant_config.json of the same folder if there is one."""
    beside = path.with_name("hf_quant_config.json")
    quant = read_json(beside) if beside != path and beside.exists() else None
    return model_from_config(read_config(path, changes), str(path), quant)


def read_config(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with some keys changed, as `hf_overrides` changes them.

    Raises InputError for a file that is not one.
    """
    return _merge(read_json(path), changes)


@lru_cache(maxsize=2)
def _read_bundled(file_name: str) -> dict[str, Any]:
    return _read_yaml(HERE / file_name)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    # The C loader reads the model list in a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = read_bytes(path, MAX_BYTES, words="")
    try:
        data = yaml.load(content.decode("utf-8"), Loader=loader)
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping, got {type(data).__name__}")
    return data


def _hardware(name: str, row: Mapping[str, Any], where: str) -> HardwareSpec:
    values: dict[str, Any] = {"name": name}
    for key, value in row.items():
        if key in HARDWARE_TEXT:
            values[key] = str(value)
        elif key in HARDWARE_UNITS:
            field, unit = HARDWARE_UNITS[key]
            if value is not None:
                values[field] = _number(value, f"{where}: {key}") * unit
        else:
            known = [*HARDWARE_TEXT, *HARDWARE_UNITS]
            raise InputError(f"{where}: {_unknown('key', str(key), known, None)}")
    missing = {"memory_gib", "memory_bandwidth_gb_per_s"} - {
        key for key, value in row.items() if value is not None
    }
    if missing:
        raise InputError(f"{where}: {min(missing)}: missing")
    for field in WHOLE:
        if field in values:
            if field == "cores" and values[field] != round(values[field]):
                raise InputError(f"{where}: cores: expected a whole number, got {values[field]:g}")
            values[field] = round(values[field])
    return HardwareSpec(**_own_hardware_defaults() | values)


def _own_hardware_defaults() -> dict[str, Any]:
    """What a user's file may leave out: PCIe 4 links, a GPU."""
    return {
        "vendor": "own",
        "kind": "gpu",
        "source": "own file",
        "link_bytes_per_s": 31.5e9,
        "host_link_bytes_per_s": 31.5e9,
    }


def _number(value: Any, where: str) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if not usable or not math.isfinite(value) or not 0 < value < MOST:
        raise InputError(f"{where}: expected a positive number below {MOST:g}, got {value!r}")
    return float(value)


def _unknown(what: str, name: str, known: Iterable[str], other: str | None) -> str:
    import difflib

    spelled = {word.lower(): word for word in known}
    close = difflib.get_close_matches(name.lower(), list(spelled), n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(spelled[word] for word in close)}?" if close else ""
    return f"{what}: {name!r} is not known{hint}" + (f" (or give {other})" if other else "")
