"""How sure a step's time is, from the errors of its kernels on shapes that no fit saw."""

from collections.abc import Mapping

import numpy as np

from servecast.calibration.fit import PROBABILITIES
from servecast.calibration.store import KernelProfile
from servecast.costmodels.memory import Z90
from servecast.costmodels.operators import kernel_type
from servecast.costmodels.specs import ModelSpec
from servecast.costmodels.weights import layer_matrices, weight_bits

#: Parts of a step that a family prices, where it does.
ATTENTION = {"attention_prefill_s": "prefill", "attention_decode_s": "decode"}


#: What step times are off by beside their kernels' errors, as half of a 90 % interval of the
#: logarithm: TPOT of the 138 closed loops of aiconfigurator's `silicon_sample.csv` is within 15 %
#: in some nine of ten (`servecast validate` on `benchmarks/cases.py`). Their kernels' own is among
#: it, but all are of one GPU.
MODEL_SPREAD = 0.15


#: How many times as long an all-reduce may take where devices are linked by PCIe and do not reach
#: each other's memory: LLMServingSim's Qwen3-32B on two RTX PRO 6000 takes 80.3 ms a token, and 64
#: with all-reduces as aiconfigurator measured them on two that do.
PCIE_WORSE = 3.0


#: What more a step may be off by where another device's kernels are scaled to this one: 1.645 times
#: the root mean square of what that gives on the bundled devices of which a relative is measured
#: (`benchmarks/borrowing.py`, 0.136).
BORROWED_SPREAD = 0.22


#: Of a family that was not measured, or of which nothing could be left out to see: as much as the
#: worst of those that are bundled.
UNKNOWN_SIGMA = 0.2


def step_spread(
    profile: KernelProfile,
    model: ModelSpec,
    tensor: int,
    kv_bits: float,
    parts_s: Mapping[str, float],
    nvlink: bool = True,
    borrowed: bool = False,
) -> float:
    """Half of the 90 % interval of the logarithm of a step's time.

    A kernel's error is the same in every layer and step, and independent of the other kernels'.
    `parts_s` are seconds of a run by part; what is no kernel's is in `MODEL_SPREAD` alone.
    Without `nvlink` devices may not reach each other's memory, and sums go through the host's.
    `borrowed` kernels are those of another device.
    """
    total = sum(parts_s.values())
    if not total:
        return 0.0
    variance = 0.0
    sizes = {
        index: (matrix.layers * matrix.n * matrix.k * weight_bits(model, matrix.group), matrix)
        for index, matrix in enumerate(layer_matrices(model, tensor))
        if matrix.copies == 1
    }
    whole = sum(size for size, _ in sizes.values())
    for size, matrix in sizes.values():
        sigma = _sigma(profile, f"gemm {kernel_type(model, matrix.group)}")
        variance += (parts_s.get("gemm_s", 0.0) / total * size / whole * sigma) ** 2
    groups = {matrix.group for matrix in layer_matrices(model, tensor) if matrix.copies > 1}
    for group in groups:
        sigma = _sigma(profile, f"experts {kernel_type(model, group)}")
        variance += (parts_s.get("moe_s", 0.0) / total * sigma) ** 2
    bits = round(kv_bits)
    for part, kind in ATTENTION.items():
        packed = f"packed {bits}"
        sigma = _sigma(profile, packed if packed in profile.families else f"{kind} {bits}")
        variance += (parts_s.get(part, 0.0) / total * sigma) ** 2
    spread = np.hypot(Z90 * np.sqrt(variance), MODEL_SPREAD)
    if borrowed:
        spread = np.hypot(spread, BORROWED_SPREAD)
    if not nvlink:
        share = parts_s.get("collective_s", 0.0) / total
        spread = np.hypot(spread, np.log1p(share * (PCIE_WORSE - 1.0)))
    return float(spread)


def _sigma(profile: KernelProfile, family: str) -> float:
    """Standard deviation of a family's log errors, by their central 90 %."""
    found = profile.families.get(family)
    if found is None or not found.residuals:
        return UNKNOWN_SIGMA
    low, high = np.interp([5.0, 95.0], PROBABILITIES, found.residuals)
    return float(high - low) / (2 * Z90)
