"""Memory of an SRAM device: weights where they were placed, and KV in all that is left.

Nothing is profiled and nothing kept back: activations stream, and there are no graphs. Figures of
the plan are those of the fullest wafer, or of a chip.
"""

from servecast.costmodels.kv_layout import kv_bytes_per_token
from servecast.costmodels.memory import (
    Doubt,
    EngineMemory,
    MemoryPlan,
    draft_kv_bytes_per_token,
    draft_weight_bytes,
    layout_of,
    max_model_len,
)
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.wafer import Placement

#: vLLM's null block, which its scheduler counts and no request gets.
NULL_BLOCKS = 1


def plan_sram(
    model: ModelSpec, hardware: HardwareSpec, engine: EngineMemory, placement: Placement
) -> MemoryPlan:
    """Account for a placed model; a request that is longer than the pool is a shortfall."""
    layout = layout_of(model, engine)
    tokens = placement.kv_tokens
    longest = max_model_len(model, engine)
    total, weights = hardware.memory_bytes, round(placement.unit_bytes)
    whole = kv_bytes_per_token(model, engine.kv) + draft_kv_bytes_per_token(engine)
    a_token = whole / placement.units
    draft = draft_weight_bytes(model, hardware, engine)
    left = total - weights
    if engine.kv_cache_memory_bytes is not None:
        left = min(left, engine.kv_cache_memory_bytes)
        tokens = min(tokens, int(left / a_token))
    if engine.num_gpu_blocks_override is not None:
        tokens = min(tokens, (engine.num_gpu_blocks_override - NULL_BLOCKS) * layout.block_size)
    blocks = tokens // layout.block_size + NULL_BLOCKS
    missing = max(0, longest - tokens)
    sure = Doubt(0.0, 0.0, 0.0, 0.0, 0.0, graphs_deducted=False)
    return MemoryPlan(
        weights_bytes=weights,
        draft_bytes=draft // placement.units,
        activation_bytes=0,
        graph_bytes=0,
        other_bytes=0,
        kv_bytes=left,
        total_bytes=total,
        budget_bytes=total,
        kv_bytes_per_token=a_token,
        layout=layout,
        num_gpu_blocks=blocks,
        blocks=blocks,
        tokens=tokens,
        max_concurrency=tokens / longest,
        shortfall_bytes=round(missing * a_token),
        refused_bytes=0,
        loading_bytes=0,
        after_start_bytes=0,
        free_bytes=total,
        max_model_len=longest,
        longest_tokens=min(longest, tokens),
        doubt=sure,
        kv_interval=(left, left),
        tokens_interval=(tokens, tokens),
    )
