"""`servecast validate --engine`: a scenario served for real on this machine, and predicted.

The device is calibrated unless a profile is given, then the engine of another Python serves the
scenario's load with random weights, and the prediction is held against what it did: latencies of
requests, and the time of every step.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from servecast.calibration import engines
from servecast.calibration.calibrating import Campaign, run_campaign
from servecast.calibration.measured import Latencies
from servecast.calibration.measuring import Tell
from servecast.calibration.shapes import Target
from servecast.calibration.store import KernelProfile, profile_text
from servecast.costmodels.catalogue import CONFIG, GIB, read_config
from servecast.costmodels.errors import InputError
from servecast.costmodels.shape import StepShape, tail_tokens
from servecast.costmodels.specs import ModelSpec
from servecast.reports.files import write_text
from servecast.scenarios.build import Deployment, Setup, beside, build, set_up
from servecast.scenarios.load import LoadedScenario, load_scenario
from servecast.scenarios.measured import profile_of
from servecast.scenarios.profiles import check_minutes
from servecast.scenarios.validate import (
    Case,
    held,
    overlay,
    predict,
    statistics,
    summed_up,
)
from servecast.scenarios.workload import build_requests
from servecast.sim.request import RequestTable

#: Flags of a scenario that an engine is started with.
FLAGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "enable_prefix_caching",
    "async_scheduling",
    "enforce_eager",
    "scheduling_policy",
    "tensor_parallel_size",
)

#: Blocks of a CPU's pool where the scenario names no number: a GiB at the most.
CPU_POOL_BYTES = GIB

#: Blocks of a null model.
NULL_BLOCKS = 1024

#: Of transformers' scheduler: blocks that it leaves free for those that decode (`safety_margin` of
#: its FIFO scheduler).
SAFETY_MARGIN = 0.15

#: Times that a load is served, of which that with the shortest
#: steps counts: other work on the machine makes some a third longer, and none shorter.
REPLAYS = 5

#: Rows of the real thing beside those of requests.
STEP_STATS = ("mean", "p50", "p95")

FIRST_TOKEN_ID = 3


@dataclass(frozen=True)
class Real:
    """The options of `servecast validate --engine`."""

    engine: str
    python: str
    profile: str | None
    minutes: float
    out: Path | None


def validate_real(
    scenarios: Sequence[Path], real: Real, say: Callable[[str], None], tell: Tell | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Serve scenarios for real and hold them against their predictions.

    Returns what `servecast validate` prints, and what its page overlays. A profile that is
    measured for it stays in `out`. Raises InputError as its parts do.
    """
    if real.engine not in engines.ENGINES:
        known = ", ".join(engines.ENGINES)
        raise InputError(f"--engine {real.engine}: expected one of {known}")
    check_minutes(real.minutes)
    engines.check_engine(real.python, real.engine)
    chosen = real.profile
    if chosen is not None and chosen.endswith((".yaml", ".yml")):
        chosen = os.path.abspath(chosen)
    asked = [as_served(load_scenario(path), real.engine) for path in scenarios]
    for loaded in asked:
        setup = set_up(loaded)
        profile_of(chosen, setup.hardware)
        hf_config(loaded, setup.model)
        _table(loaded)
    rows: list[dict[str, Any]] = []
    overlays, told = [], []
    with TemporaryDirectory(prefix="servecast-") as folder:
        for path, loaded in zip(scenarios, asked, strict=True):
            profile = chosen
            if profile is None:
                say(f"{path}: calibrating for {real.minutes:g} minutes")
                file = (real.out or Path(folder)) / f"{path.stem}.profile.yaml"
                write_text(file, profile_text(profile_for(loaded, real, tell)))
                profile = os.fspath(file.resolve())
            say(f"{path}: {real.engine} serves the load")
            served = serve_for_real(loaded, real.engine, real.python)
            case = Case(
                loaded.scenario.name or path.stem,
                loaded,
                statistics(served.latencies),
                latencies=served.latencies,
                timeline=_timeline(served.steps),
            )
            prediction = predict(case, profile)
            times = step_times(prediction.deployment, served.steps)
            rows += [*prediction.rows, *step_rows(case.name, times, prediction.spread)]
            overlays.append(overlay(case, prediction))
            engine = {"case": case.name, "engine": served.engine, "steps": len(served.steps)}
            told.append(engine | {"median_step_error": median_step_error(times)})
    return {**summed_up(rows), "engines": told}, overlays


def _timeline(steps: list[dict[str, Any]]) -> dict[str, np.ndarray] | None:
    if not steps:
        return None
    names = ("t_s", "running", "waiting", "kv_share")
    return {name: np.array([float(step[name]) for step in steps]) for name in names}


@dataclass(frozen=True)
class Served:
    """A load as an engine served it.

    Attributes
    ----------
    engine : name and version
    table : what was sent; in a closed loop when is up to the clients
    latencies : as the client of an in-process engine sees them
    steps : batch and wall time of each, where the engine tells
    """

    engine: str
    table: RequestTable
    latencies: Latencies
    steps: list[dict[str, Any]]


def profile_for(loaded: LoadedScenario, real: Real, tell: Tell | None = None) -> KernelProfile:
    """Calibrate this machine for a scenario and an engine.

    Raises InputError as `run_campaign` does.
    """
    setup = set_up(loaded)
    dtype = setup.model.dtype
    target = Target(
        (setup.model,),
        setup.hardware,
        (dtype,),
        int(setup.engine["block_size"]),
        int(setup.engine["max_num_batched_tokens"]),
        (setup.parallel.tensor,),
        int(setup.engine["max_num_seqs"]),
        int(setup.engine["max_model_len"]),
        packed=real.engine == "transformers",
    )
    campaign = Campaign(
        device="cpu" if setup.hardware.kind == "cpu" else "cuda:0",
        budget_s=60.0 * real.minutes,
        python=real.python,
        kernels="auto" if real.engine == "vllm" else "torch",
        engine=real.engine,
        flags=_flags(setup, real.engine, NULL_BLOCKS),
        environment=_environment(setup, CPU_POOL_BYTES),
    )
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    profile, _ = run_campaign(campaign, target, date, tell)
    return profile


def as_served(loaded: LoadedScenario, engine: str) -> LoadedScenario:
    """The scenario with what the engine will be given, or does of itself.

    On a CPU the pool is what the environment says, not what is left of the memory.
    """
    setup = set_up(loaded)
    changes: dict[str, Any] = {}
    if setup.engine["num_gpu_blocks_override"] is None and setup.hardware.kind == "cpu":
        changes["num_gpu_blocks_override"] = max(1, int(CPU_POOL_BYTES // setup.plan.block_bytes))
    if engine == "transformers":
        changes |= {"watermark": SAFETY_MARGIN, "enforce_eager": True, "async_scheduling": False}
    options = loaded.scenario.engine.model_copy(update=changes)
    return replace(loaded, scenario=loaded.scenario.model_copy(update={"engine": options}))


def serve_for_real(loaded: LoadedScenario, engine: str, python: str) -> Served:
    """Serve the scenario's load with an engine on this machine.

    Raises InputError for loads that cannot be sent (sessions), models that cannot be made with
    random weights, and an engine that does not come up.
    """
    setup = set_up(loaded)
    if engine == "transformers" and not setup.sampling.greedy:
        raise InputError(f"{loaded.path}: workload.sampling: --engine {engine} is greedy")
    table = _table(loaded)
    deployment = build(loaded)
    blocks = deployment.memory.blocks
    job = {
        "engine": engine,
        "config": hf_config(loaded, setup.model),
        "flags": _flags(setup, engine, blocks),
        "environment": _environment(setup, blocks * deployment.memory.block_bytes),
        "loads": [_load(table, setup.model.vocab_size) | {"sampling": asdict(setup.sampling)}]
        * REPLAYS,
    }
    answer = engines.serve(python, job)
    load = min(answer["loads"], key=_step_s)
    return Served(str(answer["engine"]), table, _latencies(load["requests"]), load["steps"])


def _step_s(load: Mapping[str, Any]) -> float:
    times = [step["wall_s"] for step in load["steps"]]
    return float(np.mean(times)) if times else 0.0


def _table(loaded: LoadedScenario) -> RequestTable:
    scenario = loaded.scenario
    table = build_requests(scenario, loaded.path.parent, scenario.seed, lambda line: None)
    if table.after is not None:
        raise InputError(f"{loaded.path}: workload: sessions cannot be served with --engine yet")
    return table


def _flags(setup: Setup, engine: str, blocks: int) -> dict[str, Any]:
    flags = {name: setup.engine[name] for name in FLAGS}
    flags |= {"dtype": setup.model.dtype, "num_gpu_blocks_override": blocks}
    if setup.engine["kv_cache_dtype"] != "auto":
        flags["kv_cache_dtype"] = setup.engine["kv_cache_dtype"]
    if engine == "transformers":
        flags["device"] = "cpu" if setup.hardware.kind == "cpu" else "cuda"
    if setup.hardware.kind == "cpu":
        flags |= {"async_scheduling": False, "enforce_eager": True}
    return flags


def _environment(setup: Setup, pool_bytes: float) -> dict[str, str]:
    if setup.hardware.kind != "cpu":
        return {}
    return {"VLLM_CPU_KVCACHE_SPACE": str(max(1, math.ceil(pool_bytes / GIB)))}


def hf_config(loaded: LoadedScenario, model: ModelSpec) -> dict[str, Any]:
    """The scenario's own config.json, or one of the same shape for a plain dense model.

    Raises InputError for a catalogue model with experts, latent attention or other layers.
    """
    path = Path(beside(loaded.scenario.model, loaded.path))
    if (path / CONFIG).is_file():
        path = path / CONFIG
    if path.suffix == ".json":
        return read_config(path, loaded.scenario.engine.hf_overrides or {})
    if model.moe or model.mla or model.linear or model.sliding_layers or not model.gated_mlp:
        raise InputError(
            f"{loaded.path}: model: only plain dense models are made from the catalogue; give "
            "the path of a config.json"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _load(table: RequestTable, vocab: int) -> dict[str, Any]:
    requests = [
        {
            "arrival_s": float(table.arrival_ns[at]) / 1e9,
            "prompt": _tokens(table, at, vocab),
            "output_tokens": int(table.output_tokens[at]),
        }
        for at in range(len(table))
    ]
    load: dict[str, Any] = {"requests": requests}
    if table.concurrency is not None:
        load["concurrency"] = table.concurrency
    return load


def _tokens(table: RequestTable, at: int, vocab: int) -> list[int]:
    """Token ids of a prompt: equal where the table says that two texts are equal."""
    length = int(table.prompt_tokens[at])
    shared = table.shared[at] if table.shared is not None else ()
    ends = [*shared, (int(table.segment_id[at]), length)]
    tokens: list[int] = []
    for segment, end in ends:
        count = min(end, length) - len(tokens)
        if count > 0:
            stream = np.random.Generator(np.random.Philox(key=int(segment)))
            # The text of a segment does not depend on where it begins to be asked for.
            ids = stream.integers(FIRST_TOKEN_ID, vocab, size=count)
            tokens += ids.tolist()
    return tokens


def _latencies(rows: list[Mapping[str, float]]) -> Latencies:
    done = [row for row in rows if "last_s" in row]
    if not done:
        raise InputError("the engine finished no request")
    sent, first, last, tokens = (
        np.array([float(row[name]) for row in done])
        for name in ("sent_s", "first_s", "last_s", "tokens")
    )
    return Latencies.from_times(sent, first, last, tokens)


def step_times(deployment: Deployment, steps: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Wall times of an engine's steps, and what the cost model gives for the same batches."""
    measured, predicted = [], []
    for step in steps:
        prefills = tuple((int(new), int(before)) for new, before in step["prefills"])
        decodes = int(step["decodes"])
        sampled = decodes + len(prefills)
        context, tail = int(step["context"]), deployment.cost.tail_sequences
        longest = sorted(step.get("contexts", ()))[-tail:] if tail else []
        tokens = tail_tokens(longest, decodes, context, tail) if longest else 0
        shape = StepShape(prefills, decodes, decodes, context, sampled, decode_tail_tokens=tokens)
        measured.append(float(step["wall_s"]))
        predicted.append(sum(deployment.cost.step(shape)[:9]))
    return {"measured": np.array(measured), "predicted": np.array(predicted)}


def step_rows(case: str, times: Mapping[str, np.ndarray], spread: float) -> list[dict[str, Any]]:
    """Rows of `servecast validate` for step times; none without steps."""
    if not len(times["measured"]):
        return []

    def stat(side: str, name: str) -> float:
        values = times[side]
        return float(values.mean() if name == "mean" else np.percentile(values, float(name[1:])))

    rows = []
    for name in STEP_STATS:
        ours = stat("predicted", name)
        bounds = [ours * math.exp(sign * spread) for sign in (-1, 1)]
        rows.append(held(case, f"step_s {name}", stat("measured", name), ours, bounds))
    return rows


def median_step_error(times: Mapping[str, np.ndarray]) -> float | None:
    """Median of |predicted / measured - 1| over steps; None without steps."""
    if not len(times["measured"]):
        return None
    return float(np.median(np.abs(times["predicted"] / times["measured"] - 1)))
