"""Measured kernels for a deployment, and what of it they do not cover."""

from collections.abc import Iterator
from dataclasses import replace

from servecast.calibration.profile import Profile
from servecast.calibration.store import load_profile
from servecast.costmodels.kernels import Kernels
from servecast.costmodels.kv_format import KvFormat
from servecast.costmodels.operators import kernel_type
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.weights import layer_matrices, weight_bits


def measured(
    base: Profile, name_or_path: str, model: ModelSpec, hardware: HardwareSpec, kv: KvFormat
) -> Profile:
    """The base profile with the kernels of another; its label says what they do not cover.

    Raises InputError for a profile that is not known or cannot be read.
    """
    found = load_profile(name_or_path)
    kernels = found.kernels()
    label = kernels.label
    if found.hardware != hardware.name:
        label += f", scaled to {hardware.name} by datasheet"
    rest = sorted(set(_uncovered(kernels, model, kv)))
    if rest:
        label += f"; {', '.join(rest)} by generic efficiencies (uncalibrated)"
    profile = replace(base, kernels=replace(kernels, label=label))
    if found.host is None:
        return profile
    return replace(
        profile,
        host_step_s=found.host.step_s,
        host_sequence_s=found.host.sequence_s,
        host_layer_s=found.host.layer_s,
    )


def _uncovered(kernels: Kernels, model: ModelSpec, kv: KvFormat) -> Iterator[str]:
    for matrix in layer_matrices(model):
        compute, bits = kernel_type(model, matrix.group), weight_bits(model, matrix.group)
        if matrix.copies > 1:
            yield "experts"
        elif not kernels.has_gemm(compute, bits):
            yield f"{bits:.2g}-bit weights"
    if model.mla is not None:
        yield "latent attention"
    elif round(kv.bits) not in kernels.decode:
        yield f"attention over {kv.name} KV"
    if model.linear is not None:
        yield "recurrent layers"
