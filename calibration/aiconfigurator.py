"""Kernel tables of ai-dynamo/aiconfigurator (Apache-2.0): Parquet files of one system.

`gemm_perf`, `context_attention_perf`, `generation_attention_perf` and `custom_allreduce_perf`,
latency in milliseconds, one row a shape, timed hot and in CUDA graphs. `step` of generation
attention is the context before the new token; `message_size` counts elements.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from servecast.calibration.fit import Rows, fit_curve, fit_family, fit_matrices
from servecast.calibration.store import Family, KernelProfile
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import (
    WEIGHT_BITS,
    Curve,
    decode_form_s,
    experts_form_s,
    experts_met,
    prefill_form_s,
)
from servecast.costmodels.specs import HardwareSpec

FloatArray = npt.NDArray[np.float64]

#: Their names of number formats, and what they compute in and store a weight in.
GEMM_DTYPES = {"bfloat16": "16bit", "fp8": "fp8", "nvfp4": "fp4"}

#: Their names for experts, the first that a system has; of several kernels for one format the
#: median counts.
EXPERT_DTYPES = {
    ("bfloat16",): "16bit",
    ("fp8_block", "fp8"): "fp8",
    ("nvfp4",): "fp4",
    ("w4a16_mxfp4", "int4_wo"): "int4",
}

#: How tokens choose experts in the rows that are taken: some far more often than others, as in
#: trained models.
ROUTING = "power_law_1.01"

#: Experts are not split over more: a node has no more devices, and slices of 16 numbers have
#: kernels that nobody runs.
MOST_RANKS = 8

HEAD_DIM = 128
KV_BITS = {"bfloat16": 16, "fp8": 8}


@dataclass(frozen=True)
class System:
    """The tables of one system, as rows over their physical forms.

    Attributes
    ----------
    device : the GPU's name in the tables
    gemm, experts : by compute type
    prefill, decode : by bits of a KV number
    """

    device: str
    version: str
    gemm: dict[str, Rows]
    experts: dict[str, Rows]
    prefill: dict[int, Rows]
    decode: dict[int, Rows]
    all_reduce: dict[int, Curve]


def read_system(folder: Path, hardware: HardwareSpec) -> System:
    """Read a folder of tables.

    Raises InputError for a folder without them, and for tables that are not theirs.
    """
    gemm = _read(folder / "gemm_perf.parquet", "gemm_dtype", "m", "n", "k")
    device = str(gemm["device"][0]) if len(gemm["device"]) else ""
    return System(
        device=device,
        version=str(gemm["version"][0]) if len(gemm["version"]) else "",
        gemm=_gemm(gemm, hardware),
        experts=_experts(folder / "moe_perf.parquet", hardware),
        prefill=_prefill(folder, hardware),
        decode=_decode(folder, hardware),
        all_reduce=_all_reduce(folder),
    )


def _read(path: Path, *columns: str) -> dict[str, npt.NDArray[np.generic]]:
    import pyarrow
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        found = {name: table[name].to_numpy() for name in (*columns, "device", "version")}
        found["seconds"] = table["latency"].to_numpy().astype(float) / 1e3
        if "window_size" in table.column_names:
            found["window_size"] = table["window_size"].to_numpy()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a table of aiconfigurator: {error}") from None
    seconds = found["seconds"].astype(float)
    if not len(seconds) or not np.isfinite(seconds).all() or not (seconds > 0).all():
        raise InputError(f"{path}: latency: expected positive numbers only")
    return found


def _gemm(table: dict[str, npt.NDArray[np.generic]], hardware: HardwareSpec) -> dict[str, Rows]:
    found = {}
    for dtype, compute in GEMM_DTYPES.items():
        rows = table["gemm_dtype"] == dtype
        if not rows.any():
            continue
        m, n, k = (table[name][rows].astype(float) for name in ("m", "n", "k"))
        least_s = n * k * WEIGHT_BITS[compute] / 8 / hardware.memory_bandwidth_bytes_per_s
        seconds = np.maximum(table["seconds"][rows].astype(float), least_s)
        # `fit_matrices` finds a form itself.
        found[compute] = Rows({"m": m, "n": n, "k": k}, seconds, seconds)
    return found


def _experts(path: Path, hardware: HardwareSpec) -> dict[str, Rows]:
    """Experts all on one rank or split inside; none where the system has no such table."""
    if not path.exists():
        return {}
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
    table = _read(path, *names, "moe_dtype", "moe_ep_size", "distribution")
    found = {}
    for dtypes, compute in EXPERT_DTYPES.items():
        usable = (table["moe_ep_size"] == 1) & (table["distribution"].astype(str) == ROUTING)
        usable &= table["moe_tp_size"].astype(float) <= MOST_RANKS
        named = table["moe_dtype"].astype(str)
        rows = next((r for r in (usable & (named == name) for name in dtypes) if r.any()), None)
        if rows is None:
            continue
        m, hidden, inter, chosen, experts, tensor = (
            table[name][rows].astype(float) for name in names
        )
        width = hidden * inter / tensor
        peak, bandwidth = hardware.peak_flops_per_s(compute), hardware.memory_bandwidth_bytes_per_s
        met = experts_met(m, experts, chosen)
        form, _ = experts_form_s(m, width, met, chosen, peak, bandwidth, WEIGHT_BITS[compute])
        shape = {"rows": m * chosen / met, "intermediate": inter / tensor, "met": met}
        models = np.unique(np.stack([hidden, inter, experts]), axis=1, return_inverse=True)[1]
        least_s = 3 * met * width * WEIGHT_BITS[compute] / 8 / bandwidth
        seconds = np.maximum(table["seconds"][rows].astype(float), least_s)
        found[compute] = Rows(shape, seconds, form, models.ravel().astype(np.int64))
    return found


def _attention(
    path: Path,
) -> tuple[dict[str, FloatArray], npt.NDArray[np.generic], FloatArray]:
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "step")
    table = _read(path, *names, "head_dim", "kv_cache_dtype", "attn_dtype")
    kept = (table["head_dim"] == HEAD_DIM) & (table["attn_dtype"] == "bfloat16")
    if "window_size" in table:
        kept &= table["window_size"] == 0
    columns = {name: table[name][kept].astype(float) for name in names}
    return columns, table["kv_cache_dtype"][kept], table["seconds"][kept].astype(float)


def _prefill(folder: Path, hardware: HardwareSpec) -> dict[int, Rows]:
    """Single prompts without a context before them."""
    columns, dtypes, seconds = _attention(folder / "context_attention_perf.parquet")
    found = {}
    for dtype, bits in KV_BITS.items():
        rows = (dtypes == dtype) & (columns["batch_size"] == 1) & (columns["isl"] > 1)
        if not rows.any():
            continue
        new = columns["isl"][rows]
        heads = columns["num_heads"][rows]
        group = heads / columns["num_key_value_heads"][rows]
        pairs = new * (new + 1) / 2
        form = prefill_form_s(pairs, 4.0 * heads * HEAD_DIM, hardware.peak_flops_per_s())
        shape = {"new": new, "heads": heads, "group": group}
        found[bits] = Rows(shape, seconds[rows], form)
    return found


def _decode(folder: Path, hardware: HardwareSpec) -> dict[int, Rows]:
    columns, dtypes, seconds = _attention(folder / "generation_attention_perf.parquet")
    found = {}
    for dtype, bits in KV_BITS.items():
        rows = dtypes == dtype
        if not rows.any():
            continue
        batch, context = columns["batch_size"][rows], columns["step"][rows] + 1
        kv_heads = columns["num_key_value_heads"][rows]
        token_bytes = 2 * kv_heads * HEAD_DIM * bits / 8
        bandwidth = hardware.memory_bandwidth_bytes_per_s
        form = decode_form_s(batch, context, token_bytes, bandwidth)
        least_s = batch * context * token_bytes / bandwidth
        shape = {
            "sequences": batch,
            "context": context,
            "kv_heads": kv_heads,
            "group": columns["num_heads"][rows] / kv_heads,
        }
        found[bits] = Rows(shape, np.maximum(seconds[rows], least_s), form)
    return found


def _all_reduce(folder: Path) -> dict[int, Curve]:
    """vLLM's own kernels in a graph, or NCCL where that was faster."""
    path = folder / "custom_allreduce_perf.parquet"
    table = _read(path, "num_gpus", "message_size", "backend")
    found = {}
    for ranks in sorted(set(table["num_gpus"].tolist())):
        rows = (table["num_gpus"] == ranks) & np.char.endswith(
            table["backend"].astype(str), "graph"
        )
        if not rows.any():
            continue
        size = table["message_size"][rows].astype(float) * 2
        curve = fit_curve(size, table["seconds"][rows].astype(float))
        if curve is not None:
            found[int(ranks)] = curve
    return found


SYSTEMS = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}


def fit_system(folder: Path, hardware: HardwareSpec, name: str) -> KernelProfile:
    """Fit every family of a folder of tables, with its errors on shapes left out.

    Raises InputError for a folder without them.
    """
    system = read_system(folder, hardware)
    families: dict[str, Family] = {}
    for compute, rows in system.gemm.items():
        families[f"gemm {compute}"] = fit_matrices(rows, compute, hardware)
    tables: list[tuple[str, Mapping[str, Rows] | Mapping[int, Rows]]] = [
        ("experts", system.experts),
        ("prefill", system.prefill),
        ("decode", system.decode),
    ]
    for kind, table in tables:
        for key, rows in table.items():
            families[f"{kind} {key}"] = fit_family(kind, rows)
    return KernelProfile(
        name=name,
        hardware=hardware.name,
        device=system.device,
        source={
            "what": f"aiconfigurator tables of vLLM {system.version}",
            "by": "ai-dynamo/aiconfigurator, aiconfigurator-core 0.12.0 on PyPI",
            "licence": "Apache-2.0",
            "timed": "hot caches, CUDA graphs",
        },
        families=families,
        all_reduce=system.all_reduce,
    )
