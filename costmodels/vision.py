"""Vision towers: their weights are loaded and counted; what they compute is not simulated.

vLLM runs a tower once at start, on the largest item that the model takes; that, too, needs
memory.

A tower is a ViT (layers of attention and an MLP), tables, and a projector into the text width.
Configs name its parts in many ways; what a class fixes in code stands in the tables here
(configuration classes of transformers 4.57 and 5.23).
"""

from typing import NamedTuple

from servecast.costmodels.reading import Config, block, items, real, whole, word

#: Three matrices in the MLP.
GATED = frozenset({"pixtral", "qwen2_5_vl", "gemma4_vision"})

#: Towers that take images of up to so many tokens after merging (vLLM's log: "Encoder cache will
#: be initialized with a budget of 16384 tokens").
LARGEST_ITEM = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), 16_384),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), 16_384),
}

#: Learned positions: a table of so many rows for each of two axes.
POSITION_ROWS = {"gemma4_vision": 2 * 10_240}

CHANNELS = 3

#: Neighbouring patches on a side that become one token, at most.
MOST_MERGED = 64


class Tower(NamedTuple):
    """What a tower takes.

    Attributes
    ----------
    parameters : its weights and its projector's
    item_tokens : text tokens of the largest item, 0 where it is small
    profile_numbers : numbers alive at the peak of one run on that item
    """

    parameters: int = 0
    item_tokens: int = 0
    profile_numbers: int = 0


def vision_tower(outer: Config, text_width: int) -> Tower:
    """The tower of a config; `text_width` is the hidden size that it projects into.

    At the peak a layer holds its MLP's middle in each of its matrices, its input and output.
    """
    vision = block(outer, "vision_config")
    if not vision:
        return Tower()
    parameters = vision_parameters(outer, text_width)
    kind = word(vision, "model_type") or word(outer, "model_type")
    tokens = LARGEST_ITEM.get(kind, 0)
    merge = _number(vision, "spatial_merge_size") or 1
    width, middle = _width(vision), _middle(vision)
    matrices = 3 if _gated(kind, vision) else 2
    per_patch = matrices * middle + 2 * width
    return Tower(parameters, tokens, tokens * merge**2 * per_patch)


def vision_parameters(outer: Config, text_width: int) -> int:
    """Weights of the tower and its projector; 0 without one."""
    vision = block(outer, "vision_config")
    layers = _number(vision, "depth", "num_hidden_layers", "vt_num_hidden_layers")
    width = _width(vision)
    if not layers or not width:
        return 0
    kind = word(vision, "model_type")
    middle = _middle(vision)
    matrices = 3 if _gated(kind, vision) else 2
    tower = layers * (4 * width**2 + matrices * width * middle)
    tables = POSITION_ROWS.get(kind, 0) + _number(vision, "init_pos_emb_height") ** 2
    patch = _number(vision, "patch_size", "spatial_patch_size") or 14
    embedding = CHANNELS * patch**2 * max(1, _number(vision, "temporal_patch_size")) * width
    return tower + tables * width + embedding + _projector(outer, vision, kind, width, text_width)


def _width(vision: Config) -> int:
    return _number(vision, "embed_dim", "hidden_size", "vt_hidden_size")


def _middle(vision: Config) -> int:
    given = _number(vision, "intermediate_size", "vt_intermediate_size")
    return given or round(_width(vision) * real(vision, "mlp_ratio", 4.0))


def _gated(kind: str, vision: Config) -> bool:
    return kind in GATED or vision.get("hidden_act") == "silu"


def _projector(outer: Config, vision: Config, kind: str, width: int, text_width: int) -> int:
    """From the tower's width, after merging neighbouring patches, into the text's."""
    merge = _number(vision, "spatial_merge_size") or _number(outer, "spatial_merge_size")
    if not merge:
        kernel = [side for side in items(vision, "merge_kernel_size") if isinstance(side, int)]
        merge = kernel[0] if kernel and 0 < kernel[0] < MOST_MERGED else 1
    merged = width * merge**2
    if kind == "pixtral":
        return merged * width + width * text_width + text_width**2
    if kind == "clip_vision_model":
        return width * text_width + text_width**2
    if kind == "llama4_vision_model":
        middle = _number(vision, "projector_output_dim") or 4096
        return 4 * width * middle + middle**2 + middle * text_width
    if merged == width:
        return width * text_width
    if kind in ("qwen2_vl", "qwen2_vl_vision"):
        out = _number(vision, "hidden_size") or text_width
    else:
        out = _number(vision, "out_hidden_size") or text_width
    mergers = 1 + len(items(vision, "deepstack_visual_indexes"))
    return mergers * (merged**2 + merged * out)


def _number(config: Config, *keys: str) -> int:
    """The first whole number among `keys`; 0 where there is none."""
    return whole(config, *keys, default=0, low=0)
