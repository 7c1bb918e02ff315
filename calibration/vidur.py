"""Profiling tables of microsoft/vidur (MIT): CSVs of one layer, by GPU and model.

`compute/SYSTEM/ORGANISATION/MODEL/mlp.csv` and `attention.csv`, and beside `compute`
`network/NODE/all_reduce.csv`: fp16, milliseconds, every split over ranks in one table. A cell is
empty where a row has no such kernel; 0 is a time below the clock's microsecond.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import numpy.typing as npt

from servecast.calibration.fit import NARROWEST, Rows, fit_curve, fit_family
from servecast.calibration.store import KernelProfile
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import (
    SMALL_KERNEL_S,
    WEIGHT_BITS,
    Curve,
    decode_form_s,
    gemm_form_s,
    prefill_form_s,
)
from servecast.costmodels.reading import MOST, read_bytes, shown
from servecast.costmodels.specs import HardwareSpec

FloatArray = npt.NDArray[np.float64]
Columns = dict[str, FloatArray]

SYSTEMS = {"a100": "a100-sxm-80gb", "a40": "a40", "h100": "h100-sxm"}

MAX_BYTES = 200_000_000

FP16_BYTES = 2

#: Points of an all-reduce's curve: the tables have a thousand sizes, in steps of equal bytes.
MOST_SIZES = 64

RANKS = "num_tensor_parallel_workers"


def _time_s(cell: str) -> float:
    """Milliseconds as seconds, 0 of an empty cell."""
    value = float(cell or 0)
    if not 0 <= value <= MOST:
        raise ValueError(cell)
    return value / 1e3


def _whole(cell: str) -> float:
    value = float(cell)
    if not 0 <= value <= MOST or not value.is_integer():
        raise ValueError(cell)
    return value


def _count(cell: str) -> float:
    value = _whole(cell)
    if not value:
        raise ValueError(cell)
    return value


def _flag(cell: str) -> float:
    return float(("False", "True").index(cell))


Parse = Callable[[str], float]

EXPECTED: dict[Parse, str] = {
    _time_s: "milliseconds of at least 0",
    _whole: "a whole number of at least 0",
    _count: "a whole number of at least 1",
    _flag: "True or False",
}


def _median(kernel: str) -> str:
    return f"time_stats.{kernel}.median"


MATRICES = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
MLP: dict[str, Parse] = {
    **dict.fromkeys(map(_median, MATRICES), _time_s),
    **dict.fromkeys(("n_head", "n_kv_head", "n_embd", "n_expanded_embd"), _count),
    **dict.fromkeys(("num_tokens", RANKS), _count),
    "use_gated_mlp": _flag,
}

#: Small kernels of a layer; a model without a second norm has no columns of it.
SMALL: dict[str, Parse] = dict.fromkeys(
    map(_median, ("input_layernorm", "attn_rope", "mlp_act", "post_attention_layernorm")), _time_s
)

ATTENTION: dict[str, Parse] = {
    **dict.fromkeys(("n_embd", "n_q_head", "n_kv_head", RANKS, "batch_size"), _count),
    **dict.fromkeys(("prefill_chunk_size", "kv_cache_size"), _whole),
    "is_prefill": _flag,
}

#: A table of decodes alone has no columns of prefills, and the other way round.
PHASES: dict[str, Parse] = dict.fromkeys(map(_median, ("attn_decode", "attn_prefill")), _time_s)

ALL_REDUCE: dict[str, Parse] = {
    _median("all_reduce"): _time_s,
    **dict.fromkeys(("num_workers", "devices_per_node", "size"), _count),
}


def fit_system(folder: Path, hardware: HardwareSpec, name: str) -> KernelProfile:
    """Fit the tables of every model under a GPU's folder, and all-reduce inside one of its nodes.

    Raises InputError for a folder without them, and for tables that are not theirs.
    """
    layers = [_mlp(path) for path in sorted(folder.glob("*/*/mlp.csv"))]
    attention = [_attention(path) for path in sorted(folder.glob("*/*/attention.csv"))]
    if not layers and not attention:
        raise InputError(f"{folder}: no tables of Vidur (ORGANISATION/MODEL/mlp.csv)")
    found = {
        "gemm 16bit": [_gemm_rows(table, hardware) for table in layers],
        "prefill 16": [_prefill_rows(table, hardware) for table in attention],
        "decode 16": [_decode_rows(table, hardware) for table in attention],
    }
    rows = {family: _joined(parts) for family, parts in found.items() if parts}
    families = {
        family: fit_family(family.split(" ")[0], some)
        for family, some in rows.items()
        if len(some.seconds)
    }
    if not families:
        raise InputError(
            f"{folder}: nothing to fit: no time of attention, nor of a matrix {NARROWEST} wide"
        )
    return KernelProfile(
        name=name,
        hardware=hardware.name,
        device=folder.name,
        source={
            "what": "Vidur tables (fp16, vLLM-era kernels of 2024)",
            "by": "microsoft/vidur, data/profiling",
            "licence": "MIT",
            "timed": "as the files say (CUDA events or Kineto)",
        },
        families=families,
        all_reduce=_all_reduce(folder.absolute().parent.parent / "network", folder.name),
        small_kernel_s=_small_kernel_s(layers),
    )


def _read(path: Path, needed: Mapping[str, Parse], optional: Mapping[str, Parse]) -> Columns:
    """The columns by their names, those optional only where they are there, and each row's line.

    Raises InputError for a file that is no such table, naming the line where it is one row's fault.
    """
    content = TextIOWrapper(BytesIO(read_bytes(path, MAX_BYTES)), encoding="utf-8", newline="")
    lines: list[float] = []
    try:
        reader = csv.reader(content)
        header = next(reader, [])
        absent = [name for name in needed if name not in header]
        if absent:
            raise InputError(f"{path}: not a table of Vidur: no column {absent[0]}")
        wanted = {name: parse for name, parse in {**needed, **optional}.items() if name in header}
        columns: dict[str, list[float]] = {name: [] for name in wanted}
        places = [(header.index(name), parse, columns[name]) for name, parse in wanted.items()]
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(
                    f"{path}:{reader.line_num}: expected {len(header)} cells, got {len(row)}"
                )
            for place, parse, column in places:
                try:
                    column.append(parse(row[place]))
                except ValueError:
                    raise InputError(
                        f"{path}:{reader.line_num}: {header[place]}: expected {EXPECTED[parse]}, "
                        f"got {shown(row[place])}"
                    ) from None
            lines.append(reader.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a table of Vidur: {error}") from None
    if not lines:
        raise InputError(f"{path}: not a table of Vidur: no rows")
    return {name: np.array(column) for name, column in {**columns, "line": lines}.items()}


def _refuse(path: Path, table: Columns, wrong: npt.NDArray[np.bool_], what: str, *of: str) -> None:
    """Raises InputError with the values of the first wrong row, if there is one."""
    rows = np.flatnonzero(wrong)
    if len(rows):
        at = rows[0]
        values = ", ".join(f"{name} {table[name][at]:.0f}" for name in of)
        raise InputError(f"{path}:{table['line'][at]:.0f}: {what}: {values}")


def _check_split(path: Path, table: Columns, heads: str) -> None:
    """Raises InputError for a model whose heads do not go into its ranks evenly."""
    count, own, ranks = table[heads], table["n_kv_head"], table[RANKS]
    uneven = "does not divide evenly"
    _refuse(path, table, table["n_embd"] % count != 0, uneven, "n_embd", heads)
    _refuse(path, table, count % ranks != 0, uneven, heads, RANKS)
    _refuse(path, table, count % own != 0, uneven, heads, "n_kv_head")
    split = np.maximum(own, ranks) % np.minimum(own, ranks)
    _refuse(path, table, split != 0, uneven, "n_kv_head", RANKS)


def _mlp(path: Path) -> Columns:
    table = _read(path, MLP, SMALL)
    _check_split(path, table, "n_head")
    odd = table["n_expanded_embd"] % table[RANKS] != 0
    _refuse(path, table, odd, "does not divide evenly", "n_expanded_embd", RANKS)
    return table


def _attention(path: Path) -> Columns:
    table = _read(path, ATTENTION, PHASES)
    _check_split(path, table, "n_q_head")
    prefill = table["is_prefill"] > 0
    phases = (
        ("attn_decode", ~prefill, "kv_cache_size"),
        ("attn_prefill", prefill, "prefill_chunk_size"),
    )
    for kernel, rows, tokens in phases:
        time = _median(kernel)
        if time not in table and rows.any():
            raise InputError(f"{path}: not a table of Vidur: no column {time}")
        table.setdefault(time, np.zeros(len(rows)))
        _refuse(path, table, rows & (table[tokens] < 1), f"{kernel} of no tokens", tokens)
    return table


def _kv_heads(table: Columns) -> FloatArray:
    """On one rank: split as far as they go, then replicated."""
    own: FloatArray = np.maximum(1.0, table["n_kv_head"] / table[RANKS])
    return own


def _gemm_rows(table: Columns, hardware: HardwareSpec) -> Rows:
    """Every matrix of a table, those too narrow for a fit left out."""
    ranks, embd = table[RANKS], table["n_embd"]
    head_dim = embd / table["n_head"]
    heads, wide = table["n_head"] / ranks, table["n_expanded_embd"] / ranks
    shapes = {
        "attn_pre_proj": ((heads + 2 * _kv_heads(table)) * head_dim, embd),
        "attn_post_proj": (embd, heads * head_dim),
        "mlp_up_proj": ((1 + table["use_gated_mlp"]) * wide, embd),
        "mlp_down_proj": (embd, wide),
    }
    parts = []
    for kernel, (n, k) in shapes.items():
        m, seconds = table["num_tokens"], table[_median(kernel)]
        form = gemm_form_s(
            m,
            n,
            k,
            peak_flops_per_s=hardware.peak_flops_per_s(),
            bytes_per_s=hardware.memory_bandwidth_bytes_per_s,
            weight_bits=WEIGHT_BITS["16bit"],
        )
        rows = Rows({"m": m, "n": n, "k": k}, seconds, form)
        parts.append(rows.take((seconds > 0) & (n >= NARROWEST) & (k >= NARROWEST)))
    return _joined(parts)


def _prefill_rows(table: Columns, hardware: HardwareSpec) -> Rows:
    """Single prompts without a context before them."""
    new, heads = table["prefill_chunk_size"], table["n_q_head"] / table[RANKS]
    pair_flops = 4 * heads * table["n_embd"] / table["n_q_head"]
    form = prefill_form_s(new * (new + 1) / 2, pair_flops, hardware.peak_flops_per_s())
    seconds = table[_median("attn_prefill")]
    whole = (table["kv_cache_size"] == 0) & (table["batch_size"] == 1)
    shape = {"new": new, "heads": heads, "group": heads / _kv_heads(table)}
    return Rows(shape, seconds, form).take((table["is_prefill"] > 0) & whole & (seconds > 0))


def _decode_rows(table: Columns, hardware: HardwareSpec) -> Rows:
    own = _kv_heads(table)
    token_bytes = 2 * own * table["n_embd"] / table["n_q_head"] * FP16_BYTES
    sequences, context = table["batch_size"], table["kv_cache_size"]
    bandwidth = hardware.memory_bandwidth_bytes_per_s
    form = decode_form_s(sequences, context, token_bytes, bandwidth)
    seconds = table[_median("attn_decode")]
    shape = {
        "sequences": sequences,
        "context": context,
        "kv_heads": own,
        "group": table["n_q_head"] / table[RANKS] / own,
    }
    return Rows(shape, seconds, form).take((table["is_prefill"] == 0) & (seconds > 0))


def _joined(parts: Sequence[Rows]) -> Rows:
    shape = {name: np.concatenate([part.shape[name] for part in parts]) for name in parts[0].shape}
    seconds = np.concatenate([part.seconds for part in parts])
    return Rows(shape, seconds, np.concatenate([part.form_s for part in parts]))


def _small_kernel_s(tables: Sequence[Columns]) -> float:
    """Mean of a layer's small kernels for the fewest tokens that were timed."""
    fewest = min((table["num_tokens"].min() for table in tables), default=0.0)
    times = [
        table[kernel][(table["num_tokens"] == fewest) & (table[kernel] > 0)]
        for table in tables
        for kernel in SMALL
        if kernel in table
    ]
    found = np.concatenate([*times, np.zeros(0)])
    return float(found.mean()) if len(found) else SMALL_KERNEL_S


def _all_reduce(network: Path, system: str) -> dict[int, Curve]:
    """By ranks, all in one node: the DGX, or the first of the system's nodes."""
    nodes = {path.parent.name: path for path in sorted(network.glob("*/all_reduce.csv"))}
    own = [name for name in nodes if name.startswith(f"{system}_")]
    if not own:
        return {}
    path = nodes[f"{system}_dgx" if f"{system}_dgx" in own else own[0]]
    table = _read(path, ALL_REDUCE, {})
    times, ranks = table[_median("all_reduce")], table["num_workers"]
    kept = (ranks == table["devices_per_node"]) & (ranks > 1) & (times > 0)
    found = {}
    for count in np.unique(ranks[kept]).tolist():
        rows = kept & (ranks == count)
        found[int(count)] = _curve(path, int(count), table["size"][rows], times[rows])
    return found


def _curve(path: Path, ranks: int, size: FloatArray, seconds: FloatArray) -> Curve:
    curve = fit_curve(size, seconds)
    if curve is None:
        raise InputError(f"{path}: all-reduce of {ranks} ranks: two sizes needed, got one")
    if len(curve.sizes) <= MOST_SIZES:
        return curve
    wanted = np.geomspace(curve.sizes[0], curve.sizes[-1], MOST_SIZES)
    kept = np.unique(np.searchsorted(curve.sizes, wanted).clip(max=len(curve.sizes) - 1))
    return Curve(
        tuple(np.take(curve.sizes, kept).tolist()), tuple(np.take(curve.seconds, kept).tolist())
    )
