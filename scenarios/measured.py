"""Measured kernels for a deployment: which profile, and what of it does not cover the model."""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache

from servecast.calibration.profile import GENERIC, Profile
from servecast.calibration.store import KernelProfile, load_profile, profile_names
from servecast.costmodels.catalogue import hardware_names, load_hardware
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import Grid, Kernels, Unpacking, without_tiles
from servecast.costmodels.kv_format import KvFormat
from servecast.costmodels.operators import kernel_type
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.weights import layer_matrices, weight_bits

#: The profile that is none: datasheet peaks and generic efficiencies.
NONE = "generic"

#: Profiles measured over many widths, so that other devices may borrow their corrections.
WIDE = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200", "gb200", "l40s", "rtx-pro-6000")

#: Major compute capabilities on which vLLM attends with FlashAttention 2.
FLASH_ATTENTION_2 = (8, 12)

#: The profile whose mixed batches stand for those of devices that have none measured.
MIXED = "rtx-pro-6000-llmservingsim"

#: The profile whose experts with 4-bit weights stand for those of devices that have none measured.
UNPACKED = "l40s"


def profile_of(asked: str | None, hardware: HardwareSpec) -> str | None:
    """The profile that a deployment uses: the one asked for, or the device's own, or its nearest
    relative's, or None.

    Raises InputError where one of another device of the catalogue is asked for.
    """
    if asked == NONE:
        return None
    if asked is None:
        return hardware.name if hardware.name in profile_names() else relative(hardware)
    owner = load_profile(asked).hardware
    if owner != hardware.name and hardware.name in hardware_names():
        raise InputError(
            f"profile: {asked} was measured on {owner}, not on {hardware.name}; left out, "
            f"{profile_of(None, hardware) or NONE} is used"
        )
    return asked


@lru_cache(maxsize=64)
def relative(hardware: HardwareSpec, among: tuple[str, ...] = WIDE) -> str | None:
    """The device measured over many widths that is nearest: of the same major compute capability,
    then the minor one, then bandwidth and peak; None where there is no such device."""
    major = math.floor(hardware.compute_capability)
    kin = [load_hardware(name) for name in among]
    kin = [own for own in kin if major and math.floor(own.compute_capability) == major]
    if not kin:
        return None

    def distance(own: HardwareSpec) -> tuple[float, float, float]:
        return (
            round(abs(own.compute_capability - hardware.compute_capability), 1),
            abs(math.log(own.memory_bandwidth_bytes_per_s / hardware.memory_bandwidth_bytes_per_s)),
            abs(math.log(own.peak_flops_per_s() / hardware.peak_flops_per_s())),
        )

    return min(kin, key=distance).name


def measured(
    base: Profile,
    name_or_path: str,
    model: ModelSpec,
    hardware: HardwareSpec,
    kv: KvFormat,
    tensor: int = 1,
    v0: bool = False,
) -> Profile:
    """The base profile with the kernels of another; its label says what they do not cover.

    `v0` is the engine before V1, which runs prompts and decodes one after the other. Where the base
    differs from the generic one, the kernels and the host's time differ as much.
    Raises InputError for a profile that is not known or cannot be read.
    """
    found = completed(load_profile(name_or_path), hardware)
    kernels = kernels_on(found, hardware)
    if v0:
        tail = kernels.tail and replace(kernels.tail, beside_prompt={})
        kernels = replace(kernels, mixed={}, tail=tail)
    label = kernels_label(found, kernels, model, hardware, kv, tensor)
    generic = GENERIC.efficiency
    rates = {
        field.name: getattr(base.efficiency, field.name) / getattr(generic, field.name)
        for field in fields(generic)
        if field.name != "label" and not field.name.endswith("_s")
    }
    rates = {name: rate for name, rate in rates.items() if rate != 1.0}
    profile = replace(base, kernels=replace(kernels, label=label, rates=rates))
    if found.host is None:
        return profile
    host = base.host_step_s / GENERIC.host_step_s
    return replace(
        profile,
        host_step_s=host * found.host.step_s,
        host_sequence_s=host * found.host.sequence_s,
        host_layer_s=base.host_layer_s if found.host.layer_s is None else found.host.layer_s,
    )


def completed(found: KernelProfile, hardware: HardwareSpec) -> KernelProfile:
    """A profile, and for what it has not measured the one that comes along for its device; on
    another device without the kernels of units that this one has not."""
    if found.hardware in profile_names():
        rest = load_profile(found.hardware)
        found = replace(
            found,
            families={**rest.families, **found.families},
            all_reduce={**rest.all_reduce, **found.all_reduce},
            tail=found.tail or rest.tail,
        )
    if of_the_device(found, hardware):
        return found
    families = {
        name: family
        for name, family in found.families.items()
        if hardware.has_units(name.split(" ")[1])
    }
    return replace(found, families=families)


def of_the_device(found: KernelProfile, hardware: HardwareSpec) -> bool:
    """Its kernels were measured on such a device: a file of a catalogue's name may have other
    figures."""
    if found.hardware != hardware.name:
        return False
    return hardware.name not in hardware_names() or _speeds(hardware) == _speeds(
        load_hardware(hardware.name)
    )


def _speeds(hardware: HardwareSpec) -> tuple[float | None, ...]:
    return (
        hardware.memory_bandwidth_bytes_per_s,
        hardware.bf16_flops_per_s,
        hardware.fp16_flops_per_s,
        hardware.fp8_flops_per_s,
        hardware.int8_flops_per_s,
        hardware.fp4_flops_per_s,
    )


def kernels_on(found: KernelProfile, hardware: HardwareSpec) -> Kernels:
    """The kernels of a completed profile on a device; matrices of another one are taken over forms
    without tiles, if it is known."""
    kernels = found.kernels()
    kernels = attending(kernels, hardware)
    own, owner = of_the_device(found, hardware), hardware
    if not own:
        if found.hardware not in hardware_names():
            return kernels
        owner = load_hardware(found.hardware)
    if hardware.kind == "gpu":
        kernels = replace(kernels, unpacking=unpacking_of(kernels, found, owner))
    if own:
        return kernels
    return replace(kernels, gemm={c: _whole(found, c, owner) for c in kernels.gemm}, tiles={})


def _whole(found: KernelProfile, compute: str, owner: HardwareSpec) -> Grid:
    """Matrices that were measured on `owner`, over the form without tiles."""
    family = found.families[f"gemm {compute}"]
    return without_tiles(family.grid, compute, family.tile_rows, owner)


def unpacking_of(kernels: Kernels, found: KernelProfile, owner: HardwareSpec) -> Unpacking | None:
    """How weights in fewer bits are unpacked: measured on `owner` too, or on another device."""
    if "int4" in kernels.experts:
        return Unpacking(kernels.experts["int4"])
    if "16bit" not in kernels.gemm:
        return None
    theirs = load_profile(UNPACKED)
    return Unpacking(
        theirs.kernels().experts["int4"],
        _whole(found, "16bit", owner),
        _whole(theirs, "16bit", load_hardware(theirs.hardware)),
    )


def attending(kernels: Kernels, hardware: HardwareSpec) -> Kernels:
    """With what decodes take longer in one kernel with a prompt, and where contexts are uneven:
    own rows, or those of a relative.

    That is so in FlashAttention 2, vLLM's on GPUs of compute capability 8 and 12: version 3 on
    Hopper packs query heads in mixed batches too, and on data-centre Blackwell the two are
    kernels of their own. What uneven contexts cost those was not measured.
    """
    if math.floor(hardware.compute_capability) not in FLASH_ATTENTION_2:
        return kernels
    theirs = load_profile(MIXED).kernels()
    return replace(kernels, mixed=kernels.mixed or theirs.mixed, tail=kernels.tail or theirs.tail)


def kernels_label(
    found: KernelProfile,
    kernels: Kernels,
    model: ModelSpec,
    hardware: HardwareSpec,
    kv: KvFormat,
    tensor: int,
) -> str:
    """What a report says of a deployment's step times."""
    label = kernels.label
    if not of_the_device(found, hardware):
        label += f", scaled to {hardware.name} by datasheet"
    rest = sorted(set(_uncovered(kernels, model, hardware, kv)))
    if tensor > 1 and tensor not in kernels.all_reduce:
        rest.append(f"all-reduce of {tensor} ranks")
    unpacked = {
        f"{bits:.2g}-bit weights"
        for matrix in layer_matrices(model)
        if matrix.copies == 1
        for compute, bits in [(kernel_type(model, matrix.group), weight_bits(model, matrix.group))]
        if not kernels.has_gemm(compute, bits) and kernels.unpacks(hardware, compute, bits)
    }
    if unpacked:
        label += f"; {', '.join(sorted(unpacked))} as experts unpack them"
    if rest:
        label += f"; {', '.join(rest)} by generic efficiencies (uncalibrated)"
    return label


def _uncovered(
    kernels: Kernels, model: ModelSpec, hardware: HardwareSpec, kv: KvFormat
) -> Iterator[str]:
    for matrix in layer_matrices(model):
        compute, bits = kernel_type(model, matrix.group), weight_bits(model, matrix.group)
        if matrix.copies > 1:
            if not (kernels.has_experts(compute, bits) and model.gated_mlp):
                yield "experts"
        elif not (kernels.has_gemm(compute, bits) or kernels.unpacks(hardware, compute, bits)):
            yield f"{bits:.2g}-bit weights"
    if model.mla is not None:
        yield "latent attention"
    else:
        if round(kv.bits) not in {*kernels.decode, *kernels.packed}:
            yield f"attention over {kv.name} KV"
        if round(kv.bits) not in {*kernels.prefill, *kernels.packed}:
            yield f"prompts over {kv.name} KV"
    if model.linear is not None:
        yield "recurrent layers"
