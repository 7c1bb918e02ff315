"""What vLLM logs as `Model loading took`: weights as kernels and the allocator hold them.

Beside the weights there are tables made at loading, the padding that some kernels ask for, and
what PyTorch's allocator cannot hand out again.
"""

from math import ceil

from servecast.costmodels.specs import ONE_DEVICE, HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.weights import (
    Matrix,
    check_parallel,
    layer_matrices,
    padded_vocab,
    weight_bits,
)

MIB = 2**20

#: PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp): an allocation of at least
#: `LARGE` gets a segment of its own in steps of `SEGMENT`, and a rest of up to `KEPT` is counted
#: with it rather than split off.
LARGE, SEGMENT, KEPT = 10 * MIB, 2 * MIB, 1 * MIB

#: What mxfp4 experts are padded to, (hidden, intermediate), by the kernel that a GPU gets:
#: Marlin below compute capability 9, Triton's swizzled layout from there (vLLM 0.19,
#: fused_moe/oracle/mxfp4.py; 256 for Triton's hidden size is seen in logs, not in that table).
MXFP4_PADDING = {False: (256, 128), True: (256, 64)}
HOPPER = 9.0


def loaded_bytes(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism = ONE_DEVICE,
    *,
    vision: bool = True,
) -> int:
    """Bytes on the fullest device when the model is loaded, the vision tower's if `vision`.

    Of a pipeline that is a stage with an embedding or a head, and one layer more than others
    where stages do not divide the layers.
    """
    check_parallel(model, parallel)
    stage = ceil(model.num_layers / parallel.pipeline) / model.num_layers
    layers = sum(
        matrix.layers * _layer_bytes(model, matrix, hardware)
        for matrix in layer_matrices(model, parallel.tensor)
    )
    table = padded_vocab(model, parallel.tensor) * model.hidden_size * model.dtype_bytes
    tables = 1 if model.tie_word_embeddings or parallel.pipeline > 1 else 2
    positions = model.learned_positions * model.hidden_size * model.dtype_bytes
    tower = model.vision_parameters * model.dtype_bytes / parallel.tensor if vision else 0.0
    rope = model.rope_table_numbers * model.dtype_bytes
    return round(stage * layers + tables * allocated(table) + positions + tower + rope)


def allocated(size: float) -> float:
    """Bytes that an allocation counts for.

    >>> allocated(31.5 * MIB) / MIB, allocated(24.5 * MIB) / MIB
    (32.0, 24.5)
    """
    if size < LARGE:
        return size
    segment = ceil(size / SEGMENT) * SEGMENT
    return segment if segment - size <= KEPT else size


def _layer_bytes(model: ModelSpec, matrix: Matrix, hardware: HardwareSpec) -> float:
    """One layer's matrix; the experts of a layer are one tensor."""
    n, k = matrix.n, matrix.k
    quantization = model.quantization
    if matrix.group == "experts" and quantization and quantization.method == "mxfp4":
        hidden, width = MXFP4_PADDING[hardware.compute_capability >= HOPPER]
        up = matrix.name.endswith("_up")
        halves = 2 if up and model.gated_mlp else 1
        n = halves * _up_to(n // halves, width) if up else _up_to(n, hidden)
        k = _up_to(k, hidden) if up else _up_to(k, width)
    return allocated(n * k * matrix.copies * weight_bits(model, matrix.group) / 8)


def _up_to(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple
