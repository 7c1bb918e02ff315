"""How far kernels stay below the datasheet: the coefficients that calibration fits."""

from dataclasses import dataclass, fields

UNCALIBRATED = "datasheet peaks with generic efficiencies (uncalibrated)"


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a peak, in (0, 1], and fixed times.

    A fallback for any device, and labelled so. Defaults marked * are medians of 16-bit kernels
    that ai-dynamo/aiconfigurator measured on an H100 SXM with vLLM 0.24 (aiconfigurator-core
    0.12.0, Apache-2.0); the others are assumptions, not measurements.

    Attributes
    ----------
    gemm_flops*, gemm_bandwidth* : of dense layers, at 4,096 tokens and more, and at 8 and fewer
    moe_flops*, moe_bandwidth* : of fused experts, balanced, at 8,192 tokens and more, and at 64 and
        fewer with 200 MB of weights and more
    attention_prefill_flops* : causal, 2,048 tokens and more, counting attended pairs
    attention_prefill_bandwidth : reading the context of a chunk
    attention_decode_flops : binds with MLA and in verification of drafts
    attention_decode_bandwidth* : reading KV, 200 MB and more, heads of 128
    sampling_bandwidth : passes over the logits
    collective_bandwidth : of a ring over the datasheet link, one direction
    collective_latency_s* : of a small all-reduce over NVLink in a CUDA graph, rounded up
    launch_s : between two kernels of a CUDA graph
    eager_launch_s : host time for a kernel without graphs, which the device waits out: 0.8 ms a
        layer, after 22 ms of 28 layers and 19 of 24 (vllm-project/vllm-omni#7960, A800) and
        35 of 36 (vllm-project/vllm#42058, A100)
    label : what a report says of these figures
    """

    gemm_flops: float = 0.78
    gemm_bandwidth: float = 0.78
    moe_flops: float = 0.49
    moe_bandwidth: float = 0.72
    attention_prefill_flops: float = 0.56
    attention_prefill_bandwidth: float = 0.80
    attention_decode_flops: float = 0.40
    attention_decode_bandwidth: float = 0.80
    sampling_bandwidth: float = 0.50
    collective_bandwidth: float = 0.80
    collective_latency_s: float = 5e-6
    launch_s: float = 1e-6
    eager_launch_s: float = 90e-6
    label: str = UNCALIBRATED

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "label":
                continue
            if field.name.endswith("_s"):
                if not value >= 0:
                    raise ValueError(f"{field.name} must not be negative: {value}")
            elif not 0 < value <= 1:
                raise ValueError(f"{field.name} must be in (0, 1]: {value}")


#: What a device without fitted coefficients gets.
GENERIC = Efficiency()

#: The law's edge: nothing real is faster.
DATASHEET = Efficiency(
    *(1.0,) * 10,
    collective_latency_s=0.0,
    launch_s=0.0,
    eager_launch_s=0.0,
    label="datasheet peaks",
)
