"""Measured kernel times: a physical form, and how far kernels stay from it, by shape.

What was measured is kept as `log2(seconds / form)` on a grid of shapes in powers of two, so that a
shape between the measured ones, or beyond them, keeps the form's scaling. Between grid points the
logarithm is interpolated linearly in the logarithms of the shape; outside, the edge holds.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from servecast.costmodels.lines import Lines, through
from servecast.costmodels.specs import HardwareSpec

FloatArray = npt.NDArray[np.float64]

#: Between a kernel's launch and its first byte, in a captured graph.
LAUNCH_S = 2e-6

#: A small kernel in a captured graph, where none was measured: between the means of one token on
#: LLMServingSim's two GPUs (2.1 and 2.6 us, `servecast calibrate --show rtx-4090 --json` and
#: rtx-pro-6000-llmservingsim).
SMALL_KERNEL_S = 2.5e-6


@dataclass(frozen=True)
class Grid:
    """Corrections on a regular grid.

    Attributes
    ----------
    axes : ascending coordinates of each dimension (tokens, heads, ...), at least one each
    values : log2 of measured over form, shape of the axes' lengths
    """

    axes: tuple[tuple[float, ...], ...]
    values: FloatArray

    def factor(self, *coordinates: float | FloatArray) -> FloatArray:
        """Measured over form at a point, or at as many points as the arrays have.

        Bit for bit the same for a scalar and for an array that holds it.
        """
        points = np.broadcast_arrays(*(np.atleast_1d(np.asarray(c, float)) for c in coordinates))
        total = np.zeros(points[0].shape)
        cells = [_cell(axis, point) for axis, point in zip(self.axes, points, strict=True)]
        for corner in range(2 ** len(cells)):
            weight = np.ones(points[0].shape)
            index = []
            for dimension, (low, share) in enumerate(cells):
                upper = corner >> dimension & 1
                last = len(self.axes[dimension]) - 1
                index.append(np.minimum(low + upper, last))
                weight = weight * (share if upper else 1.0 - share)
            total = total + weight * self.values[tuple(index)]
        factor: FloatArray = np.exp2(total)
        return factor

    def at_last(self, coordinate: float) -> "Grid":
        """The grid of the other dimensions, at a point of the last one."""
        low, share = _cell(self.axes[-1], np.array([coordinate]))
        high = min(int(low[0]) + 1, len(self.axes[-1]) - 1)
        values = (1.0 - share) * self.values[..., int(low[0])] + share * self.values[..., high]
        return Grid(self.axes[:-1], values)

    def at(self, *coordinates: float) -> float:
        """`factor` of one point, fast."""
        corners = [(0, 1.0)]
        for (logs, stride), coordinate in zip(self._steps, coordinates, strict=True):
            place = math.log2(coordinate) if coordinate > 0 else logs[0]
            if place <= logs[0]:
                continue
            if place >= logs[-1]:
                corners = [(at + (len(logs) - 1) * stride, weight) for at, weight in corners]
                continue
            low = bisect_right(logs, place) - 1
            share = (place - logs[low]) / (logs[low + 1] - logs[low])
            corners = [
                (at + (low + upper) * stride, weight * (share if upper else 1.0 - share))
                for at, weight in corners
                for upper in (0, 1)
            ]
        return float(2.0 ** sum(self._flat[at] * weight for at, weight in corners))

    @cached_property
    def _flat(self) -> list[float]:
        flat: list[float] = self.values.ravel().tolist()
        return flat

    @cached_property
    def _steps(self) -> list[tuple[list[float], int]]:
        """Logarithms of each axis, and how far apart in `_flat` its points are."""
        found, stride = [], 1
        for axis in reversed(self.axes):
            found.append(([math.log2(x) for x in axis], stride))
            stride *= len(axis)
        return found[::-1]


def _cell(axis: tuple[float, ...], point: FloatArray) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """The grid point below, and how far to the next, in logarithms."""
    logs = np.log2(axis)
    at = np.clip(np.log2(np.maximum(point, 1e-9)), logs[0], logs[-1])
    low = np.clip(np.searchsorted(logs, at, side="right") - 1, 0, max(0, len(axis) - 2))
    if len(axis) == 1:
        return low, np.zeros(at.shape)
    share = (at - logs[low]) / (logs[low + 1] - logs[low])
    return low, share


@dataclass(frozen=True)
class Curve:
    """Seconds by size, interpolated and extrapolated in logarithms.

    Attributes
    ----------
    sizes, seconds : ascending, two at least
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Beyond the largest size time grows with it; below the smallest it does not shrink."""
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        logs = np.interp(np.log2(max(size, 1e-9)), np.log2(self.sizes), np.log2(self.seconds))
        return float(np.exp2(logs))


@dataclass(frozen=True)
class Tail:
    """What the longest contexts of a batch cost decode attention (`shape.tail_tokens`).

    A kernel reads each KV head of a sequence, a stream, at a pace of its own; only many at once
    are bound by memory.

    Attributes
    ----------
    streams : at once that memory can feed
    alone, beside_prompt : by streams of the batch, the share of the law that is seen: where
        nothing but decodes is in a kernel and they are not cut up, and beside a prompt
    """

    streams: float
    alone: Mapping[int, float]
    beside_prompt: Mapping[int, float]

    def sequences(self, kv_heads: int) -> int:
        """Sequences at once that memory can feed, of so many KV heads each on the device."""
        return max(1, round(self.streams / kv_heads))

    def share(self, streams: int, beside_prompt: bool, multiprocessors: int) -> float:
        """Straight in the logarithm of streams between those measured, in proportion beyond."""
        together = beside_prompt and bool(self.beside_prompt)
        shares = self.beside_prompt if together else self.alone
        uncut = multiprocessors and streams >= uncut_streams(multiprocessors)
        if not shares or not (together or uncut):
            return 0.0
        sizes = sorted(shares)
        at = np.interp(math.log2(streams), np.log2(sizes), [shares[size] for size in sizes])
        return float(at) * min(1.0, sizes[-1] / streams)


def uncut_streams(multiprocessors: int) -> float:
    """Streams from which FlashAttention 2 does not cut up long ones, if there are but decodes: as
    many as fill four fifths of two places a multiprocessor (its `num_splits_heuristic`)."""
    return 0.8 * 2 * multiprocessors


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What of a device was measured beside its grids, or is assumed.

    Attributes
    ----------
    all_reduce : by ranks: seconds of a message in bytes
    small_kernel_s : of a norm, a rotation, an activation, whatever the size
    small : seconds of all such kernels of one layer, by `operators.small_bytes`
    sampling : seconds of choosing tokens, by logits
    block_factor : decode attention at a block size, over the one that the grid was measured at
    query_factor : decode attention of so many query tokens a sequence, over that of one
    whole_factor : a whole layer of so many tokens, over the sum of its kernels measured alone
    tail : of uneven contexts
    """

    all_reduce: Mapping[int, Curve] = field(default_factory=dict)
    small_kernel_s: float = SMALL_KERNEL_S
    small: Curve | None = None
    sampling: Curve | None = None
    block_factor: Mapping[int, float] = field(default_factory=dict)
    query_factor: Mapping[int, float] = field(default_factory=dict)
    whole_factor: Mapping[int, float] = field(default_factory=dict)
    tail: Tail | None = None


@dataclass(frozen=True)
class Unpacking:
    """Matrices whose weights have fewer bits than they are multiplied in, by experts of that kind:
    tables have no others, and vLLM has one family of kernels (Marlin) for both.

    Attributes
    ----------
    experts : their grid
    own, theirs : matrices in 16 bits on this device and where the experts were measured, if that
        was another one; both over forms without tiles
    """

    experts: Grid
    own: Grid | None = None
    theirs: Grid | None = None

    def factor(self, m: FloatArray, n: float, k: float) -> FloatArray:
        """Over the form with the bits that are stored."""
        # The narrower side stands for what lies between an expert's matrices.
        found = self.experts.factor(m, min(n, k), UNPACKED_EXPERTS)
        if self.own is not None and self.theirs is not None:
            found = found * self.own.factor(m, n, k) / self.theirs.factor(m, n, k)
        return found


@dataclass(frozen=True)
class Kernels(Beside):
    """The kernels of one device, as corrections of its physical forms.

    On another device of the same family the forms take that one's datasheet, and the corrections
    stay.

    Attributes
    ----------
    label : what a report says of where they are from
    gemm : by "32bit", "16bit", "fp8" or "fp4": axes m, n, k
    tiles : rows of such matrices that are computed together, whether there are so many or fewer;
        1 where not given
    experts : likewise, all matrices of a mixture together: axes rows (tokens of an expert that is
        met), intermediate (numbers between its matrices), experts met
    prefill : by bits of a KV number: axes new tokens, heads, query heads a KV head
    decode : by bits of a KV number: axes sequences, context, KV heads, query heads a KV head
    packed : by bits of a KV number: all queries of a step over all its keys, masked, in place of
        the two above: axes new tokens, context, heads
    mixed : by bits of a KV number: decodes beside a prompt, in one kernel, over the same decodes
        alone: axes new tokens of the prompt, KV heads of all sequences that decode, context, query
        heads a KV head
    unpacking : of weights in fewer bits than 16
    scale : on every time, to see what an error of so much would do
    rates : name of an efficiency (`costmodels.efficiency.Efficiency`) to how much faster than
        measured what it stands for is taken to be, likewise
    """

    label: str
    gemm: Mapping[str, Grid] = field(default_factory=dict)
    tiles: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, Grid] = field(default_factory=dict)
    prefill: Mapping[int, Grid] = field(default_factory=dict)
    decode: Mapping[int, Grid] = field(default_factory=dict)
    packed: Mapping[int, Grid] = field(default_factory=dict)
    mixed: Mapping[int, Grid] = field(default_factory=dict)
    unpacking: Unpacking | None = None
    scale: float = 1.0
    rates: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Short, and other for other figures: results are kept by it."""
        digest = sha256()
        families = ("gemm", "experts", "prefill", "decode", "packed", "mixed")
        grids: dict[str, Grid | None] = {
            f"{kind} {key}": grid for kind in families for key, grid in getattr(self, kind).items()
        }
        if self.unpacking is not None:
            grids |= {f"unpacking {name}": grid for name, grid in vars(self.unpacking).items()}
        for name, grid in sorted(grids.items(), key=lambda item: item[0]):
            if grid is not None:
                digest.update(repr((name, grid.axes)).encode())
                digest.update(grid.values.tobytes())
        factors = (self.block_factor, self.query_factor, self.whole_factor)
        for table in (self.all_reduce, self.rates, self.tiles, *factors):
            digest.update(repr(sorted(table.items())).encode())
        rest = (self.small_kernel_s, self.small, self.sampling, self.scale, self.tail)
        digest.update(repr(rest).encode())
        return f"Kernels({self.label!r}, {digest.hexdigest()[:16]})"

    def slowness(self, efficiency: str) -> float:
        """On times that an efficiency stands for."""
        return self.scale / self.rates.get(efficiency, 1.0)

    def _slowness(self, kind: str, by_flops: npt.NDArray[np.bool_]) -> FloatArray:
        """Likewise, where FLOPs bind and where bytes do."""
        flops, bandwidth = (self.slowness(f"{kind}_{what}") for what in ("flops", "bandwidth"))
        return np.where(by_flops, flops, bandwidth)

    def together(self, tokens: int) -> float:
        """On the kernels of a layer that run one after another, so many tokens each; 1 unless
        wholes were measured."""
        return _by_size(self.whole_factor, tokens)

    def has_gemm(self, compute: str, weight_bits: float) -> bool:
        """Matrices of such weights were measured: those of fewer bits than the units compute in
        go through kernels of their own."""
        return compute in self.gemm and _stored(compute, weight_bits)

    def unpacks(self, hardware: HardwareSpec, compute: str, weight_bits: float) -> bool:
        """Such weights are unpacked before they are multiplied, which was measured: a device
        without units for a format takes it for storage."""
        if self.unpacking is None or "16bit" not in self.gemm or weight_bits > UNPACKED_BITS:
            return False
        return not hardware.has_units(compute) or compute in ("16bit", "int4")

    def has_experts(self, compute: str, weight_bits: float) -> bool:
        """The same of experts."""
        return compute in self.experts and _stored(compute, weight_bits)

    def all_reduce_s(self, ranks: int, message_bytes: float) -> float | None:
        """Seconds to sum a message; None for ranks that were not measured."""
        curve = self.all_reduce.get(ranks)
        if curve is None:
            return None
        return self.slowness("collective_bandwidth") * curve.at(message_bytes)

    def gemm_lines(
        self, hardware: HardwareSpec, compute: str, n: int, k: int, weight_bits: float
    ) -> Lines | None:
        """Seconds of y (m, n) = x (m, k) @ W.T by m; None where no such kernel was measured.

        Not always rising with m, because the measured ones are not.
        """
        if not self.has_gemm(compute, weight_bits):
            return self._unpacked_lines(hardware, compute, n, k, weight_bits)
        grid, tile_rows = self.gemm[compute], self.tiles.get(compute, 1)
        m = beyond(with_edges(between(grid.axes[0]), tile_rows))
        bandwidth = hardware.memory_bandwidth_bytes_per_s
        peak = hardware.peak_flops_per_s(compute)
        form = gemm_form_s(m, n, k, peak, bandwidth, weight_bits, tile_rows)
        read_s = n * k * weight_bits / 8 / bandwidth
        by_flops = 2.0 * m * n * k / peak > read_s
        seconds = form * grid.factor(m, float(n), float(k))
        wide, deep = (min(axis[-1], COLD_WIDTH) for axis in grid.axes[1:])
        few = np.array([rows for rows in grid.axes[0] if rows <= COLD_ROWS] or grid.axes[0][:1])
        tiled, whole = (
            gemm_form_s(few, wide, deep, peak, bandwidth, weight_bits, rows)
            for rows in (tile_rows, 1)
        )
        cold = float((grid.factor(few, wide, deep) * tiled / whole).min())
        seconds = within(np.asarray(grid.axes[0]), m, seconds)
        # Libraries choose a kernel by m, and a worse one often: twice the rows in half the time.
        seconds = self._slowness("gemm", by_flops) * np.maximum(seconds, read_s * cold)
        return through(m, seconds, dips=True)

    def _unpacked_lines(
        self, hardware: HardwareSpec, compute: str, n: int, k: int, weight_bits: float
    ) -> Lines | None:
        if self.unpacking is None or not self.unpacks(hardware, compute, weight_bits):
            return None
        m = beyond(between(self.gemm["16bit"].axes[0]))
        bandwidth, peak = hardware.memory_bandwidth_bytes_per_s, hardware.peak_flops_per_s()
        form = gemm_form_s(m, n, k, peak, bandwidth, weight_bits)
        read_s = n * k * weight_bits / 8 / bandwidth
        by_flops = 2.0 * m * n * k / peak > read_s
        seconds = np.maximum(form * self.unpacking.factor(m, n, k), read_s)
        return through(m, self._slowness("gemm", by_flops) * seconds, dips=True)

    def experts_lines(
        self,
        hardware: HardwareSpec,
        compute: str,
        weight_bits: float,
        hidden: int,
        intermediate: float,
        experts: int,
        chosen: int,
    ) -> Lines | None:
        """Seconds of one layer's gated experts by tokens; None where none such were measured."""
        if not self.has_experts(compute, weight_bits):
            return None
        grid = self.experts[compute]
        m = EXPERT_TOKENS
        width, met = float(hidden * intermediate), experts_met(m, experts, chosen)
        form, by_flops = experts_form_s(
            m,
            width,
            met,
            chosen,
            hardware.peak_flops_per_s(compute),
            hardware.memory_bandwidth_bytes_per_s,
            weight_bits,
        )
        seconds = form * grid.factor(m * chosen / met, float(intermediate), met)
        return through(m, self._slowness("moe", by_flops) * seconds, dips=True)

    def decode_lines(
        self,
        hardware: HardwareSpec,
        kv_bits: float,
        sequences: int,
        kv_heads: int,
        group: float,
        token_bytes: float,
        block_size: int = 0,
        query_len: int = 1,
    ) -> Lines | None:
        """Seconds of one layer by the context of all sequences together, equal ones assumed.

        None where no such kernel was measured: KV of other bits, several query tokens without a
        factor for them. `block_size` 0 is the one that was measured.
        """
        grid = self.decode.get(round(kv_bits))
        if grid is None or (query_len > 1 and not self.query_factor):
            return None
        scale = self.slowness("attention_decode_bandwidth")
        scale *= _by_size(self.block_factor, block_size)
        scale *= _by_size(self.query_factor, query_len)
        context = between(grid.axes[1])
        bandwidth = hardware.memory_bandwidth_bytes_per_s
        form = decode_form_s(float(sequences), context, token_bytes, bandwidth)
        # A kernel splits its work by sequence and KV head: more heads than were measured are
        # priced as more sequences.
        heads = min(float(kv_heads), grid.axes[2][-1])
        factor = grid.factor(sequences * kv_heads / heads, context, heads, group)
        long = min(grid.axes[1][-1], COLD_CONTEXT)
        many = min(grid.axes[0][-1], COLD_SEQUENCES)
        cold = float(grid.factor(many, long, heads, group)[0])
        read_s = sequences * context * token_bytes / bandwidth
        return through(context * sequences, scale * np.maximum(form * factor, read_s * cold))

    def packed_lines(
        self, hardware: HardwareSpec, kv_bits: float, new: int, heads: int, pair_flops: float
    ) -> Lines | None:
        """Seconds of one layer for `new` queries by the keys of the whole step; None where no
        engine that attends so was measured."""
        grid = self.packed.get(round(kv_bits))
        if grid is None:
            return None
        context = between(grid.axes[1])
        form = prefill_form_s(new * context, pair_flops, hardware.peak_flops_per_s())
        slow = self.slowness("attention_prefill_flops")
        return through(context, slow * form * grid.factor(float(new), context, float(heads)))

    def mixed_grid(self, kv_bits: float, group: float) -> Grid | None:
        """How much longer decodes take in one kernel with a prompt, by its new tokens, KV heads of
        all sequences that decode, and their mean context; None where that was not measured.

        FlashAttention 2 lets query heads of a group read their KV together in batches of decodes
        alone. Groups smaller than any measured are taken to lose less, and those of one nothing.
        """
        grid = self.mixed.get(round(kv_bits))
        if grid is None:
            return None
        least = grid.axes[-1][0]
        found = grid.at_last(group)
        if group < least:
            found = replace(found, values=found.values * math.log2(group) / math.log2(least))
        return found

    def tail_token_s(
        self, hardware: HardwareSpec, streams: int, token_bytes: float, beside_prompt: bool
    ) -> float:
        """Seconds of one layer for each of `shape.tail_tokens`; `token_bytes` of all KV heads."""
        if self.tail is None:
            return 0.0
        read_s = token_bytes / hardware.memory_bandwidth_bytes_per_s
        slow = self.slowness("attention_decode_bandwidth")
        share = self.tail.share(streams, beside_prompt, hardware.multiprocessors)
        return slow * share * read_s

    def prefill_lines(
        self,
        hardware: HardwareSpec,
        kv_bits: float,
        heads: int,
        group: float,
        pair_flops: float,
    ) -> Lines | None:
        """Seconds of one layer by attended pairs, those of one prompt.

        A chunk behind a context is priced as the prompt with as many pairs.
        """
        grid = self.prefill.get(round(kv_bits))
        if grid is None:
            return None
        new = between(grid.axes[0])
        pairs = new * (new + 1) / 2
        form = prefill_form_s(pairs, pair_flops, hardware.peak_flops_per_s())
        slow = self.slowness("attention_prefill_flops")
        return through(pairs, slow * form * grid.factor(new, float(heads), group))


def _stored(compute: str, weight_bits: float) -> bool:
    return math.isclose(weight_bits, WEIGHT_BITS[compute], rel_tol=0.15)


def _by_size(factors: Mapping[int, float], size: int) -> float:
    """Of a size, straight in logarithms between those that were measured; 1 if none were."""
    if not factors or size < 1:
        return 1.0
    sizes = sorted(factors)
    logs = [math.log2(factors[key]) for key in sizes]
    return float(np.exp2(np.interp(math.log2(size), np.log2(sizes), logs)))


#: Kernels are timed over and over on the same tensors, so small ones read from the L2 cache (50 to
#: 128 MB on these devices), faster than from memory. In a server another layer's tensors lie there.
#: So nothing is read faster than by the kernels on tensors far too large for
#: any cache: matrices of this width (0.5 GB), contexts of these sizes.
COLD_WIDTH = 16_384.0
COLD_ROWS = 64
COLD_CONTEXT = 8_192.0
COLD_SEQUENCES = 64.0

#: Bits of a weight, at most, that is unpacked to 16; and experts met, of which there are enough to
#: fill a device, as a matrix of that size does.
UNPACKED_BITS = 8.5
UNPACKED_EXPERTS = 32.0

#: Tiles of rows after which the steps between them are small.
MOST_TILES = 32

#: Stored bits of a weight that the measured kernels read, by what they compute in.
WEIGHT_BITS = {
    "32bit": 32.0,
    "16bit": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "fp4": 4.5,
    # Weights only: computed in 16 bits.
    "int4": 4.25,
}


def between(axis: tuple[float, ...]) -> FloatArray:
    """A grid's coordinates and the middles between them, in logarithms."""
    points = np.asarray(axis, float)
    middles = np.sqrt(points[1:] * points[:-1])
    found: FloatArray = np.sort(np.concatenate([points, middles]))
    return found


def beyond(points: FloatArray) -> FloatArray:
    """Points, and two far beyond the last: what goes on from there is the form's line, not that of
    the last two, which may be next to each other."""
    found: FloatArray = np.concatenate([points, points[-1] * np.array([4.0, 16.0])])
    return found


def within(axis: FloatArray, points: FloatArray, seconds: FloatArray) -> FloatArray:
    """Seconds at points between two of an axis, no less and no more than at those two: where an
    edge is not, its form must not make one."""
    own = np.interp(axis, points, seconds)
    after = np.clip(np.searchsorted(axis, points), 1, len(axis) - 1)
    low, high = (side(own[after - 1], own[after]) for side in (np.minimum, np.maximum))
    inside = (points >= axis[0]) & (points <= axis[-1])
    found: FloatArray = np.where(inside, np.clip(seconds, low, high), seconds)
    return found


def with_edges(points: FloatArray, rows: int) -> FloatArray:
    """Points, and where another tile of so many rows begins, as long as tiles are a good part."""
    if rows == 1:
        return points
    most = min(points[-2], float(rows * MOST_TILES))
    edges = np.arange(rows, most + 1, rows)
    found: FloatArray = np.unique(np.concatenate([points, edges, edges + 1]))
    return found


def gemm_form_s(
    m: FloatArray,
    n: float | FloatArray,
    k: float | FloatArray,
    peak_flops_per_s: float,
    bytes_per_s: float,
    weight_bits: float = 16.0,
    tile_rows: int = 1,
) -> FloatArray:
    """y (m, n) = x (m, k) @ W.T at the datasheet's peaks: compute or bytes, and a launch."""
    flops = 2.0 * np.ceil(m / tile_rows) * tile_rows * n * k
    moved = n * k * weight_bits / 8 + 2.0 * m * (n + k)
    form: FloatArray = LAUNCH_S + np.maximum(flops / peak_flops_per_s, moved / bytes_per_s)
    return form


def without_tiles(grid: Grid, compute: str, tile_rows: int, hardware: HardwareSpec) -> Grid:
    """The same times of a device's matrices, as corrections of the form that has no tiles.

    Whether a tile binds depends on the device's ridge, so these hold on another one, and those not.
    """
    m, n, k = np.meshgrid(*(np.asarray(axis) for axis in grid.axes), indexing="ij")
    tiled = tiled_over_whole(m, n, k, compute, tile_rows, hardware)
    return replace(grid, values=grid.values + np.log2(tiled))


def tiled_over_whole(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    compute: str,
    tile_rows: int,
    hardware: HardwareSpec,
) -> FloatArray:
    """The form of matrices with tiles over that without."""
    peak, bandwidth = hardware.peak_flops_per_s(compute), hardware.memory_bandwidth_bytes_per_s
    tiled, whole = (
        gemm_form_s(m, n, k, peak, bandwidth, WEIGHT_BITS[compute], rows) for rows in (tile_rows, 1)
    )
    return tiled / whole


def decode_form_s(
    sequences: float | FloatArray,
    context: FloatArray,
    token_bytes: float | FloatArray,
    bytes_per_s: float,
) -> FloatArray:
    """Every sequence reads its context once; `token_bytes` are those of a token and layer."""
    return LAUNCH_S + sequences * context * token_bytes / bytes_per_s


def prefill_form_s(
    pairs: FloatArray, pair_flops: float | FloatArray, peak_flops_per_s: float
) -> FloatArray:
    """Attended pairs at the datasheet's peak."""
    return LAUNCH_S + pairs * pair_flops / peak_flops_per_s


#: Tokens between which the time of experts is straight.
EXPERT_TOKENS = np.exp2(np.arange(0.0, 15.5, 0.5))


def experts_met(
    m: FloatArray, experts: float | FloatArray, chosen: float | FloatArray
) -> FloatArray:
    """Of E experts, those that one of m tokens chooses, if all are as likely: E (1 - (1 - c/E)^m).

    At least `chosen`, whatever rounding says.
    """
    met: FloatArray = experts * (1.0 - (1.0 - chosen / experts) ** m)
    return np.maximum(met, chosen)


def experts_form_s(
    m: FloatArray,
    width: float | FloatArray,
    met: FloatArray,
    chosen: float | FloatArray,
    peak_flops_per_s: float,
    bytes_per_s: float,
    weight_bits: float = 16.0,
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """(seconds, whether FLOPs bind) of gated experts, three matrices of `width` numbers each."""
    flops_s = 6.0 * m * chosen * width / peak_flops_per_s
    bytes_s = 3.0 * met * width * weight_bits / 8 / bytes_per_s
    form: FloatArray = 2 * LAUNCH_S + np.maximum(flops_s, bytes_s)
    return form, flops_s > bytes_s
