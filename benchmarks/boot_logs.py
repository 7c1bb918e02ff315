"""Predicted start-ups beside logged ones: the rows of a table of public vLLM starts.

    python benchmarks/boot_logs.py [boot_logs.csv] [--all]

A row decides the KV pool where it states the model, the release, the device, the flags that
matter (or that they are the defaults) and what the log said; without the share of memory or the
length it still decides the weights. What is missing is told, row by row; nothing is filled in
from what the row logged.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from servecast.costmodels.catalogue import (
    catalogue_name,
    hardware_names,
    load_hardware,
    load_model,
)
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import kv_format
from servecast.costmodels.kv_layout import mla_block_size
from servecast.costmodels.memory import GIB, EngineMemory, MemoryPlan, plan_memory
from servecast.costmodels.quantization import with_quantization
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.versions import (
    HYBRID_PREFIXES_SINCE,
    Version,
    batch_defaults,
    default_gpu_memory_utilization,
    parse_version,
    runs_v0,
)
from servecast.scenarios.flags import names_of

DEFAULT_FILE = Path(__file__).parents[2] / "shared/validation/boot_logs.csv"

Row = Mapping[str, str]

COLUMNS = names_of(
    """
    id vllm_version engine model dtype_quant kv_cache_dtype gpu gpu_memory_gib num_gpus tp pp
    gpu_mem_util max_model_len max_num_seqs max_num_batched_tokens block_size enforce_eager
    spec_config cpu_offload weights_gib activation_peak_gib non_torch_gib kv_cache_gib
    cuda_graph_gib kv_cache_tokens notes
    """
)


@dataclass(frozen=True)
class Boot:
    """One row that decides something.

    Attributes
    ----------
    logged_* : None where the row does not state it
    """

    id: str
    title: str
    plan: MemoryPlan
    logged_weights_gib: float | None
    logged_kv_gib: float | None
    logged_tokens: int | None
    logged_starts: bool | None
    logged_terms_gib: Mapping[str, float]

    @property
    def tokens_error(self) -> float | None:
        """Predicted over logged KV tokens, minus one."""
        if self.logged_tokens is None:
            return None
        return self.plan.tokens / self.logged_tokens - 1

    def term_error_gib(self, term: str) -> float | None:
        """Predicted minus logged."""
        logged = self.logged_terms_gib.get(term)
        predicted: int = getattr(self.plan, f"{term}_bytes")
        return None if logged is None else predicted / GIB - logged

    @property
    def inside(self) -> bool:
        """The logged KV tokens lie in the 90 % interval."""
        low, high = self.plan.tokens_interval
        return self.logged_tokens is not None and low <= self.logged_tokens <= high

    @property
    def weights_error(self) -> float | None:
        """Predicted over logged weights, minus one."""
        if self.logged_weights_gib is None:
            return None
        return self.plan.weights_bytes / GIB / self.logged_weights_gib - 1


def read_rows(path: Path) -> list[dict[str, str]]:
    """The table; raises InputError for one that cannot be read or lacks a column."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {error}") from None
    absent = sorted(COLUMNS - rows[0].keys()) if rows else []
    if absent or not rows:
        raise InputError(f"{path}: no column {', '.join(absent)}" if absent else f"{path}: empty")
    return rows


def boots(rows: list[dict[str, str]]) -> Iterator[Boot | tuple[str, str]]:
    """Every row as a Boot, or (id, what it does not state)."""
    for row in rows:
        try:
            yield _boot(row)
        except InputError as error:
            yield row.get("id", "?"), str(error)


def _boot(row: Row) -> Boot:
    tokens = _count(row["kv_cache_tokens"])
    kv = _gib(row["kv_cache_gib"])
    weights = _gib(row["weights_gib"]) or None
    if tokens is None and kv is None and weights is None:
        raise InputError("logs neither weights nor KV")
    version = _version(row)
    hardware = _hardware(row)
    model = _model(row)
    engine, missing = _engine(row, version, hardware, model)
    if missing and weights is None:
        raise InputError(f"{missing} not stated")
    title = f"{row['model'].rpartition('/')[2]} on {hardware.name}, {version}"
    if engine.tensor * engine.pipeline > 1:
        title += f", TP{engine.tensor} PP{engine.pipeline}"
    terms = {
        "activation": _gib(row["activation_peak_gib"]),
        "other": _gib(row["non_torch_gib"]),
        "graph": _after("graph estimate", row["notes"]),
    }
    return Boot(
        id=row["id"],
        title=title,
        plan=plan_memory(model, hardware, engine),
        logged_weights_gib=weights,
        logged_kv_gib=None if missing else kv,
        logged_tokens=None if missing else tokens,
        # A start that failed for another reason than memory tells nothing of it.
        logged_starts=None if missing else not re.search(r"FAILS(?!: Assertion)", row["notes"]),
        logged_terms_gib={}
        if missing
        else {name: size for name, size in terms.items() if size is not None},
    )


def _version(row: Row) -> Version:
    text = row["vllm_version"]
    if not text:
        raise InputError("version not stated")
    if re.search(r"patch\)?$|patch |Kunlun|XPU", text):
        raise InputError(f"version {text!r} is no release of vLLM's own")
    return parse_version(text)


def _hardware(row: Row) -> HardwareSpec:
    name = row["gpu"]
    if not name or re.search(r"\bnot\b(?!.*: model)|class|per the|cut off", name):
        raise InputError("device not stated")
    outside = re.sub(r"\(.*?\)", "", name).strip()
    inside = [part.strip() for part in re.findall(r"[^():;,]+", name[len(outside) :])]
    known = [part for part in (outside, *inside) if catalogue_name(part) in hardware_names()]
    hardware = load_hardware(known[0] if known else outside)
    total = _gib(row["gpu_memory_gib"])
    # nvidia-smi counts what the driver keeps; sizes in GB are those of the name.
    if total is not None and not re.search(r"nvidia-smi|\dG|\d GB", row["gpu_memory_gib"]):
        hardware = replace(hardware, memory_bytes=round(total * GIB))
    return hardware


def _model(row: Row) -> ModelSpec:
    if re.search(r"\b(class|not|unnamed)\b", row["model"]):
        raise InputError("model not stated")
    model = load_model(re.split(r"[ (]", row["model"].strip())[0])
    kinds = row["dtype_quant"].lower()
    if model.quantization is None:
        for word, method in QUANTISED.items():
            if word in kinds:
                model = with_quantization(model, method)
                break
        else:
            if re.search(r"awq|int4|int8|nvfp4|nf4|4.?bit|8.?bit", kinds):
                raise InputError(f"which layers {kinds!r} quantises is not stated")
    if model.quantization and re.search(r"mlp only|attention (bf|fp)16", kinds):
        keeps = model.quantization.keeps | {"attention"}
        model = replace(model, quantization=replace(model.quantization, keeps=keeps))
    if re.search(r"\b(float32|fp32)\b", kinds):
        model = replace(model, dtype="float32")
    if kinds in ("float16", "fp16", "half"):
        model = replace(model, dtype="float16")
    return model


#: Words of the column that say how every linear layer is stored.
QUANTISED = {"fp8": "fp8", "w8a8": "compressed-tensors", "gptq": "gptq", "nf4": "bitsandbytes"}

#: Ways to write "none".
NONE = ("", "none", "no", "-", "off", "false", "n/a", "0")


def _engine(
    row: Row, version: Version, hardware: HardwareSpec, model: ModelSpec
) -> tuple[EngineMemory, str]:
    """The flags, and which of those that the KV pool needs is not stated."""
    if row["spec_config"].strip().lower() not in NONE:
        raise InputError(f"a draft model ({row['spec_config']}) is not modelled")
    offloaded = _gib(row["cpu_offload"])
    if offloaded is None and row["cpu_offload"].strip().lower() not in NONE:
        raise InputError(f"offload of {row['cpu_offload']!r} is not modelled")
    missing = ""
    utilization = _share(row["gpu_mem_util"])
    if "default" in row["gpu_mem_util"]:
        utilization = default_gpu_memory_utilization(version)
    if utilization is None:
        missing, utilization = "gpu_memory_utilization", 0.9
    length = _count(row["max_model_len"], kilo=1024)
    if length is None:
        missing = missing if "default" in row["max_model_len"] else missing or "max_model_len"
        length = model.max_position_embeddings
    tensor, pipeline = _count(row["tp"]), _count(row["pp"])
    if tensor is None and pipeline is None and _count(row["num_gpus"]) != 1:
        raise InputError("how it is split is not stated")
    stated = {"V0": False, "V1": True}.get(row["engine"].strip().upper())
    v0 = runs_v0(version, hardware.compute_capability, stated)
    tokens, seqs = batch_defaults(version, hardware.memory_bytes, hardware.name, length, v0)
    notes = row["notes"].lower()
    off = re.search(r"prefix cach\w+ (off|disabled)|enable_prefix_caching ?[=:] ?false", notes)
    graphs = notes + row["cuda_graph_gib"]
    unestimated = re.search(r"estimate_cudagraphs ?= ?0|estimate off", graphs)
    engine = EngineMemory(
        gpu_memory_utilization=utilization,
        block_size=_count(row["block_size"])
        or 0
        or max(hardware.default_block_size, mla_block_size(model, hardware, version)),
        max_num_seqs=_count(row["max_num_seqs"], kilo=1024) or seqs,
        max_num_batched_tokens=_count(row["max_num_batched_tokens"], kilo=1024) or tokens,
        max_model_len=length,
        kv=kv_format(model, _kv_dtype(row["kv_cache_dtype"]), version),
        cpu_offload_gb=offloaded or 0.0,
        tensor=tensor or 1,
        pipeline=pipeline or 1,
        enforce_eager=bool(re.match(r"(true|yes|on|1)\b", row["enforce_eager"].strip().lower())),
        enable_prefix_caching=not off
        and (model.linear is None or version >= HYBRID_PREFIXES_SINCE),
        estimate_cudagraphs=False if unestimated else None,
        version=version,
        v0=v0,
    )
    return engine, missing


def _kv_dtype(text: str) -> str:
    """vLLM's name for what the cell says."""
    name = re.split(r"[ (]", text.strip().lower())[0]
    same = {"": "auto", "default": "auto", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
    return same.get(name, name)


#: No cell says more.
MOST = 1e9


def _found(text: str, kilo: int) -> tuple[float, str] | None:
    found = re.search(r"(-?(?:\d[\d,]*)?\.?\d+)(?: ?(k|K|M)(?![A-Za-z]))?(?: ?(%|MiB|MB))?", text)
    if found is None:
        return None
    value = float(found[1].replace(",", ""))
    value *= {"k": kilo, "K": kilo, "M": kilo**2}.get(found[2] or "", 1)
    return (value, found[3] or "") if abs(value) < MOST else None


def _count(text: str, kilo: int = 1000) -> int | None:
    """The first number of a cell, `default (8192)`, `~50` and `0.95M` among them; None where it
    counts nothing."""
    found = _found(text, kilo)
    return round(found[0]) if found is not None and found[0] >= 1 else None


def _share(text: str) -> float | None:
    """A share as 0.9, .9 or 90%; None where there is none above 0 and up to 1."""
    found = _found(text, 1000)
    if found is None:
        return None
    share = found[0] / 100 if found[1] == "%" or found[0] > 1 else found[0]
    return share if 0 < share <= 1 else None


def _gib(text: str) -> float | None:
    """A size in GiB, also from MiB."""
    found = _found(text, 1000)
    if found is None:
        return None
    return found[0] / 1024 if found[1] in ("MiB", "MB") else found[0]


def _after(words: str, text: str) -> float | None:
    """The number right after some words."""
    found = re.search(rf"{words} (\d+(?:\.\d+)?)", text)
    return None if found is None else float(found[1])


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--all", action="store_true", help="every row, not the worst alone")
    args = parser.parse_args()
    try:
        rows = read_rows(args.file)
    except InputError as error:
        sys.exit(f"boot_logs: {error}")
    decided = [boot for boot in boots(rows) if isinstance(boot, Boot)]
    missing = [boot for boot in boots(rows) if not isinstance(boot, Boot)]
    with_tokens = [b for b in decided if b.tokens_error is not None and b.logged_tokens]
    with_weights = [b for b in decided if b.weights_error is not None]
    print(f"{len(rows)} rows, {len(decided)} decide something, {len(with_tokens)} KV tokens")
    _report("KV tokens", [abs(b.tokens_error or 0.0) for b in with_tokens])
    _report("weights", [abs(b.weights_error or 0.0) for b in with_weights])
    inside = [b for b in with_tokens if b.inside]
    print(f"inside the 90 % interval: {len(inside)} of {len(with_tokens)}")
    for term in ("activation", "other", "graph"):
        off = [error for b in decided if (error := b.term_error_gib(term)) is not None]
        if off:
            median, p95 = np.percentile(np.abs(off), [50, 95])
            print(f"{term}: {len(off)} rows, median error {median:.2f} GiB, p95 {p95:.2f} GiB")
    judged = [b for b in decided if b.logged_starts is not None]
    wrong = [b for b in judged if b.plan.fits != b.logged_starts]
    names = "".join(f", {b.id} wrong" for b in wrong)
    print(f"starts: {len(judged) - len(wrong)} of {len(judged)} right{names}")
    shown = sorted(with_tokens, key=lambda b: -abs(b.tokens_error or 0.0))
    for boot in decided if args.all else shown[:5]:
        print(_line(boot))
    if args.all:
        for row_id, reason in missing:
            print(f"{row_id}: left out: {reason}")


def _report(name: str, errors: list[float]) -> None:
    if errors:
        median, p95 = np.percentile(100 * np.array(errors), [50, 95])
        print(f"{name}: {len(errors)} rows, median error {median:.2f} %, p95 {p95:.2f} %")


def _line(boot: Boot) -> str:
    plan = boot.plan
    parts = [f"{boot.id}: {boot.title}:"]
    if boot.logged_weights_gib is not None:
        parts.append(
            f"weights {plan.weights_bytes / GIB:.2f} for {boot.logged_weights_gib:g} "
            f"({100 * (boot.weights_error or 0.0):+.2f} %),"
        )
    if boot.logged_kv_gib is not None:
        parts.append(f"KV {plan.kv_bytes / GIB:.2f} for {boot.logged_kv_gib:g} GiB,")
    if boot.logged_tokens is not None:
        parts.append(
            f"{plan.tokens:,} tokens for {boot.logged_tokens:,} "
            f"({100 * (boot.tokens_error or 0.0):+.2f} %{'' if boot.inside else ', outside'})"
        )
    if boot.logged_starts is not None and not (boot.logged_starts and plan.fits):
        parts.append(
            f"[logged {'starts' if boot.logged_starts else 'fails'}, "
            f"predicted {'starts' if plan.fits else 'fails'}]"
        )
    return " ".join(parts)


if __name__ == "__main__":
    main()
