"""How far steps are off where a device borrows its nearest relative's kernels.

    python benchmarks/borrowing.py

For each bundled device with a relative of the same major compute capability: steps of two models by
that one's kernels, scaled by datasheet, over those by its own. Printed are the errors of decodes
and of steps with a prompt, and the root mean square of the logarithm over all.
"""

import math

import numpy as np

from servecast.calibration.store import load_profile
from servecast.costmodels.catalogue import load_hardware, load_model
from servecast.costmodels.graphs import capture_sizes
from servecast.costmodels.kernels import Kernels
from servecast.costmodels.roofline import Roofline
from servecast.costmodels.shape import StepShape
from servecast.costmodels.specs import HardwareSpec, ModelSpec
from servecast.scenarios.measured import WIDE, completed, kernels_on, relative

DEVICES = (*WIDE, "rtx-4090")

MODELS = ("Llama-3.1-8B", "Qwen2.5-14B")

#: Sequences and their mean context.
DECODES = [
    StepShape((), rows, rows, rows * context, rows)
    for rows in (1, 8, 32, 128)
    for context in (500, 2_000, 8_000)
]

#: A chunk of a prompt beside sixteen of them.
PROMPTS = [StepShape(((new, 0),), 16, 16, 16_000, 17) for new in (512, 2_048, 8_000)]


def seconds(model: ModelSpec, hardware: HardwareSpec, profile: str) -> tuple[list[float], ...]:
    """Of decodes, and of steps with a prompt."""
    kernels: Kernels = kernels_on(completed(load_profile(profile), hardware), hardware)
    cost = Roofline(
        model=model,
        hardware=hardware,
        measured=kernels,
        cuda_graph_sizes=capture_sizes(256, 8_192),
    )
    return tuple([cost.step(shape).total_s for shape in shapes] for shapes in (DECODES, PROMPTS))


def main() -> None:
    every = []
    for name in DEVICES:
        hardware = load_hardware(name)
        nearest = relative(hardware, tuple(own for own in WIDE if own != name))
        if nearest is None:
            continue
        logs: list[list[float]] = [[], []]
        for model in map(load_model, MODELS):
            pairs = zip(
                logs,
                seconds(model, hardware, nearest),
                seconds(model, hardware, name),
                strict=True,
            )
            for kept, borrowed, own in pairs:
                kept += [math.log(b / o) for b, o in zip(borrowed, own, strict=True)]
        every += [*logs[0], *logs[1]]
        words = (
            f"{what} {100 * math.expm1(min(kept)):+.0f} to {100 * math.expm1(max(kept)):+.0f} %"
            for what, kept in zip(("decodes", "prompts"), logs, strict=True)
        )
        print(f"{name} by {nearest}: {', '.join(words)}")
    print(f"root mean square of the logarithm: {np.sqrt(np.mean(np.square(every))):.3f}")


if __name__ == "__main__":
    main()
