"""Write recorded serving runs as cases for `servecast validate`.

    python benchmarks/cases.py FOLDER [--path shared/validation]
    servecast validate FOLDER/*.case.yaml --profile h100-sxm

From inference-sim/training (`vllm-h100/measured.csv`, folder default_args, commit ed5c1d2): ten
stages of vLLM on H100 SXM under a constant rate. Its client counts two gaps a token, so the time
between tokens is (E2E - TTFT) / (output tokens - 1); prompts are ten in each of ten groups, drawn
again and again; overloaded runs are left out. From casys-kaist/LLMServingSim (commit 5daddb21): two
overloaded runs with vLLM's own time stamps of 300 greedy requests. From ai-dynamo/aiconfigurator's
silicon_sample.csv (`inferencex/measured.csv`): 138 closed loops of vLLM on H100 SXM.

That file states neither the statistic nor flags nor clients; they are read from the projects behind
it. Both count ten requests a client, all of which send at once, and means. InferenceX's rows: fp8
KV, no prefix caching, as many max-num-seqs as clients, lengths within 20 % below, greedy.
aiconfigurator's own (gap-analysis): its evaluation (eval/benchmarks/genai_perf_runner.py) sends
equal lengths and asks for no sampling, so that the model's own holds; its rule for a server that is
measured (generator/rule_plugin/benchmark/vllm.rule) is a token budget of the prompt, 1,500 and a
token for each client. Blank precision is 16 bits.
"""

import argparse
import csv
import json
import os
import sys
from pathlib import Path

from replay_llmservingsim import RUNS, load_of

from servecast.calibration.aiconfigurator import SYSTEMS

DEFAULT = Path(__file__).parents[2] / "shared" / "validation"

#: Systems of that file, and the catalogue's devices.
DEVICES = SYSTEMS | {"b300_sxm": "b300", "gb300": "gb300"}

#: `max-num-seqs` of InferenceX's servers on B200, whatever the clients.
BLACKWELL_SEQS = 512

#: Requests of a closed loop, for each of its clients.
REQUESTS_A_CLIENT = 10

#: Tokens that aiconfigurator's rule adds to a prompt and a token for each client.
BUDGET_BESIDE_PROMPT = 1500

#: Of a stage, so many seconds are simulated: the load is steady.
SECONDS = 300

STAGE = """name: {name}
model: {model}
hardware: h100-sxm
engine:
  tensor_parallel_size: {tensor_parallel}
  max_num_seqs: {max_num_seqs}
  max_num_batched_tokens: {max_num_batched_tokens}
  max_model_len: {max_model_len}
  gpu_memory_utilization: 0.9
  vllm_version: 0.15.0
workload:
  arrivals: {{kind: constant, rate_per_s: {stage_rate_per_s}, requests: {requests}}}
  lengths: {{kind: fixed, input_tokens: {question}, output_tokens: {output_tokens_max}}}
  prefixes: {{groups: 10, prefix_tokens: {system_prompt_tokens}, prompts_per_group: 10}}
"""

REPLAY = """name: {name}
model: meta-llama/Llama-3.1-8B
hardware: {hardware}
profile: {profile}
engine: {engine}
workload:
  arrivals: {{kind: trace, path: {load}}}
  sampling: {{temperature: 0}}
"""

LOOP = """name: {name}
model: {model}
hardware: {hardware}
engine: {engine}
workload:
  arrivals: {{kind: closed_loop, concurrency: {concurrency}, requests: {requests}}}
  lengths: {lengths}
{sampling}"""

#: Profiles of kernels as vLLM ran them on the devices of the replays.
PROFILES = {"rtx-4090": "rtx-4090", "rtx-pro-6000": "rtx-pro-6000-llmservingsim"}


def write(folder: Path, name: str, scenario: str, case: str) -> None:
    (folder / f"{name}.yaml").write_text(scenario)
    (folder / f"{name}.case.yaml").write_text(f"scenario: {name}.yaml\n{case}")


def stages(source: Path, folder: Path) -> None:
    with (source / "measured.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if int(row["stage"]) < 0 or "reasoning" in row["experiment"]:
            continue
        rate = float(row["stage_rate_per_s"])
        name = f"{row['experiment'].split('-', 2)[2]}-{rate:g}"
        facts = dict(row) | {
            "name": name,
            "model": os.path.relpath(
                source / f"{row['model'].rpartition('/')[2]}.config.json", folder
            ),
            "stage_rate_per_s": f"{rate:g}",
            "requests": str(round(rate * SECONDS)),
            "question": str(
                round(float(row["prompt_len_mean"])) - int(row["system_prompt_tokens"])
            ),
        }
        ttft_s, e2e_s = float(row["ttft_s_mean"]), float(row["e2e_s_mean"])
        tpot_s = (e2e_s - ttft_s) / (int(row["output_tokens_max"]) - 1)
        case = (
            f"client: true\nmeasured:\n  ttft_s: {{mean: {ttft_s}}}\n"
            f"  tpot_s: {{mean: {tpot_s}}}\n"
            f"  e2e_s: {{mean: {e2e_s}, p99: {float(row['e2e_s_p99'])}}}\n"
        )
        write(folder, name, STAGE.format(**facts), case)


def loops(source: Path, folder: Path) -> None:
    with (source / "measured.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        if row["backend"] != "vllm" or row["system"] not in DEVICES:
            print(f"cases: row {number}: {row['backend']} on {row['system']}: left out")
            continue
        isl, osl, clients = int(row["isl"]), int(row["osl"]), int(row["concurrency"])
        swept = row["origin"] == "inferencex_sweep"
        engine: dict[str, object] = {
            "tensor_parallel_size": int(row["tp"]),
            "gpu_memory_utilization": 0.9,
            "pipeline_parallel_size": int(row["pp"]),
            "enable_prefix_caching": False,
            "vllm_version": row["backend_version"] or "0.11.0",
        }
        if row["gemm_quant"]:
            engine["quantization"] = row["gemm_quant"]
        if swept:
            engine |= {
                "kv_cache_dtype": "fp8",
                "max_num_seqs": BLACKWELL_SEQS if "b200" in row["system"] else clients,
                "max_num_batched_tokens": 8192,
                "async_scheduling": True,
                "max_model_len": isl + osl + 200,
            }
            lengths = (
                f"{{kind: uniform, input_tokens: {{min: {isl * 4 // 5}, max: {isl}}}, "
                f"output_tokens: {{min: {osl * 4 // 5}, max: {osl}}}}}"
            )
        else:
            engine["max_num_batched_tokens"] = clients + isl + BUDGET_BESIDE_PROMPT
            lengths = f"{{kind: fixed, input_tokens: {isl}, output_tokens: {osl}}}"
        kind = "sweep" if swept else "gap"
        model = row["model"].rpartition("/")[2].lower()
        name = f"{kind}-{number:03}-{model}-tp{row['tp']}-{isl}x{osl}-c{clients}"
        text = LOOP.format(
            name=name,
            model=row["model"],
            engine=json.dumps(engine),
            concurrency=clients,
            hardware=DEVICES[row["system"]],
            requests=REQUESTS_A_CLIENT * clients,
            lengths=lengths,
            sampling="  sampling: {temperature: 0}\n" if swept else "",
        )
        ttft_s, tpot_s = float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3
        case = (
            "client: true\nmeasured:\n"
            f"  ttft_s: {{mean: {ttft_s:.9g}}}\n  tpot_s: {{mean: {tpot_s:.9g}}}\n"
        )
        write(folder, name, text, case)


def replays(source: Path, folder: Path) -> None:
    for name, hardware, engine, _ in RUNS:
        requests = os.path.relpath(source / name / "vllm" / "requests.jsonl", folder)
        text = REPLAY.format(
            name=name,
            hardware=hardware,
            profile=PROFILES[hardware],
            engine=engine,
            load=os.path.relpath(load_of(source / name), folder),
        )
        timeline = requests.replace("requests.jsonl", "timeseries.csv")
        case = f"measured: {{requests: {requests}}}\ntimeline: {timeline}\n"
        write(folder, name, text, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="where the cases go")
    parser.add_argument("--path", type=Path, default=DEFAULT, help="folder of the measured runs")
    arguments = parser.parse_args()
    if not arguments.path.is_dir():
        sys.exit(f"cases: {arguments.path}: not there")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    stages(arguments.path / "vllm-h100", arguments.folder)
    replays(arguments.path / "llmservingsim", arguments.folder)
    loops(arguments.path / "inferencex", arguments.folder)


if __name__ == "__main__":
    main()
