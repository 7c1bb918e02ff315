"""Real engines in another Python: loads served in real time, and the host's share of a step.

An engine's host time comes from null models, so narrow that the device has next to nothing to do:
a step of `sequences` decodes and `layers` layers takes

    step_s + sequence_s x sequences + layer_s x layers + kernels

where what the kernels of such a model take is measured by themselves. On a CPU a real model's
weights go through the same caches as the engine's code and data, and the host's share of a step is
two to three times what it is without them: so much is read beside the null models, and not counted.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from servecast.calibration.measuring import last_words, with_servecast
from servecast.calibration.store import Host
from servecast.costmodels.errors import InputError

ENGINE = "servecast.calibration.device.engine"

ENGINES = ("vllm", "transformers")

#: The null models: layers of each, and how many sequences decode together.
LAYERS = (1, 8)
SEQUENCES = (1, 4, 16, 32)
PROMPT_TOKENS, OUTPUT_TOKENS = 16, 48

#: Widths so small that a layer's arithmetic takes some microseconds.
NULL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

#: An engine may take so long beyond the last arrival of its loads.
PATIENCE_S = 1800.0

Answer = dict[str, Any]

#: Seconds of all kernels of one layer of the null model, by sequences.
KernelTime = Callable[[int], float]


def serve(python: str, job: Mapping[str, Any]) -> Answer:
    """Run an engine on a job (`calibration/device/engine.py`), its loads one after another.

    Raises InputError with the engine's last words where it does not come up, or breaks.
    """
    loads = job.get("loads", ())
    last_s = [max((r["arrival_s"] for r in load["requests"]), default=0.0) for load in loads]
    patience_s = PATIENCE_S + sum(last_s)
    with (
        tempfile.TemporaryDirectory(prefix="servecast-") as folder,
        tempfile.TemporaryFile("w+") as errors,
    ):
        try:
            process = subprocess.Popen(
                [python, "-W", "ignore", "-m", ENGINE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=with_servecast(folder),
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"--python {python}: {error.strerror}") from None
        try:
            output, _ = process.communicate(json.dumps(job), timeout=patience_s)
        except subprocess.TimeoutExpired:
            raise InputError(f"--engine {job['engine']}: no answer in {patience_s:.0f} s") from None
        finally:
            # Its own processes too: they would hold the device.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        words = last_words(errors.read())
    try:
        answer: Answer = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise InputError(f"--engine {job['engine']}: {words}") from None
    return answer


def check_engine(python: str, engine: str) -> None:
    """Raises InputError where a Python has no such engine."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, check=False)
    except OSError as error:
        raise InputError(f"--python {python}: {error.strerror}") from None
    if found.returncode:
        raise InputError(f"--engine {engine}: not installed for {python} (--python names another)")


def null_jobs(
    engine: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    ballast: Mapping[str, int],
) -> list[dict[str, Any]]:
    """A job for each null model, with batches of equal requests that all come at once; `ballast` as
    `calibration/device/engine.py` has it."""
    jobs = []
    for layers in LAYERS:
        loads = [
            {
                "requests": [
                    {
                        "arrival_s": 0.0,
                        "prompt": [(7 * at + k) % 500 + 3 for k in range(PROMPT_TOKENS)],
                        "output_tokens": OUTPUT_TOKENS,
                    }
                    for at in range(sequences)
                ]
            }
            for sequences in SEQUENCES
        ]
        job: dict[str, Any] = {"engine": engine, "environment": dict(environment), "loads": loads}
        job["config"] = {**NULL, "num_hidden_layers": layers}
        job["flags"] = {**flags, "max_model_len": 512}
        job["ballast"] = dict(ballast)
        jobs.append(job)
    return jobs


def measure_host(python: str, jobs: Sequence[Mapping[str, Any]], kernels: KernelTime) -> Host:
    """Run the null models and part their steps; `kernels` is what a layer's own work takes.

    The share of a layer is that of launching its kernels one by one: None where the engine replays
    CUDA graphs. Raises InputError as `serve` does.
    """
    eager = bool(jobs[0]["flags"].get("enforce_eager"))
    rows, seconds, version = [], [], ""
    for layers, job in zip(LAYERS, jobs, strict=True):
        answer = serve(python, job)
        version = str(answer["engine"])
        for sequences, load in zip(SEQUENCES, answer["loads"], strict=True):
            work_s = layers * kernels(sequences)
            rows.append([1.0, sequences, layers])
            seconds.append(max(0.0, _gap_s(load["requests"]) - work_s))
    host = part_host(version, np.array(rows), np.array(seconds))
    return host if eager else replace(host, layer_s=None)


def part_host(version: str, rows: np.ndarray, seconds: np.ndarray) -> Host:
    """Least squares of relative errors, no part below zero; rows are (1, sequences, layers)."""
    weight = 1.0 / np.maximum(seconds, 1e-6)
    parts, _ = nnls(rows * weight[:, None], seconds * weight)
    return Host(version, *(float(part) for part in parts))


def _gap_s(requests: Sequence[Mapping[str, Any]]) -> float:
    """The median time between tokens of requests that ran together."""
    gaps = [
        (row["last_s"] - row["first_s"]) / (row["tokens"] - 1)
        for row in requests
        if row.get("tokens", 0) > 1
    ]
    if not gaps:
        raise InputError("the engine gave no second token: nothing to measure")
    return float(np.median(gaps))
