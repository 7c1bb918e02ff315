"""Make `calibration/acceptance_fits.yaml` from the shared data.

    python benchmarks/acceptance_fits.py > calibration/acceptance_fits.yaml

Where requests were recorded, all of them are fitted. Where a source has means alone, the spread of
requests is that of a recorded method, and the rates are moved until the mean comes out.
"""

import csv
import sys
from pathlib import Path

import yaml

from servecast.calibration.acceptance import fit_decay, fit_hierarchical, read_lengths, replay
from servecast.calibration.fits import mean_length, shifted_to
from servecast.sim.acceptance import Hierarchical

SPECULATION = Path(__file__).parents[2] / "shared" / "speculation"

#: Drafts of the recorded rounds.
K = 8

RECORDED = (
    "Llama-3.1-8B-Instruct, {method}, {data}: accepted lengths of {n} requests recorded with vLLM "
    "0.10.1 on an H100 by SpecDecode-Bench (arXiv 2601.11580)"
)
PUBLISHED = (
    "mean acceptance length {length} at k = 3 of Llama-3.1-8B-Instruct, {method}, {data} "
    "(SpecDecode-Bench, arXiv 2601.11580); spread of requests as in chat"
)
CURVE = (
    "mean acceptance lengths of {model}, {mode}, k = 1 to 8 (InferenceX golden_acceptance_length, "
    "Apache-2.0); spread of requests as of eagle-chat"
)
SPEC_BENCH = (
    "{tokens} mean accepted tokens of Vicuna-7B, {method}, greedy (Spec-Bench leaderboard, "
    "Apache-2.0); spread of requests as of eagle-chat"
)

#: (name, method, data, mean at k = 3): data sets that were published as means.
MEANS = (
    ("eagle-code", "eagle", "InstructCoder", 2.35),
    ("eagle-summaries", "eagle", "CNN/DailyMail", 2.33),
    ("ngram-code", "ngram", "InstructCoder", 2.03),
    ("ngram-summaries", "ngram", "CNN/DailyMail", 1.33),
)

#: (name, model, mode) of the published curves.
CURVES = (
    ("eagle3", "kimi-k2.5-nvfp4", "thinking_off"),
    ("eagle3-thinking", "kimi-k2.5-nvfp4", "thinking_on"),
    ("mtp", "deepseek-v4-pro", "thinking_off"),
    ("mtp-thinking", "deepseek-v4-pro", "thinking_on"),
    ("mtp-qwen3.5-thinking", "qwen3.5-397b-a17b-nvfp4", "thinking_on"),
)

#: (name, method of the leaderboard, depth of a draft). SpS drafts a chain of 5 with a model of 68 M
#: parameters, Medusa a tree with 5 heads, EAGLE-2 a tree of depth 6.
BENCHED = (("draft-model", "SpS", 5), ("medusa", "Medusa", 5), ("eagle2-tree", "EAGLE2", 6))


def main() -> None:
    fits: dict[str, tuple[Hierarchical, str]] = {}
    for word, data, title in (("chat", "sharegpt", "ShareGPT"), ("maths", "gsm8k", "GSM8K")):
        for method, rows in read_lengths(SPECULATION / f"acc_len_{data}.jsonl").items():
            process = fit_hierarchical([replay(row, K) for row in rows], K)
            source = RECORDED.format(method=method, data=title, n=len(rows))
            fits[f"{method}-{word}"] = process, source
    for name, method, data, length in MEANS:
        process = shifted_to(fits[f"{method}-chat"][0], 3, length)
        fits[name] = process, PUBLISHED.format(length=length, method=method, data=data)
    spread = fits["eagle-chat"][0]
    with (SPECULATION / "golden_acceptance_length.csv").open(newline="") as file:
        rows_of_curves = list(csv.DictReader(file))
    for name, model, mode in CURVES:
        curve = {
            int(row["num_speculative_tokens"]): float(row["acceptance_length_incl_bonus"])
            for row in rows_of_curves
            if (row["model"], row["thinking_mode"]) == (model, mode)
        }
        rates = tuple(fit_decay(curve).rates(K).tolist())
        process = Hierarchical(rates, spread.quality, spread.persistence, spread.depth)
        fits[name] = shifted_to(process, K, curve[K]), CURVE.format(model=model, mode=mode)
        told = ", ".join(f"{k}: {mean_length(fits[name][0], k) / curve[k] - 1:+.1%}" for k in curve)
        print(f"{name}: error of the mean by k: {told}", file=sys.stderr)
    with (SPECULATION / "spec_bench_leaderboard.csv").open(newline="") as file:
        bench = {
            (row["device"], row["target_model"], row["method"]): row for row in csv.DictReader(file)
        }
    for name, method, depth in BENCHED:
        tokens = float(bench["A100", "Vicuna-7B-v1.3", method]["mean_accepted_tokens"])
        process = Hierarchical((0.7,) * depth, spread.quality, spread.persistence, spread.depth)
        fits[name] = (
            shifted_to(process, depth, tokens),
            SPEC_BENCH.format(tokens=tokens, method=method),
        )
    print("# Made by benchmarks/acceptance_fits.py; see servecast/calibration/fits.py.")
    for name, (process, source) in fits.items():
        row = {
            "source": source,
            "rates": [round(rate, 4) for rate in process.rates],
            "quality": [round(value, 3) for value in process.quality],
            "persistence": round(process.persistence, 4),
            "depth": process.depth,
        }
        print(
            yaml.safe_dump({name: row}, sort_keys=False, width=100, default_flow_style=None), end=""
        )


if __name__ == "__main__":
    main()
