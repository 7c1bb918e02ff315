"""EAGLE of SpecDecode-Bench, predicted: Llama-3.1-8B on an H100, GSM8K, by batch.

    python benchmarks/specdecode_bench.py

Accepted lengths are those recorded at every output position (../shared/speculation), lengths of
requests are theirs; k = 3. Step times come once from kernels measured on an H100, and once from the
constants published with the data, which were fitted to vLLM 0.10.1. The speed-up published for
128 requests at once is 1.21 (arXiv 2601.11580).
"""

import json
import tempfile
from pathlib import Path

from servecast.scenarios.load import load_scenario
from servecast.scenarios.run import run

RECORDED = Path(__file__).parents[2] / "shared" / "speculation" / "acc_len_gsm8k.jsonl"

SCENARIO = """
name: gsm8k
model: meta-llama/Llama-3.1-8B
hardware: h100-sxm
engine:
  max_num_seqs: 256
  max_model_len: 8192
  speculative_config:
    {{method: eagle, num_speculative_tokens: 3, acceptance: {{kind: trace, path: {recorded}}}}}
workload:
  arrivals: {{kind: closed_loop, concurrency: {batch}, requests: {requests}}}
  lengths: {{kind: trace, path: lengths.jsonl}}
{profile}
"""


def speedup(batch: int, profile: str) -> tuple[float, float]:
    """(output tokens a second, mean gap): how many times as fast as without drafts."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
        lengths = [
            {"arrival_s": 0, "prompt_tokens": row["prompt_len"], "output_tokens": row["output_len"]}
            for row in rows
        ]
        Path(folder, "lengths.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lengths))
        path = Path(folder, "gsm8k.yaml")
        path.write_text(
            SCENARIO.format(recorded=RECORDED, batch=batch, requests=20 * batch, profile=profile)
        )
        found = run(load_scenario(path)).summary["speculation"]["speedup"]
    return found["output_tokens_per_s"], found["tpot"]


def main() -> None:
    if not RECORDED.exists():
        raise SystemExit("../shared/speculation is not beside this clone")
    print("batch   kernels: tokens/s, gap   constants: tokens/s, gap")
    for batch in (1, 8, 32, 64, 128):
        kernels = speedup(batch, "")
        constants = speedup(batch, "profile: specdecode-bench-h100")
        told = (f"x{tokens:.2f}, x{gap:.2f}" for tokens, gap in (kernels, constants))
        print(f"{batch:5d}   {'   '.join(told)}")


if __name__ == "__main__":
    main()
