"""Serves loads with a real engine in real time: `python -m servecast.calibration.device.engine`.

A job in JSON on its input: `engine` ("vllm" or "transformers"), `config` (a Hugging Face
configuration; weights are random), `flags`, `environment`, and `loads`: lists of requests with
`arrival_s`, `prompt` (token ids) and `output_tokens`, or with `concurrency` for a closed loop. With
`ballast` (`layer_bytes`, `head_bytes`) so much is read before each layer and each step, and left
out of all times. One line of JSON comes back: what was served when, and each step's batch and wall
time.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

#: What vLLM is told to leave out: its own processes, statistics and hub.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

#: A load before the first that counts: kernels are chosen, caches filled.
WARM_UP = [{"arrival_s": 0.0, "prompt": list(range(3, 67)), "output_tokens": 8}] * 4

NAP_S = 0.002

Request = dict[str, Any]
Load = dict[str, Any]


class Clock:
    """Seconds, without those in which ballast was read."""

    def __init__(self) -> None:
        self._left_out_s = 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self._left_out_s

    def leave_out(self, seconds: float) -> None:
        self._left_out_s += seconds


class Ballast:
    """Numbers that are read as a real model's weights are, where a model has next to none.

    On a CPU they drive the engine's own code and data out of its caches, and a step of the engine
    takes two to three times as long.
    """

    def __init__(self, clock: Clock, layer_bytes: int = 0, head_bytes: int = 0) -> None:
        import torch

        self._clock = clock
        self._layer, self._head = (torch.ones(size // 4) for size in (layer_bytes, head_bytes))

    def lay_on(self, model: Any) -> None:
        """Before each layer of a model."""
        if len(self._layer):
            for module in model.modules():
                if type(module).__name__.endswith("DecoderLayer"):
                    module.register_forward_pre_hook(lambda *_: self._read(self._layer))

    def before_step(self) -> None:
        """What the head of the step before has left."""
        if len(self._head):
            self._read(self._head)

    def _read(self, numbers: Any) -> None:
        before = time.perf_counter()
        numbers.sum()
        self._clock.leave_out(time.perf_counter() - before)


class Clients:
    """When requests are sent: at their times, or one after another by so many clients."""

    def __init__(self, load: Load) -> None:
        self._left = list(enumerate(load["requests"]))
        self._free = load.get("concurrency")
        if self._free is None:
            self._left.sort(key=lambda item: item[1]["arrival_s"])

    def due(self, now_s: float) -> Iterator[tuple[int, Request]]:
        while self._left:
            if self._free is None and self._left[0][1]["arrival_s"] > now_s:
                return
            if self._free is not None:
                if self._free == 0:
                    return
                self._free -= 1
            yield self._left.pop(0)

    def finished(self) -> None:
        if self._free is not None:
            self._free += 1

    def __bool__(self) -> bool:
        return bool(self._left)


def batch_of(scheduled: Iterable[tuple[int, int, int]]) -> dict[str, Any]:
    """What a step holds, by each request's tokens in it, after it, and of its prompt.

    A chunk of a prompt is its new tokens and those before them; a decode is its context.
    """
    chunks, contexts = [], []
    for new, after, prompt in scheduled:
        if after - new < prompt:
            chunks.append([new, after - new])
        else:
            contexts.append(after)
    return {
        "prefills": chunks,
        "decodes": len(contexts),
        "context": sum(contexts),
        "contexts": contexts,
    }


class Vllm:
    """An engine in this process, stepped by us, so that each step can be timed."""

    def __init__(
        self, config: dict[str, Any], flags: dict[str, Any], ballast: dict[str, int]
    ) -> None:
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._folder = tempfile.TemporaryDirectory(prefix="servecast-")
        path = Path(self._folder.name) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        arguments = {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0, **flags}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(model=self._folder.name, disable_log_stats=True, **arguments)
        )
        self.version = f"vllm {vllm.__version__}"
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self.blocks = int(self._scheduler.kv_cache_config.num_blocks)
        self._clock = Clock()
        self._ballast = Ballast(self._clock, **ballast)
        if ballast:
            self._engine.apply_model(self._ballast.lay_on)
        self._batch: dict[str, Any] = {}
        self._scheduled: Callable[..., Any] = self._scheduler.schedule
        self._scheduler.schedule = self._watched

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        output = self._scheduled(*args, **kwargs)
        requests = self._scheduler.requests
        self._batch = {
            **batch_of(
                (new, requests[name].num_computed_tokens, requests[name].num_prompt_tokens)
                for name, new in output.num_scheduled_tokens.items()
            ),
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "kv_share": float(self._scheduler.kv_cache_manager.usage),
        }
        return output

    def serve(self, load: Load) -> dict[str, Any]:
        from vllm import SamplingParams

        # A load that comes again finds nothing of the last time.
        self._engine.reset_prefix_cache()
        requests = load["requests"]
        sampling = load.get("sampling") or {"temperature": 0.0}
        rows: list[dict[str, Any]] = [{} for _ in requests]
        given = [0] * len(requests)
        clients, steps = Clients(load), []
        start = self._clock()
        while clients or self._engine.has_unfinished_requests():
            now = self._clock() - start
            for at, request in clients.due(now):
                parameters = SamplingParams(
                    max_tokens=request["output_tokens"],
                    ignore_eos=True,
                    detokenize=False,
                    **sampling,
                )
                prompt = {"prompt_token_ids": request["prompt"]}
                self._engine.add_request(str(at), prompt, parameters)
                sent = request["arrival_s"] if load.get("concurrency") is None else now
                rows[at] |= {"sent_s": sent, "queued_s": self._clock() - start}
            if not self._engine.has_unfinished_requests():
                time.sleep(NAP_S)
                continue
            self._batch = {}
            self._ballast.before_step()
            before = self._clock()
            outputs = self._engine.step()
            end = self._clock()
            if self._batch.get("prefills") or self._batch.get("decodes"):
                steps.append({**self._batch, "t_s": before - start, "wall_s": end - before})
            for output in outputs:
                at = int(output.request_id.split("-")[0])
                tokens = len(output.outputs[0].token_ids)
                if tokens > given[at] == 0:
                    rows[at]["first_s"] = end - start
                given[at] = tokens
                rows[at] |= {"last_s": end - start, "tokens": tokens}
                if output.finished:
                    clients.finished()
        return {"requests": rows, "steps": steps}

    def close(self) -> None:
        self._folder.cleanup()


class Transformers:
    """Hugging Face transformers with its continuous batching."""

    def __init__(
        self, config: dict[str, Any], flags: dict[str, Any], ballast: dict[str, int]
    ) -> None:
        import torch
        import transformers

        dtype = getattr(torch, str(flags.get("dtype", "float32")))
        made = transformers.AutoConfig.for_model(**config)
        made.eos_token_id = None
        with torch.device(str(flags.get("device", "cpu"))):
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
        settings = transformers.GenerationConfig(
            max_new_tokens=int(flags["max_model_len"]),
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        limits = transformers.generation.ContinuousBatchingConfig(
            page_size=flags["block_size"],
            num_blocks=flags["num_gpu_blocks_override"],
            max_batch_tokens=flags["max_num_batched_tokens"],
            max_requests_per_batch=flags["max_num_seqs"],
            allow_block_sharing=flags["enable_prefix_caching"],
            # PyTorch's own attention is everywhere, and what is calibrated.
            auto_switch_to_flash=False,
            # Of itself it would have both on a GPU.
            use_cuda_graph=not flags.get("enforce_eager", True),
            use_async_batching=bool(flags.get("async_scheduling", False)),
        )
        self._clock = Clock()
        self._ballast = Ballast(self._clock, **ballast)
        self._ballast.lay_on(model)
        self._manager = model.eval().init_continuous_batching(
            generation_config=settings, continuous_batching_config=limits
        )
        self._batch: dict[str, Any] = {}
        self._steps: list[dict[str, Any]] = []
        self._start, self._turns = 0.0, 0
        self._bound = self._steps, self._start
        self._step: Callable[[], Any] = self._manager._generation_step
        self._body: Callable[..., Any] = self._manager._generation_loop_body
        self._manager._generation_step = self._watched
        self._manager._generation_loop_body = self._timed
        self._manager.start()
        self.version = f"transformers {transformers.__version__}"
        self.blocks = int(flags["num_gpu_blocks_override"])
        self._loads = 0

    def _watched(self) -> Any:
        """A step, whose batch is noted down."""
        self._ballast.before_step()
        processor = self._manager.batch_processor
        scheduler = processor.scheduler
        self._batch = {
            **batch_of(
                (one.query_length, one.state.position_offset, len(one.state.initial_tokens))
                for one in processor.inputs_and_outputs.requests_in_batch
            ),
            "running": len(scheduler.active_requests),
            "waiting": len(scheduler.waiting_requests),
            "kv_share": 1.0 - float(processor.cache.compute_free_capacity()),
        }
        # Answers are given before a turn is over, and the next load may begin then.
        self._bound = self._steps, self._start
        return self._step()

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        """One turn of the engine's loop, and how long it took if there was a step in it."""
        self._batch = {}
        before = self._clock()
        found = self._body(*args, **kwargs)
        end = self._clock()
        if self._batch:
            steps, start = self._bound
            steps.append({**self._batch, "t_s": before - start, "wall_s": end - before})
        self._turns += 1
        return found

    def serve(self, load: Load) -> dict[str, Any]:
        """Requests are added, and answers read, while a thread of its own runs the steps."""
        if self._loads:
            # A load that comes again finds nothing of the last time.
            self._manager.batch_processor.cache.evict_cached_blocks()
        requests = load["requests"]
        rows: list[dict[str, Any]] = [{} for _ in requests]
        clients, open_requests = Clients(load), 0
        self._loads += 1
        self._steps = []
        self._start = start = self._clock()
        while clients or open_requests:
            now = self._clock() - start
            for at, request in clients.due(now):
                self._manager.add_request(
                    request["prompt"],
                    request_id=f"{self._loads}-{at}",
                    max_new_tokens=request["output_tokens"],
                    streaming=True,
                )
                sent = request["arrival_s"] if load.get("concurrency") is None else now
                rows[at] |= {"sent_s": sent, "queued_s": self._clock() - start}
                open_requests += 1
            result = self._manager.get_result(timeout=NAP_S)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the engine's own thread has ended")
                continue
            end, row = self._clock() - start, rows[int(result.request_id.split("-")[1])]
            row.setdefault("first_s", end)
            row |= {"last_s": end, "tokens": len(result.generated_tokens)}
            if result.is_finished():
                open_requests -= 1
                clients.finished()
        turns = self._turns
        while self._turns == turns and self._manager.is_running():
            time.sleep(NAP_S)
        return {"requests": rows, "steps": self._steps}

    def close(self) -> None:
        self._manager.stop(block=True)


ENGINES: dict[str, Callable[..., Vllm | Transformers]] = {
    "vllm": Vllm,
    "transformers": Transformers,
}


def main() -> None:
    # Engines print; the answer has the real output to itself.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    for name, value in {**QUIET, **job.get("environment", {})}.items():
        os.environ.setdefault(name, value)
    started = time.perf_counter()
    engine = ENGINES[job["engine"]](job["config"], job["flags"], job.get("ballast", {}))
    ready_s = time.perf_counter() - started
    engine.serve({"requests": WARM_UP})
    served = [engine.serve(load) for load in job["loads"]]
    engine.close()
    answer = {"engine": engine.version, "blocks": engine.blocks, "ready_s": ready_s}
    print(json.dumps({**answer, "loads": served}), file=output, flush=True)


if __name__ == "__main__":
    main()
