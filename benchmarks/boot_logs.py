"""Predicted start-ups beside logged ones: the rows of a table of public vLLM starts.

    python benchmarks/boot_logs.py [boot_logs.csv] [--all]

A row decides something where it states the model, the device, the flags that matter (or that
they are the defaults) and what the log said. What is missing is told, row by row; nothing is
filled in from what the row logged.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import kv_format
from servecast.costmodels.memory import GIB, EngineMemory, MemoryPlan, plan_memory
from servecast.costmodels.quantization import with_quantization
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.versions import (
    Version,
    batch_defaults,
    default_gpu_memory_utilization,
    parse_version,
    runs_v0,
)

DEFAULT_FILE = Path(__file__).parents[2] / "shared/validation/boot_logs.csv"

Row = Mapping[str, str]


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
    logged_starts: bool

    @property
    def tokens_error(self) -> float | None:
        """Predicted over logged KV tokens, minus one."""
        if self.logged_tokens is None:
            return None
        return self.plan.tokens / self.logged_tokens - 1

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
    """The table; raises InputError for one that cannot be read."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [{k: v or "" for k, v in row.items() if k} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: {error}") from None


def boots(rows: list[dict[str, str]]) -> Iterator[Boot | tuple[str, str]]:
    """Every row as a Boot, or (id, what it does not state)."""
    for row in rows:
        try:
            yield _boot(row)
        except InputError as error:
            yield row.get("id", "?"), str(error)


def _boot(row: Row) -> Boot:
    tokens = _number(row["kv_cache_tokens"])
    kv = _number(row["kv_cache_gib"])
    weights = _number(row["weights_gib"])
    if tokens is None and kv is None and weights is None:
        raise InputError("logs neither weights nor KV")
    version = _version(row)
    hardware = _hardware(row)
    model = _model(row)
    engine = _engine(row, version, hardware, model)
    title = f"{row['model'].rpartition('/')[2]} on {hardware.name}, {version}"
    if engine.tensor * engine.pipeline > 1:
        title += f", TP{engine.tensor} PP{engine.pipeline}"
    return Boot(
        id=row["id"],
        title=title,
        plan=plan_memory(model, hardware, engine),
        logged_weights_gib=weights,
        logged_kv_gib=kv,
        logged_tokens=round(tokens) if tokens is not None else None,
        logged_starts=not re.search(r"FAILS(?!: Assertion)", row["notes"]),
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
    if not name or re.search(r"not|class|per the|cut off", name):
        raise InputError("device not stated")
    hardware = load_hardware(re.sub(r"\(.*?\)", "", name).strip())
    total = _number(row["gpu_memory_gib"])
    if total is not None and "nvidia-smi" not in row["gpu_memory_gib"]:
        hardware = replace(hardware, memory_bytes=round(total * GIB))
    return hardware


def _model(row: Row) -> ModelSpec:
    name = re.split(r"[ (]", row["model"].strip())[0]
    model = load_model(name)
    kinds = row["dtype_quant"].lower()
    if model.quantization is None:
        for word, method in (("fp8", "fp8"), ("w8a8", "compressed-tensors"), ("gptq", "gptq")):
            if word in kinds:
                model = with_quantization(model, method)
                break
        else:
            if re.search(r"awq|int4|int8|nvfp4|4bit", kinds):
                raise InputError(f"which layers {kinds!r} quantises is not stated")
    if "float32" in kinds:
        model = replace(model, dtype="float32")
    if kinds in ("float16", "fp16"):
        model = replace(model, dtype="float16")
    return model


def _engine(row: Row, version: Version, hardware: HardwareSpec, model: ModelSpec) -> EngineMemory:
    if row["spec_config"] not in ("", "none"):
        raise InputError(f"a draft model ({row['spec_config']}) is not modelled")
    util_text = row["gpu_mem_util"]
    utilization = _number(util_text)
    if utilization is None:
        raise InputError("gpu_memory_utilization not stated")
    if "default" in util_text:
        utilization = default_gpu_memory_utilization(version)
    max_model_len = _number(row["max_model_len"])
    if max_model_len is None:
        raise InputError("max_model_len not stated")
    stated = {"V0": False, "V1": True}.get(row["engine"].strip().upper())
    v0 = runs_v0(version, hardware.compute_capability, stated)
    tokens, seqs = batch_defaults(
        version, hardware.memory_bytes, hardware.name, round(max_model_len), v0
    )
    kv = row["kv_cache_dtype"].split("_e")[0] or "auto"
    return EngineMemory(
        gpu_memory_utilization=utilization,
        block_size=round(_number(row["block_size"]) or 16),
        max_num_seqs=round(_number(row["max_num_seqs"]) or seqs),
        max_num_batched_tokens=round(_number(row["max_num_batched_tokens"]) or tokens),
        max_model_len=round(max_model_len),
        kv=kv_format(model, {"bf16": "bfloat16"}.get(kv, kv)),
        tensor=round(_number(row["tp"]) or 1),
        pipeline=round(_number(row["pp"]) or 1),
        enforce_eager=row["enforce_eager"].startswith("True"),
        enable_prefix_caching="prefix caching off" not in row["notes"],
        version=version,
        v0=v0,
    )


def _number(text: str) -> float | None:
    """The first number of a cell, `default (8192)` and `~50` among them."""
    found = re.search(r"-?\d[\d,]*\.?\d*", text)
    return float(found[0].replace(",", "")) if found else None


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
    wrong = [b for b in decided if b.plan.fits != b.logged_starts]
    print("starts: " + (", ".join(f"{b.id} wrong" for b in wrong) or "all right"))
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
    if not boot.logged_starts or not plan.fits:
        parts.append(
            f"[logged {'starts' if boot.logged_starts else 'fails'}, "
            f"predicted {'starts' if plan.fits else 'fails'}]"
        )
    return " ".join(parts)


if __name__ == "__main__":
    main()
