"""EAGLE-2 of Spec-Bench, predicted: Vicuna on an RTX 3090 and on an A100, batch 1, Hugging Face.

    python benchmarks/spec_bench.py

Spec-Bench (leaderboard of 2025-04-22, Apache-2.0) runs models of transformers without CUDA graphs,
so the host's launches bound a small model. What a layer's launches take, and what building and
accepting a tree takes in Python, are not told; both are fitted to two rows (13B and 33B on an
A100), and the two rows of the 7B, one of them on another device, are predicted with them.
"""

from dataclasses import dataclass, replace

from scipy.optimize import brentq

from servecast.calibration.profile import GENERIC
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.drafting import drafter_of
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import StepShape
from servecast.costmodels.specs import ModelSpec
from servecast.costmodels.speculative import Layers

#: EAGLE-2 as Spec-Bench runs it: depth 6, 10 candidates a depth, 60 tokens verified.
WIDTHS = (10,) * 6
VERIFIED = 60

#: Context in the middle of a Spec-Bench answer, tokens.
CONTEXT = 500

A100, RTX_3090 = "a100-sxm-80gb", "rtx-3090"


@dataclass(frozen=True)
class Row:
    """A row of the leaderboard."""

    device: str
    size: str
    accepted_tokens: float
    speedup: float


#: Layers, hidden size, heads and width of the MLP.
SIZES = {"13B": (40, 5120, 40, 13824), "33B": (60, 6656, 52, 17920)}

FITTED = (Row(A100, "13B", 4.43, 2.46), Row(A100, "33B", 4.05, 2.59))
PREDICTED = (Row(RTX_3090, "7B", 4.35, 2.19), Row(A100, "7B", 4.34, 2.36))


def vicuna(size: str) -> ModelSpec:
    """Vicuna v1.3: LLaMA in float16 (arXiv 2302.13971, table 2)."""
    llama = replace(load_model("meta-llama/Llama-2-7b-hf"), dtype="float16")
    if size == "7B":
        return llama
    layers, hidden, heads, width = {"13B": (40, 5120, 40, 13824), "33B": (60, 6656, 52, 17920)}[
        size
    ]
    return replace(
        llama,
        name=f"Vicuna-{size}",
        num_layers=layers,
        attention_layers=layers,
        dense_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=width,
    )


def steps(row: Row, layer_s: float) -> tuple[float, float, float]:
    """Seconds of a plain step, of a verification, and of drafting a tree."""
    hardware, model = load_hardware(row.device), vicuna(row.size)

    def cost(of: ModelSpec) -> Roofline:
        efficiency = GENERIC.efficiency
        return Roofline(model=of, hardware=hardware, efficiency=efficiency, host_layer_s=layer_s)

    target = cost(model)
    plain = target.step(StepShape((), 1, 1, CONTEXT, 1)).total_s
    verify = target.step(StepShape((), 1, VERIFIED, CONTEXT + VERIFIED, VERIFIED)).total_s
    drafter = drafter_of("eagle", model, WIDTHS)
    assert drafter.model is not None
    passes = Layers(cost(drafter.model), WIDTHS)
    accepted = round(row.accepted_tokens)
    shape = StepShape((), 1, accepted, CONTEXT, 1, (1,) * len(WIDTHS), CONTEXT)
    return plain, verify, passes.draft(shape, verify)[0]


def speedup(row: Row, layer_s: float, tree_s: float) -> float:
    """Tokens of a round over what a round takes in plain steps."""
    plain, verify, draft = steps(row, layer_s)
    return row.accepted_tokens * plain / (verify + draft + tree_s)


def fit() -> tuple[float, float]:
    """(seconds of a layer's launches, seconds of a tree in Python): both fitted rows come out."""

    def tree(layer_s: float) -> float:
        big = FITTED[1]
        plain, verify, draft = steps(big, layer_s)
        return big.accepted_tokens * plain / big.speedup - verify - draft

    def miss(layer_s: float) -> float:
        return speedup(FITTED[0], layer_s, tree(layer_s)) - FITTED[0].speedup

    # From 0.8 ms on the host would bound the 33B too: two figures could not be told apart.
    layer_s = float(brentq(miss, 3e-4, 8e-4))
    return layer_s, tree(layer_s)


def main() -> None:
    layer_s, tree_s = fit()
    print(
        f"fitted: a layer's launches {layer_s * 1e3:.2f} ms, a tree {tree_s * 1e3:.1f} ms of Python"
    )
    for rows, word in ((FITTED, "fitted"), (PREDICTED, "predicted")):
        for row in rows:
            found = speedup(row, layer_s, tree_s)
            plain, verify, draft = (1e3 * seconds for seconds in steps(row, layer_s))
            print(
                f"{word}: EAGLE-2, Vicuna-{row.size}, {row.device}: x{found:.2f}, measured "
                f"x{row.speedup:.2f} ({found / row.speedup - 1:+.1%}); plain step {plain:.1f} ms, "
                f"verification {verify:.1f} ms, drafting {draft:.1f} ms"
            )


if __name__ == "__main__":
    main()
