"""Answers requests for measurements: `python -m servecast.calibration.device.worker DEVICE`.

First a line of facts about the device; then, for each JSON line on its input, one on its output:
`{"seconds", "noise", "runs"}` or `{"error"}`. Ends with its input, and after an error with
`"restart"`, which leaves the device in a state of its own.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from servecast.calibration.device import collectives, operators
from servecast.calibration.device.operators import Builder, Request
from servecast.calibration.device.sizes import operand_bytes
from servecast.calibration.device.timing import BrokenCaptureError, Call, cache_bytes, measure

#: Share of the memory that operands may take, and bytes of them on a CPU, where drawing them is
#: slow.
MEMORY_SHARE = 0.25
MOST_CPU_BYTES = 4 << 30

#: How long a driver may take to answer, and a GPU is kept busy before the first measurement.
PATIENCE_S = 10.0
WARM_UP_S = 1.0

#: What is noted down while measuring, and the driver's names for it.
DRIVER_CLOCKS = {
    "clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}


def kernels(device: torch.device, wanted: str) -> tuple[str, Mapping[str, Builder]]:
    """Whose: "vllm" where the device is a CPU and vLLM is there, unless "torch" is wanted."""
    if device.type == "cpu" and wanted != "torch":
        try:
            from servecast.calibration.device import vllm_cpu

            return "vllm", vllm_cpu.BUILDERS
        except ImportError:
            if wanted == "vllm":
                raise
    return "torch", operators.BUILDERS


def facts(device: torch.device, whose: str) -> dict[str, Any]:
    """What a profile says of where it was measured."""
    found: dict[str, Any] = {
        "device": _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": whose,
        "cache_bytes": cache_bytes(device),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if whose == "vllm":
        import vllm

        found["kernels"] = f"vllm {vllm.__version__}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
        found["cudnn"] = str(torch.backends.cudnn.version())
        found |= driver_says(device, {"driver": "driver_version"}, lambda: time.sleep(0.01))
        found["kernels"] = "torch, and Triton kernels of our own (decode attention, small ones)"
        with contextlib.suppress(Exception):
            import triton

            found["triton"] = triton.__version__
    return found


def driver_says(device: torch.device, asked: Mapping[str, str], meanwhile: Call) -> dict[str, str]:
    """What `nvidia-smi --query-gpu` has of a GPU, by our names; nothing where it is not there.

    `meanwhile` is done again and again until the answer is there: clocks of a GPU that waits for
    it would be idle ones.
    """
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [] if uuid is None else ["-i", f"GPU-{uuid}"]
    command = ["nvidia-smi", *which, f"--query-gpu={','.join(asked.values())}"]
    try:
        process = subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return {}
    with process:
        end = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < end:
            meanwhile()
        process.kill()
        told = process.communicate()[0]
    if process.returncode:
        return {}
    values = [value.strip() for value in told.partition("\n")[0].split(",")]
    return {name: value for name, value in zip(asked, values, strict=False) if value}


def clocks(device: torch.device) -> dict[str, float]:
    """Clocks, temperature and power now, where the driver tells."""
    found: dict[str, float] = {}
    if device.type == "cuda":
        for name, value in driver_says(device, DRIVER_CLOCKS, work(device)).items():
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    else:
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path("/proc/cpuinfo").read_text()
            found["clock_mhz"] = float(text.split("cpu MHz")[1].split(":")[1].split()[0])
    return found


def _cpu_name() -> str:
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def answer(
    request: Request, device: torch.device, builders: Mapping[str, Builder]
) -> dict[str, Any]:
    """Measure what is asked, or say why not; with "restart" where nothing more can be measured in
    this process."""
    if request["op"] == "clocks":
        return {"clocks": clocks(device)}
    try:
        if request["op"] == "all_reduce":
            timings = collectives.all_reduce(request["ranks"], request["sizes"], device.type)
            return {"sizes": {str(size): timing.seconds for size, timing in timings.items()}}
        needed, room = operand_bytes(request), room_bytes(device)
        if needed > room:
            return {"error": f"operands of {needed / 2**30:.1f} GiB: at most {room / 2**30:.1f}"}
        if request["op"] == "chain":
            calls = operators.chain(request, device, builders)
        else:
            calls = list(builders[request["op"]](request, device))
        timing = measure(calls, device, eager=bool(request.get("eager")))
    except Exception as error:
        # A device may refuse in many ways: no such kernel, out of memory, a compiler's own error.
        calls = []
        reply: dict[str, Any] = {
            "error": " ".join(str(error).split())[:200] or type(error).__name__
        }
        if isinstance(error, BrokenCaptureError) or "CUDA error" in str(error):
            reply["restart"] = True
        elif device.type == "cuda":
            torch.cuda.empty_cache()
        return reply
    return {"seconds": timing.seconds, "noise": timing.noise, "runs": timing.runs}


def room_bytes(device: torch.device) -> float:
    """What operands may take."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch keeps of earlier operands is free to it.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return MEMORY_SHARE * float(free + kept)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(MEMORY_SHARE * whole, float(MOST_CPU_BYTES))


def work(device: torch.device) -> Call:
    """Something to do for a GPU, a millisecond or so."""
    x = torch.randn(4096, 4096, device=device, dtype=torch.float16)

    def call() -> None:
        torch.mm(x, x)
        torch.cuda.synchronize(device)

    return call


def warm_up(device: torch.device) -> None:
    """An idle GPU's clocks take a while to rise."""
    call, end = work(device), time.perf_counter() + WARM_UP_S
    while time.perf_counter() < end:
        call()


def why_not_triton(device: torch.device) -> str:
    """Why kernels of our own do not run on a GPU, or ""."""
    try:
        from servecast.calibration.device import triton_small

        triton_small.silu_times(torch.randn(2, 64, device=device))
    except Exception as error:
        # Triton needs a C compiler and the driver's library, and says so in its own ways.
        return "Triton does not run here: " + (" ".join(str(error).split())[:200])
    return ""


def main() -> None:
    # Libraries print; the answers have the real output to themselves.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    device = torch.device(sys.argv[1])
    if device.type == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"error": "no GPU that this PyTorch can use"}), file=output, flush=True)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if why := why_not_triton(device):
            print(json.dumps({"error": why}), file=output, flush=True)
            return
    whose, builders = kernels(device, sys.argv[2] if len(sys.argv) > 2 else "auto")
    print(json.dumps(facts(device, whose)), file=output, flush=True)
    with torch.inference_mode():
        # Whoever wants the facts alone does not wait for it.
        if device.type == "cuda":
            warm_up(device)
        for line in sys.stdin:
            reply = answer(json.loads(line), device, builders)
            print(json.dumps(reply), file=output, flush=True)
            if reply.get("restart"):
                return


if __name__ == "__main__":
    main()
