"""Kernel tables of casys-kaist/LLMServingSim (MIT): CSVs of one layer, by GPU, model and split.

`dense.csv` (layer, tokens, time_us), `per_sequence.csv` (layer, sequences, time_us),
`attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us), as vLLM ran them, and
`skew.csv`: batches in which some contexts are longer, beside equal ones of as many tokens.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from servecast.calibration.fit import Rows, fit_curve, fit_family, fit_matrices
from servecast.calibration.store import KernelProfile
from servecast.costmodels.catalogue import load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import (
    Tail,
    decode_form_s,
    experts_form_s,
    prefill_form_s,
    uncut_streams,
)
from servecast.costmodels.operators import pair_flops_of, small_bytes
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.weights import kv_heads, layer_matrices, lm_head

#: Their names of matrices, and ours.
MATRICES = {
    "qkv_proj": "qkv_proj",
    "o_proj": "o_proj",
    "gate_up_proj": "mlp_up",
    "down_proj": "mlp_down",
}

#: Small kernels, and how often a layer runs each; writing KV is in the rows of attention.
SMALL = {"layernorm": 2, "rotary_emb": 1, "act_fn": 1}

#: Decodes that take less alone, or less of a mixed batch, say nothing but noise.
MIXED_LEAST_S = 20e-6
MIXED_SHARE = 0.2

#: More coordinates than these are thinned: of mixed batches, of matrices (none).
MIXED_POINTS = 4
MATRIX_POINTS = 256

#: Columns of `attention.csv`, the first as text, and of `skew.csv`: batches of `n` of which `nb`
#: have `kv_big` tokens and the others `kvs`, beside a prompt behind `kp`; times of a batch all
#: `kv_big`, all alike with as many tokens, and as it is.
ATTENTION = ("prefill_chunk", "prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
SKEW = ("regime", "n", "nb", "kvs", "kv_big", "kp", "t_max_us", "t_mean_us", "t_skew_us")

#: Streams that memory may feed at once, of which those are taken that predict uneven batches best.
FED = range(16, 257, 2)

#: Batches that should show less than this part of a whole tail say nothing of its share.
TAIL_LEAST = 0.25

SYSTEMS = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000"}

Columns = dict[str, list[float]]
FloatArray = npt.NDArray[np.float64]


def fit_system(folder: Path, hardware: HardwareSpec, name: str) -> KernelProfile:
    """Fit the tables of every 16-bit model under a GPU's folder.

    Raises InputError for a folder without them, and for tables that are not theirs.
    """
    splits = sorted(folder.glob("*/*/bf16/tp*/dense.csv"))
    if not splits:
        raise InputError(f"{folder}: no tables of LLMServingSim (ORGANISATION/MODEL/bf16/tp1)")
    gemm: Columns = defaultdict(list)
    prefill: Columns = defaultdict(list)
    decode: Columns = defaultdict(list)
    mixed: Columns = defaultdict(list)
    experts: Columns = defaultdict(list)
    small: Columns = defaultdict(list)
    sampling: Columns = defaultdict(list)
    uneven: Columns = defaultdict(list)
    for dense in splits:
        split = dense.parent
        model = load_model("/".join(split.parts[-4:-2]))
        tensor = int(split.name.removeprefix("tp"))
        if (split / "moe.csv").exists():
            _add_experts(experts, split / "moe.csv", model, tensor)
        _add_gemms(gemm, split, model, tensor)
        _add_attention(prefill, decode, mixed, split / "attention.csv", model, tensor)
        if (split / "skew.csv").exists():
            _add_uneven(uneven, split, model, tensor, hardware)
        _add_small(small, dense, small_bytes(model, tensor))
        for layer, (sequences, time_us) in _rows(
            split / "per_sequence.csv", "layer", "sequences", "time_us"
        ):
            if layer == "sampler":
                _add(sampling, size=sequences * model.vocab_size, seconds=time_us / 1e6)
    families = {
        "gemm 16bit": fit_matrices(_gemm_rows(gemm), "16bit", hardware, MATRIX_POINTS),
        "prefill 16": fit_family("prefill", _prefill_rows(prefill, hardware)),
        "decode 16": fit_family("decode", _decode_rows(decode, hardware)),
    }
    if experts:
        families["experts 16bit"] = fit_family("experts", _expert_rows(experts, hardware))
    if mixed:
        families["mixed 16"] = fit_family("mixed", _mixed_rows(mixed), MIXED_POINTS)
    return KernelProfile(
        name=name,
        hardware=hardware.name,
        device=folder.name,
        source={
            "what": "LLMServingSim tables of vLLM 0.19.0",
            "by": "casys-kaist/LLMServingSim, profiler/perf, commit 5daddb21",
            "licence": "MIT",
            "timed": "one layer with dummy weights, three iterations, eager",
        },
        families=families,
        small=fit_curve(np.array(small["size"]), np.array(small["seconds"])),
        sampling=fit_curve(np.array(sampling["size"]), np.array(sampling["seconds"])),
        tail=_tail(uneven, hardware) if uneven else None,
    )


def _rows(path: Path, *columns: str) -> Iterator[tuple[str, list[float]]]:
    """(first column as text, the others as numbers) of every row."""
    found = False
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                values = [float(row[name]) for name in columns[1:]]
                if not all(np.isfinite(values)) or values[-1] <= 0:
                    raise InputError(f"{path}:{number}: expected finite numbers, time above 0")
                found = True
                yield row[columns[0]], values
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: not a table of LLMServingSim: {error}") from None
    if not found:
        raise InputError(f"{path}: not a table of LLMServingSim: no rows")


def _add_gemms(found: Columns, split: Path, model: ModelSpec, tensor: int) -> None:
    ours = {matrix.name: (matrix.n, matrix.k) for matrix in layer_matrices(model, tensor)}
    shapes = {theirs: ours[name] for theirs, name in MATRICES.items() if name in ours}
    head = lm_head(model, tensor)
    shapes["lm_head"] = (head.n, head.k)
    rows = [
        *_rows(split / "dense.csv", "layer", "tokens", "time_us"),
        *_rows(split / "per_sequence.csv", "layer", "sequences", "time_us"),
    ]
    for layer, (tokens, time_us) in rows:
        if layer in shapes:
            shape = shapes[layer]
            _add(found, m=tokens, n=shape[0], k=shape[1], seconds=time_us / 1e6)


def _add_experts(found: Columns, path: Path, model: ModelSpec, tensor: int) -> None:
    """A whole mixture, so many of whose experts are met."""
    if model.moe is None:
        raise InputError(f"{path}: {model.name} has no experts")
    columns = ("tokens", "tokens", "activated_experts", "time_us")
    for _, (tokens, met, time_us) in _rows(path, *columns):
        _add(
            found,
            tokens=tokens,
            met=met,
            chosen=model.moe.experts_per_token,
            hidden=model.hidden_size,
            intermediate=model.moe.intermediate_size / tensor,
            seconds=time_us / 1e6,
        )


def _add_attention(
    prefill: Columns, decode: Columns, mixed: Columns, path: Path, model: ModelSpec, tensor: int
) -> None:
    """Prompts alone, decodes alone, and what decodes take beside a prompt."""
    heads, own = model.num_attention_heads // tensor, kv_heads(model, tensor)
    pair_flops, _ = pair_flops_of(model, tensor)
    seconds = {tuple(shape): us / 1e6 for _, (*shape, us) in _rows(path, *ATTENTION)}
    for (chunk, before, sequences, context), own_s in seconds.items():
        shared = {"group": heads / own, "seconds": own_s}
        if chunk and not sequences and not before:
            _add(prefill, new=chunk, heads=heads, pair_flops=pair_flops, **shared)
        elif sequences and not chunk and not before:
            token_bytes = 2 * own * model.head_dim * model.dtype_bytes
            _add(
                decode,
                sequences=sequences,
                context=context,
                kv_heads=own,
                token_bytes=token_bytes,
                **shared,
            )
        elif chunk and sequences and context:
            alone_s = seconds.get((0.0, 0.0, sequences, context))
            prompt_s = seconds.get((chunk, before, 0.0, 0.0))
            if alone_s and prompt_s and alone_s > max(MIXED_LEAST_S, MIXED_SHARE * own_s):
                _add(
                    mixed,
                    new=chunk,
                    streams=sequences * own,
                    context=context,
                    group=heads / own,
                    seconds=max(own_s - prompt_s, alone_s),
                    alone_s=alone_s,
                )


def _add_uneven(
    found: Columns, split: Path, model: ModelSpec, tensor: int, hardware: HardwareSpec
) -> None:
    """Batches of some longer and some shorter contexts, but those beside a prompt with a context.

    Their times are of all iterations together: three times those of `attention.csv` where both
    have a batch.
    """
    own = kv_heads(model, tensor)
    read_s = 2 * model.head_dim * model.dtype_bytes / hardware.memory_bandwidth_bytes_per_s
    path = split / "attention.csv"
    alone = {
        (sequences, context): us
        for _, (chunk, before, sequences, context, us) in _rows(path, *ATTENTION)
        if not chunk and not before
    }
    path = split / "skew.csv"
    rows = list(_rows(path, *SKEW))
    iterations = [
        t_max / alone[n, longest]
        for regime, (n, _, _, longest, _, t_max, _, _) in rows
        if regime == "pure" and (n, longest) in alone
    ]
    if not iterations:
        raise InputError(f"{path}: no batch of decodes that attention.csv has too")
    each_s = 1e-6 / np.median(iterations)
    for regime, (n, longer, short, longest, before, _, even_us, uneven_us) in rows:
        if not before:
            _add(
                found,
                alone=regime == "pure",
                streams=n * own,
                longer=longer * own,
                short=short,
                lead=longest - short,
                even_s=even_us * each_s,
                seconds=uneven_us * each_s,
                read_s=read_s,
            )


def _tail(found: Columns, hardware: HardwareSpec) -> Tail:
    """How many streams memory can feed, and what is seen of the law by their number."""
    columns = {name: np.array(column, float) for name, column in found.items()}
    streams, lead, alone = columns["streams"], columns["lead"], columns["alone"] > 0
    mean = columns["short"] + lead * columns["longer"] / streams

    def law(fed: int) -> FloatArray:
        """Tokens of one stream, as `shape.tail_tokens` has them of sequences."""
        few = np.maximum(fed - streams, 0) * (columns["short"] - mean)
        tokens: FloatArray = np.maximum(fed - columns["longer"], 0) * lead + few
        return tokens

    def off(fed: int) -> float:
        seconds = columns["even_s"] + law(fed) * columns["read_s"]
        # Where there are but few, decodes alone are cut up.
        return float(np.median(np.abs(np.log(seconds / columns["seconds"]))[~alone]))

    fed = min(FED, key=off)
    tokens = law(fed)
    seen = (columns["seconds"] - columns["even_s"]) / columns["read_s"]
    told = tokens >= TAIL_LEAST * fed * lead

    def shares(own: np.ndarray) -> dict[int, float]:
        sizes, share = streams[own & told], seen[own & told] / tokens[own & told]
        return {
            int(size): max(0.0, float(np.median(share[sizes == size]))) for size in np.unique(sizes)
        }

    uncut = streams >= uncut_streams(hardware.multiprocessors)
    return Tail(float(fed), shares(alone & uncut), shares(~alone))


def _add(found: Columns, **values: float) -> None:
    for name, value in values.items():
        found[name].append(value)


def _add_small(found: Columns, dense: Path, token_bytes: float) -> None:
    """Seconds of a layer's small kernels together, by their traffic."""
    times: dict[float, dict[str, float]] = defaultdict(dict)
    for layer, (tokens, time_us) in _rows(dense, "layer", "tokens", "time_us"):
        if layer in SMALL:
            times[tokens][layer] = time_us / 1e6
    for tokens, own in times.items():
        if len(own) == len(SMALL):
            seconds = sum(count * own[layer] for layer, count in SMALL.items())
            _add(found, size=tokens * token_bytes, seconds=seconds)


def _columns(found: Columns, names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: np.array(found[name], float) for name in names}


def _gemm_rows(found: Columns) -> Rows:
    """As `fit_matrices` takes them, which finds a form itself."""
    seconds = np.array(found["seconds"], float)
    return Rows(_columns(found, ("m", "n", "k")), seconds, seconds)


def _prefill_rows(found: Columns, hardware: HardwareSpec) -> Rows:
    shape = _columns(found, ("new", "heads", "group"))
    pairs = shape["new"] * (shape["new"] + 1) / 2
    form = prefill_form_s(pairs, np.array(found["pair_flops"]), hardware.peak_flops_per_s())
    return Rows(shape, np.array(found["seconds"], float), form)


def _decode_rows(found: Columns, hardware: HardwareSpec) -> Rows:
    shape = _columns(found, ("sequences", "context", "kv_heads", "group"))
    form = decode_form_s(
        shape["sequences"],
        shape["context"],
        np.array(found["token_bytes"]),
        hardware.memory_bandwidth_bytes_per_s,
    )
    return Rows(shape, np.array(found["seconds"], float), form)


def _expert_rows(found: Columns, hardware: HardwareSpec) -> Rows:
    own = _columns(found, ("tokens", "hidden", "intermediate", "met", "chosen"))
    form, _ = experts_form_s(
        own["tokens"],
        own["hidden"] * own["intermediate"],
        own["met"],
        own["chosen"],
        hardware.peak_flops_per_s(),
        hardware.memory_bandwidth_bytes_per_s,
    )
    rows = own["tokens"] * own["chosen"] / own["met"]
    shape = {"rows": rows, "intermediate": own["intermediate"], "met": own["met"]}
    return Rows(shape, np.array(found["seconds"], float), form)


def _mixed_rows(found: Columns) -> Rows:
    shape = _columns(found, ("new", "streams", "context", "group"))
    return Rows(shape, np.array(found["seconds"], float), np.array(found["alone_s"], float))
