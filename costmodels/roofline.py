"""The roofline of a GPU: each operator takes as long as its FLOPs or its bytes, and a launch.

Williams, Waterman and Patterson, Commun. ACM 52(4), 2009, with the peaks scaled by measured
efficiencies. A step is: GEMMs over all its tokens, attention by chunk and by decode, collectives,
logits and sampling, and the host. FLOPs and bytes in the answer are what the model needs; padding
to a CUDA graph's size costs time, not work.
"""

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from servecast.costmodels.collectives import all_gather_s
from servecast.costmodels.efficiency import GENERIC, Efficiency
from servecast.costmodels.graphs import padded_tokens
from servecast.costmodels.kernels import Grid, Kernels
from servecast.costmodels.kv_format import BFLOAT16, KvFormat
from servecast.costmodels.lines import Lines, straight, through
from servecast.costmodels.operators import (
    attention,
    communication_s,
    elementwise_s,
    gemm,
    kernel_type,
    kernels,
    small_bytes,
    sublayers,
    window_pairs,
)
from servecast.costmodels.sampling import (
    GREEDY,
    GREEDY_BYTES,
    Sampling,
    filter_s,
    random_bytes,
)
from servecast.costmodels.shape import NS_PER_S, StepCost, StepShape
from servecast.costmodels.specs import ONE_DEVICE, HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.versions import LATEST, Version
from servecast.costmodels.weights import (
    Matrix,
    check_parallel,
    kv_heads,
    layer_matrices,
    lm_head,
    weight_bits,
)

#: Below this a list comprehension beats numpy's fixed cost.
VECTOR_STEPS = 16

#: Kernels of a layer beside GEMMs and attention: two norms, rotation, KV write, activation, and
#: what else a compiled graph leaves on its own.
SMALL_KERNELS = 6

#: Bits of a KV number of kernels that have a tail: FlashAttention 2 takes no others.
TAIL_BITS = 16

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
        host_sequence_s: float = 0.0,
        host_layer_s: float | None = None,
        block_size: int = 0,
        async_scheduling: bool = True,
        cuda_graph_sizes: tuple[int, ...] = (),
        measured: Kernels | None = None,
        sampling: Sampling = GREEDY,
        version: Version = LATEST,
    ) -> None:
        """Fold everything that no shape changes into coefficients.

        Parameters
        ----------
        host_s, host_sequence_s : scheduling, input preparation and output of a step, and of each
            sequence in it; hidden behind the device where `async_scheduling` holds
        host_layer_s : what launching a layer's kernels one by one takes; None: as `efficiency` has
            it. Hidden behind the device, but where the host is the device (a CPU)
        block_size : of the KV cache, where `measured` tells them apart; 0 is the measured one
        cuda_graph_sizes : ascending, `graphs.capture_sizes`; empty means enforce_eager
        measured : kernel times; what they do not cover is priced by `efficiency`
        sampling : of all requests, in the sampler of vLLM's `version`

        Raises InputError for a split that vLLM refuses.
        """
        check_parallel(model, parallel)
        self.model, self.hardware, self.parallel = model, hardware, parallel
        self.efficiency = efficiency
        self._sizes = cuda_graph_sizes
        self._attention = attention(model, hardware, parallel, kv, efficiency)
        self._measured = measured
        self._kv = kv
        self._sampling, self._version = sampling, version
        self._block_size = block_size
        self._matrices = [
            (
                matrix.group in MOE_GROUPS,
                gemm(model, matrix, hardware, efficiency),
                self._matrix_lines(matrix),
            )
            for matrix in layer_matrices(model, parallel.tensor)
        ]
        head = lm_head(model, parallel.tensor)
        self._head = gemm(model, head, hardware, efficiency)
        self._head_lines = self._matrix_lines(head)
        self._prefill_lines = self._chunk_lines()
        self._kv_heads = kv_heads(model, parallel.tensor)
        self._mixed = self._mixed_grid()
        self._tails: dict[tuple[int, bool], float] = {}
        self.tail_sequences = self._tail_sequences()
        self._elementwise_s = elementwise_s(model, hardware, parallel.tensor, efficiency)
        self._launch_s = kernels(model) * efficiency.launch_s
        self._small_s = 0.0
        if measured is not None:
            # Measured kernels have their launch in them; the small ones beside are counted.
            unmeasured = sum(matrix.layers for _, matrix, lines in self._matrices if lines is None)
            self._launch_s = unmeasured * efficiency.launch_s
            small_s = measured.scale * measured.small_kernel_s
            self._small_s = model.num_layers * SMALL_KERNELS * small_s
        eager_s = 0.0 if cuda_graph_sizes else kernels(model) * efficiency.eager_launch_s
        if host_layer_s is not None and not cuda_graph_sizes:
            eager_s = model.num_layers * host_layer_s
        # What the device must wait out, and what comes on top of it: of a step, of a sequence.
        self._floor = host_s + eager_s, host_sequence_s
        self._host = (0.0, 0.0) if async_scheduling else (host_s, host_sequence_s)
        if hardware.kind == "cpu":
            self._floor, self._host = (0.0, 0.0), self._floor
        self._by_tokens: dict[int, tuple[float, float, float, float, float]] = {}
        self._by_sampled: dict[int, tuple[float, float, float, float, float]] = {}
        self._by_decodes: dict[int, RooflineDecode] = {}
        self._by_sequences: dict[tuple[int, int], Lines] = {}
        self._by_queries: dict[int, Lines | None] = {}

    def step(self, shape: StepShape) -> StepCost:
        """Cost of any step that has at least one token."""
        prefills, decodes, decode_tokens, context, sampled = shape[:5]
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
            if prefills and self._mixed is not None and decode_tokens == decodes:
                new = tokens - decode_tokens
                decode_s *= self._mixed.at(new, decodes * self._kv_heads, context / decodes)
            if self.tail_sequences:
                each_s = self.tail_token_s(decodes, bool(prefills))
                if prefills and decodes <= self.tail_sequences:
                    # So few are not bound by memory, but by the pace of each.
                    decode_s = max(decode_s, self.tail_sequences * context / decodes * each_s)
                decode_s += shape.decode_tail_tokens * each_s
            flops += decode_flops
            moved += decode_bytes
        if prefills:
            packed_s = self._packed_s(shape, tokens)
            if packed_s is not None:
                # Where a step attends as one, its tokens share what it takes.
                decode_s = packed_s * decode_tokens / tokens
                prefill_s = packed_s - decode_s
        device_s = gemm_s + prefill_s + decode_s + moe_s + collective_s + sampling_s
        host_s = self.host_s(decodes + len(prefills), device_s)
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

    def host_s(self, sequences: int, device_s: float) -> float:
        """Seconds that the host adds to a step of so many sequences."""
        (step_s, each_s), (floor_s, floor_each_s) = self._host, self._floor
        return max(step_s + each_s * sequences, floor_s + floor_each_s * sequences - device_s)

    def _matrix_lines(self, matrix: Matrix) -> Lines | None:
        if self._measured is None:
            return None
        if matrix.copies > 1:
            return self._experts_lines(matrix)
        compute = kernel_type(self.model, matrix.group)
        bits = weight_bits(self.model, matrix.group)
        return self._measured.gemm_lines(self.hardware, compute, matrix.n, matrix.k, bits)

    def _experts_lines(self, matrix: Matrix) -> Lines | None:
        """Measured together: all of it stands at the first matrix."""
        model, moe = self.model, self.model.moe
        if self._measured is None or moe is None or not model.gated_mlp:
            return None
        both = self._measured.experts_lines(
            self.hardware,
            kernel_type(model, matrix.group),
            weight_bits(model, matrix.group),
            model.hidden_size,
            moe.intermediate_size / self.parallel.tensor,
            moe.num_experts,
            moe.experts_per_token,
        )
        return both if both is None or matrix.name.endswith("_up") else straight(0.0, 0.0)

    def _chunk_lines(self) -> Lines | None:
        model, tensor = self.model, self.parallel.tensor
        if self._measured is None or model.mla is not None:
            return None
        heads = model.num_attention_heads // tensor
        group = heads / kv_heads(model, tensor)
        return self._measured.prefill_lines(
            self.hardware, self._kv.bits, heads, group, self._attention.pair_flops
        )

    def _packed_lines(self, tokens: int) -> Lines | None:
        """One layer's attention of a step by its keys, where all queries meet all of them."""
        if self._measured is None or not self._measured.packed or self.model.mla is not None:
            return None
        found = self._by_queries.get(tokens)
        if found is None:
            heads = self.model.num_attention_heads // self.parallel.tensor
            found = self._by_queries[tokens] = self._measured.packed_lines(
                self.hardware, self._kv.bits, tokens, heads, self._attention.pair_flops
            )
        return found

    def _packed_s(self, shape: StepShape, tokens: int) -> float | None:
        """Attention of a step with prompts, where all its queries meet all its keys."""
        packed = self._packed_lines(tokens)
        if packed is None:
            return None
        a, decodes = self._attention, shape.decodes
        read = shape.decode_context_tokens + sum(new + before for new, before in shape.prefills)
        seconds = a.full_layers * packed.at(read)
        if a.sliding_layers:
            most = (decodes + len(shape.prefills)) * a.window + tokens
            seconds += a.sliding_layers * packed.at(min(read, most))
        fixed_s = max(shape.decode_tokens * a.token_s, decodes * a.sequence_s)
        fixed_s += sum(max(new * a.token_s, a.sequence_s) for new, _ in shape.prefills)
        return self._together(tokens) * seconds + fixed_s

    def _mixed_grid(self) -> Grid | None:
        if self._measured is None or self.model.mla is not None:
            return None
        group = self.model.num_attention_heads // self.parallel.tensor / self._kv_heads
        return self._measured.mixed_grid(self._kv.bits, group)

    def _tail_sequences(self) -> int:
        measured = self._measured
        tail = None if measured is None else measured.tail
        if measured is None or tail is None or self.model.mla is not None:
            return 0
        if round(self._kv.bits) != TAIL_BITS or measured.packed:
            return 0
        return tail.sequences(self._kv_heads)

    def tail_token_s(self, decodes: int, beside_prompt: bool = False) -> float:
        """Seconds for each of `shape.tail_tokens`.

        Sliding layers see no context longer than their window, and wait for none.
        """
        known = self._tails.get((decodes, beside_prompt))
        if known is None:
            known = 0.0
            if self._measured is not None and self.tail_sequences:
                a, streams = self._attention, decodes * self._kv_heads
                known = a.full_layers * self._measured.tail_token_s(
                    self.hardware, streams, a.token_bytes, beside_prompt
                )
            self._tails[decodes, beside_prompt] = known
        return known

    def _communication_s(self, tokens: int) -> float:
        """All-reduces and hand-overs, the former measured where they were."""
        message = tokens * self.model.hidden_size * self.model.dtype_bytes
        ranks, reduce_s = self.parallel.tensor, None
        if self._measured is not None:
            reduce_s = self._measured.all_reduce_s(ranks, message)
        parallel = self.parallel if reduce_s is None else Parallelism(1, self.parallel.pipeline)
        seconds = communication_s(self.model, self.hardware, parallel, self.efficiency, tokens)
        return seconds + sublayers(self.model) * (reduce_s or 0.0)

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
        for is_moe, matrix, lines in self._matrices:
            seconds[is_moe] += matrix.layers * lines.at(run) if lines else matrix.seconds(run)
            matrix_flops, matrix_bytes = matrix.work(tokens)
            flops += matrix_flops
            moved += matrix_bytes
        dense_s = self._together(run) * (seconds[0] + self._small_seconds(run)) + self._launch_s
        collective_s = self._communication_s(run)
        stages = self.parallel.pipeline
        priced = (dense_s, seconds[1], collective_s, flops / stages, moved / stages)
        self._by_tokens[tokens] = priced
        return priced

    def _together(self, tokens: int) -> float:
        """What kernels of a layer take one after another, over what they take alone."""
        return 1.0 if self._measured is None else self._measured.together(tokens)

    def _small_seconds(self, tokens: int) -> float:
        """Norms, rotation, activation and KV write of all layers."""
        curve = None if self._measured is None else self._measured.small
        if self._measured is None or curve is None:
            return max(tokens * self._elementwise_s, self._small_s)
        layer_s = curve.at(tokens * small_bytes(self.model, self.parallel.tensor))
        return self._measured.scale * self.model.num_layers * layer_s

    def _sampling_s(self, rows: int) -> float:
        """Choosing a token from each row of logits. What was measured of it is greedy."""
        vocab, own = self.model.vocab_size, self._sampling
        logits = rows * vocab
        bandwidth = self.hardware.memory_bandwidth_bytes_per_s
        seconds = logits * GREEDY_BYTES / (bandwidth * self.efficiency.sampling_bandwidth)
        if self._measured is not None and self._measured.sampling is not None:
            slow = self._measured.slowness("sampling_bandwidth")
            seconds = slow * self._measured.sampling.at(logits)
        passes = logits * random_bytes(own, self.hardware, self._version)
        seconds += passes / (bandwidth * self.efficiency.gemm_bandwidth)
        if own.filter is not None:
            seconds += filter_s(own.filter, rows, vocab, self.hardware, self._version)
        return seconds

    def _price_sampled(self, sampled: int) -> tuple[float, float, float, float, float]:
        """(lm_head, sampling, gather seconds; FLOPs, bytes) for so many rows of logits."""
        priced = (0.0, 0.0, 0.0, 0.0, 0.0)
        if sampled:
            logits = sampled * self.model.vocab_size
            gather_s = all_gather_s(
                logits * self.model.dtype_bytes,
                self.parallel.tensor,
                self.hardware.link_bytes_per_s * self.efficiency.collective_bandwidth,
                self.efficiency.collective_latency_s,
            )
            priced = (
                self._head_lines.at(sampled)
                if self._head_lines
                else self._head.seconds(sampled) + self.efficiency.launch_s,
                self._sampling_s(sampled),
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
        lines = self._prefill_lines
        pair_s = pairs * a.pair_s if lines is None else self._together(new) * lines.at(pairs)
        read_s = read * a.read_s
        seconds = a.full_layers * (pair_s if pair_s > read_s else read_s)
        layer_pairs, layer_reads = a.full_layers * pairs, a.full_layers * read
        if a.sliding_layers:
            pairs = window_pairs(new, before, a.window)
            read = min(read, a.window + new)
            pair_s = pairs * a.pair_s if lines is None else self._together(new) * lines.at(pairs)
            seconds += a.sliding_layers * max(pair_s, read * a.read_s)
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

    def _decode_lines(self, decodes: int, decode_tokens: int) -> Lines:
        """Decode attention of all layers, by the context of all sequences together.

        Sliding layers read min(context, decodes x window) tokens: the mean context stands for
        each one's.
        """
        found = self._by_sequences.get((decodes, decode_tokens))
        if found is None:
            found = self._measured_decodes(decodes, decode_tokens)
            if found is None:
                found = self._generic_decodes(decodes, decode_tokens)
            self._by_sequences[decodes, decode_tokens] = found
        return found

    def _generic_decodes(self, decodes: int, decode_tokens: int) -> Lines:
        a = self._attention
        token_s = max(decode_tokens / decodes * a.decode_pair_s, a.decode_read_s)
        fixed_s = max(decode_tokens * a.token_s, decodes * a.sequence_s)
        full_s, window_s, window = a.full_layers * token_s, a.sliding_layers * token_s, a.window
        if not window_s:
            return straight(fixed_s, full_s)
        passed = decodes * window
        return Lines((passed,), (fixed_s, fixed_s + window_s * passed), (full_s + window_s, full_s))

    def _measured_decodes(self, decodes: int, decode_tokens: int) -> Lines | None:
        """From measured kernels, where there are some of this kind."""
        a, model, tensor = self._attention, self.model, self.parallel.tensor
        if self._measured is None or model.mla is not None:
            return None
        heads = kv_heads(model, tensor)
        group = model.num_attention_heads // tensor / heads
        layer = self._packed_lines(decode_tokens) or self._measured.decode_lines(
            self.hardware,
            self._kv.bits,
            decodes,
            heads,
            group,
            a.token_bytes,
            self._block_size,
            -(-decode_tokens // decodes),
        )
        if layer is None:
            return None
        knots = {0.0, *layer.ends, 2.0 * layer.ends[-1]}
        if a.sliding_layers:
            knots.add(float(decodes * a.window))
        counts = np.array(sorted(knots))
        seconds = a.full_layers * layer.at_all(counts)
        if a.sliding_layers:
            seconds += a.sliding_layers * layer.at_all(np.minimum(counts, decodes * a.window))
        fixed_s = max(decode_tokens * a.token_s, decodes * a.sequence_s)
        together = self._together(decode_tokens)
        return through(counts, together * np.maximum(seconds, 0.0) + fixed_s)

    def _price_decodes(
        self, decodes: int, decode_tokens: int, context: int
    ) -> tuple[float, float, float]:
        """(seconds, FLOPs, bytes) of attention for sequences that decode."""
        a = self._attention
        seconds = self._decode_lines(decodes, decode_tokens).at(context)
        seen = min(context, decodes * a.window)
        reads = a.full_layers * context + a.sliding_layers * seen
        flops = reads * decode_tokens / decodes * a.decode_pair_flops
        flops += decode_tokens * a.token_flops
        moved = reads * a.token_bytes + decodes * a.sequence_bytes
        stages = self.parallel.pipeline
        return seconds, flops / stages, moved / stages


class RooflineDecode:
    """Steps of `decodes` sequences, on straight lines over their context: a `DecodeCost`.

    Scalars and arrays go through the same additions and multiplications in the same order, so
    both round to the same nanosecond (`round` and `np.rint` take halves to even).
    """

    __slots__ = (
        "_bends",
        "_decodes",
        "_first",
        "_floor_ns",
        "_lines",
        "_roofline",
        "_tail_token_ns",
    )

    def __init__(self, roofline: Roofline, decodes: int) -> None:
        empty = roofline.step(StepShape((), decodes, decodes, 0, decodes))
        # What the host adds where the device is not waited for, and what it takes at least.
        step_s, each_s = roofline._host
        floor_s, floor_each_s = roofline._floor
        fixed_s = sum(empty[:7]) + (step_s + each_s * decodes)
        lines = roofline._decode_lines(decodes, decodes)
        # The empty step holds the first line's offset already.
        first = lines.offsets[0]
        self._roofline = roofline
        self._decodes = decodes
        self._lines = Lines(
            lines.ends,
            tuple((fixed_s + (offset - first)) * NS_PER_S for offset in lines.offsets),
            tuple(slope * NS_PER_S for slope in lines.slopes),
        )
        self._bends = bool(lines.ends)
        self._first = self._lines.offsets[0], self._lines.slopes[0]
        self._floor_ns = (floor_s + floor_each_s * decodes) * NS_PER_S
        self._tail_token_ns = roofline.tail_token_s(decodes) * NS_PER_S

    def steps_ns(
        self, context_tokens: int, steps: int, tail_tokens: int = 0
    ) -> list[int] | npt.NDArray[np.int64]:
        """Nanoseconds of `steps` steps, the first of which reads `context_tokens`."""
        lines, floor, bent = self._lines, self._floor_ns, False
        more = self._tail_token_ns * tail_tokens
        last = context_tokens + (steps - 1) * self._decodes
        fixed, rate = self._first
        if self._bends:
            at = bisect_right(lines.ends, context_tokens)
            fixed, rate = lines.offsets[at], lines.slopes[at]
            bent = at < len(lines.ends) and last >= lines.ends[at]
        fixed += more
        if steps > VECTOR_STEPS:
            context = np.arange(context_tokens, last + 1, self._decodes)
            ns = lines.at_all(context, more) if bent else fixed + rate * context
            rounded: npt.NDArray[np.int64] = np.rint(np.maximum(ns, floor)).astype(np.int64)
            return rounded
        contexts = range(context_tokens, last + 1, self._decodes)
        if bent:
            return [round(max(lines.at(c, more), floor)) for c in contexts]
        if fixed + rate * context_tokens >= floor:
            return [round(fixed + rate * c) for c in contexts]
        return [round(max(fixed + rate * c, floor)) for c in contexts]

    def cost(self, context_tokens: int, tail_tokens: int = 0) -> StepCost:
        """The same step by part."""
        n = self._decodes
        shape = StepShape((), n, n, context_tokens, n, decode_tail_tokens=tail_tokens)
        return self._roofline.step(shape)
