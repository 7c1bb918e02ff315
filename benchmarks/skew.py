"""What uneven contexts cost in attention, and how near the law of the tail comes.

    python benchmarks/skew.py [FOLDER]

LLMServingSim's `skew.csv` has batches of which some contexts are longer, beside equal ones of as
many tokens. Printed are, by GPU and kind of batch, how far off equal contexts are, and how far
those with the tail that the bundled profile has (median and 90th percentile, mean with its sign).
"""

import csv
import sys
from pathlib import Path

import numpy as np

from servecast.calibration.store import load_profile
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.shape import tail_tokens
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.costmodels.weights import kv_heads

DEFAULT = Path(__file__).parents[2] / "shared" / "kernels" / "llmservingsim"

PROFILES = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000-llmservingsim"}

#: The times are of so many iterations together.
ITERATIONS = 3

KINDS = {"pure": "decodes", "mixed": "decodes beside a prompt"}


def logs(
    row: dict[str, str], profile: str, hardware: HardwareSpec, model: ModelSpec, tensor: int
) -> tuple[float, float]:
    """log(predicted / measured) by equal contexts, and with the tail."""
    tail = load_profile(profile).tail
    if tail is None:
        raise SystemExit(f"skew: {profile} has no tail")
    own = kv_heads(model, tensor)
    number, longer = int(row["n"]), int(row["nb"])
    contexts = sorted([int(row["kv_big"])] * longer + [int(row["kvs"])] * (number - longer))
    sequences = tail.sequences(own)
    tokens = tail_tokens(contexts[-sequences:], number, sum(contexts), sequences)
    share = tail.share(number * own, row["regime"] == "mixed", hardware.multiprocessors)
    token_bytes = 2 * own * model.head_dim * model.dtype_bytes
    even, uneven = (float(row[f"t_{name}_us"]) / ITERATIONS for name in ("mean", "skew"))
    more = 1e6 * tokens * share * token_bytes / hardware.memory_bandwidth_bytes_per_s
    return float(np.log(even / uneven)), float(np.log((even + more) / uneven))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    for gpu, profile in PROFILES.items():
        hardware = load_hardware(load_profile(profile).hardware)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for path in sorted((folder / gpu).glob("*/*/bf16/tp*/skew.csv")):
            model, tensor = load_model("/".join(path.parts[-5:-3])), int(path.parts[-2][2:])
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    if not float(row["kp"]):
                        own = logs(row, profile, hardware, model, tensor)
                        found[row["regime"]].append(own)
        for kind, words in KINDS.items():
            rows = np.array(found[kind])
            for name, errors in zip(("equal contexts", "with the tail"), rows.T, strict=True):
                off = np.abs(np.expm1(errors))
                print(
                    f"{gpu}, {words} ({len(rows):,} batches), {name}: median {np.median(off):.1%}, "
                    f"90th percentile {np.percentile(off, 90):.1%}, mean {np.mean(errors):+.1%}"
                )


if __name__ == "__main__":
    main()
