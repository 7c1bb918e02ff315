"""`servecast calibrate --device`: from a device to its profile."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from servecast.calibration import engines
from servecast.calibration.device_profile import device_profile
from servecast.calibration.measuring import Measured, Tell, Worker, measure, started
from servecast.calibration.shapes import Target, coarse, fine, layer_requests
from servecast.calibration.store import Host, KernelProfile
from servecast.costmodels.catalogue import hardware_names, load_hardware
from servecast.costmodels.errors import InputError
from servecast.costmodels.hf_config import model_from_config
from servecast.costmodels.specs import BYTES_OF_DTYPE, HardwareSpec
from servecast.costmodels.weights import layer_matrices, lm_head

#: Messages of an all-reduce, bytes.
MESSAGES = tuple(2**power for power in range(10, 25, 2))

#: Words of a GPU's own name that say which of two devices of the catalogue it is, and words of
#: devices that the catalogue has not.
FORM_FACTORS = {"hbm3": "sxm", "hbm2e": "sxm", "pcie": "pcie"}
OTHERS = {"nvl", "laptop", "mobile", "max", "q", "super", "ti", "d", "mig"}

#: Ballast of so many times the last-level cache drives all out of it; what is beyond changes
#: nothing.
BALLAST_CACHES = 4.0

#: How far the memory may be off the catalogue's.
MEMORY_OFF = 0.15


@dataclass(frozen=True)
class Campaign:
    """What is to be measured, where and for how long.

    Attributes
    ----------
    device : "cpu" or "cuda:0"
    python : the one that will serve, or ours
    kernels : "auto", "torch" or "vllm"
    engine : of which the host's time is measured too; "" for none
    flags, environment : of that engine
    """

    device: str
    budget_s: float
    python: str = sys.executable
    kernels: str = "auto"
    engine: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def run_campaign(
    campaign: Campaign, target: Target, date: str, tell: Tell | None = None
) -> tuple[KernelProfile, Measured]:
    """Measure and fit.

    Raises InputError without torch, without the device, for a device that is not the target's,
    and where there was too little time.
    """
    if campaign.engine:
        engines.check_engine(campaign.python, campaign.engine)
    host: Host | None = None
    with started(campaign.device, campaign.python, campaign.kernels) as worker:
        check_device(worker.facts, campaign.device, target.hardware)
        found = measure(worker, coarse(target), fine(target), campaign.budget_s, tell)
        if not found.facts.get("interrupted"):
            # These come on top of the budget, a minute or so; without them a profile is one too.
            try:
                found.all_reduce = _all_reduces(worker, campaign.device)
                host = _host(worker, campaign, target) if campaign.engine else None
            except KeyboardInterrupt:
                found.facts["interrupted"] = True
            except InputError as error:
                found.facts["host"] = f"not measured: {error}"
    return device_profile(found, target.hardware, target.hardware.name, date, host), found


def _host(worker: Worker, campaign: Campaign, target: Target) -> Host:
    cache_bytes = float(worker.facts["cache_bytes"])
    ballast = _ballast(target, cache_bytes) if campaign.device == "cpu" else {}
    jobs = engines.null_jobs(campaign.engine, campaign.flags, campaign.environment, ballast)
    own = {number: _null_layer_s(worker, target, number) for number in engines.SEQUENCES}
    return engines.measure_host(campaign.python, jobs, own.__getitem__)


def _ballast(target: Target, cache_bytes: float) -> dict[str, int]:
    """Bytes of a layer's weights, and of the head's, of the first model, as far as they matter."""
    model, tensor = target.models[0], target.splits[0]
    each = BYTES_OF_DTYPE[target.dtype]
    layers = sum(matrix.parameters for matrix in layer_matrices(model, tensor)) / model.num_layers
    sizes = {"layer_bytes": layers * each, "head_bytes": lm_head(model, tensor).parameters * each}
    return {name: int(min(size, BALLAST_CACHES * cache_bytes)) for name, size in sizes.items()}


def _all_reduces(worker: Worker, device: str) -> dict[int, dict[float, float]]:
    """By ranks: of as many GPUs as there are, of two processes on a CPU."""
    found = {}
    for ranks in (2, 4, 8):
        reply = worker.ask({"op": "all_reduce", "ranks": ranks, "sizes": list(MESSAGES)})
        if "error" in reply:
            break
        found[ranks] = {float(size): float(s) for size, s in reply["sizes"].items()}
        if device == "cpu":
            break
    return found


def _null_layer_s(worker: Worker, target: Target, sequences: int) -> float:
    """Seconds of one layer of the null model, measured as a whole."""
    null = model_from_config({**engines.NULL, "num_hidden_layers": 1}, "null model")
    own = replace(target, models=(null,), splits=(1,), most_sequences=max(engines.SEQUENCES))
    context = engines.PROMPT_TOKENS + engines.OUTPUT_TOKENS // 2
    parts = layer_requests(null, sequences, own, context)
    return float(worker.ask({"op": "chain", "parts": parts}).get("seconds", 0.0))


def hardware_of(facts: Mapping[str, Any], device: str) -> HardwareSpec:
    """The catalogue's device that a worker runs on.

    Raises InputError where its name says none, or several.
    """
    if device == "cpu":
        return load_hardware("cpu")
    name = str(facts["device"])
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    words |= {form for word, form in FORM_FACTORS.items() if word in words}
    fitting = [own for own in hardware_names() if _fits(own, words) and not words & OTHERS]
    memory = float(facts.get("memory_bytes", 0))
    if memory:
        near = {own: load_hardware(own).memory_bytes / memory for own in fitting}
        fitting = [own for own in fitting if abs(near[own] - 1) < MEMORY_OFF]
    best = sorted(
        fitting, key=lambda own: (-len(own), abs(load_hardware(own).memory_bytes - memory))
    )
    if not best:
        raise InputError(f"--hardware: name the device: {name!r} is not in the catalogue")
    return load_hardware(best[0])


def _fits(own: str, words: set[str]) -> bool:
    """Every part of a catalogue name is in the device's, but for memory sizes and a lone sxm."""
    parts = [part for part in own.split("-") if not re.fullmatch(r"\d+gb", part)]
    return all(part in words or (part == "sxm" and "pcie" not in words) for part in parts)


def check_device(facts: Mapping[str, Any], device: str, hardware: HardwareSpec) -> None:
    """Raises InputError where a worker runs on a device that is not the target's."""
    other = (device == "cpu") != (hardware.kind == "cpu")
    if not other and device != "cpu" and hardware.name in hardware_names():
        try:
            other = hardware_of(facts, device).name != hardware.name
        except InputError:
            other = False
    if other:
        raise InputError(
            f"--hardware {hardware.name}: not what --device {device} is ({facts['device']})"
        )
