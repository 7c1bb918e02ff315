"""SRAM devices: layers on regions of a wafer or of many chips, tokens streaming through them.

A model is placed once and stays. Each layer gets a region of cores in proportion to the number of
its weights; layers that follow one another lie on one wafer as far as it reaches, and a model that
is larger is cut between layers. The vocabulary's tables are cut over the vocabulary, a part on each
wafer. A device whose cores are chips (Groq) is one fabric of as many chips as there are.

A token passes the layers one after another. In a region it takes

    max(FLOPs / peak of the region, bytes / bandwidth of the region)
        + fixed + hops x side x hop_s + words x (hidden / side) x word_s

after the alpha-beta-hops of PLMR (He et al., WaferLLM, arXiv 2502.04563): collectives cross a
region `hops` times its side, and move `words` times what a core holds of the hidden state. Between
wafers it takes `link_s`, and the hidden state over the link. The four constants are fitted
(`servecast.calibration.fabric`).

While a layer works on one token, the layers before it work on the next: several sequences are in
flight, and none slows another until the stages are full. From there on the slowest stage decides:
a step takes as long as a token does, or as the slowest stage needs for all of its tokens. A
prompt's tokens stream in the same way; those that nothing is sampled from are waited for by nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import KvFormat
from servecast.costmodels.kv_layout import kv_bytes_per_token
from servecast.costmodels.shape import NS_PER_S, StepCost, StepShape
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.weights import layer_matrices, lm_head, padded_vocab, weight_bits

#: Collectives of a layer of experts beside those of any layer, as a share of them: to the experts
#: and back. An assumption.
MOE_COLLECTIVES = 0.5

#: No device of the kind is built of more.
MOST_UNITS = 100_000


@dataclass(frozen=True)
class FabricConstants:
    """What is fitted: see the module. `hops` and `words` have no unit."""

    fixed_s: float
    hops: float
    words: float
    link_s: float


@dataclass(frozen=True)
class Stage:
    """A layer, or the head, on its region.

    Attributes
    ----------
    weight_bytes : that it holds; `active_bytes` of them are read for a token
    flops : of one token, attention aside
    kv_bytes : of one token of context
    pair_flops : of one token of context
    places : cores of its region
    collectives : in those of a dense layer
    """

    weight_bytes: float
    active_bytes: float
    flops: float
    kv_bytes: float
    pair_flops: float
    places: float
    collectives: float

    @property
    def side(self) -> float:
        """Cores along an edge of the region."""
        return max(1.0, sqrt(self.places))


@dataclass(frozen=True)
class Placement:
    """A model on its wafers.

    Attributes
    ----------
    units : wafers, or chips
    stages : in the order in which a token passes them
    crossings : times that a token leaves a wafer, the way back to the first included
    unit_bytes : weights on the fullest unit
    kv_tokens : that fit beside them
    """

    units: int
    stages: tuple[Stage, ...]
    crossings: int
    unit_bytes: float
    kv_tokens: int


class Terms(NamedTuple):
    """Latency of a token without context: `const_s` and the constants times these."""

    const_s: float
    fixed: float
    hops: float
    words: float
    link: float

    def seconds(self, constants: FabricConstants) -> float:
        """Of one token."""
        return (
            self.const_s
            + self.fixed * constants.fixed_s
            + self.hops * constants.hops
            + self.words * constants.words
            + self.link * constants.link_s
        )


class _Layer(NamedTuple):
    parameters: float
    weight_bytes: float
    active_bytes: float
    flops: float
    kv_bytes: float
    pair_flops: float
    collectives: float


def place(
    model: ModelSpec,
    hardware: HardwareSpec,
    kv: KvFormat,
    units: int | None = None,
    *,
    tokens: int = 1,
    beside_bytes: float = 0.0,
    beside_kv_bytes: float = 0.0,
) -> Placement:
    """Put a model on wafers or chips.

    Parameters
    ----------
    units : how many there are; None for as many as are needed
    tokens : KV that must fit at least
    beside_bytes, beside_kv_bytes : of a drafter, and of a token in it, spread over the units

    Raises InputError where the model does not fit, naming how many it needs.
    """
    if hardware.cores < 1 or not hardware.hop_s or not hardware.word_s:
        raise InputError(
            f"hardware {hardware.name}: an SRAM device needs cores, hop_ns and word_ns"
        )
    layers = _layers(model, kv)
    beside = (_table_bytes(model) + beside_bytes, beside_kv_bytes)
    if hardware.cores > 1 and units is not None and units > len(layers):
        raise InputError(
            f"wafers: {model.name} is cut between its {len(layers)} layers: it lies on "
            f"{len(layers)} x {hardware.name} at most, {units} given"
        )
    if units is not None:
        found = _placed(model, hardware, layers, beside, units)
        if found is not None and found.kv_tokens >= 1:
            return found
        whole = sum(layer.weight_bytes for layer in layers) + beside[0]
        needed = _least(model, hardware, layers, beside, 1)
        raise InputError(
            f"wafers: {model.name} has weights of {whole / 1e9:,.0f} GB and needs {needed} x "
            f"{hardware.name} ({hardware.memory_bytes / 1e9:,.3g} GB each), {units} given"
        )
    needed = _least(model, hardware, layers, beside, tokens)
    found = _placed(model, hardware, layers, beside, needed)
    assert found is not None
    return found


def _least(
    model: ModelSpec,
    hardware: HardwareSpec,
    layers: Sequence[_Layer],
    beside: tuple[float, float],
    tokens: int,
) -> int:
    """The fewest units that hold weights and so many tokens of KV."""
    whole = sum(layer.weight_bytes for layer in layers) + beside[0]
    most = MOST_UNITS if hardware.cores == 1 else len(layers)
    for units in range(max(1, ceil(whole / hardware.memory_bytes)), most + 1):
        found = _placed(model, hardware, layers, beside, units)
        if found is not None and found.kv_tokens >= tokens:
            return units
    largest = max(layer.weight_bytes for layer in layers)
    raise InputError(
        f"wafers: {model.name} does not fit any number of {hardware.name} "
        f"({hardware.memory_bytes / 1e9:,.3g} GB each): its {len(layers)} layers are of up to "
        f"{largest / 1e9:,.3g} GB, and {tokens:,} tokens of KV are to fit"
    )


def _placed(
    model: ModelSpec,
    hardware: HardwareSpec,
    layers: Sequence[_Layer],
    beside: tuple[float, float],
    units: int,
) -> Placement | None:
    """The placement on so many units, with bytes, and bytes a token, `beside` the layers; None
    where it does not fit."""
    one_fabric = hardware.cores == 1
    capacity = float(hardware.memory_bytes) * (units if one_fabric else 1)
    cores = hardware.cores * (units if one_fabric else 1)
    parts = 1 if one_fabric else units
    if parts > len(layers):
        return None
    each, each_token = beside[0] / parts, beside[1] / parts
    groups = _cut([layer.weight_bytes for layer in layers], parts, capacity - each)
    if groups is None:
        return None
    head = lm_head(model)
    head_bytes = head.parameters * weight_bits(model, "lm_head") / 8 / parts
    stages: list[Stage] = []
    fullest, tokens = 0.0, float("inf")
    most_parameters = 0.0
    for first, last in groups:
        mine = layers[first:last]
        weights = sum(layer.weight_bytes for layer in mine)
        # By parameters, not bytes: a head that is left in 16 bits gets no larger beside layers in
        # 8. The part of the embedding holds memory and computes nothing.
        parameters = sum(layer.parameters for layer in mine) + head.parameters / parts
        most_parameters = max(most_parameters, parameters)
        stages += [
            Stage(
                layer.weight_bytes,
                layer.active_bytes,
                layer.flops,
                layer.kv_bytes,
                layer.pair_flops,
                cores * layer.parameters / parameters,
                layer.collectives,
            )
            for layer in mine
        ]
        fullest = max(fullest, weights + each)
        a_token = sum(layer.kv_bytes for layer in mine) + each_token
        if a_token:
            tokens = min(tokens, (capacity - weights - each) / a_token)
    flops = 2.0 * head.parameters / parts
    places = cores * (head.parameters / parts) / most_parameters
    stages.append(Stage(head_bytes, head_bytes, flops, 0.0, 0.0, places, 1.0))
    crossings = 0 if parts == 1 else parts
    each_unit = fullest / (units if one_fabric else 1)
    return Placement(units, tuple(stages), crossings, each_unit, max(0, int(min(tokens, 1e12))))


def on_a_share(placement: Placement, share: float) -> Placement:
    """The same with its regions cut to a share of their cores: a drafter beside its target."""
    stages = tuple(replace(stage, places=share * stage.places) for stage in placement.stages)
    return replace(placement, stages=stages)


def _cut(sizes: Sequence[float], parts: int, capacity: float) -> list[tuple[int, int]] | None:
    """Contiguous runs, as even as they can be; None where one is larger than the capacity."""

    def runs(most: float) -> list[tuple[int, int]] | None:
        found: list[tuple[int, int]] = []
        start, held = 0, 0.0
        for i, size in enumerate(sizes):
            # Leave a layer for each part that is still to come.
            if i > start and (held + size > most or len(sizes) - i < parts - len(found)):
                found.append((start, i))
                start, held = i, 0.0
            held += size
        found.append((start, len(sizes)))
        return found if len(found) <= parts and _largest(sizes, found) <= most else None

    low, high = max(max(sizes), sum(sizes) / parts), sum(sizes)
    for _ in range(60):
        middle = (low + high) / 2
        if runs(middle) is None:
            low = middle
        else:
            high = middle
    best = runs(high)
    edges = np.concatenate([[0.0], np.cumsum(sizes)])
    ends = np.searchsorted(edges, edges[-1] * np.arange(1, parts + 1) / parts - 1e-6)
    even = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    whole = all(last > first for first, last in even)
    if best is not None and whole and _largest(sizes, even) <= _largest(sizes, best) * (1 + 1e-9):
        # As even as the largest allows, rather than the last one small.
        best = even
    if best is None or len(best) < parts or _largest(sizes, best) > capacity:
        return None
    return best


def _largest(sizes: Sequence[float], groups: Sequence[tuple[int, int]]) -> float:
    return max(sum(sizes[first:last]) for first, last in groups)


def _table_bytes(model: ModelSpec) -> float:
    tables = 1 if model.tie_word_embeddings else 2
    return float(tables * padded_vocab(model) * model.hidden_size * model.dtype_bytes)


def _layers(model: ModelSpec, kv: KvFormat) -> list[_Layer]:
    """One after another; kinds of layers are spread as models usually have them."""
    n = model.num_layers
    parameters, weights, active, flops, collectives = np.zeros((5, n))
    collectives += 1.0
    attends = _spread(model.attention_layers, n)
    for matrix in layer_matrices(model):
        size = matrix.n * matrix.k * weight_bits(model, matrix.group) / 8
        where = np.ones(n, bool)
        if matrix.group == "attention":
            where = attends
        elif matrix.group == "linear_mixer":
            where = ~attends
        elif matrix.group == "mlp":
            where = np.arange(n) < matrix.layers
        elif matrix.group in ("experts", "shared_expert", "router"):
            where = np.arange(n) >= n - matrix.layers
        elif matrix.group == "fusion":
            where = np.arange(n) < 1
        chosen = model.moe.experts_per_token if matrix.copies > 1 and model.moe else 1
        parameters[where] += matrix.n * matrix.k * matrix.copies
        weights[where] += size * matrix.copies
        active[where] += size * chosen
        flops[where] += 2.0 * matrix.n * matrix.k * chosen
        if matrix.group == "router":
            collectives[where] += MOE_COLLECTIVES
    kv_layer = kv_bytes_per_token(model, kv) / max(1, model.attention_layers)
    heads = model.num_attention_heads * model.head_dim
    return [
        _Layer(
            float(parameters[i]),
            float(weights[i]),
            float(active[i]),
            float(flops[i]),
            kv_layer if attends[i] else 0.0,
            4.0 * heads if attends[i] else 0.0,
            float(collectives[i]),
        )
        for i in range(n)
    ]


def _spread(count: int, n: int) -> npt.NDArray[np.bool_]:
    """`count` of n, at equal distances, the last among them."""
    marks = np.zeros(n, bool)
    if count:
        marks[np.ceil(np.arange(1, count + 1) * n / count).astype(int) - 1] = True
    return marks


def stage_seconds(stage: Stage, hardware: HardwareSpec, compute: str) -> tuple[float, float]:
    """(seconds of a token without context, seconds a token of context) of the region's work."""
    share = stage.places / hardware.cores
    peak = hardware.peak_flops_per_s(compute) * share
    bandwidth = hardware.memory_bandwidth_bytes_per_s * share
    work_s = max(stage.flops / peak, stage.active_bytes / bandwidth)
    return work_s, max(stage.pair_flops / peak, stage.kv_bytes / bandwidth)


def terms_of(model: ModelSpec, hardware: HardwareSpec, placement: Placement) -> Terms:
    """What the latency of a token is made of."""
    hidden = model.hidden_size
    message_s = hidden * model.dtype_bytes / hardware.link_bytes_per_s
    stages = placement.stages
    return Terms(
        const_s=sum(stage_seconds(stage, hardware, model.compute)[0] for stage in stages)
        + placement.crossings * message_s,
        fixed=float(len(stages)),
        hops=sum(s.collectives * s.side for s in stages) * hardware.hop_s,
        words=sum(s.collectives * hidden / s.side for s in stages) * hardware.word_s,
        link=float(placement.crossings),
    )


class Wafer:
    """Prices steps of a placed model: a `CostModel`.

    Parameters
    ----------
    stages : number of slots that a token in each stage would fill
    """

    #: Contexts lie beside the compute; nothing waits for the longest.
    tail_sequences = 0

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareSpec,
        placement: Placement,
        constants: FabricConstants,
    ) -> None:
        self.placement = placement
        seconds = [stage_seconds(stage, hardware, model.compute) for stage in placement.stages]
        hidden = model.hidden_size
        collective_s = [
            stage.collectives
            * (
                constants.hops * stage.side * hardware.hop_s
                + constants.words * hidden / stage.side * hardware.word_s
            )
            for stage in placement.stages
        ]
        message_s = hidden * model.dtype_bytes / hardware.link_bytes_per_s
        self._link_s = placement.crossings * (constants.link_s + message_s)
        self._collective_s = sum(collective_s)
        self._work_s = sum(work for work, _ in seconds) + constants.fixed_s * len(seconds)
        #: latency of a token, and what each token of its context adds
        self.latency_s = self._work_s + self._collective_s + self._link_s
        self.context_s = sum(context for _, context in seconds)
        #: stages that may be the slowest: seconds of a token, and of each token of its context
        self.slowest = sorted(
            {
                (work + constants.fixed_s + collective, context)
                for (work, context), collective in zip(seconds, collective_s, strict=True)
            }
        )
        self._flops = sum(stage.flops for stage in placement.stages) / placement.units
        self._bytes = sum(stage.active_bytes for stage in placement.stages) / placement.units
        self._pair_flops = sum(stage.pair_flops for stage in placement.stages) / placement.units
        self._kv_bytes = sum(stage.kv_bytes for stage in placement.stages) / placement.units

    @property
    def stage_s(self) -> float:
        """The slowest stage's time of a token without context."""
        return max(work for work, _ in self.slowest)

    @property
    def slots(self) -> float:
        """Tokens in flight when the slowest stage is always busy."""
        return self.latency_s / self.stage_s

    def step(self, shape: StepShape) -> StepCost:
        """Cost of any step that has at least one token."""
        prefills, decodes, queries, context, sampled = shape[:5]
        prompt = sum(new for new, _ in prefills)
        pairs = sum(new * before + new * (new + 1) // 2 for new, before in prefills)
        each = context / decodes if decodes else 0.0
        verified = queries * each
        far = max([each, *(before + (new + 1) / 2 for new, before in prefills)])
        seconds = full_s = max(
            (prompt + queries) * work + context_s * (pairs + verified)
            for work, context_s in self.slowest
        )
        if decodes or sampled:
            stage_s = max(work + context_s * far for work, context_s in self.slowest)
            latency_s = self.latency_s + self.context_s * far
            # Drafts of a sequence follow one another through every stage.
            follow_s = (queries / decodes - 1) * stage_s if decodes else 0.0
            seconds = max(full_s, latency_s + follow_s)
            if sampled > decodes:
                # The last of a prompt's tokens has all stages before it.
                seconds = max(seconds, full_s + latency_s - stage_s)
        return self._parts(seconds, prompt + queries, float(pairs), float(verified), far)

    def _parts(
        self, total_s: float, tokens: int, pairs: float, verified: float, far: float
    ) -> StepCost:
        """The time of a step shared out as a token's latency is."""
        attention_s = self.context_s * far
        unit = total_s / (self.latency_s + attention_s)
        read = pairs + verified
        share = pairs / read if read else 0.0
        return StepCost(
            gemm_s=unit * self._work_s,
            attention_prefill_s=unit * attention_s * share,
            attention_decode_s=unit * attention_s * (1 - share),
            collective_s=unit * (self._collective_s + self._link_s),
            flops=tokens * self._flops + read * self._pair_flops,
            bytes=tokens * self._bytes + read * self._kv_bytes,
        )

    def decode(self, decodes: int) -> "WaferDecode":
        """Cost of steps in which `decodes` sequences decode one token each."""
        return WaferDecode(self, decodes)


class WaferDecode:
    """Steps of so many decodes: a `DecodeCost`."""

    def __init__(self, wafer: Wafer, decodes: int) -> None:
        self._wafer = wafer
        self._decodes = decodes

    def steps_ns(
        self, context_tokens: int, steps: int, tail_tokens: int = 0
    ) -> npt.NDArray[np.int64]:
        """Nanoseconds of `steps` steps, the first of which reads `context_tokens`."""
        wafer, n = self._wafer, self._decodes
        context = context_tokens + n * np.arange(steps)
        seconds = wafer.latency_s + wafer.context_s * (context / n)
        for work, context_s in wafer.slowest:
            seconds = np.maximum(seconds, n * work + context_s * context)
        ns: npt.NDArray[np.int64] = np.rint(seconds * NS_PER_S).astype(np.int64)
        return ns

    def cost(self, context_tokens: int, tail_tokens: int = 0) -> StepCost:
        """The same step by part."""
        n = self._decodes
        return self._wafer.step(StepShape((), n, n, context_tokens, n))
