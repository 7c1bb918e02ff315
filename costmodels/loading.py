"""What vLLM logs as `Model loading took`: weights as kernels and the allocator hold them.

Beside the weights there are tables made at loading, the padding that some kernels ask for, and
what PyTorch's allocator cannot hand out again.
"""

from math import ceil

from servecast.costmodels.specs import ONE_DEVICE, HardwareSpec, ModelSpec, Parallelism
from servecast.costmodels.versions import LATEST, Version
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

#: What mxfp4 experts are padded to, (hidden, intermediate): by Marlin, and by Triton's swizzled
#: layout (vLLM 0.19, fused_moe/oracle/mxfp4.py; 256 for Triton's hidden size is seen in logs, not
#: in that table). Logs of 0.11 and 0.14 on H100 show the latter, those of 0.10.1, of 0.19 and of
#: older GPUs the former.
MARLIN_PADDING = (256, 128)
TRITON_PADDING = (256, 64)
TRITON_RELEASES = (Version(0, 10, 2), Version(0, 17))
HOPPER = 9.0


def loaded_bytes(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism = ONE_DEVICE,
    *,
    vision: bool = True,
    expert_engines: int = 1,
    tables: int | None = None,
    version: Version = LATEST,
) -> int:
    """Bytes on the fullest device when the model is loaded, the vision tower's if `vision`.

    `tables` of the size of the vocabulary are loaded; None: an embedding, and a head unless tied.

    `expert_engines` are the data-parallel engines over which a model's experts are spread.

    Of a pipeline that is a stage with an embedding or a head, and one layer more than others
    where stages do not divide the layers.
    """
    check_parallel(model, parallel)
    stage = ceil(model.num_layers / parallel.pipeline) / model.num_layers
    padding = _mxfp4_padding(hardware, version)
    layers = sum(
        matrix.layers
        * _layer_bytes(model, matrix, padding)
        / (expert_engines if matrix.group == "experts" else 1)
        for matrix in layer_matrices(model, parallel.tensor)
    )
    table = padded_vocab(model, parallel.tensor) * model.hidden_size * model.dtype_bytes
    if tables is None:
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


def _mxfp4_padding(hardware: HardwareSpec, version: Version) -> tuple[int, int]:
    first, past = TRITON_RELEASES
    triton = hardware.compute_capability >= HOPPER and first <= version < past
    return TRITON_PADDING if triton else MARLIN_PADDING


def _layer_bytes(model: ModelSpec, matrix: Matrix, padding: tuple[int, int]) -> float:
    """One layer's matrix; the experts of a layer are one tensor."""
    n, k = matrix.n, matrix.k
    quantization = model.quantization
    if matrix.group == "experts" and quantization and quantization.method == "mxfp4":
        hidden, width = padding
        up = matrix.name.endswith("_up")
        halves = 2 if up and model.gated_mlp else 1
        n = halves * _up_to(n // halves, width) if up else _up_to(n, hidden)
        k = _up_to(k, hidden) if up else _up_to(k, width)
    return allocated(n * k * matrix.copies * weight_bits(model, matrix.group) / 8)


def _up_to(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple
