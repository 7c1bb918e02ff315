"""The CUDA path without a GPU: PyTorch's own checks of shapes and formats, Triton's compiler.

PyTorch's fake tensors run each operator's checks for a GPU and compute nothing; Triton compiles for
a GPU that is not there, as far as the machine code.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.cuda.is_available():
    # Before Triton is imported: its kernels then run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from servecast.calibration.device import operators, timing, worker  # noqa: E402

GPU = torch.device("cuda:0")
SHAPE = {"tokens": 5, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 64}
BF16 = {"dtype": "bfloat16"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a GPU, answered."""
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def _called(request: dict[str, Any]) -> Any:
    with FakeTensorMode(), torch.inference_mode():
        calls = list(operators.BUILDERS[request["op"]](request, GPU))
        return [call() for call in calls[:2]][-1]


@pytest.mark.parametrize("m", [1, 3, 16, 17, 8192])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "fp8", "int8", "int4"])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (128256, 512), (512, 14336)])
def test_matrices_are_as_a_gpu_takes_them(gpu: None, dtype: str, m: int, n: int, k: int) -> None:
    found = _called({"op": "gemm", "m": m, "n": n, "k": k, "dtype": dtype})
    rows = max(m, operators.LEAST_INT8_ROWS) if dtype == "int8" else m
    assert tuple(found.shape) == (rows, n)
    assert found.device == GPU


@pytest.mark.parametrize(
    ("request_", "shape"),
    [
        ({"op": "prefill", "new": 16, **SHAPE, **BF16}, (1, 4, 16, 64)),
        ({"op": "kv_write", **SHAPE, **BF16}, (2, 20, 2, 64)),
        ({"op": "embedding", **SHAPE, "vocab": 100, **BF16}, (5, 64)),
        ({"op": "sampling", "tokens": 2, "vocab": 200, **BF16}, (2,)),
        ({"op": "launch", "kernels": 4}, (1,)),
    ],
    ids=lambda value: value["op"] if isinstance(value, dict) else "",
)
def test_operators_are_as_a_gpu_takes_them(
    gpu: None, request_: dict[str, Any], shape: tuple[int, ...]
) -> None:
    found = _called(request_)
    assert tuple(found.shape) == shape
    assert found.device == GPU


def test_experts_are_as_a_gpu_takes_them(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from servecast.calibration.device import triton_small

    def halved(x: Any) -> Any:
        return torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)

    monkeypatch.setattr(triton_small, "silu_times", halved)
    shape = {"op": "experts", "met": 8, "rows": 3, "hidden": 128, "intermediate": 64}
    assert tuple(_called({**shape, **BF16}).shape) == (24, 128)


def test_paged_operands_are_on_the_gpu_and_cut_up(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from servecast.calibration.device import triton_attention as own

    seen: list[Any] = []
    monkeypatch.setattr(own, "multiprocessors_of", lambda device: 132)
    monkeypatch.setattr(own, "paged_attention", lambda paged, parts: seen.append((paged, parts)))
    asked = {"op": "decode", "sequences": 4, "context": 4096, "block_size": 16, **SHAPE, **BF16}
    _called({**asked, "kv_dtype": "fp8"})
    paged, parts = seen[0]
    assert paged.keys.dtype == torch.float8_e4m3fn
    assert paged.query.dtype == torch.bfloat16
    assert {x.device for x in vars(paged).values()} == {GPU}
    # 8 streams on 132 multiprocessors, of 256 tokens a part at least.
    assert parts == 16


# ---------------------------------------------------------------- what the driver says


def test_the_driver_is_asked_by_the_gpus_own_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Properties:
        uuid = "12-34"

    def smi(text: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{text}\n')
        path.chmod(0o755)

    done: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    monkeypatch.setattr(worker, "work", lambda device: lambda: done.append(1))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    smi("sleep 0.1; echo '1980, [N/A], 41, 312.50'")
    assert worker.clocks(GPU) == {"clock_mhz": 1980.0, "temperature_c": 41.0, "power_w": 312.5}
    assert (tmp_path / "asked").read_text().startswith("-i GPU-12-34 --query-gpu=clocks.sm,")
    # Clocks of a GPU that does nothing say nothing.
    assert done
    smi("echo no such device; exit 6")
    assert worker.clocks(GPU) == {}
    (tmp_path / "nvidia-smi").unlink()
    assert worker.clocks(GPU) == {}


def test_what_pytorch_keeps_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("memory_reserved", 30), ("memory_allocated", 10)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 << 30, 80 << 30))
    assert worker.room_bytes(GPU) == worker.MEMORY_SHARE * (40 << 30)


# ---------------------------------------------------------------- graphs and events


class _Device:
    """Streams, graphs and events of a GPU whose kernels are this process's own calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks: bool = False) -> None:
        device, self.stream = self, "ordinary"
        self.captured: list[int] = []
        self.replays, self.now_s = 0, 0.0

        class Graph:
            def replay(self) -> None:
                device.replays += 1
                device.now_s += 1e-4 * len(device.captured)

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now_s

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * float(end.at - self.at)

        @contextlib.contextmanager
        def graph(_: Graph) -> Iterator[None]:
            device.stream = "capturing"
            yield
            if breaks:
                raise RuntimeError("operation not permitted when stream is capturing")
            device.stream = "ordinary"

        stream = Stream()
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "stream": lambda _: contextlib.nullcontext(),
            "current_stream": lambda: stream,
            "_sleep": lambda cycles: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def call(self) -> None:
        if self.stream == "capturing":
            self.captured.append(1)
        else:
            self.now_s += 1e-4


def test_calls_are_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    found = timing.measure([device.call] * 3, GPU, limit_s=0.1)
    # What a replay itself takes is spread over a millisecond: 3 sets of operands, 3 times each.
    assert len(device.captured) == 9
    assert device.replays >= timing.FEWEST
    assert found.seconds == pytest.approx(1e-4)


def test_a_broken_capture_costs_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch, breaks=True)
    with pytest.raises(timing.BrokenCaptureError, match="not captured: operation not permitted"):
        timing.measure([device.call], GPU)
    monkeypatch.setattr(worker, "room_bytes", lambda device: 1e9)
    request = {"op": "gemm", "m": 1, "n": 16, "k": 16, "dtype": "bfloat16"}
    builders = {"gemm": lambda request, place: [device.call]}
    assert worker.answer(request, GPU, builders)["restart"]

    def refusing(request: Any, place: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert worker.answer(request, GPU, {"gemm": refusing})["restart"]


# ---------------------------------------------------------------- Triton's compiler

#: Bytes of shared memory that a program may have, by compute capability (CUDA C++ Programming
#: Guide, technical specifications).
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

#: Prints the shared memory of each kernel as JSON, or why it did not compile.
COMPILE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from servecast.calibration.device import attention, triton_attention as own, triton_small as small

def compiled(kernel, types, constants, capability, warps=4):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    try:
        target = GPUTarget("cuda", capability, 32)
        found = triton.compile(source, target=target, options={"num_warps": warps})
    except Exception as error:
        return str(error)[-200:]
    assert found.asm["cubin"]
    return found.metadata.shared

def decode(capability, kv, heads, kv_heads, query_len, dim, parts):
    paged = attention.random_paged(
        [query_len], heads=heads, kv_heads=kv_heads, head_dim=dim, block_size=16,
        query_len=query_len, dtype=torch.bfloat16,
    )
    out = "*bf16" if parts == 1 else "*fp32"
    types = {
        "query": "*bf16", "keys": kv, "values": kv, "table": "*i32", "contexts": "*i32",
        "out": out, "weights": out, "scale": "fp32", "table_stride": "i32",
    }
    plan = own.plan(paged, parts)
    return compiled(own._part_kernel, types, plan.part_constants, capability, plan.warps)

found = {}
for capability in map(int, sys.argv[1:]):
    for kv in ("*bf16",) if capability < 89 else ("*bf16", "*fp8e4nv"):
        for shape in ((32, 8, 1, 128, 1), (32, 8, 1, 128, 8), (64, 8, 9, 128, 1)):
            found[f"{capability} decode {kv} {shape}"] = decode(capability, kv, *shape)
plan = own.Plan(32, 8, 1, 128, 16, 64, 64)
paged, rows = "*bf16", {"results": "*fp32", "weights": "*fp32", "out": "*bf16"}
three = {"x": "*bf16", "rest": "*bf16", "weight": "*bf16"}
turned = {"x": "*bf16", "cos": "*bf16", "sin": "*bf16"}
for name, kernel, types, constants in (
    ("join", own._join_kernel, rows, plan.join_constants),
    ("norm", small._add_norm_kernel, three, {"width": 8192, "padded": 8192, "eps": 1e-5}),
    ("rotate", small._rotate_kernel, turned, {"heads": 40, "half": 64, "padded": 64, "some": 16}),
    ("silu", small._silu_kernel, {"x": "*bf16", "out": "*bf16"}, {"width": 14336, "chunk": 1024}),
):
    for capability in map(int, sys.argv[1:]):
        found[f"{capability} {name}"] = compiled(kernel, types, constants, capability)
print(json.dumps(found))
"""


def test_triton_kernels_compile_for_gpus_that_are_not_here() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, SHARED_BYTES)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-1000:]
    found = json.loads(ran.stdout)
    assert len(found) == 3 + 4 * 6 + 4 * len(SHARED_BYTES)
    for name, shared in found.items():
        assert isinstance(shared, int), f"{name}: {shared}"
        assert shared <= SHARED_BYTES[int(name.split(" ")[0])], name
