"""`servecast calibrate`: tables or a device to a profile, and a profile to figures."""

import os
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from servecast.calibration import aiconfigurator, engines, llmservingsim, vidur
from servecast.calibration.against import hold_against
from servecast.calibration.calibrating import Campaign, hardware_of, run_campaign
from servecast.calibration.device_profile import read_rows, write_rows
from servecast.calibration.measuring import Measured, Tell, started
from servecast.calibration.shapes import Target
from servecast.calibration.store import (
    KernelProfile,
    load_profile,
    profile_facts,
    profile_text,
)
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.specs import BYTES_OF_DTYPE, HardwareSpec
from servecast.reports.files import atomic_write, write_text

#: Each reader, its systems' devices, and where below a folder of tables the systems' lie.
READERS = {
    "aiconfigurator": (aiconfigurator.fit_system, aiconfigurator.SYSTEMS, ""),
    "llmservingsim": (llmservingsim.fit_system, llmservingsim.SYSTEMS, ""),
    "vidur": (vidur.fit_system, vidur.SYSTEMS, "compute"),
}

#: Whose shapes a device is measured at where no model is named.
DEFAULT_MODEL = "meta-llama/Llama-3.1-8B"

DTYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "int4")
KERNELS = ("auto", "torch", "vllm")

#: Tokens of a step, on a GPU and elsewhere.
LARGEST_M = {"gpu": 8192, "cpu": 2048}

#: Less says nothing, more is a slip of the keyboard.
LEAST_MINUTES, MOST_MINUTES = 0.1, 24 * 60.0

#: Flags of an engine whose host time is measured; its device has nothing to do.
HOST_FLAGS = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 1024,
}


#: Of engines on a CPU, and of transformers anywhere: no graphs, one step after another.
EAGER = {"async_scheduling": False, "enforce_eager": True}


@dataclass(frozen=True)
class Ask:
    """The options of `servecast calibrate --device`."""

    device: str
    models: tuple[str, ...]
    minutes: float
    dtypes: tuple[str, ...]
    python: str
    kernels: str
    engine: str | None
    hardware: str | None


def measure_device(
    ask: Ask, tell: Tell | None = None
) -> tuple[KernelProfile, tuple[Measured, HardwareSpec]]:
    """Measure a device at the shapes of models: its profile, and what that is made of.

    Raises InputError for options that are not known, without torch, and without the device.
    """
    _check(ask)
    with started(ask.device, ask.python, ask.kernels) as worker:
        facts = worker.facts
    spec = load_hardware(ask.hardware) if ask.hardware else hardware_of(facts, ask.device)
    models = [load_model(name) for name in ask.models or (DEFAULT_MODEL,)]
    dtypes = ask.dtypes or _usual_dtypes(spec, models[0].dtype)
    first = dtypes[0]
    target = Target(
        tuple(replace(model, dtype=first) for model in models),
        spec,
        dtypes,
        spec.block_size_multiple,
        LARGEST_M.get(spec.kind, LARGEST_M["gpu"]),
        packed=ask.engine == "transformers",
    )
    on_cpu = ask.device == "cpu"
    own_kernels = ask.engine != "transformers" or ask.kernels != "auto"
    flags = {**HOST_FLAGS, "dtype": first, "block_size": spec.block_size_multiple}
    flags |= {"device": ask.device} if ask.engine == "transformers" else {}
    campaign = Campaign(
        device=ask.device,
        budget_s=60.0 * ask.minutes,
        python=ask.python,
        kernels=ask.kernels if own_kernels else "torch",
        engine=ask.engine or "",
        flags=flags | (EAGER if on_cpu or ask.engine == "transformers" else {}),
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"} if on_cpu else {},
    )
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    profile, found = run_campaign(campaign, target, date, tell)
    return profile, (found, spec)


def _check(ask: Ask) -> None:
    check_minutes(ask.minutes)
    if ask.device != "cpu" and not ask.device.startswith("cuda"):
        raise InputError(f"--device {ask.device}: expected cpu or cuda:N")
    for name, value, known in (
        ("kernels", ask.kernels, KERNELS),
        ("engine", ask.engine or engines.ENGINES[0], engines.ENGINES),
        *(("dtype", dtype, DTYPES) for dtype in ask.dtypes),
    ):
        if value not in known:
            raise InputError(f"--{name} {value}: expected one of {', '.join(known)}")
    if ask.dtypes and ask.dtypes[0] not in BYTES_OF_DTYPE:
        raise InputError(f"--dtype {ask.dtypes[0]}: the first is that of activations and KV too")


def _usual_dtypes(spec: HardwareSpec, dtype: str) -> tuple[str, ...]:
    """The model's own, and those below it that the device computes in."""
    found = [dtype]
    found += ["fp8"] * (spec.kind == "gpu" and spec.fp8_flops_per_s is not None)
    found += ["int4"] * (spec.kind == "gpu")
    return tuple(found)


def rows_path(profile: Path) -> Path:
    """Where the raw rows of a profile lie."""
    return profile.with_suffix(".parquet")


def check_out(path: Path | None) -> None:
    """Raises InputError where no profile can be written: better before measuring than after."""
    if path is None:
        return
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out {path}: a profile ends in .yaml")
    if path.is_dir():
        raise InputError(f"--out {path}: is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"--out {path}: cannot be written")


def check_minutes(minutes: float) -> None:
    """Raises InputError for no time, and for what is no time."""
    if not LEAST_MINUTES <= minutes <= MOST_MINUTES:
        raise InputError(f"--minutes {minutes:g}: expected {LEAST_MINUTES} to {MOST_MINUTES:.0f}")


def keep(
    profile: KernelProfile,
    out: Path | None,
    measured: tuple[Measured, HardwareSpec] | None = None,
) -> Path:
    """Write a profile, and the rows behind it where there are some."""
    path = out or Path(f"{profile.hardware}.yaml")
    check_out(path)
    write_text(path, profile_text(profile))
    if measured is not None:
        with atomic_write(rows_path(path)) as aside:
            found, spec = measured
            write_rows(found, profile, spec, aside)
    return path


def load_shown(name_or_path: str) -> tuple[KernelProfile, dict[str, dict[str, Any]]]:
    """A profile, and its raw rows if they lie beside it.

    Raises InputError as `load_profile` and `read_rows` do.
    """
    profile = load_profile(name_or_path)
    path = Path(name_or_path)
    beside = rows_path(path)
    there = path.suffix in (".yaml", ".yml") and beside.exists()
    return profile, read_rows(beside) if there else {}


def told_against(name_or_path: str, against: str) -> dict[str, Any]:
    """A profile, and its rows where there are some, held against another.

    Raises InputError as `hold_against` does.
    """
    profile, rows = load_shown(name_or_path)
    other = load_profile(against)
    found = hold_against(profile, rows, other, load_hardware(profile.hardware))
    return {
        "profile": other.name,
        "what": other.source["what"],
        "operators": [asdict(difference) for difference in found],
    }


def draw(profile: KernelProfile, rows: dict[str, dict[str, Any]], folder: Path) -> None:
    """Figures of a profile as PNG, and a page with all of them."""
    from servecast.reports.profile_figures import profile_figures, write_pngs
    from servecast.reports.profile_html import profile_page

    spec = load_hardware(profile.hardware)
    facts = profile_facts(profile)
    computes = {name.split(" ")[1] for name in profile.families if name.startswith("gemm ")}
    peaks = {compute: spec.peak_flops_per_s(compute) for compute in computes}
    figures = profile_figures(facts, rows, peaks, spec.memory_bandwidth_bytes_per_s)
    write_pngs(figures, folder)
    write_text(folder / "report.html", profile_page(facts, figures))


def fit_tables(
    path: Path | None, source: str | None, system: str | None, hardware: str | None
) -> KernelProfile:
    """Fit the tables of one GPU.

    Raises InputError for whatever is missing or cannot be read.
    """
    if source is None or path is None:
        raise InputError(f"calibrate: give --from {'|'.join(READERS)} and a folder, or --show")
    if source not in READERS:
        raise InputError(f"--from {source}: not known; one of {', '.join(READERS)}")
    fit, systems, below = READERS[source]
    if not path.is_dir():
        raise InputError(f"{path}: no folder of tables")
    if (path / below).is_dir():
        path = path / below
    if system is None:
        found = [name for name in systems if (path / name).is_dir() or path.name == name]
        if len(found) != 1:
            raise InputError(f"--system: name one of {', '.join(found or systems)}")
        system = found[0]
    device = hardware or systems.get(system)
    if device is None:
        raise InputError(f"--system {system}: name its device with --hardware")
    folder = path if path.name == system else path / system
    if not folder.is_dir():
        raise InputError(f"{folder}: no tables of {system}")
    spec = load_hardware(device)
    return fit(folder, spec, spec.name)
