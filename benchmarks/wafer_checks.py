"""The model of SRAM devices against WaferLLM, which no constant was fitted to.

    python benchmarks/wafer_checks.py

WaferLLM (arXiv 2502.04563) runs its own kernels on a WSE-2: 2,700 tokens/s of LLaMA3-8B and 840 of
Qwen2-72B for one user, and matrix-vector products up to 606 times as fast as on an A100. The
constants are those of the vendor's first service. A product alone crosses the wafer twice (a
broadcast and a reduction), and has nothing of a layer's fixed cost.
"""

from math import sqrt

from servecast.calibration.fabric import Point, bundled_fabric, held_against
from servecast.calibration.profile import GENERIC
from servecast.costmodels.catalogue import load_hardware

CROSSINGS = 2

WAFERLLM = (
    Point("cerebras-wse2", "meta-llama/Meta-Llama-3-8B", None, 2700.0),
    Point("cerebras-wse2", "Qwen/Qwen2-72B", None, 840.0),
)


def gemv_seconds(n: int) -> tuple[float, float]:
    """(WSE-2, A100) of an n by n product in 16 bits."""
    wafer, gpu = load_hardware("cerebras-wse2"), load_hardware("a100-sxm-80gb")
    side = sqrt(wafer.cores)
    size = 2.0 * n * n
    work_s = max(size / wafer.peak_flops_per_s(), size / wafer.memory_bandwidth_bytes_per_s)
    on_wafer = work_s + CROSSINGS * (side * wafer.hop_s + n / side * wafer.word_s)
    bandwidth = gpu.memory_bandwidth_bytes_per_s * GENERIC.efficiency.gemm_bandwidth
    return on_wafer, size / bandwidth


def main() -> None:
    for row in held_against(bundled_fabric(), WAFERLLM):
        print(
            f"{row['model']} on {row['hardware']}: {row['predicted']:,.0f} tokens/s "
            f"({row['low']:,.0f} to {row['high']:,.0f}), WaferLLM {row['measured']:,.0f}"
        )
    for n in (4096, 8192, 16384, 32768):
        wafer_s, gpu_s = gemv_seconds(n)
        print(
            f"{n} x {n} by a vector: {wafer_s * 1e6:.2f} us on a WSE-2, {gpu_s * 1e6:,.0f} us on "
            f"an A100: x{gpu_s / wafer_s:,.0f}"
        )


if __name__ == "__main__":
    main()
