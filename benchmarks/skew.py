"""What unequal contexts in a batch cost in attention, from LLMServingSim's `skew.csv`.

    python benchmarks/skew.py [FOLDER]

A row has the time of a batch of which some sequences are longer, and of one of as many tokens all
alike; printed is the median of their ratio by GPU, kind of batch and sequences.
"""

import csv
import sys
from pathlib import Path

import numpy as np

DEFAULT = Path(__file__).parents[2] / "shared" / "kernels" / "llmservingsim"

SEQUENCES = ((2, 8), (16, 32), (64, 256))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    for path in sorted(folder.glob("*/*/Llama-3.1-8B/bf16/tp1/skew.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for regime in ("pure", "mixed"):
            for least, most in SEQUENCES:
                ratios = [
                    float(row["t_skew_us"]) / float(row["t_mean_us"])
                    for row in rows
                    if row["regime"] == regime and least <= float(row["n"]) <= most
                ]
                words = "decodes" if regime == "pure" else "decodes beside a prompt"
                gpu = path.relative_to(folder).parts[0]
                print(f"{gpu}, {words}, {least} to {most}: x{np.median(ratios):.3f}")


if __name__ == "__main__":
    main()
