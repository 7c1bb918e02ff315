"""Scenarios served for real: what an engine is given, and what comes of its answer."""

import json
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from servecast.calibration import calibrating, engines
from servecast.calibration.device.engine import Ballast, Clients, Clock
from servecast.calibration.shapes import Target
from servecast.calibration.store import Host
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.errors import InputError
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import StepShape
from servecast.costmodels.weights import embedding_parameters, parameters
from servecast.scenarios import real
from servecast.scenarios.build import build
from servecast.scenarios.cli import app
from servecast.scenarios.load import load_scenario
from servecast.scenarios.workload import build_requests
from servecast.sim.trace import COMPLETED

LIBRARY = Path(__file__).parent.parent / "scenarios/library"
REPLAY = LIBRARY / "cpu-replay.yaml"

#: Stands for an engine: a token every 10 ms from 50 ms after a request was sent.
FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    sys.exit(0)
if not sys.argv[-1].endswith("engine"):
    sys.exit("RuntimeError: asked for " + sys.argv[-1])
job = json.load(sys.stdin)
loads = []
for load in job["loads"]:
    rows = [
        dict(sent_s=r["arrival_s"], first_s=r["arrival_s"] + 0.05, tokens=r["output_tokens"],
             last_s=r["arrival_s"] + 0.05 + 0.01 * (r["output_tokens"] - 1))
        for r in load["requests"]
    ]
    steps = [dict(prefills=[[64, 0]], decodes=2, context=100, running=3, waiting=0, kv_share=0.1,
                  t_s=0.1 * at, wall_s=0.012) for at in range(5)]
    loads.append(dict(requests=rows, steps=steps))
print(json.dumps(dict(engine="fake 1", blocks=99, ready_s=1.0, loads=loads)))
"""


@pytest.fixture
def fake(tmp_path: Path) -> str:
    path = tmp_path / "fake-python"
    path.write_text(FAKE.replace("{python}", sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """One matrix family that is far from this CPU, so that a case needs no measuring."""
    path = tmp_path / "law.yaml"
    path.write_text(
        "format: 1\nhardware: cpu\ndevice: a law\nsource: {what: made up}\nfamilies:\n"
        "  gemm 32bit:\n    rows: 4\n    median: 0.1\n    p95: 0.2\n"
        f"    residuals: {np.linspace(-0.1, 0.1, 20).round(3).tolist()}\n"
        "    axes: {m: [1, 512], n: [512, 32000], k: [512, 1536]}\n"
        "    log2: 500 500 500 500 500 500 500 500\n"
        "host: {engine: fake 1, step_s: 0.002, sequence_s: 0.0001, layer_s: 0.0005}\n"
    )
    return str(path)


def test_an_engine_is_held_against_its_prediction(tmp_path: Path, fake: str, profile: str) -> None:
    out = tmp_path / "out"
    words = ["validate", "--engine", "vllm", "--python", fake, "--profile", profile, "--json"]
    result = CliRunner().invoke(
        app, [*words, "--out", str(out), str(REPLAY)], catch_exceptions=False
    )
    rows = {row["metric"]: row for row in json.loads(result.stdout)}
    assert rows["ttft_s mean"]["measured"] == pytest.approx(0.05)
    assert rows["tpot_s p99"]["measured"] == pytest.approx(0.01)
    assert rows["step_s mean"]["measured"] == pytest.approx(0.012)
    for row in rows.values():
        assert row["lo"] <= row["predicted"] <= row["hi"]
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
    assert "cpu-replay" in (out / "report.html").read_text()
    text = CliRunner().invoke(app, [*words[:-1], str(REPLAY)]).stdout
    assert "cpu-replay: fake 1, 5 steps, median error" in text


def test_a_step_is_priced_as_the_simulation_prices_it(profile: str) -> None:
    deployment = build(load_scenario(REPLAY, [f"profile={profile}"]))
    step = {"prefills": [[64, 0]], "decodes": 2, "context": 100, "wall_s": 0.02}
    times = real.step_times(deployment, [step])
    cost = deployment.cost.step(StepShape(((64, 0),), 2, 2, 100, 3))
    assert times["predicted"][0] == sum(cost[:9])
    assert real.median_step_error(times) == pytest.approx(abs(times["predicted"][0] / 0.02 - 1))
    assert real.median_step_error(real.step_times(deployment, [])) is None


def _job(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    """What an engine would be started with."""
    loaded = real.as_served(load_scenario(REPLAY, list(overrides)), "vllm")
    seen: dict[str, Any] = {}

    def serve(python: str, job: dict[str, Any]) -> dict[str, Any]:
        seen.update(job)
        rows = [{"sent_s": 0.0, "first_s": 1.0, "last_s": 2.0, "tokens": 2}]
        return {"engine": "x", "loads": [{"requests": rows, "steps": []}]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "serve", serve)
        real.serve_for_real(loaded, "vllm", "python")
    return seen


def test_an_engine_gets_the_scenario(tmp_path: Path) -> None:
    job = _job(tmp_path)
    assert job["config"]["hidden_size"] == 512
    flags = job["flags"]
    assert flags["max_num_seqs"] == 32
    assert flags["max_num_batched_tokens"] == 512
    assert flags["dtype"] == "float32"
    # A GiB of blocks of 32 tokens: 4 layers x 2 x 2 heads x 64 x 4 bytes.
    assert flags["num_gpu_blocks_override"] == 2**30 // (32 * 4 * 2 * 2 * 64 * 4)
    assert job["environment"] == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    requests = job["loads"][0]["requests"]
    assert len(requests) == 60
    assert [len(r["prompt"]) for r in requests] != [len(requests[0]["prompt"])] * 60


def test_transformers_is_predicted_as_it_is() -> None:
    """Eager, one step after another, with blocks left free for those that decode."""
    loaded = real.as_served(load_scenario(REPLAY), "transformers")
    engine = loaded.scenario.engine
    assert (engine.watermark, engine.enforce_eager, engine.async_scheduling) == (0.15, True, False)
    assert engine.num_gpu_blocks_override == 2**30 // (32 * 4 * 2 * 2 * 64 * 4)


#: Stands for Hugging Face transformers: its continuous batching as far as the engine looks at it.
TRANSFORMERS = {
    "transformers/__init__.py": """
import threading, types
from . import generation
__version__ = "5.x"

class GenerationConfig:
    def __init__(self, **settings): pass

class AutoConfig:
    for_model = staticmethod(lambda **config: types.SimpleNamespace(**config))

class State:
    def __init__(self, name, prompt, wanted):
        self.request_id, self.initial_tokens, self.wanted = name, prompt, wanted
        self.position_offset, self.generated_tokens = 0, []
    def is_finished(self):
        return len(self.generated_tokens) == self.wanted

class Manager:
    def __init__(self):
        self.queue, self.done = [], []
        cache = types.SimpleNamespace(compute_free_capacity=lambda: 0.75,
                                      evict_cached_blocks=lambda: True)
        self.batch_processor = types.SimpleNamespace(
            cache=cache, inputs_and_outputs=types.SimpleNamespace(requests_in_batch=[]),
            scheduler=types.SimpleNamespace(active_requests={}, waiting_requests={}))
        self.alive = True
    def add_request(self, prompt, request_id, max_new_tokens, streaming):
        self.queue.append(State(request_id, prompt, max_new_tokens))
    def get_result(self, timeout):
        return self.done.pop(0) if self.done else None
    def is_running(self):
        return self.alive
    def start(self):
        def loop():
            while self.alive:
                self._generation_loop_body(self.batch_processor, bootstrapping=False)
        threading.Thread(target=loop, daemon=True).start()
    def _generation_loop_body(self, processor, bootstrapping):
        if self.queue:
            processor.inputs_and_outputs.requests_in_batch = batch = []
            for state in self.queue:
                new = 1 if state.position_offset else len(state.initial_tokens)
                state.position_offset += new
                batch.append(types.SimpleNamespace(state=state, query_length=new))
            self._generation_step()
            for state in list(self.queue):
                state.generated_tokens.append(1)
                self.done.append(types.SimpleNamespace(
                    request_id=state.request_id, generated_tokens=list(state.generated_tokens),
                    is_finished=lambda over=state.is_finished(): over))
                if state.is_finished():
                    self.queue.remove(state)
        return True
    def _generation_step(self):
        pass
    def stop(self, block):
        self.alive = False

class Model:
    def eval(self): return self
    def init_continuous_batching(self, **settings): return Manager()

class AutoModelForCausalLM:
    from_config = staticmethod(lambda config, dtype: Model())
""",
    "transformers/generation.py": "class ContinuousBatchingConfig:\n"
    "    def __init__(self, **settings): pass\n",
}


def test_transformers_tells_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    for name, text in TRANSFORMERS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    python = tmp_path / "python"
    words = f'PYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{sys.executable}" "$@"'
    python.write_text(f"#!/bin/sh\n{words}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    flags = {"max_model_len": 64, "block_size": 32, "num_gpu_blocks_override": 9}
    flags |= {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_prefix_caching": True}
    load = {"requests": [{"arrival_s": 0.0, "prompt": [3] * 7, "output_tokens": 3}]}
    job = {"engine": "transformers", "config": {}, "flags": flags, "loads": [load, load]}
    answer = engines.serve(str(python), job)
    assert answer["engine"] == "transformers 5.x" and answer["blocks"] == 9
    for served in answer["loads"]:
        steps = served["steps"]
        assert [step["prefills"] for step in steps] == [[[7, 0]], [], []]
        assert [step["context"] for step in steps] == [0, 8, 9]
        assert [step["decodes"] for step in steps] == [0, 1, 1]
        assert all(step["kv_share"] == 0.25 and step["wall_s"] > 0 for step in steps)
        assert served["requests"][0]["tokens"] == 3


def test_texts_are_equal_where_the_load_says_so() -> None:
    prefixes = ["workload.prefixes.groups=2", "workload.prefixes.prefix_tokens=10"]
    loaded = load_scenario(REPLAY, prefixes)
    table = build_requests(loaded.scenario, REPLAY.parent, 0, lambda line: None)
    assert table.shared is not None
    heads = {}
    for at in range(len(table)):
        tokens = real._tokens(table, at, 32000)
        assert len(tokens) == table.prompt_tokens[at]
        assert 3 <= min(tokens) <= max(tokens) < 32000
        heads.setdefault(table.shared[at][0][0], set()).add(tuple(tokens[:10]))
    assert len(heads) == 2
    assert all(len(texts) == 1 for texts in heads.values())


def test_a_catalogue_model_is_made_of_its_shape(tmp_path: Path) -> None:
    config = _job(tmp_path, "model=Qwen/Qwen3-0.6B", "engine.max_model_len=1024")["config"]
    assert config["num_hidden_layers"] == 28
    assert config["tie_word_embeddings"] is True


def test_a_models_folder_and_its_overrides_reach_the_engine(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text((LIBRARY / "tiny-llama.json").read_text())
    job = _job(tmp_path, f"model={folder}", "engine.hf_overrides.num_hidden_layers=2")
    assert job["config"]["bos_token_id"] == 1  # the folder's own, not one of its shape
    assert job["config"]["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=openai/gpt-oss-20b"], "only plain dense models are made from the catalogue"),
        (
            ['workload.sessions={"turns": {"mean": 3}, "think_s": {"mean": 1}}'],
            "sessions",
        ),
    ],
)
def test_what_cannot_be_served_for_real(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        _job(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "nan"], "--minutes nan: expected"),
        (["--profile", "h100-sxm"], "h100-sxm was measured on h100-sxm, not on cpu"),
        (["--profile", "none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_an_engine_is_not_started_for_nothing(fake: str, words: list[str], message: str) -> None:
    asked = ["validate", "--engine", "vllm", "--python", fake, *words, str(REPLAY)]
    result = CliRunner().invoke(app, asked)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


def test_an_engine_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(InputError, match="--engine vllm: not installed"):
        engines.check_engine(sys.executable, "vllm")


def test_an_engine_that_breaks_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho 'ValueError: no such model' >&2\necho bye >&2\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(InputError, match="--engine vllm: ValueError: no such model"):
        engines.serve(str(path), {"engine": "vllm"})
    with pytest.raises(InputError, match="--python /nowhere"):
        engines.serve("/nowhere", {"engine": "vllm"})
    result = CliRunner().invoke(app, ["validate", "--engine", "tgi", str(REPLAY)])
    assert "--engine tgi: expected one of vllm, transformers" in str(result.exception)


def test_a_host_is_what_null_models_take_beyond_their_kernels(fake: str) -> None:
    """The stand-in takes 10 ms a step whatever the layers and sequences."""
    ballast = {"layer_bytes": 64, "head_bytes": 8}
    jobs = engines.null_jobs("vllm", {"dtype": "float32"}, {}, ballast)
    assert [job["ballast"] for job in jobs] == [ballast, ballast]
    assert [job["config"]["num_hidden_layers"] for job in jobs] == list(engines.LAYERS)
    host = engines.measure_host(fake, jobs, lambda sequences: 0.0)
    # With CUDA graphs a layer's share says nothing of launching it.
    assert host == Host("fake 1", pytest.approx(0.01), pytest.approx(0.0), None)
    eager = engines.null_jobs("vllm", {"dtype": "float32", "enforce_eager": True}, {}, {})
    assert engines.measure_host(fake, eager, lambda sequences: 0.0).layer_s == pytest.approx(0.0)


def test_ballast_is_read_before_layers_and_steps_and_not_counted() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class TinyDecoderLayer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x + 1

    clock = Clock()
    ballast = Ballast(clock, layer_bytes=1 << 26, head_bytes=1 << 24)
    model = torch.nn.Sequential(TinyDecoderLayer(), torch.nn.ReLU(), TinyDecoderLayer())
    ballast.lay_on(model)
    real, start = time.perf_counter(), clock()
    ballast.before_step()
    assert float(model(torch.zeros(1))) == 2.0
    left_out = (time.perf_counter() - real) - (clock() - start)
    ours = clock() - start
    # 144 MiB take milliseconds anywhere, two additions do not.
    assert left_out > 1e-3
    assert 0 < ours < left_out
    # Without ballast nothing is hooked, and nothing left out.
    plain = torch.nn.Sequential(TinyDecoderLayer())
    none = Ballast(clock)
    none.lay_on(plain)
    none.before_step()
    assert not plain[0]._forward_pre_hooks


def test_ballast_is_as_large_as_the_models_weights() -> None:
    model = load_model(str(LIBRARY / "tiny-llama.json"))
    target = Target((model,), load_hardware("cpu"), ("float32",), 32, 512, (1,))
    head = 4 * model.vocab_size * model.hidden_size
    layers = 4 * (parameters(model) - embedding_parameters(model))
    cache = 1 << 25
    found = calibrating._ballast(target, cache)
    assert found == {"layer_bytes": layers // model.num_layers, "head_bytes": head}
    huge = load_model("meta-llama/Llama-3.1-70B-Instruct")
    most = calibrating._ballast(replace(target, models=(huge,)), cache)
    assert set(most.values()) == {4 * cache}


def test_clients_send_when_it_is_time_or_one_by_one() -> None:
    requests = [{"arrival_s": float(at)} for at in (0, 2, 1)]
    clients = Clients({"requests": requests})
    assert [at for at, _ in clients.due(1.5)] == [0, 2]
    assert clients
    assert [at for at, _ in clients.due(2.0)] == [1]
    assert not clients
    loop = Clients({"requests": requests, "concurrency": 1})
    assert [at for at, _ in loop.due(0.0)] == [0]
    assert [at for at, _ in loop.due(9.0)] == []
    loop.finished()
    assert [at for at, _ in loop.due(9.0)] == [1]


# ---------------------------------------------------------------- the host in a step


def _priced(hardware_kind: str, **host: Any) -> tuple[Roofline, float]:
    loaded = load_scenario(REPLAY)
    setup = real.set_up(loaded)
    cost = Roofline(model=setup.model, hardware=setup.hardware, **host)
    return cost, sum(cost.step(StepShape((), 8, 8, 800, 8))[:9])


def test_a_sequence_costs_the_host_its_share() -> None:
    _, none = _priced("cpu", async_scheduling=False)
    _, both = _priced("cpu", async_scheduling=False, host_s=1e-3, host_sequence_s=1e-4)
    assert both - none == pytest.approx(1e-3 + 8e-4)
    _, layers = _priced("cpu", async_scheduling=False, host_layer_s=2e-4)
    _, eager = _priced("cpu", async_scheduling=False, host_layer_s=0.0)
    assert layers - eager == pytest.approx(4 * 2e-4)


def test_fast_forward_is_the_stepped_run_with_a_measured_host(profile: str) -> None:
    loaded = load_scenario(REPLAY, [f"profile={profile}"])
    cost = build(loaded).cost
    for decodes in (1, 5, 32):
        priced = cost.decode(decodes)
        ns = priced.steps_ns(40 * decodes, 30)
        one = [
            round(
                sum(
                    cost.step(StepShape((), decodes, decodes, 40 * decodes + i * decodes, decodes))[
                        :9
                    ]
                )
                * 1e9
            )
            for i in range(30)
        ]
        assert np.abs(np.asarray(ns) - one).max() <= 1


def test_the_replay_of_the_library_completes() -> None:
    loaded = real.as_served(load_scenario(REPLAY), "vllm")
    deployment = build(loaded)
    table = build_requests(loaded.scenario, REPLAY.parent, 0, lambda line: None)
    trace = deployment.simulate(table).trace
    assert (trace.requests["status"] == COMPLETED).all()
