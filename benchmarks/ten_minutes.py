"""What a calibration finds out in its time, on a device of which every time is known.

    python benchmarks/ten_minutes.py [PROFILE [MODEL [MINUTES]]]

The device answers as a bundled profile says, with 0.5 % of noise, and takes as long over it as a
measurement is thought to (a quarter of a second beside the operands and runs). Printed is how far
the profile that is fitted to its answers is from it at the model's own shapes, by operator and
tokens; no GPU and no real time is needed.
"""

import sys
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from servecast.calibration import measuring
from servecast.calibration.device.sizes import contexts_of
from servecast.calibration.device_profile import device_profile
from servecast.calibration.measuring import Worker, measure
from servecast.calibration.shapes import COMPUTE, Target, coarse, fine, heads_of, matrix_shapes
from servecast.calibration.store import load_profile
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.kernels import WEIGHT_BITS, Kernels
from servecast.costmodels.specs import HardwareSpec

NOISE = 0.005

#: Seconds that a measurement takes whatever it is of, and runs.
EACH_S, RUNS = 0.25, 12

#: A kernel that the profile has not.
OTHER_S = 1e-5

RANGES = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 8192))
SEQUENCES = (1, 3, 8, 24, 64, 100, 256, 400)
CONTEXTS = (50, 200, 700, 1500, 3000, 10000)


class Known:
    """Times by a profile's kernels."""

    def __init__(self, kernels: Kernels, hardware: HardwareSpec) -> None:
        self._kernels, self._hardware = kernels, hardware
        self._gemm = cache(kernels.gemm_lines)
        self._decode = cache(kernels.decode_lines)

    def gemm(self, compute: str, m: float, n: int, k: int) -> float:
        lines = self._gemm(self._hardware, compute, n, k, WEIGHT_BITS[compute])
        return OTHER_S if lines is None else lines.at(m)

    def decode(self, bits: int, contexts: list[int], heads: Mapping[str, int]) -> float:
        token_bytes = 2 * heads["kv_heads"] * heads["head_dim"] * bits / 8
        group = heads["heads"] / heads["kv_heads"]
        number, own = len(contexts), heads["kv_heads"]
        lines = self._decode(self._hardware, bits, number, own, group, token_bytes)
        return OTHER_S if lines is None else lines.at(sum(contexts))

    def prefill(self, new: int, before: int, heads: Mapping[str, int]) -> float:
        number, group = heads["heads"], heads["heads"] / heads["kv_heads"]
        flops = 4.0 * number * heads["head_dim"]
        lines = self._kernels.prefill_lines(self._hardware, 16, number, group, flops)
        return OTHER_S if lines is None else lines.at(new * before + new * (new + 1) / 2)


class Device(Worker):
    """A worker on a known device, whose time passes as it answers."""

    def __init__(self, known: Known, name: str) -> None:
        self.facts = {"device": name, "kernels": "known", "cuda": "known"}
        self._known = known
        self._noise = np.random.default_rng(0)
        self.now_s = 0.0

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["op"] == "clocks":
            return {"clocks": {}}
        seconds = self._seconds(request)
        self.now_s += EACH_S + RUNS * seconds
        seen = seconds * float(np.exp(self._noise.normal(0, NOISE)))
        return {"seconds": seen, "noise": NOISE, "runs": RUNS}

    def _seconds(self, request: Mapping[str, Any]) -> float:
        op = request["op"]
        if op == "gemm" and request["dtype"] in COMPUTE:
            m, n, k = (request[name] for name in "mnk")
            return self._known.gemm(COMPUTE[request["dtype"]], m, n, k)
        if op == "decode":
            bits = 8 if request.get("kv_dtype") == "fp8" else 16
            return self._known.decode(bits, contexts_of(request), request)
        if op == "prefill":
            return self._known.prefill(request["new"], request.get("context", 0), request)
        return OTHER_S


def told(name: str, ratios: list[float]) -> None:
    off = np.abs(np.array(ratios) - 1)
    print(f"{name:28s} median {np.median(off):6.1%}   p95 {np.percentile(off, 95):6.1%}")


def main(profile: str = "h200-sxm", model: str = "Llama-3.1-8B", minutes: str = "10") -> None:
    reference = load_profile(profile)
    hardware = load_hardware(reference.hardware)
    dtypes = ("bfloat16", "fp8") if "gemm fp8" in reference.families else ("bfloat16",)
    target = Target((load_model(model),), hardware, dtypes, 16, 8192)
    known = Known(reference.kernels(), hardware)
    device = Device(known, reference.device)
    # Time is the device's own.
    measuring.time = SimpleNamespace(monotonic=lambda: device.now_s)  # type: ignore[assignment]
    found = measure(device, coarse(target), fine(target), 60.0 * float(minutes))
    fitted = Known(device_profile(found, hardware, "fitted", "today").kernels(), hardware)
    print(f"{len(found.rows)} rows in {found.seconds / 60:.1f} minutes")
    shapes = matrix_shapes(target)
    for dtype in dtypes:
        compute = COMPUTE[dtype]
        for low, high in RANGES:
            tokens = np.unique(np.geomspace(low, high, 16).astype(int))
            ratios = [
                fitted.gemm(compute, m, n, k) / known.gemm(compute, m, n, k)
                for n, k in shapes
                for m in tokens.tolist()
            ]
            told(f"gemm {compute}, {low} to {high}", ratios)
    heads = heads_of(target)
    for bits in (16, 8)[: len(target.kv_dtypes)]:
        batches = [[context] * number for number in SEQUENCES for context in CONTEXTS]
        told(
            f"decode {bits}",
            [
                fitted.decode(bits, batch, own) / known.decode(bits, batch, own)
                for own in heads
                for batch in batches
            ],
        )
    news = (20, 100, 300, 700, 1500, 3000, 6000)
    told(
        "prefill 16",
        [fitted.prefill(new, 0, own) / known.prefill(new, 0, own) for own in heads for new in news],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
