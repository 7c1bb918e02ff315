"""The roofline of a GPU: each operator takes as long as its FLOPs or its bytes, and a launch.

Williams, Waterman and Patterson, Commun. ACM 52(4), 2009, with the peaks scaled by measured
efficiencies. A step is: GEMMs over all its tokens, attention by chunk and by decode, collectives,
logits and sampling, and the host. FLOPs and bytes in the answer are what the model needs; padding
to a CUDA graph's size costs time, not work.
"""

import numpy as np
import numpy.typing as npt

from servecast.costmodels.collectives import all_gather_s
from servecast.costmodels.efficiency import GENERIC, Efficiency
from servecast.costmodels.graphs import padded_tokens
from servecast.costmodels.kv_format import BFLOAT16, KvFormat
from servecast.costmodels.operators import (
    attention,
    communication_s,
    elementwise_s,
    gemm,
    kernels,
    window_pairs,
)
from servecast.costmodels.shape import NS_PER_S, StepCost, StepShape
from servecast.costmodels.specs import ONE_DEVICE, HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.weights import check_parallel, layer_matrices, lm_head

#: Below this a list comprehension beats numpy's fixed cost.
VECTOR_STEPS = 16

#: Traffic of one logit: written in 16 bits, read, written and read in fp32, read to choose.
SAMPLING_BYTES_PER_LOGIT = 2 + 2 + 4 + 4 + 4

MOE_GROUPS = ("router", "experts", "shared_expert")


class Roofline:
    """Prices steps of one replica: a `CostModel`.

    Times are those of a step that passes all pipeline stages, one after another; `flops` and
    `bytes` are of one device.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        hardware: HardwareSpec,
        parallel: Parallelism = ONE_DEVICE,
        kv: KvFormat = BFLOAT16,
        efficiency: Efficiency = GENERIC,
        host_s: float = 0.0,
        async_scheduling: bool = True,
        cuda_graph_sizes: tuple[int, ...] = (),
    ) -> None:
        """Fold everything that no shape changes into coefficients.

        Parameters
        ----------
        host_s : scheduling, input preparation and output of a step; hidden behind the device
            where `async_scheduling` holds
        cuda_graph_sizes : ascending, `graphs.capture_sizes`; empty means enforce_eager

        Raises InputError for a split that vLLM refuses.
        """
        check_parallel(model, parallel)
        self.model, self.hardware, self.parallel = model, hardware, parallel
        self.efficiency = efficiency
        self._sizes = cuda_graph_sizes
        self._attention = attention(model, hardware, parallel, kv, efficiency)
        self._matrices = [
            (matrix.group in MOE_GROUPS, gemm(model, matrix, hardware, efficiency))
            for matrix in layer_matrices(model, parallel.tensor)
        ]
        head = lm_head(model, parallel.tensor)
        self._head = gemm(model, head, hardware, efficiency)
        self._elementwise_s = elementwise_s(model, hardware, parallel.tensor, efficiency)
        self._launch_s = kernels(model) * efficiency.launch_s
        eager_s = 0.0 if cuda_graph_sizes else kernels(model) * efficiency.eager_launch_s
        # What the device must wait out, and what comes on top of it.
        self._floor_s = host_s + eager_s
        self._host_s = 0.0 if async_scheduling else host_s
        self._by_tokens: dict[int, tuple[float, float, float, float, float]] = {}
        self._by_sampled: dict[int, tuple[float, float, float, float, float]] = {}
        self._by_decodes: dict[int, RooflineDecode] = {}

    def step(self, shape: StepShape) -> StepCost:
        """Cost of any step that has at least one token."""
        prefills, decodes, decode_tokens, context, sampled = shape
        tokens = decode_tokens
        for new, _ in prefills:
            tokens += new
        gemms = self._by_tokens.get(tokens) or self._price_tokens(tokens)
        head = self._by_sampled.get(sampled) or self._price_sampled(sampled)
        gemm_s, moe_s, collective_s, flops, moved = gemms
        head_s, sampling_s, gather_s, head_flops, head_bytes = head
        gemm_s += head_s
        collective_s += gather_s
        flops += head_flops
        moved += head_bytes
        prefill_s = decode_s = 0.0
        for new, before in prefills:
            chunk_s, chunk_flops, chunk_bytes = self._price_chunk(new, before)
            prefill_s += chunk_s
            flops += chunk_flops
            moved += chunk_bytes
        if decodes:
            decode_s, decode_flops, decode_bytes = self._price_decodes(
                decodes, decode_tokens, context
            )
            flops += decode_flops
            moved += decode_bytes
        device_s = gemm_s + prefill_s + decode_s + moe_s + collective_s + sampling_s
        host_s = max(self._host_s, self._floor_s - device_s)
        return StepCost(
            gemm_s,
            prefill_s,
            decode_s,
            moe_s,
            collective_s,
            sampling_s,
            0.0,
            host_s,
            0.0,
            flops,
            moved,
        )

    def decode(self, decodes: int) -> "RooflineDecode":
        """Cost of steps in which `decodes` sequences decode one token each."""
        priced = self._by_decodes.get(decodes)
        if priced is None:
            priced = self._by_decodes[decodes] = RooflineDecode(self, decodes)
        return priced

    def _price_tokens(self, tokens: int) -> tuple[float, float, float, float, float]:
        """(GEMM, MoE, collective seconds; FLOPs, bytes) of the layers for so many tokens."""
        if tokens < 1:
            raise ValueError(f"a step needs at least one token: {tokens}")
        run = padded_tokens(tokens, self._sizes)
        seconds = [0.0, 0.0]
        flops = moved = 0.0
        for is_moe, matrix in self._matrices:
            seconds[is_moe] += matrix.seconds(run)
            matrix_flops, matrix_bytes = matrix.work(tokens)
            flops += matrix_flops
            moved += matrix_bytes
        dense_s = seconds[0] + run * self._elementwise_s + self._launch_s
        collective_s = communication_s(
            self.model, self.hardware, self.parallel, self.efficiency, run
        )
        stages = self.parallel.pipeline
        priced = (dense_s, seconds[1], collective_s, flops / stages, moved / stages)
        self._by_tokens[tokens] = priced
        return priced

    def _price_sampled(self, sampled: int) -> tuple[float, float, float, float, float]:
        """(lm_head, sampling, gather seconds; FLOPs, bytes) for so many rows of logits."""
        priced = (0.0, 0.0, 0.0, 0.0, 0.0)
        if sampled:
            logits = sampled * self.model.vocab_size
            bandwidth = self.hardware.memory_bandwidth_bytes_per_s
            gather_s = all_gather_s(
                logits * self.model.dtype_bytes,
                self.parallel.tensor,
                self.hardware.link_bytes_per_s * self.efficiency.collective_bandwidth,
                self.efficiency.collective_latency_s,
            )
            priced = (
                self._head.seconds(sampled) + self.efficiency.launch_s,
                logits
                * SAMPLING_BYTES_PER_LOGIT
                / (bandwidth * self.efficiency.sampling_bandwidth),
                gather_s,
                *self._head.work(sampled),
            )
        self._by_sampled[sampled] = priced
        return priced

    def _price_chunk(self, new: int, before: int) -> tuple[float, float, float]:
        """(seconds, FLOPs, bytes) of attention for `new` tokens after `before` in KV.

        Token i of a chunk attends to before + i tokens: new * before + new (new + 1) / 2 pairs.
        """
        a = self._attention
        pairs = new * before + new * (new + 1) // 2
        read = before + new
        pair_s = pairs * a.pair_s
        read_s = read * a.read_s
        seconds = a.full_layers * (pair_s if pair_s > read_s else read_s)
        layer_pairs, layer_reads = a.full_layers * pairs, a.full_layers * read
        if a.sliding_layers:
            pairs = window_pairs(new, before, a.window)
            read = min(read, a.window + new)
            seconds += a.sliding_layers * max(pairs * a.pair_s, read * a.read_s)
            layer_pairs += a.sliding_layers * pairs
            layer_reads += a.sliding_layers * read
        seconds += max(new * a.token_s, a.sequence_s)
        flops = layer_pairs * a.pair_flops + new * a.token_flops
        stages = self.parallel.pipeline
        return (
            seconds,
            flops / stages,
            (layer_reads * a.token_bytes + a.sequence_bytes) / stages,
        )

    def _decode_rates(self, decodes: int, decode_tokens: int) -> tuple[float, float, float, float]:
        """Decode attention is linear in context: (fixed s, s a token, s a window token, window).

        The last rate is for sliding layers, which read min(context, decodes x window) tokens:
        the mean context stands for each one's.
        """
        a = self._attention
        pair_s = decode_tokens / decodes * a.decode_pair_s
        token_s = max(pair_s, a.decode_read_s)
        fixed_s = max(decode_tokens * a.token_s, decodes * a.sequence_s)
        return fixed_s, a.full_layers * token_s, a.sliding_layers * token_s, decodes * a.window

    def _price_decodes(
        self, decodes: int, decode_tokens: int, context: int
    ) -> tuple[float, float, float]:
        """(seconds, FLOPs, bytes) of attention for sequences that decode."""
        a = self._attention
        fixed_s, token_s, window_s, window = self._decode_rates(decodes, decode_tokens)
        seen = min(context, window)
        seconds = fixed_s + token_s * context + window_s * seen
        reads = a.full_layers * context + a.sliding_layers * seen
        flops = reads * decode_tokens / decodes * a.decode_pair_flops
        flops += decode_tokens * a.token_flops
        moved = reads * a.token_bytes + decodes * a.sequence_bytes
        stages = self.parallel.pipeline
        return seconds, flops / stages, moved / stages


class RooflineDecode:
    """Steps of `decodes` sequences, linear in their context: a `DecodeCost`.

    Scalars and arrays go through the same additions and multiplications in the same order, so
    both round to the same nanosecond (`round` and `np.rint` take halves to even).
    """

    __slots__ = ("_decodes", "_fixed_ns", "_floor_ns", "_roofline", "_token_ns", "_window")

    def __init__(self, roofline: Roofline, decodes: int) -> None:
        empty = roofline.step(StepShape((), decodes, decodes, 0, decodes))
        host_s = roofline._host_s
        fixed_s = sum(empty[:7]) + host_s
        _, token_s, window_s, window = roofline._decode_rates(decodes, decodes)
        self._roofline = roofline
        self._decodes = decodes
        self._fixed_ns = fixed_s * NS_PER_S
        self._token_ns = token_s * NS_PER_S
        self._window = (window_s * NS_PER_S, window)
        self._floor_ns = roofline._floor_s * NS_PER_S

    def steps_ns(self, context_tokens: int, steps: int) -> list[int] | npt.NDArray[np.int64]:
        """Nanoseconds of `steps` steps, the first of which reads `context_tokens`."""
        fixed, rate, floor = self._fixed_ns, self._token_ns, self._floor_ns
        window_rate, window = self._window
        last = context_tokens + (steps - 1) * self._decodes
        if steps > VECTOR_STEPS:
            context = np.arange(context_tokens, last + 1, self._decodes)
            ns = fixed + rate * context
            if window_rate:
                ns = ns + window_rate * np.minimum(context, window)
            rounded: npt.NDArray[np.int64] = np.rint(np.maximum(ns, floor)).astype(np.int64)
            return rounded
        contexts = range(context_tokens, last + 1, self._decodes)
        if window_rate:
            return [
                round(max(fixed + rate * c + window_rate * min(c, window), floor)) for c in contexts
            ]
        if fixed + rate * context_tokens >= floor:
            return [round(fixed + rate * c) for c in contexts]
        return [round(max(fixed + rate * c, floor)) for c in contexts]

    def cost(self, context_tokens: int) -> StepCost:
        """The same step by part."""
        decodes = self._decodes
        return self._roofline.step(StepShape((), decodes, decodes, context_tokens, decodes))
