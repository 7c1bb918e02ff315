"""Microbenchmarks: kernels that compute the right thing, a worker that answers, a budget kept."""

import json
import os
import signal
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from servecast.calibration import calibrating, engines, measuring
from servecast.calibration.device.sizes import contexts_of, operand_bytes
from servecast.calibration.device_profile import (
    FEW,
    device_profile,
    read_rows,
    write_rows,
)
from servecast.calibration.measuring import Measured, measure
from servecast.calibration.shapes import Point, Target, coarse, fine
from servecast.calibration.store import load_profile, profile_text
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.kv_format import KvFormat
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import StepShape
from servecast.scenarios.cli import app, ended_as_by_ctrl_c

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.cuda.is_available():
    # Before Triton is imported: its kernels then run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

from servecast.calibration.device import attention, operators, timing, worker  # noqa: E402

CPU = torch.device("cpu")

#: Where Triton's kernels run: compiled where there is a GPU, else in the interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HARDWARE = load_hardware("cpu")
TINY = load_model(str(Path(__file__).parent.parent / "scenarios/library/tiny-llama.json"))
TARGET = Target((TINY,), HARDWARE, ("float32",), 32, 512, (1, 2))

DTYPE_ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}


# ---------------------------------------------------------------- attention


@st.composite
def paged_cases(draw: st.DrawFn) -> attention.Paged:
    kv_heads = draw(st.sampled_from([1, 2]))
    query_len = draw(st.integers(1, 9))
    return attention.random_paged(
        draw(st.lists(st.integers(query_len, 150), min_size=1, max_size=4)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64, 80])),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128, 256])),
        query_len=query_len,
        dtype=operators.DTYPES[draw(st.sampled_from(sorted(DTYPE_ERROR)))],
        device=DEVICE,
        generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))),
    )


def _close(found: Any, paged: attention.Paged) -> bool:
    name = str(paged.query.dtype).removeprefix("torch.")
    difference = (found.double().cpu() - attention.reference(paged)).abs().max()
    return bool(difference < DTYPE_ERROR[name])


@given(paged_cases(), st.integers(1, 6))
@settings(deadline=None, max_examples=25)
def test_triton_attention_is_that_of_float64(paged: attention.Paged, parts: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from servecast.calibration.device.triton_attention import paged_attention

    assert _close(paged_attention(paged, parts), paged)


@given(st.integers(1, 4096), st.integers(1, 1 << 20), st.integers(1, 200))
def test_contexts_are_cut_up_where_sequences_are_few(
    streams: int, longest: int, multiprocessors: int
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from servecast.calibration.device import triton_attention as own

    parts = own.parts_for(streams, longest, multiprocessors)
    room = own.PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    assert 1 <= parts <= own.MOST_PARTS
    assert parts == 1 or (parts * streams <= room and parts * own.LEAST_PART_TOKENS <= longest)
    assert parts >= own.parts_for(2 * streams, longest, multiprocessors)


@pytest.mark.parametrize("dtype", sorted(DTYPE_ERROR))
def test_small_triton_kernels_are_those_of_float64(dtype: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from servecast.calibration.device import triton_small

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, device=DEVICE).to(operators.DTYPES[dtype])

    def close(found: Any, expected: Any) -> bool:
        return bool(torch.allclose(found.double(), expected, atol=DTYPE_ERROR[dtype], rtol=1e-2))

    x, rest, weight = drawn(5, 96), drawn(5, 96), drawn(96)
    total = x.double() + rest.double()
    mean = (total * total).mean(-1, keepdim=True)
    triton_small.add_norm(x, rest, weight)
    assert close(rest, total)
    assert close(x, total * torch.rsqrt(mean + triton_small.EPSILON) * weight.double())

    turned, cos, sin = drawn(5, 21, 48), drawn(5, 24), drawn(5, 24)
    left, right = turned.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    triton_small.rotate(turned, cos, sin)
    assert close(turned, torch.cat((left * c - right * s, right * c + left * s), -1))

    wide = drawn(3, 2 * 1300)
    gate, up = wide.double().chunk(2, -1)
    assert close(triton_small.silu_times(wide), torch.nn.functional.silu(gate) * up)


@given(paged_cases())
@settings(deadline=None, max_examples=25)
def test_gathered_attention_is_that_of_float64(paged: attention.Paged) -> None:
    assert _close(attention.gathered(paged), paged)


@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_a_chunk_sees_what_came_before_it(new: int, before: int, group: int) -> None:
    query = torch.randn(1, 2 * group, new, 16, dtype=torch.float64)
    keys, values = (torch.randn(1, 2, before + new, 16, dtype=torch.float64) for _ in range(2))
    found = attention.prefill(query, keys, values)
    for at in range(new):
        seen = before + at + 1
        for head in range(2 * group):
            scores = keys[0, head // group, :seen] @ query[0, head, at] / 4.0
            expected = scores.softmax(0) @ values[0, head // group, :seen]
            assert torch.allclose(found[0, head, at], expected)


def test_a_context_shorter_than_its_queries_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter than 3 queries"):
        attention.random_paged([5, 2], heads=1, kv_heads=1, head_dim=16, block_size=8, query_len=3)
    with pytest.raises(ValueError, match="2 keys are fewer than 3 queries"):
        attention.random_packed(3, 2, heads=1, kv_heads=1, head_dim=16)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from([1, 2]), st.sampled_from([1, 3]))
def test_a_packed_batch_keeps_its_sequences_apart(
    new: int, each: int, kv_heads: int, group: int
) -> None:
    context = new * each
    operands = attention.random_packed(
        new, context, heads=kv_heads * group, kv_heads=kv_heads, head_dim=16
    )
    keys, values = operands.cache.clone()
    keys[operands.slots], values[operands.slots] = operands.fresh
    found = attention.packed(operands)
    for at in range(new):
        # A query's own keys stand in a row, wherever in the cache they lie.
        own = operands.read[at * each : (at + 1) * each]
        for head in range(kv_heads * group):
            seen = keys[own, head // group].double()
            scores = seen @ operands.query[0, head, at].double() / 4.0
            expected = scores.softmax(0) @ values[own, head // group].double()
            assert torch.allclose(found[0, head, at].double(), expected, atol=1e-5)


# ---------------------------------------------------------------- operators

SHAPE = {"tokens": 5, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}
REQUESTS: list[dict[str, Any]] = [
    {"op": "gemm", "m": 3, "n": 64, "k": 128, "dtype": "float32"},
    {"op": "gemm", "m": 3, "n": 64, "k": 128, "dtype": "bfloat16"},
    {"op": "gemm", "m": 32, "n": 64, "k": 128, "dtype": "int8"},
    {"op": "gemm", "m": 16, "n": 64, "k": 128, "dtype": "int4"},
    {"op": "gemm", "m": 16, "n": 64, "k": 128, "dtype": "fp8"},
    {
        **{"op": "experts", "met": 2, "rows": 3, "hidden": 64, "intermediate": 32},
        "dtype": "bfloat16",
    },
    {"op": "prefill", "new": 16, "context": 8, **SHAPE, "dtype": "float32"},
    {"op": "decode", "sequences": 2, "context": 33, "block_size": 16, **SHAPE, "dtype": "float32"},
    {"op": "decode", "contexts": [5, 60], "block_size": 16, **SHAPE, "dtype": "float32"},
    {"op": "packed", "new": 5, "context": 33, **SHAPE, "dtype": "float32"},
    *({"op": op, **SHAPE, "dtype": "float32"} for op in ("norm", "rope", "activation", "kv_write")),
    {"op": "embedding", **SHAPE, "vocab": 100, "dtype": "float32"},
    {"op": "sampling", "tokens": 2, "vocab": 200, "dtype": "float32"},
    {"op": "sampling", "tokens": 2, "vocab": 200, "dtype": "float32", "greedy": False},
    {"op": "copy", "kind": "device", "bytes": 1 << 16, "block_bytes": 1 << 14},
    {"op": "copy", "kind": "to_device", "bytes": 1 << 16, "block_bytes": 1 << 14, "pinned": True},
    {"op": "launch", "kernels": 4},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r['op']}-{r.get('dtype', '')}")
def test_every_operator_runs_on_every_set_of_operands(request_: dict[str, Any]) -> None:
    calls = operators.BUILDERS[request_["op"]](request_, CPU)
    assert calls
    for call in list(calls)[:3]:
        call()


def test_operands_are_larger_than_the_cache() -> None:
    cache = timing.cache_bytes(CPU)
    request = {"op": "gemm", "m": 1, "n": 1024, "k": 1024, "dtype": "float32"}
    assert len(operators.gemm(request, CPU)) * 4 * 1024 * 1024 >= 2 * cache


@pytest.mark.parametrize(
    ("request_", "shape"),
    [
        (REQUESTS[0], (3, 64)),
        (REQUESTS[3], (16, 64)),
        (REQUESTS[5], (6, 64)),
        (REQUESTS[6], (1, 4, 16, 16)),
        (REQUESTS[7], (2, 1, 4, 16)),
        ({"op": "activation", **SHAPE, "dtype": "float32"}, (5, 96)),
        ({"op": "rope", **SHAPE, "dtype": "float32"}, (5, 6, 16)),
        ({"op": "sampling", "tokens": 2, "vocab": 200, "dtype": "float32"}, (2,)),
    ],
)
def test_results_have_the_shape_of_a_layer(request_: dict[str, Any], shape: Any) -> None:
    assert tuple(operators.BUILDERS[request_["op"]](request_, CPU)[0]().shape) == shape


def test_top_k_and_top_p_keep_the_likely_ones() -> None:
    torch.manual_seed(1)
    request = {"op": "sampling", "tokens": 400, "vocab": 300, "dtype": "float32", "greedy": False}
    call = operators.sampling(request, CPU)[0]
    logits = call.__closure__[0].cell_contents  # type: ignore[attr-defined]
    ranks = (logits > logits.gather(1, call())).sum(1)
    assert int(ranks.max()) < 50


def test_a_measurement_is_a_median_and_says_how_sure() -> None:
    found = timing.measure([lambda: sum(range(2000))], CPU, limit_s=0.05)
    assert 0 < found.seconds < 0.01
    assert found.runs >= timing.FEWEST
    assert timing.noise([1.0] * 9) == 0.0
    assert timing.noise([1.0, 1.1] * 50) < timing.noise([1.0, 1.1] * 5)


def test_the_worker_measures_wholes_refuses_and_goes_on() -> None:
    found = measuring.Worker("cpu")
    try:
        assert found.facts["kernels"] in ("torch", found.facts["kernels"])
        gemm = REQUESTS[0]
        assert found.ask(gemm)["seconds"] > 0
        refused = found.ask({"op": "prefill", **SHAPE, "new": -1, "dtype": "float32"})
        assert refused["error"]
        whole = found.ask({"op": "chain", "parts": [gemm, gemm], "repeat": 2})
        assert whole["seconds"] > 0
        assert "clocks" in found.ask({"op": "clocks"})
        reply = found.ask({"op": "all_reduce", "ranks": 2, "sizes": [1024, 4096]})
        assert all(seconds > 0 for seconds in reply["sizes"].values())
    finally:
        found.close()


def test_operands_that_do_not_fit_are_refused_before_they_are_drawn() -> None:
    huge = {"op": "decode", "sequences": 4096, "context": 1 << 20, "block_size": 16, **SHAPE}
    assert operand_bytes(huge) >= 2**40
    found = worker.answer({**huge, "dtype": "float32"}, CPU, operators.BUILDERS)
    assert found["error"].startswith("operands of")
    assert operand_bytes({"op": "chain", "parts": [huge, huge]}) == 2 * operand_bytes(huge)
    assert operand_bytes(REQUESTS[0]) == 4 * 64 * 128 + 4 * 3 * (64 + 128)


def test_a_worker_that_leaves_its_device_unusable_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = _script(
        tmp_path,
        f"""#!{sys.executable}
import json, os, sys
print(json.dumps(dict(device="x", pid=os.getpid())), flush=True)
for line in sys.stdin:
    op = json.loads(line)["op"]
    if op == "hang":
        import time
        time.sleep(60)
    reply = dict(error="broken", restart=True) if op == "break" else dict(seconds=1.0)
    print(json.dumps(reply), flush=True)
    if op == "break":
        break
""",
    )
    monkeypatch.setattr(measuring, "MOST_RESTARTS", 2)
    found = measuring.Worker("cpu", python)
    try:
        first = found.facts["pid"]
        assert found.ask({"op": "fine"}) == {"seconds": 1.0}
        assert found.ask({"op": "break"})["error"] == "broken"
        assert found.facts["pid"] != first
        assert found.ask({"op": "fine"}) == {"seconds": 1.0}
        # Long enough for another to come up.
        monkeypatch.setattr(measuring, "ANSWER_S", 4.0)
        assert found.ask({"op": "hang"})["error"] == "no answer in 4 s"
        assert found.ask({"op": "fine"}) == {"seconds": 1.0}
        with pytest.raises(InputError, match="given up after 2 restarts: broken"):
            found.ask({"op": "break"})
    finally:
        found.close()


def test_whatever_a_kernel_throws_is_a_refusal() -> None:
    def broken(request: Any, device: Any) -> Any:
        raise KeyError("a compiler's own error")

    found = worker.answer(REQUESTS[0], CPU, {"gemm": broken})
    assert "a compiler's own error" in found["error"]


def test_no_gpu_is_said_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match="--device cuda:0: no GPU that this PyTorch can use"):
        measuring.Worker("cuda:0")


def _script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_torch_it_is_said_how_to_get_it(tmp_path: Path) -> None:
    words = "ModuleNotFoundError: No module named 'torch'"
    python = _script(tmp_path, f'#!/bin/sh\necho "{words}" >&2\nexit 1\n')
    with pytest.raises(InputError, match=r"pip install 'servecast\[calibrate\]'"):
        measuring.Worker("cpu", python)
    with pytest.raises(InputError, match="--python /nowhere: No such file"):
        measuring.Worker("cpu", "/nowhere")
    python = _script(tmp_path, "#!/bin/sh\necho oh >&2\nexit 1\n")
    with pytest.raises(InputError, match="the measuring process ended: oh"):
        measuring.Worker("cpu", python)
    for said in ("hello", "[1]"):
        python = _script(tmp_path, f"#!/bin/sh\necho '{said}'\ncat >/dev/null\n")
        with pytest.raises(InputError, match="--python: answered"):
            measuring.Worker("cpu", python)


def test_clocks_and_facts_are_told() -> None:
    facts = worker.facts(CPU, "torch")
    assert {"device", "torch", "threads", "memory_bytes", "cache_bytes"} <= set(facts)
    assert all(value > 0 for value in worker.clocks(CPU).values())


# ---------------------------------------------------------------- a campaign


class _Law(measuring.Worker):
    """A device of which every time is known: the form, times a smooth factor of the shape."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.facts = {"device": "A law", "torch": "2", "kernels": "torch", "threads": 1}
        self.asked: list[Mapping[str, Any]] = []
        self._interrupt_after = interrupt_after

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["op"] == "clocks":
            return {"clocks": {"clock_mhz": 1000.0}}
        self.asked.append(request)
        if len(self.asked) == self._interrupt_after:
            raise KeyboardInterrupt
        if request.get("dtype") == "fp8":
            return {"error": "no such unit"}
        return {"seconds": self.seconds(request), "noise": 0.001, "runs": 9}

    @staticmethod
    def seconds(request: Mapping[str, Any]) -> float:
        if request["op"] == "gemm":
            m = request["m"]
            return float(1e-6 * (3 + m**0.7) * request["n"] * request["k"] / 1e6)
        if request["op"] == "decode":
            tokens = sum(contexts_of(request)) * request.get("query_len", 1) ** 0.5
            return 1e-6 * (5 + tokens / request["block_size"] ** 0.1)
        if request["op"] == "prefill":
            return 1e-6 * (4 + float(request["new"]) ** 1.5)
        if request["op"] == "experts":
            tokens = request["met"] * (5 + request["rows"] ** 0.8)
            return float(1e-9 * tokens * request["intermediate"])
        if request["op"] == "packed":
            return 1e-6 * (4 + float(request["new"]) ** 0.8 * float(request["context"]) / 50)
        return 1e-5 * request.get("tokens", 1)


def test_a_law_comes_out_of_its_profile(tmp_path: Path) -> None:
    law = _Law()
    found = measure(law, coarse(TARGET), fine(TARGET), 60.0)
    profile = device_profile(found, HARDWARE, "law", "2026-11-29")
    assert set(profile.families) == {"gemm 32bit", "decode 32", "prefill 32"}
    path = tmp_path / "law.yaml"
    path.write_text(profile_text(profile))
    kernels = load_profile(str(path)).kernels()
    for m, n, k in ((1, 768, 512), (64, 3072, 512), (512, 512, 1536), (4, 32000, 512)):
        lines = kernels.gemm_lines(HARDWARE, "32bit", n, k, 32.0)
        assert lines is not None
        expected = law.seconds({"op": "gemm", "m": m, "n": n, "k": k})
        assert lines.at(m) == pytest.approx(expected, rel=0.02)
    assert profile.block_factor[256] < profile.block_factor[32] == 1.0
    assert profile.query_factor[9] > profile.query_factor[2] > profile.query_factor[1] == 1.0
    assert profile.source["clock_mhz"] == "1000 to 1000"
    assert profile.extras["skew 1 over equal contexts"] == pytest.approx(1.0, rel=0.01)
    rows = tmp_path / "law.parquet"
    write_rows(found, profile, HARDWARE, rows)
    back = read_rows(rows)
    assert np.allclose(back["gemm 32bit"]["fitted_s"], back["gemm 32bit"]["seconds"], rtol=0.01)


def test_a_law_of_whole_batches_comes_out_of_its_profile(tmp_path: Path) -> None:
    """Of an engine that attends a batch at once: no other attention is measured."""
    law, target = _Law(), replace(TARGET, packed=True)
    points = [*coarse(target), *fine(target)]
    assert not {p.family for p in points} & {"decode 32", "prefill 32", "block_size", "skew"}
    found = measure(law, coarse(target), fine(target), 60.0)
    profile = device_profile(found, HARDWARE, "law", "2026-11-29")
    assert set(profile.families) == {"gemm 32bit", "packed 32"}
    path = tmp_path / "law.yaml"
    path.write_text(profile_text(profile))
    kernels = load_profile(str(path)).kernels()
    for new, context in ((1, 64), (7, 3000), (64, 1024), (512, 16384)):
        lines = kernels.packed_lines(HARDWARE, 32, new, 8, 4.0 * 8 * TINY.head_dim)
        assert lines is not None
        expected = law.seconds({"op": "packed", "new": new, "context": context})
        assert lines.at(context) == pytest.approx(expected, rel=0.1)
    # What the law says of whole layers is not what it says of their parts.
    kernels = replace(kernels, whole_factor={})
    cost = Roofline(model=TINY, hardware=HARDWARE, measured=kernels, kv=KvFormat("float32", 32.0))
    step = cost.step(StepShape(((64, 30),), 3, 3, 900, 4))
    expected = TINY.num_layers * law.seconds({"op": "packed", "new": 67, "context": 994})
    assert step.attention_prefill_s + step.attention_decode_s == pytest.approx(expected, rel=0.1)
    assert step.attention_decode_s == pytest.approx(step.attention_prefill_s * 3 / 64)
    # Sliding layers attend too, beside a prompt as without one.
    sliding = replace(TINY, sliding_layers=2, sliding_window=64)
    windowed = Roofline(
        model=sliding, hardware=HARDWARE, measured=kernels, kv=KvFormat("float32", 32.0)
    ).step(StepShape(((64, 30),), 3, 3, 900, 4))
    windowed_s = windowed.attention_prefill_s + windowed.attention_decode_s
    whole_s = step.attention_prefill_s + step.attention_decode_s
    assert 0.5 * whole_s < windowed_s < whole_s
    alone = cost.decode(3).cost(900).attention_decode_s
    expected = TINY.num_layers * law.seconds({"op": "packed", "new": 3, "context": 900})
    assert alone == pytest.approx(expected, rel=0.1)


def test_experts_and_kv_in_fp8_come_out_of_a_profile(tmp_path: Path) -> None:
    law, mixture = _Law(), load_model("mistralai/Mixtral-8x7B-Instruct-v0.1")
    hardware = load_hardware("h100-sxm")
    target = Target((mixture,), hardware, ("bfloat16",), 16, 4096, (1, 4))
    assert target.kv_dtypes == ("bfloat16", "fp8")
    found = measure(law, coarse(target), fine(target), 60.0)
    profile = device_profile(found, hardware, "law", "2026-11-29")
    assert {"experts 16bit", "decode 16", "decode 8", "prefill 16"} <= set(profile.families)
    path = tmp_path / "law.yaml"
    path.write_text(profile_text(profile))
    kernels = load_profile(str(path)).kernels()
    lines = kernels.experts_lines(hardware, "16bit", 16.0, 4096, 14336, 8, 2)
    assert lines is not None
    # So many tokens that every expert is met.
    for tokens in (256, 2048):
        asked = {"op": "experts", "met": 8, "rows": tokens * 2 / 8, "intermediate": 14336}
        assert lines.at(tokens) == pytest.approx(law.seconds(asked), rel=0.05)
    # The law asks for tokens alone, whatever they are kept in.
    for bits, token_bytes in ((16, 4096.0), (8, 2048.0)):
        decode = kernels.decode_lines(hardware, bits, 16, 8, 4.0, token_bytes)
        assert decode is not None
        expected = law.seconds({"op": "decode", "contexts": [1000] * 16, "block_size": 16})
        assert decode.at(16_000) == pytest.approx(expected, rel=0.05)
    rows = tmp_path / "law.parquet"
    write_rows(found, profile, HARDWARE, rows)
    back = read_rows(rows)
    assert set(back["decode 8"]["block_size"]) == {16}
    assert set(back["decode 16"]["block_size"]) == {8, 16, 32, 64, 128, 256}


def test_two_profiles_of_a_device_are_held_against_each_other(tmp_path: Path) -> None:
    class Slower(_Law):
        @staticmethod
        def seconds(request: Mapping[str, Any]) -> float:
            return _Law.seconds(request) * (1.2 if request["op"] == "decode" else 1.0)

    paths = []
    for name, law in (("law", _Law()), ("slower", Slower())):
        found = measure(law, coarse(TARGET), fine(TARGET), 60.0)
        profile = device_profile(found, HARDWARE, name, "2026-11-29")
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(profile_text(profile))
        if name == "slower":
            write_rows(found, profile, HARDWARE, paths[-1].with_suffix(".parquet"))
    # The second has its rows beside it, the first is held by its grid.
    for first, second, decode in ((paths[1], paths[0], 1.2), (paths[0], paths[1], 1 / 1.2)):
        words = ["calibrate", "--show", str(first), "--against", str(second), "--json"]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        told = json.loads(result.stdout)["against"]
        rows = {row["name"]: row for row in told["operators"]}
        assert told["profile"] == second.stem
        assert rows["decode 32"]["ratio"] == pytest.approx(decode, rel=0.01)
        assert rows["decode 32"]["median"] == pytest.approx(abs(decode - 1), rel=0.05)
        for name in ("gemm 32bit", "prefill 32", "sampling"):
            assert rows[name]["ratio"] == pytest.approx(1.0, rel=0.01)
            assert rows[name]["p95"] < 0.05
            assert rows[name]["points"] > 0


def test_profiles_of_two_devices_are_not_held_against_each_other() -> None:
    words = ["calibrate", "--show", "h100-sxm", "--against", "h200-sxm"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith("--against h200-sxm: of h200-sxm, and h100-sxm is of")
    result = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--against", "mine"])
    assert isinstance(result.exception, InputError)
    assert "'mine' is not known" in str(result.exception)


def test_more_is_measured_where_neighbours_disagree() -> None:
    """Of two lines, one straight along its form and one not, the latter gets the points."""

    class Bent(_Law):
        @staticmethod
        def seconds(request: Mapping[str, Any]) -> float:
            form = float(request["form"])
            bend = 1.0 + (request["n"] == 2) * (request["m"] > 100)
            return form * bend

    def point(m: int, n: int) -> Point:
        request = {"op": "gemm", "m": m, "n": n, "k": 1, "form": 1e-6 * m}
        return Point("gemm 32bit", request, {"m": m, "n": n, "k": 1}, "m", 1e-6 * m)

    law = Bent()
    frame = [point(m, n) for m in (1, 1024) for n in (1, 2)]
    between = [point(2**power, n) for power in range(1, 10) for n in (1, 2)]
    measure(law, frame, between, 60.0)
    later = law.asked[len(frame) :]
    assert later
    assert {request["n"] for request in later} == {2}


def test_a_machine_that_changes_is_looked_at_again() -> None:
    """Of three looks, one of them while others work on the machine, the median is taken."""

    class Shared(_Law):
        def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
            reply = super().ask(request)
            if "seconds" in reply and len(self.asked) <= self.slow_until:
                reply["seconds"] *= 1.3
            return reply

        slow_until = 0

    points = coarse(TARGET)
    steady = Shared()
    found = measure(steady, points, (), 60.0)
    assert found.changed == 0.0
    assert len(found.rows) + measuring.SAMPLED <= len(steady.asked) <= 1.2 * len(found.rows)

    shared = Shared()
    shared.slow_until = len(found.rows)
    found = measure(shared, points, (), 60.0)
    assert found.changed == pytest.approx(np.log(1.3))
    assert len(shared.asked) == 3 * len(found.rows)
    assert all(row.seconds == pytest.approx(_Law.seconds(row.point.request)) for row in found.rows)
    profile = device_profile(found, HARDWARE, "law", "2026-11-29")
    assert profile.source["measured again"] == "26.2% apart (median)"


def test_ctrl_c_keeps_what_was_measured() -> None:
    found = measure(_Law(interrupt_after=60), coarse(TARGET), fine(TARGET), 60.0)
    assert len(found.rows) == 59
    assert found.facts["interrupted"]
    assert device_profile(found, HARDWARE, "law", "2026-11-29").source["interrupted"] == "yes"


def test_a_measurement_that_is_ended_is_kept_as_by_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), ended_as_by_ctrl_c():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_a_device_refuses_is_told() -> None:
    target = Target((TINY,), HARDWARE, ("float32", "fp8"), 32, 64, (1,))
    found = measure(_Law(), coarse(target), (), 60.0)
    assert found.refused == {"gemm fp8": "no such unit"}
    profile = device_profile(found, HARDWARE, "law", "2026-11-29")
    assert profile.source["not measured"] == "gemm fp8: no such unit"


def test_what_costs_a_process_is_left_alone() -> None:
    class Fragile(_Law):
        def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
            reply = super().ask(request)
            breaks = request["op"] == "prefill" and request["new"] >= 64
            return {"error": "not captured", "restart": True} if breaks else reply

    law = Fragile()
    found = measure(law, coarse(TARGET), fine(TARGET), 60.0)
    # Once of prompts, and once of chunks behind a context.
    assert found.broken == {"prefill 32", "chunk"}
    assert sum(request["op"] == "prefill" and request["new"] >= 64 for request in law.asked) == 2
    assert {"gemm 32bit", "decode 32"} <= {row.point.family for row in found.rows}


def test_what_is_refused_is_not_asked_for_again_and_again() -> None:
    target = Target((TINY,), HARDWARE, ("float32", "fp8"), 32, 64, (1,))
    law = _Law()
    measure(law, coarse(target), fine(target), 60.0)
    frame = sum(point.request.get("dtype") == "fp8" for point in coarse(target))
    assert sum(request.get("dtype") == "fp8" for request in law.asked) == frame


def test_a_worker_that_dies_leaves_what_it_gave() -> None:
    class Mortal(_Law):
        def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
            if len(self.asked) == 70:
                raise InputError("the measuring process ended: Killed")
            return super().ask(request)

    found = measure(Mortal(), coarse(TARGET), fine(TARGET), 60.0)
    assert len(found.rows) == 70
    source = device_profile(found, HARDWARE, "law", "2026-11-29").source
    assert source["interrupted"] == "the measuring process ended: Killed"


def test_a_profile_that_misses_a_part_says_which(tmp_path: Path) -> None:
    found = measure(_Law(), coarse(TARGET), fine(TARGET), 60.0)
    text = profile_text(device_profile(found, HARDWARE, "law", "2026-11-29"))
    path = tmp_path / "law.yaml"
    path.write_text(text.replace("sequences:", "batch:"))
    with pytest.raises(InputError, match=r"law\.yaml: not a profile: misses 'sequences'"):
        load_profile(str(path))


def test_too_little_time_is_an_error() -> None:
    with pytest.raises(InputError, match="too little was measured"):
        device_profile(Measured({"device": "x", "kernels": "y", "threads": 1}), HARDWARE, "x", "d")


def test_weights_of_4_bits_are_rows_alone() -> None:
    target = Target((TINY,), load_hardware("h100-sxm"), ("bfloat16", "int4"), 16, 512, (1,))
    points = [p for p in (*coarse(target), *fine(target)) if p.request.get("dtype") == "int4"]
    assert {p.family for p in points} == {"int4 weights"}
    assert max(p.shape["m"] for p in points) == 16
    found = measure(_Law(), points[:8] + coarse(replace(target, dtypes=("bfloat16",))), (), 60.0)
    profile = device_profile(found, target.hardware, "law", "2026-11-29")
    assert "gemm 16bit" in profile.families
    assert not any("int4" in name for name in profile.families)


def test_points_of_a_model_are_its_own() -> None:
    points = [*coarse(TARGET), *fine(TARGET)]
    shapes = {
        (point.shape["n"], point.shape["k"]) for point in points if point.family == "gemm 32bit"
    }
    assert {(768, 512), (384, 512), (512, 1536), (512, 768), (32000, 512)} <= shapes
    assert len(shapes) <= FEW
    assert max(p.shape["m"] for p in points if p.family == "gemm 32bit") == 512
    blocks = {p.shape["block_size"] for p in points if p.family == "block_size"}
    assert blocks == {8, 16, 32, 64, 128, 256}
    lengths = {p.shape["query_len"] for p in points if p.family == "query_len"}
    assert lengths == set(range(1, 10))
    sums = {sum(p.request["contexts"]) for p in points if p.family == "skew"}
    assert max(sums) / min(sums) < 1.001


@pytest.mark.parametrize(
    ("name", "memory_gib", "expected"),
    [
        ("NVIDIA H200", 139.8, "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40gb"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.0, "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx-6000-ada"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L4", 22.0, "l4"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA B200", 178.4, "b200"),
        ("NVIDIA H100 NVL", 94.0, None),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, memory_gib: float, expected: str | None) -> None:
    facts = {"device": name, "memory_bytes": memory_gib * 2**30}
    if expected is None:
        with pytest.raises(InputError, match="not in the catalogue"):
            calibrating.hardware_of(facts, "cuda:0")
        return
    assert calibrating.hardware_of(facts, "cuda:0").name == expected


def test_an_unknown_gpu_has_to_be_named() -> None:
    with pytest.raises(InputError, match="--hardware: name the device: 'Voodoo 2'"):
        calibrating.hardware_of({"device": "Voodoo 2"}, "cuda:0")
    with pytest.raises(InputError, match="--hardware h100-sxm: not what --device cpu is"):
        calibrating.check_device({"device": "x"}, "cpu", load_hardware("h100-sxm"))


# ---------------------------------------------------------------- the host's share


@given(st.floats(0, 5e-3), st.floats(0, 1e-4), st.floats(0, 1e-3))
def test_the_parts_of_a_host_are_told_apart(step_s: float, each_s: float, layer_s: float) -> None:
    rows = np.array([[1.0, n, layers] for layers in engines.LAYERS for n in engines.SEQUENCES])
    parts = np.array([step_s + 1e-6, each_s, layer_s])
    host = engines.part_host("x", rows, rows @ parts)
    assert np.allclose([host.step_s, host.sequence_s, host.layer_s], parts, rtol=1e-3, atol=1e-9)


# ---------------------------------------------------------------- the command


def test_calibrate_measures_this_cpu_and_draws_it(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    model = str(Path(__file__).parent.parent / "scenarios/library/tiny-llama.json")
    words = [
        "calibrate",
        "--device",
        "cpu",
        "--model",
        model,
        "--minutes",
        "0.3",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, [*words, "--dtype", "float32"], catch_exceptions=False)
    assert result.exit_code == 0
    profile = load_profile(str(out))
    assert profile.hardware == "cpu"
    assert "gemm 32bit" in profile.families
    assert float(profile.source["minutes"]) < 0.5
    rows = read_rows(out.with_suffix(".parquet"))
    assert (rows["gemm 32bit"]["seconds"] > 0).all()
    figures = tmp_path / "figures"
    shown = CliRunner().invoke(app, ["calibrate", "--show", str(out), "--out", str(figures)])
    assert shown.exit_code == 0
    assert (figures / "report.html").exists()
    assert {path.name for path in figures.glob("*.png")} >= {"roofline.png", "residuals.png"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device tpu: expected cpu or cuda:N"),
        (["--device", "cpu", "--minutes", "0"], "--minutes 0: expected 0.1 to 1440"),
        (["--device", "cpu", "--minutes", "nan"], "--minutes nan: expected 0.1 to 1440"),
        (["--device", "cpu", "--dtype", "fp32"], "--dtype fp32: expected one of float32"),
        (["--device", "cpu", "--dtype", "int8"], "--dtype int8: the first is that of"),
        (["--device", "cpu", "--engine", "tgi"], "--engine tgi: expected one of vllm"),
        (["--device", "cpu", "--kernels", "mine"], "--kernels mine: expected one of auto"),
        (["--device", "cpu", "--from", "vidur"], "--device: takes no tables"),
        (["--from", "points", "--against", "h100-sxm"], "--against: holds profiles of kernels"),
        (["--device", "cpu", "--model", "gpt-9"], "gpt-9"),
        (["--device", "cpu", "--hardware", "h100-sxm"], "--hardware h100-sxm: not what"),
    ],
)
def test_what_a_measurement_cannot_be_asked(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", *words])
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_the_worker_needs_nothing_of_ours_but_itself(tmp_path: Path) -> None:
    """Another Python sees the measuring code alone, not our packages."""
    environment = measuring.with_servecast(str(tmp_path))
    assert environment["PYTHONPATH"] == str(tmp_path)
    assert [path.name for path in (tmp_path / "servecast").iterdir()] == ["calibration"]
    assert sys.executable
