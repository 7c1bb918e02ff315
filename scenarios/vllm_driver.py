"""Drives vLLM's own scheduler, in a Python that has vLLM: workloads in, schedules out.

Not used by servecast itself: `servecast parity --vllm PYTHON` starts this file with that Python
and talks to it in JSON lines over its pipes. It must not import servecast, which that Python need
not have. A line in is a workload (`docs/parity.md`), a line out is `{"trace": [...]}` or
`{"error": ...}`.

Model and weights are not loaded: outputs are made up, since a schedule depends only on their
number.
"""

import contextlib
import copy
import json
import os
import sys
import tempfile
from collections import deque
from typing import Any

CONFIG_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "num_blocks": 64,
    "enable_prefix_caching": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "watermark": 0.0,
    "max_model_len": 1024,
    "reserve_full_isl": True,
    "async_scheduling": False,
    "spec": None,
}

#: A model that exists only as a config: nothing of it reaches the scheduler but its being there.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}

IDLE_STEPS = 3


class _NoGrammar:
    """Stands where vLLM keeps its structured outputs."""

    def accept_tokens(self, request: Any, tokens: Any) -> bool:
        return True

    def validate_tokens(self, request: Any, tokens: Any) -> Any:
        return tokens

    def should_advance(self, request: Any) -> bool:
        return False


class Engine:
    """One vLLM, with a configuration for each kind of speculation, made when first asked for."""

    def __init__(self) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        import vllm

        self.version = str(vllm.__version__)
        self._folder = tempfile.TemporaryDirectory()
        self._configs: dict[str, Any] = {}

    def _model(self, name: str) -> str:
        folder = os.path.join(self._folder.name, name)
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(TINY, file)
        return folder

    def _base_config(self, spec: dict[str, Any] | None) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        key = json.dumps(spec)
        if key not in self._configs:
            arguments: dict[str, Any] = {
                "model": self._model("model"),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "dtype": "float32",
                "max_model_len": 1024,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 1024,
            }
            if spec:
                speculative = {"method": spec["method"], "num_speculative_tokens": spec["k"]}
                if spec["method"] == "ngram":
                    speculative |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
                else:
                    speculative["model"] = self._model(spec["method"])
                arguments["speculative_config"] = speculative
            self._configs[key] = EngineArgs(**arguments).create_engine_config()
        return self._configs[key]

    def scheduler(self, config: dict[str, Any]) -> Any:
        """A fresh scheduler with the settings of one workload."""
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        whole = copy.copy(self._base_config(config["spec"]))
        whole.scheduler_config = s = copy.copy(whole.scheduler_config)
        whole.cache_config = c = copy.copy(whole.cache_config)
        whole.model_config = copy.copy(whole.model_config)
        for key in ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "policy"):
            setattr(s, key, config[key])
        s.long_prefill_token_threshold = config["long_prefill_token_threshold"]
        s.watermark = config["watermark"]
        s.scheduler_reserve_full_isl = config["reserve_full_isl"]
        s.async_scheduling = config["async_scheduling"]
        s.max_num_scheduled_tokens = None
        whole.model_config.max_model_len = config["max_model_len"]
        c.block_size = config["block_size"]
        c.enable_prefix_caching = config["enable_prefix_caching"]
        c.num_gpu_blocks = config["num_blocks"]
        spec = FullAttentionSpec(
            block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        init_none_hash(sha256)
        kind = AsyncScheduler if config["async_scheduling"] else Scheduler
        return kind(
            vllm_config=whole,
            kv_cache_config=KVCacheConfig(
                num_blocks=config["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=_NoGrammar(),
            block_size=config["block_size"],
            hash_block_size=config["block_size"],
            log_stats=False,
        )


class Run:
    """One workload on one scheduler."""

    def __init__(self, engine: Engine, workload: dict[str, Any]) -> None:
        self.config = {**CONFIG_DEFAULTS, **workload["config"]}
        self.k = self.config["spec"]["k"] if self.config["spec"] else 0
        self.scheduler = engine.scheduler(self.config)
        self.requests = {
            request["id"]: {**request, "number": i}
            for i, request in enumerate(workload["requests"])
        }
        self.turns: dict[tuple[str, str], int] = {}
        self.preempted: list[str] = []
        inner = self.scheduler._preempt_request

        def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.preempted.append(request.request_id)
            return inner(request, *args, **kwargs)

        self.scheduler._preempt_request = preempt

    def token(self, request: dict[str, Any], position: int) -> int:
        output = request.get("output")
        if output:
            return int(output[min(position, len(output) - 1)])
        return int(10_000_000 + request["number"] * 100_000 + position)

    def turn(self, request: dict[str, Any], key: str) -> int:
        values = request[key]
        at = self.turns.get((request["id"], key), 0)
        self.turns[request["id"], key] = at + 1
        return int(values[at % len(values)])

    def add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        prompt = request.get("prompt")
        if prompt is None:
            start = 1_000_000 + request["number"] * 10_000
            prompt = list(range(start, start + request["prompt_len"]))
        self.scheduler.add_request(
            Request(
                request_id=request["id"],
                prompt_token_ids=list(prompt),
                sampling_params=SamplingParams(
                    max_tokens=request["output_len"], ignore_eos=True, temperature=0.0
                ),
                pooling_params=None,
                arrival_time=request["arrival"] + request["number"] * 1e-6,
                priority=request.get("priority", 0),
                block_hasher=get_request_block_hasher(self.config["block_size"], sha256),
            )
        )

    def plan(self, step: int) -> tuple[Any, dict[str, bool], dict[str, Any]]:
        scheduler = self.scheduler
        self.preempted.clear()
        output = scheduler.schedule()
        cached = output.scheduled_cached_reqs
        computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        spec = output.scheduled_spec_decode_tokens
        record = {
            "step": step,
            "scheduled": dict(output.num_scheduled_tokens),
            "spec": {name: len(tokens) for name, tokens in spec.items()},
            "new": {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs},
            "resumed": {name: n for name, n in computed if name in cached.resumed_req_ids},
            "preempted": list(self.preempted),
            "finished": [],
            "running": [request.request_id for request in scheduler.running],
            "waiting": [request.request_id for request in scheduler.waiting],
            "free_blocks": self.free_blocks(),
        }
        emits = {
            name: not scheduler.requests[name].is_prefill_chunk
            for name in output.num_scheduled_tokens
        }
        return output, emits, record

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def commit(self, output: Any, emits: dict[str, bool], record: dict[str, Any]) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        names = list(output.num_scheduled_tokens)
        alive = {name: scheduler.requests[name] for name in names if name in scheduler.requests}
        before = {name: request.num_output_tokens for name, request in alive.items()}
        sampled = []
        for name in names:
            tokens: list[int] = []
            if emits[name] and name in alive:
                request = self.requests[name]
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                accepted = 0
                if drafts and request.get("accept"):
                    accepted = min(drafts, self.turn(request, "accept"))
                tokens = [self.token(request, before[name] + j) for j in range(1 + accepted)]
            sampled.append(tokens)
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        record["emitted"] = {
            name: request.num_output_tokens - before[name]
            for name, request in alive.items()
            if request.num_output_tokens > before[name]
        }
        record["finished"] = [name for name in alive if name not in scheduler.requests]
        record["free_blocks_after"] = self.free_blocks()
        if self.k and not self.config["async_scheduling"]:
            self.draft([n for n, tokens in zip(names, sampled, strict=True) if tokens])

    def draft(self, names: list[str]) -> None:
        """Propose drafts, as the engine does after a step."""
        from vllm.v1.outputs import DraftTokenIds

        alive = [name for name in names if name in self.scheduler.requests]
        drafts = []
        for name in alive:
            request = self.requests[name]
            count = self.turn(request, "drafts") if request.get("drafts") else self.k
            first = self.scheduler.requests[name].num_output_tokens
            drafts.append([self.token(request, first + j) for j in range(count)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids=alive, draft_token_ids=drafts))

    def trace(self) -> list[dict[str, Any]]:
        """Run to the end, with one or two steps in flight as vLLM's engine core has them."""
        pending = deque(sorted(self.requests.values(), key=lambda r: (r["arrival"], r["number"])))
        depth = 2 if self.config["async_scheduling"] else 1
        in_flight: deque[Any] = deque()
        trace: list[dict[str, Any]] = []
        step = idle = 0
        while True:
            while pending and pending[0]["arrival"] <= step:
                self.add(pending.popleft())
            if not self.scheduler.has_requests() and not in_flight:
                if not pending:
                    return trace
                step = pending[0]["arrival"]
                continue
            if self.scheduler.has_requests():
                planned = self.plan(step)
                trace.append(planned[2])
                in_flight.append(planned)
                executed = planned[0].total_num_scheduled_tokens > 0
                if len(in_flight) < depth and (executed or self.scheduler.has_requests()):
                    step += 1
                    continue
                idle = 0 if executed or len(in_flight) > 1 else idle + 1
            self.commit(*in_flight.popleft())
            step += 1
            if idle > IDLE_STEPS and not pending:
                waiting = [request.request_id for request in self.scheduler.waiting]
                return [*trace, {"step": step, "deadlock": waiting}]


def main() -> None:
    """Answer workloads until the input ends; the first line out names the version."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        engine = Engine()
        print(json.dumps({"version": engine.version}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                answer: dict[str, Any] = {"trace": Run(engine, json.loads(line)).trace()}
            except Exception as error:
                answer = {"error": f"{error.__class__.__name__}: {error}"}
            print(json.dumps(answer, separators=(",", ":")), file=answers, flush=True)


if __name__ == "__main__":
    main()
