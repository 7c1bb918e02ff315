"""What drafts: its layers, how often they run in a round, and the memory that it takes.

Seven methods of vLLM's `--speculative-config`. A draft model is a whole model of its own. EAGLE
(arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840) are one decoder layer on the target's hidden
states, MTP (DeepSeek-V3, arXiv 2412.19437) is a layer like the target's own; all run once a
drafted token, and share the target's embedding. Medusa (arXiv 2401.10774) has a head for each
position, all of which run at once. N-gram and suffix look drafts up in text, on the host.
"""

from dataclasses import dataclass, replace

from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import KvFormat
from servecast.costmodels.kv_layout import kv_bytes_per_token
from servecast.costmodels.loading import loaded_bytes
from servecast.costmodels.specs import ONE_DEVICE, HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.versions import LATEST, Version
from servecast.costmodels.weights import Matrix, padded_vocab

METHODS = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "ngram", "suffix")

#: Methods without weights.
LOOKUPS = ("ngram", "suffix")

#: What vLLM's scheduler tells apart: whether drafts write KV, and whether the last block of a
#: prefix hit is computed again for them.
SCHEDULED_AS = {
    "draft_model": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle",
    "mtp": "eagle",
    "medusa": "ngram",
    "ngram": "ngram",
    "suffix": "ngram",
}

#: vLLM 0.32 schedules ahead of the output with these alone (config/vllm.py).
ASYNC_METHODS = ("draft_model", "eagle", "eagle3", "mtp")

#: Decoder layers of a head of EAGLE's; published ones have one.
MOST_HEAD_LAYERS = 4

#: Tokens that an EAGLE-3 head knows (`draft_vocab_size` of the published heads for Llama 3.1).
EAGLE3_VOCABULARY = 32_000

#: Hidden states that an EAGLE-3 head takes from the target: of a low, a middle and a high layer.
EAGLE3_STATES = 3


@dataclass(frozen=True)
class Drafter:
    """What proposes tokens for one target.

    Attributes
    ----------
    widths : candidates at each depth of a draft: a chain of k has k times 1, a tree more
    model : the layers that run once a depth; None for a lookup and for Medusa
    parallel : devices that it is split over
    tables : vocabulary-sized matrices of its own
    shares : its layers are the target's first ones: no weights and no KV of its own
    at_once : one pass proposes all depths (`parallel_drafting`)
    """

    method: str
    widths: tuple[int, ...]
    model: ModelSpec | None = None
    parallel: Parallelism = ONE_DEVICE
    tables: int = 0
    shares: bool = False
    at_once: bool = False

    @property
    def scheduled_as(self) -> str:
        """vLLM's scheduler's view: see `SCHEDULED_AS`."""
        return SCHEDULED_AS[self.method]


def drafter_of(
    method: str,
    target: ModelSpec,
    widths: tuple[int, ...],
    *,
    model: ModelSpec | None = None,
    layers: int | None = None,
    parallel: Parallelism = ONE_DEVICE,
    at_once: bool = False,
) -> Drafter:
    """The drafter of a method for a target.

    Parameters
    ----------
    model : the draft model, or the head of EAGLE; None for a head like those published
    layers : a self-draft of the target's first layers, in place of a model

    Raises InputError for what does not go together: a vocabulary that is not the target's, MTP for
    a model that has no such layers, a model where none is used or none where one is needed.
    """
    if method not in METHODS:
        raise InputError(f"method: {method!r} is not one of {', '.join(METHODS)}")
    if model is not None and method not in ("draft_model", "eagle", "eagle3"):
        raise InputError(f"model: {method} takes no model of its own")
    if layers is not None and (method != "draft_model" or model is not None):
        raise InputError("draft_layers: a self-draft is a draft_model without a model")
    if at_once and method not in ("draft_model", "eagle", "eagle3"):
        raise InputError(f"parallel_drafting: not with {method}")
    if method == "draft_model":
        if layers is not None:
            return Drafter(
                method, widths, _first_layers(target, layers), parallel, 0, True, at_once
            )
        if model is None:
            raise InputError("model: a draft_model needs one (or draft_layers)")
        if model.vocab_size != target.vocab_size:
            raise InputError(
                f"model: {model.name} has a vocabulary of {model.vocab_size:,}, {target.name} one "
                f"of {target.vocab_size:,}: draft and target must share it"
            )
        tables = 1 if model.tie_word_embeddings else 2
        return Drafter(method, widths, model, parallel, tables, at_once=at_once)
    if method in ("eagle", "eagle3"):
        head = model or _one_layer(target, f"{method} head of {target.name}")
        if head.num_layers > MOST_HEAD_LAYERS:
            raise InputError(
                f"model: {head.name} has {head.num_layers} layers: a head has one, a whole model "
                "is a draft_model"
            )
        if head.vocab_size != target.vocab_size:
            raise InputError(
                f"model: {head.name} has a vocabulary of {head.vocab_size:,}, {target.name} one "
                f"of {target.vocab_size:,}: draft and target must share it"
            )
        if head.hidden_size != target.hidden_size:
            raise InputError(
                f"model: {head.name} reads hidden states of {head.hidden_size}, those of "
                f"{target.name} have {target.hidden_size}"
            )
        if method == "eagle":
            return Drafter(
                method, widths, replace(head, fusion_inputs=2), parallel, at_once=at_once
            )
        own = replace(
            head,
            fusion_inputs=EAGLE3_STATES,
            attention_inputs=2,
            vocab_size=head.draft_vocab_size or min(EAGLE3_VOCABULARY, target.vocab_size),
        )
        return Drafter(method, widths, own, parallel, 1, at_once=at_once)
    if method == "mtp":
        if not target.mtp_layers:
            raise InputError(f"method: {target.name} has no MTP layers")
        return Drafter(method, widths, _mtp_layer(target), parallel)
    return Drafter(method, widths, None, parallel)


def _first_layers(target: ModelSpec, layers: int) -> ModelSpec:
    if not 1 <= layers < target.num_layers:
        raise InputError(
            f"draft_layers: {layers} is not below the {target.num_layers} of {target.name}"
        )
    slides = 0 < target.sliding_layers < target.attention_layers
    if target.linear is not None or slides or target.moe is not None:
        raise InputError(f"draft_layers: {target.name} has layers of several kinds")
    return replace(
        target,
        name=f"first {layers} layers of {target.name}",
        num_layers=layers,
        attention_layers=layers,
        sliding_layers=min(layers, target.sliding_layers),
        dense_layers=layers,
    )


def _one_layer(target: ModelSpec, name: str) -> ModelSpec:
    """A dense decoder layer of the target's width, in 16 bits, with full attention."""
    latent = target.mla is not None
    return replace(
        target,
        name=name,
        num_layers=1,
        attention_layers=1,
        dense_layers=1,
        sliding_layers=0,
        sliding_window=0,
        chunked_attention=False,
        full_head_dim=0,
        full_key_value_heads=0,
        values_are_keys=False,
        gated_attention=False,
        head_dim=target.hidden_size // target.num_attention_heads if latent else target.head_dim,
        learned_positions=0,
        rope_table_numbers=0,
        vision_parameters=0,
        vision_item_tokens=0,
        vision_profile_numbers=0,
        moe=None,
        mla=None,
        linear=None,
        quantization=None,
    )


def _mtp_layer(target: ModelSpec) -> ModelSpec:
    """A layer like the target's last, its experts and quantisation included."""
    dense = replace(
        _one_layer(target, f"MTP layer of {target.name}"),
        quantization=target.quantization,
        mla=target.mla,
        head_dim=target.head_dim,
        gated_attention=target.gated_attention,
        fusion_inputs=2,
    )
    if target.moe is None:
        return dense
    return replace(dense, moe=replace(target.moe, layers=1), dense_layers=0)


def drafter_bytes(
    drafter: Drafter, target: ModelSpec, hardware: HardwareSpec, version: Version = LATEST
) -> int:
    """Weights that the drafter adds to each device."""
    if drafter.method == "medusa":
        matrices = medusa_matrices(drafter, target)
        return sum(matrix.parameters for matrix in matrices) * target.dtype_bytes
    if drafter.model is None or drafter.shares:
        return 0
    return loaded_bytes(
        drafter.model,
        hardware,
        drafter.parallel,
        vision=False,
        tables=drafter.tables,
        version=version,
    )


def drafter_kv_bytes_per_token(drafter: Drafter, fmt: KvFormat) -> float:
    """KV that the drafter's own layers add for a token, on one device."""
    if drafter.model is None or drafter.shares:
        return 0.0
    return kv_bytes_per_token(drafter.model, fmt, drafter.parallel.tensor)


def medusa_matrices(drafter: Drafter, target: ModelSpec) -> tuple[Matrix, ...]:
    """A residual block and a head over the vocabulary for each depth."""
    heads, hidden = len(drafter.widths), target.hidden_size
    tensor = drafter.parallel.tensor
    return (
        Matrix("medusa_block", hidden, hidden, heads, "fusion"),
        Matrix("medusa_head", padded_vocab(target, tensor), hidden, heads, "lm_head"),
    )
