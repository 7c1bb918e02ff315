"""Vidur's profiling tables: fits of a known law, splits over ranks, nodes, and damaged files."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from servecast.calibration import vidur
from servecast.calibration.store import load_profile, profile_text
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import (
    SMALL_KERNEL_S,
    decode_form_s,
    gemm_form_s,
    prefill_form_s,
)
from servecast.costmodels.lines import Lines
from servecast.costmodels.weights import layer_matrices
from servecast.scenarios.cli import app

A100 = load_hardware("a100-sxm-80gb")
PEAK, BANDWIDTH = A100.peak_flops_per_s(), A100.memory_bandwidth_bytes_per_s
LLAMA = load_model("Llama-3.1-8B")
HEAD_DIM = 128

STATS = ("min", "max", "mean", "median", "std")
MATRICES = {
    "attn_pre_proj": "qkv_proj",
    "attn_post_proj": "o_proj",
    "mlp_up_proj": "mlp_up",
    "mlp_down_proj": "mlp_down",
}
SMALL = {"input_layernorm": 2e-6, "attn_rope": 3e-6, "mlp_act": 4e-6}
SECOND_NORM = {"post_attention_layernorm": 5e-6}

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
BATCHES = (1, 4, 16, 64)
CONTEXTS = (32, 256, 2048)
PROMPTS = (64, 512, 4096)
SIZES = (2048, 10240, 65536, 1048576)

LLAMA_MLP = {
    "n_head": 32,
    "n_kv_head": 8,
    "n_embd": 4096,
    "n_expanded_embd": 14336,
    "vocab_size": 128256,
    "use_gated_mlp": True,
}
LLAMA_ATTENTION = {
    "n_embd": 4096,
    "n_q_head": 32,
    "n_kv_head": 8,
    "block_size": 16,
    "max_model_len": 4096,
    "attention_backend": "AttentionBackend.FLASH_ATTENTION",
    "profile_method": "ProfileMethod.KINETO",
}

Cells = Mapping[str, object]


# --- the law that the tables are made from: nearest to the datasheet for the largest kernels, so
# that no small one is faster than those, which a cost model takes for its cache


def gemm_s(m: float, n: float, k: float) -> float:
    form = gemm_form_s(np.array(float(m)), n, k, PEAK, BANDWIDTH)
    return 4.0 * min(n, 14336) ** -0.1 * k**-0.05 * float(form)


def prefill_s(new: float, heads: float) -> float:
    pairs = np.array(new * (new + 1) / 2)
    return 2.5 * heads**-0.1 * float(prefill_form_s(pairs, 4 * heads * HEAD_DIM, PEAK))


def decode_factor(sequences: float, context: float, own: float) -> float:
    return 3.0 * sequences**-0.02 * context**-0.05 * own**-0.1


def decode_s(sequences: float, context: float, own: float) -> float:
    token_bytes = 2 * own * HEAD_DIM * 2
    form = decode_form_s(sequences, np.array(float(context)), token_bytes, BANDWIDTH)
    return decode_factor(sequences, context, own) * float(form)


def shapes(tensor: int) -> dict[str, tuple[int, int]]:
    ours = {matrix.name: (matrix.n, matrix.k) for matrix in layer_matrices(LLAMA, tensor)}
    return {theirs: ours[name] for theirs, name in MATRICES.items()}


# --- the tables as Vidur writes them


def stats(kernel: str, seconds: float | None) -> dict[str, object]:
    """Only the median is the kernel's."""
    times = {stat: "" if seconds is None else 77.0 for stat in STATS}
    if seconds is not None:
        times["median"] = seconds * 1e3
    return {f"time_stats.{kernel}.{stat}": time for stat, time in times.items()}


def write(path: Path, rows: list[Cells], index: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join([*[""] * index, *rows[0]])]
    for number, row in enumerate(rows):
        lines.append(",".join([*[str(number)] * index, *map(str, row.values())]))
    path.write_text("\n".join(lines) + "\n")


def mlp_row(
    tokens: int, tensor: int, seconds: Mapping[str, float | None], **other: object
) -> Cells:
    row: dict[str, object] = {}
    for kernel, time in {"emb": 1e-6, **seconds, "add": 1e-6}.items():
        row.update(stats(kernel, time))
    return {
        **row,
        **LLAMA_MLP,
        "num_tokens": tokens,
        "num_tensor_parallel_workers": tensor,
        **other,
    }


def matrices(tokens: int, tensor: int) -> dict[str, float]:
    return {kernel: gemm_s(tokens, *shape) for kernel, shape in shapes(tensor).items()}


def mlp(path: Path) -> None:
    norm = {name: 99.0 for name in (*SMALL, *SECOND_NORM)}
    rows = [
        mlp_row(
            tokens,
            tensor,
            {**matrices(tokens, tensor), **(norm if tokens > 1 else {**SMALL, **SECOND_NORM})},
        )
        for tensor in (1, 2)
        for tokens in reversed(TOKENS)
    ]
    write(path, rows)


def attention_row(
    tensor: int, new: int, before: int, batch: int, seconds: float | None, **other: object
) -> Cells:
    return {
        **stats("attn_input_reshape", 0.0),
        **stats("attn_decode", None if new else seconds),
        **stats("attn_output_reshape", 1e-6),
        **stats("attn_prefill", seconds if new else None),
        **LLAMA_ATTENTION,
        "num_tensor_parallel_workers": tensor,
        "batch_size": batch,
        "prefill_chunk_size": new,
        "kv_cache_size": before,
        "is_prefill": bool(new),
        **other,
    }


def attention_rows() -> list[Cells]:
    rows = []
    for tensor in (1, 2):
        heads, own = 32 // tensor, 8 // tensor
        rows += [attention_row(tensor, new, 0, 1, prefill_s(new, heads)) for new in PROMPTS]
        rows.append(attention_row(tensor, 512, 512, 1, 1.0))  # behind a context: not a prompt
        rows += [
            attention_row(tensor, 0, context, batch, decode_s(batch, context, own))
            for batch in BATCHES
            for context in CONTEXTS
        ]
    return rows


def reduce_row(workers: int, size: int, seconds: float, node: int) -> Cells:
    return {
        **stats("all_reduce", seconds),
        "rank": 0,
        "num_workers": workers,
        "size": size,
        "collective": "all_reduce",
        "devices_per_node": node,
        "max_devices_per_node": 8,
    }


def tables(folder: Path) -> Path:
    """A folder of everything, and its system's folder."""
    system = folder / "compute/a100"
    mlp(system / "meta-llama/Meta-Llama-3-8B/mlp.csv")
    write(system / "meta-llama/Meta-Llama-3-8B/attention.csv", attention_rows())
    rows = [reduce_row(2, size, 1e-5 + size * 1e-11, 2) for size in SIZES]
    write(folder / "network/a100_dgx/all_reduce.csv", rows, index=True)
    return system


# --- fits


def test_matrices_of_each_split_cost_what_was_measured(tmp_path: Path) -> None:
    profile = vidur.fit_system(tables(tmp_path), A100, "x")
    assert profile.families["gemm 16bit"].rows == 2 * 4 * len(TOKENS)
    axes = profile.families["gemm 16bit"].grid.axes
    measured = [shape for tensor in (1, 2) for shape in shapes(tensor).values()]
    for axis, values in zip(axes[1:], zip(*measured, strict=True), strict=True):
        assert axis == tuple(sorted(set(map(float, values))))
    for n, k in measured:
        lines = profile.kernels().gemm_lines(A100, "16bit", n, k, 16.0)
        assert isinstance(lines, Lines)
        for tokens in TOKENS:
            assert lines.at(tokens) == pytest.approx(gemm_s(tokens, n, k), rel=0.01)


@pytest.mark.parametrize("tensor", [1, 2])
def test_attention_of_each_split_costs_what_was_measured(tmp_path: Path, tensor: int) -> None:
    kernels = vidur.fit_system(tables(tmp_path), A100, "x").kernels()
    heads, own = 32 // tensor, 8 // tensor
    prefill = kernels.prefill_lines(A100, 16, heads, 4.0, 4.0 * heads * HEAD_DIM)
    assert isinstance(prefill, Lines)
    for new in PROMPTS:
        assert prefill.at(new * (new + 1) // 2) == pytest.approx(prefill_s(new, heads), rel=0.01)
    for batch in BATCHES:
        decode = kernels.decode_lines(A100, 16, batch, own, 4.0, 2 * own * HEAD_DIM * 2.0)
        assert isinstance(decode, Lines)
        for context in CONTEXTS:
            expected = decode_s(batch, context, own)
            assert decode.at(batch * context) == pytest.approx(expected, rel=0.02)


def test_prompts_behind_a_context_and_blank_or_zero_times_are_no_rows(tmp_path: Path) -> None:
    system = tables(tmp_path)
    path = system / "meta-llama/Meta-Llama-3-8B/attention.csv"
    before = vidur.fit_system(system, A100, "x")
    rows = [
        *attention_rows(),
        attention_row(1, 0, 4000, 7, 0.0),
        attention_row(1, 0, 4000, 7, None),
        attention_row(1, 300, 0, 1, 0.0),
        attention_row(1, 300, 0, 1, None),
        attention_row(1, 300, 0, 2, 1.0),
    ]
    write(path, rows, index=True)
    after = vidur.fit_system(system, A100, "x")
    assert profile_text(after) == profile_text(before)
    assert before.families["prefill 16"].rows == 2 * len(PROMPTS)
    assert before.families["decode 16"].rows == 2 * len(BATCHES) * len(CONTEXTS)


def test_kv_heads_are_split_as_far_as_they_go(tmp_path: Path) -> None:
    rows = [
        attention_row(tensor, 0, context, batch, 1e-5, n_kv_head=2)
        for tensor in (1, 2, 8)
        for batch in BATCHES
        for context in CONTEXTS
    ]
    write(tmp_path / "a100/o/m/attention.csv", rows)
    profile = vidur.fit_system(tmp_path / "a100", A100, "x")
    assert set(profile.families) == {"decode 16"}
    _, contexts, own, group = profile.families["decode 16"].grid.axes
    assert (contexts, own, group) == ((32, 256, 2048), (1, 2), (4, 16))
    times = {kernel: 1e-5 for kernel in (*MATRICES, *SMALL)}
    write(
        tmp_path / "a100/o/m/mlp.csv",
        [mlp_row(m, 8, times, n_kv_head=2, use_gated_mlp=False) for m in TOKENS],
    )
    _, n, k = vidur.fit_system(tmp_path / "a100", A100, "x").families["gemm 16bit"].grid.axes
    assert n == (128 * (4 + 2), 14336 / 8, 4096)  # query, key and value; up, not gated; out, down
    assert k == (512, 14336 / 8, 4096)


def test_a_model_without_a_second_norm_and_without_attention(tmp_path: Path) -> None:
    rows = [mlp_row(m, 1, {**matrices(m, 1), **SMALL}) for m in TOKENS]
    write(tmp_path / "a100/microsoft/phi-2/mlp.csv", rows)
    profile = vidur.fit_system(tmp_path / "a100", A100, "x")
    assert set(profile.families) == {"gemm 16bit"}
    assert profile.all_reduce == {}
    assert profile.small_kernel_s == pytest.approx(3e-6)
    kernels = profile.kernels()
    assert kernels.prefill_lines(A100, 16, 32, 4.0, 1e4) is None
    assert kernels.label == (
        "kernels measured on a100 (Vidur tables (fp16, vLLM-era kernels of 2024))"
    )


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({**SMALL, **SECOND_NORM}, 3.5e-6),
        ({**SMALL, "attn_rope": 0.0}, 3e-6),
        ({**SMALL, "attn_rope": None}, 3e-6),
        (dict.fromkeys(SMALL, 0.0), SMALL_KERNEL_S),
        ({}, SMALL_KERNEL_S),
    ],
)
def test_small_kernels_are_those_of_the_fewest_tokens(
    tmp_path: Path, times: dict[str, float | None], expected: float
) -> None:
    rows = [
        mlp_row(m, 1, {**matrices(m, 1), **(times if m == 1 else dict.fromkeys(times, 99.0))})
        for m in TOKENS
    ]
    write(tmp_path / "a100/o/m/mlp.csv", rows)
    other = [mlp_row(64, 1, {**matrices(64, 1), "mlp_act": 99.0})]
    write(tmp_path / "a100/o/n/mlp.csv", other)
    profile = vidur.fit_system(tmp_path / "a100", A100, "x")
    assert profile.small_kernel_s == pytest.approx(expected)


# --- all-reduce


def test_all_reduce_is_that_inside_one_node(tmp_path: Path) -> None:
    system = tables(tmp_path)
    rows = [
        reduce_row(2, 2048, 4e-5, 1),  # across nodes
        reduce_row(4, 2048, 4e-5, 2),
        reduce_row(1, 2048, 4e-5, 1),
        reduce_row(4, 4096, 3e-5, 4),
        *(reduce_row(2, 2048, seconds, 2) for seconds in (1e-5, 9e-5, 2e-5)),
        reduce_row(2, 8192, 1e-5, 2),
        reduce_row(2, 4096, 3e-5, 2),
        reduce_row(2, 16384, 5e-5, 2),
        reduce_row(2, 32768, 0.0, 2),
        reduce_row(4, 2048, 2e-5, 4),
    ]
    write(tmp_path / "network/a100_dgx/all_reduce.csv", rows, index=True)
    found = vidur.fit_system(system, A100, "x").all_reduce
    assert set(found) == {2, 4}
    assert found[2].sizes == (2048, 4096, 8192, 16384)
    # Never falling: half way between the most before and the least after.
    assert found[2].seconds == pytest.approx((1.5e-5, 2e-5, 2e-5, 5e-5))
    assert found[4].seconds == pytest.approx((2e-5, 3e-5))


def test_a_long_curve_is_thinned_and_keeps_its_ends(tmp_path: Path) -> None:
    system = tables(tmp_path)
    sizes = range(2048, 2048 + 8192 * 1000, 8192)
    rows = [reduce_row(2, size, 1e-5 + size * 1e-11, 2) for size in sizes]
    write(tmp_path / "network/a100_dgx/all_reduce.csv", rows)
    curve = vidur.fit_system(system, A100, "x").all_reduce[2]
    assert 32 <= len(curve.sizes) <= 64
    assert (curve.sizes[0], curve.sizes[-1]) == (sizes[0], sizes[-1])
    for size in sizes:
        assert curve.at(size) == pytest.approx(1e-5 + size * 1e-11, rel=0.01)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["a100_dgx", "a100_a"], "a100_dgx"),
        (["a100_pairwise_nvlink", "a100_pair_nvlink", "h100_dgx"], "a100_pair_nvlink"),
        (["h100_dgx", "a1000_dgx"], None),
        ([], None),
    ],
)
def test_the_dgx_is_preferred(tmp_path: Path, nodes: list[str], expected: str | None) -> None:
    mlp(tmp_path / "compute/a100/o/m/mlp.csv")
    for number, node in enumerate(nodes, 1):
        rows = [reduce_row(2, size, number * 1e-5, 2) for size in SIZES]
        write(tmp_path / f"network/{node}/all_reduce.csv", rows)
    (tmp_path / "network/a100_dgx").mkdir(parents=True, exist_ok=True)
    found = vidur.fit_system(tmp_path / "compute/a100", A100, "x").all_reduce
    if expected is None:
        assert found == {}
    else:
        assert found[2].at(4096) == pytest.approx((nodes.index(expected) + 1) * 1e-5)


# --- damaged files


def replaced(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


def last_line(end: int) -> Callable[[str], str]:
    return lambda text: text.rstrip("\n")[:end]


MLP, ATTENTION, REDUCE = "mlp.csv", "attention.csv", "all_reduce.csv"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (MLP, lambda text: "", "not a table of Vidur: no column time_stats.attn_pre_proj.median"),
        (MLP, lambda text: text.split("\n")[0], "not a table of Vidur: no rows"),
        (MLP, replaced("num_tokens", "tokens"), "no column num_tokens"),
        (MLP, replaced("mlp_up_proj.median", "x"), "no column time_stats.mlp_up_proj.median"),
        (MLP, replaced(",4096,14336,", ",4096,wide,"), ":2: n_expanded_embd: expected a whole"),
        (MLP, replaced(",4096,14336,", ",4096.5,14336,"), ":2: n_embd: expected a whole number"),
        (MLP, replaced(",4096,14336,", ",0,14336,"), "of at least 1, got '0'"),
        (MLP, replaced(",4096,14336,", ",,14336,"), "of at least 1, got ''"),
        (MLP, replaced(",True,", ",yes,"), ":2: use_gated_mlp: expected True or False, got 'yes'"),
        (MLP, replaced(",32,8,", ",33,8,"), ":2: does not divide evenly: n_embd 4096, n_head 33"),
        (MLP, replaced(",32,8,", ",32,5,"), "does not divide evenly: n_head 32, n_kv_head 5"),
        (MLP, replaced(",4096,1\n", ",4096,3\n"), "n_head 32, num_tensor_parallel_workers 3"),
        (MLP, replaced(",4096,1\n", ",4096,0\n"), "num_tensor_parallel_workers: expected"),
        (MLP, last_line(-60), ":15: expected 58 cells, got "),
        (MLP, last_line(-1), ":15: num_tensor_parallel_workers: expected a whole number"),
        (MLP, lambda text: text + "1,2\n", ":16: expected 58 cells, got 2"),
        (MLP, lambda text: text + '"' + "x" * 200_000, "field larger than field limit"),
        (MLP, lambda text: "\x00\x00", "no column"),
        (ATTENTION, replaced("kv_cache_size", "kv"), "no column kv_cache_size"),
        (ATTENTION, replaced("attn_decode.median", "x"), "no column time_stats.attn_decode.median"),
        (ATTENTION, replaced(",64,0,True", ",0,0,True"), ":2: attn_prefill of no tokens"),
        (ATTENTION, replaced(",0,32,False", ",0,0,False"), "attn_decode of no tokens: kv_cache"),
        (ATTENTION, replaced(",64,0,True", ",64,-1,True"), "kv_cache_size: expected a whole"),
        (ATTENTION, replaced(",64,0,True", ",64,0,"), ":2: is_prefill: expected True or False"),
        (REDUCE, replaced("devices_per_node", "x"), "no column devices_per_node"),
        (REDUCE, replaced(",2048,", ",2e99,"), ":2: size: expected a whole number"),
        (REDUCE, lambda text: "\n".join(text.split("\n")[:2]), "of 2 ranks: two sizes needed"),
    ],
)
def test_damaged_tables(
    tmp_path: Path, name: str, change: Callable[[str], str], message: str
) -> None:
    system = tables(tmp_path)
    (path,) = tmp_path.rglob(name)
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text
    with pytest.raises(InputError) as caught:
        vidur.fit_system(system, A100, "x")
    said = str(caught.value)
    assert message in said and said.startswith(str(path)) and "\n" not in said


@pytest.mark.parametrize("value", ["nan", "inf", "-0.5", "-inf", "1e400", "fast", "0.1.2", "\n"])
@pytest.mark.parametrize("name", [MLP, ATTENTION, REDUCE])
def test_times_that_are_none(tmp_path: Path, name: str, value: str) -> None:
    system = tables(tmp_path)
    (path,) = tmp_path.rglob(name)
    header, first, *rest = path.read_text().split("\n")
    names = header.split(",")
    kernel = {MLP: "mlp_act", ATTENTION: "attn_decode", REDUCE: "all_reduce"}[name]
    cells = first.split(",")
    cells[names.index(f"time_stats.{kernel}.median")] = f'"{value}"'
    path.write_text("\n".join([header, ",".join(cells), *rest]))
    with pytest.raises(InputError) as caught:
        vidur.fit_system(system, A100, "x")
    said = str(caught.value)
    line = 3 if value == "\n" else 2
    assert f"{name}:{line}: time_stats.{kernel}.median: expected milliseconds" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        (3, {}, "n_head 32, num_tensor"),
        (6, {"n_head": 24, "n_kv_head": 4, "n_embd": 3072}, "n_kv_head 4, num_tensor"),
        (2, {"n_expanded_embd": 14335}, "n_expanded_embd 14335, num_tensor"),
        (1, {"n_head": 30, "n_kv_head": 6}, "n_embd 4096, n_head 30"),
    ],
)
def test_models_that_do_not_divide(
    tmp_path: Path, tensor: int, change: dict[str, object], message: str
) -> None:
    write(tmp_path / "a100/o/m/mlp.csv", [mlp_row(1, tensor, matrices(1, 1), **change)])
    with pytest.raises(InputError, match=rf"mlp\.csv:2: does not divide evenly: {message}"):
        vidur.fit_system(tmp_path / "a100", A100, "x")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    system = tables(tmp_path)
    (path,) = tmp_path.rglob(MLP)
    path.write_bytes(path.read_bytes()[:-9] + b"\xff\xfe")
    with pytest.raises(InputError, match=r"mlp\.csv: not a table of Vidur: 'utf-8'"):
        vidur.fit_system(system, A100, "x")


def test_nothing_to_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tables of Vidur \(ORGANISATION"):
        vidur.fit_system(tmp_path, A100, "x")
    path = tmp_path / "a100/o/m/mlp.csv"
    narrow = {"n_head": 4, "n_kv_head": 4, "n_embd": 128, "n_expanded_embd": 128}
    for rows in (
        [mlp_row(1, 1, dict.fromkeys(MATRICES, 0.0))],
        [mlp_row(m, 1, dict.fromkeys(MATRICES, 1e-5), **narrow) for m in TOKENS],
    ):
        write(path, rows)
        with pytest.raises(InputError, match="nothing to fit"):
            vidur.fit_system(tmp_path / "a100", A100, "x")


def test_one_shape_is_a_fit(tmp_path: Path) -> None:
    write(tmp_path / "a100/o/m/mlp.csv", [mlp_row(64, 1, {"mlp_act": 1e-6, **matrices(64, 1)})])
    write(tmp_path / "a100/o/m/attention.csv", [attention_row(1, 0, 64, 8, decode_s(8, 64, 8))])
    profile = vidur.fit_system(tmp_path / "a100", A100, "x")
    factor = float(profile.families["decode 16"].grid.factor(8, 64, 8, 4)[0])
    assert factor == pytest.approx(decode_factor(8, 64, 8))
    path = tmp_path / "p.yaml"
    path.write_text(profile_text(profile))
    assert load_profile(str(path)).families["gemm 16bit"].rows == 4


@given(st.sampled_from([MLP, ATTENTION, REDUCE]), st.floats(0, 1), st.text(max_size=6), st.data())
def test_a_damaged_table_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: float, other: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("v")
    system = tables(folder)
    (path,) = folder.rglob(name)
    text = path.read_text()
    start = int(at * len(text))
    end = start + data.draw(st.integers(0, 60))
    path.write_bytes((text[:start] + other + text[end:]).encode("utf-8", "replace"))
    try:
        profile = vidur.fit_system(system, A100, "x")
        assert math.isfinite(profile.families["gemm 16bit"].p95)
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)


# --- the command


@pytest.mark.parametrize("below", ["", "compute", "compute/a100"])
def test_calibrate_from_vidur(tmp_path: Path, below: str) -> None:
    tables(tmp_path)
    mlp(tmp_path / "compute/h100/o/m/mlp.csv")
    out = tmp_path / "p.yaml"
    words = [str(tmp_path / below), "--from", "vidur", "--system", "a100", "--out", str(out)]
    result = CliRunner().invoke(app, ["calibrate", *words, "--json"], catch_exceptions=False)
    facts = json.loads(result.stdout)
    assert facts["hardware"] == "a100-sxm-80gb"
    assert facts["all_reduce_ranks"] == [2]
    assert set(facts["families"]) == {"gemm 16bit", "prefill 16", "decode 16"}
    assert facts["families"]["gemm 16bit"]["median"] < 0.02
    profile = load_profile(str(out))
    assert profile.device == "a100" and profile.source["licence"] == "MIT"
    assert profile.small_kernel_s == pytest.approx(3.5e-6)
    lines = profile.kernels().gemm_lines(A100, "16bit", 4096, 14336, 16.0)
    assert isinstance(lines, Lines)
    assert lines.at(256) == pytest.approx(gemm_s(256, 4096, 14336), rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--system: name one of a100, h100"),
        (["--system", "a40"], "no tables of a40"),
        (["--system", "v100"], "name its device with --hardware"),
        (["--system", "h100"], "h100: no tables of Vidur"),
    ],
)
def test_what_calibrate_cannot_do(tmp_path: Path, words: list[str], message: str) -> None:
    tables(tmp_path)
    (tmp_path / "compute/h100").mkdir()
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path), "--from", "vidur", *words])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_another_system_is_fitted_against_the_device_named(tmp_path: Path) -> None:
    mlp(tmp_path / "compute/v100/o/m/mlp.csv")
    out = tmp_path / "p.yaml"
    words = ["--system", "v100", "--hardware", "a100-pcie-80gb", "--out", str(out)]
    CliRunner().invoke(
        app, ["calibrate", str(tmp_path), "--from", "vidur", *words], catch_exceptions=False
    )
    assert load_profile(str(out)).hardware == "a100-pcie-80gb"
