"""Choosing tokens from logits: what a request asks for, and how long vLLM's sampler takes.

Greedy rows are read once for the largest logit. Random ones go through softmax and noise; top-k and
top-p need the largest logits first, which vLLM found by sorting the whole vocabulary, and finds by
kernels of their own in later releases.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from servecast.costmodels.errors import InputError
from servecast.costmodels.kernels import Curve
from servecast.costmodels.reading import read_json
from servecast.costmodels.specs import HardwareSpec
from servecast.costmodels.versions import (
    FLASHINFER_IN_IMAGE,
    FLASHINFER_SAMPLER_SINCE,
    GENERATION_CONFIG_SINCE,
    TRITON_SAMPLER_SINCE,
    Version,
)

#: A temperature below this is greedy to vLLM (sampling_params.py, `_SAMPLING_EPS`).
GREEDY_BELOW = 1e-5

#: Traffic of one logit: written in 16 bits, read, written and read in fp32, read to choose.
GREEDY_BYTES = 2 + 2 + 4 + 4 + 4

#: Beside that, of a random row in fp32: divided by the temperature; softmax, noise drawn, divided
#: by it, and the largest found.
TEMPERATURE_BYTES = 8
CHOICE_BYTES = 12 + 4 + 12 + 4

Filter = Literal["top_k", "top_p", "top_k and top_p"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, in vLLM's terms.

    Attributes
    ----------
    temperature : 0 is greedy
    top_k : only among so many of the largest logits; 0 and -1 mean all
    top_p : only among the largest that together have this probability
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """Always the largest logit."""
        return self.temperature < GREEDY_BELOW

    @property
    def filter(self) -> Filter | None:
        """What keeps tokens from being chosen."""
        if self.greedy or (self.top_k < 1 and self.top_p >= 1):
            return None
        if self.top_p >= 1:
            return "top_k"
        return "top_p" if self.top_k < 1 else "top_k and top_p"


GREEDY = Sampling(temperature=0.0)

#: What publishers put into generation_config.json, by how the last part of a name is written; the
#: first that matches holds. Others are taken to have nothing there.
PUBLISHED = (
    (r"qwen[23].*-base$|qwen2(\.5)?-[0-9.]+b$", Sampling()),
    (r"qwen2\.5-vl", GREEDY),
    (r"qwen2-vl", Sampling(0.01, 1, 0.001)),
    (r"qwen3-.*(instruct|coder)", Sampling(0.7, 20, 0.8)),
    (r"qwen3", Sampling(0.6, 20, 0.95)),
    (r"qwen2.*instruct", Sampling(0.7, 20, 0.8)),
    (r"(meta-)?llama-[234]", Sampling(0.6, 0, 0.9)),
    (r"gemma-[34]", Sampling(1.0, 64, 0.95)),
    (r"deepseek-(r1|v3)", Sampling(0.6, 0, 0.95)),
)

#: Its name beside config.json.
GENERATION_CONFIG = "generation_config.json"


def published_sampling(model: str) -> Sampling:
    """What a server chooses by where a request does not say, by its model's generation_config.json.

    `model` is a catalogue name, or the path of a config.json, beside which the file may lie. Raises
    InputError for a file that is not one.
    """
    path = Path(model)
    if path.suffix == ".json":
        beside = path.with_name(GENERATION_CONFIG)
        return _from_file(beside) if beside.is_file() else Sampling()
    name = model.lower().rpartition("/")[2]
    return next((own for words, own in PUBLISHED if re.match(words, name)), Sampling())


def _from_file(path: Path) -> Sampling:
    data = read_json(path)
    return Sampling(
        temperature=_of(data, "temperature", 1.0, math.inf, path),
        top_k=round(_of(data, "top_k", 0, 1e9, path, -1)),
        top_p=_of(data, "top_p", 1.0, 1.0, path),
    )


def _of(
    data: Mapping[str, Any], key: str, default: float, most: float, path: Path, least: float = 0
) -> float:
    value = data.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        expected = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise InputError(f"{path}: {key}: expected {expected}, got {value!r}")
    return float(value)


def default_generation_config(version: Version) -> str:
    """vLLM's default: a model's own sampling from 0.8, none before."""
    return "auto" if version >= GENERATION_CONFIG_SINCE else "vllm"


def _curve(*points: tuple[int, float]) -> Curve:
    """Rows of 131,072 or 32,768 logits, and milliseconds."""
    return Curve(tuple(float(n) for n, _ in points), tuple(ms / 1e3 for _, ms in points))


#: Seconds of a filter by logits, of PyTorch's sort, the Triton kernel and FlashInfer's sampler:
#: tables of vllm-project/vllm pull request 40376, and for one row that of 51507. They do not name
#: the GPU; a sort of 128 x 151,936 with both filters and the choice takes 2.95 ms on an H200 in
#: ModelTC/LightLLM's pull request 1573, and 3.0 ms by these.
SORT: Mapping[Filter, Curve] = {
    "top_k": _curve((1 << 15, 0.094), (1 << 22, 0.525), (1 << 24, 2.061), (1 << 26, 5.494)),
    "top_p": _curve(
        (1 << 15, 0.104), (1 << 21, 0.370), (1 << 22, 0.626), (1 << 24, 2.318), (1 << 26, 6.150)
    ),
    "top_k and top_p": _curve(
        (1 << 15, 0.130), (1 << 21, 0.401), (1 << 22, 0.662), (1 << 23, 1.074), (1 << 24, 2.399)
    ),
}
TRITON: Mapping[Filter, Curve] = {
    "top_k": _curve((1 << 22, 0.114), (1 << 24, 0.302), (1 << 26, 1.124)),
    "top_p": _curve((1 << 21, 0.239), (1 << 22, 0.260), (1 << 24, 0.528), (1 << 26, 2.013)),
    "top_k and top_p": _curve(
        (1 << 21, 0.126), (1 << 22, 0.143), (1 << 23, 0.311), (1 << 24, 0.359)
    ),
}
FLASHINFER: Mapping[Filter, Curve] = {
    "top_k": _curve((1 << 22, 0.059), (1 << 24, 0.198), (1 << 26, 0.488)),
    "top_p": _curve((1 << 21, 0.048), (1 << 22, 0.046), (1 << 24, 0.139), (1 << 26, 0.372)),
    "top_k and top_p": _curve(
        (1 << 21, 0.068), (1 << 22, 0.074), (1 << 23, 0.199), (1 << 24, 0.267)
    ),
}

#: Memory bandwidth of the GPU that those are taken to be of: an H100's.
MEASURED_BYTES_PER_S = 3.35e12

#: NVIDIA's first architecture that FlashInfer takes (`flashinfer_sampler_supported`).
FLASHINFER_CAPABILITY = 7.5

#: Fewer rows than these are sorted where the Triton kernel would serve more.
TRITON_ROWS = 8


def random_bytes(sampling: Sampling, hardware: HardwareSpec, version: Version) -> float:
    """Traffic of one logit beside that of a greedy choice. FlashInfer chooses as it filters."""
    if sampling.greedy:
        return 0
    fused = sampling.filter is not None and _kernels(1, hardware, version) is FLASHINFER
    return TEMPERATURE_BYTES + (0 if fused else CHOICE_BYTES)


def filter_s(
    kind: Filter, rows: int, vocab_size: int, hardware: HardwareSpec, version: Version
) -> float:
    """Seconds of keeping tokens from being chosen, by FlashInfer with the choice.

    A device of less bandwidth than the measured one takes as much longer; one of more is not taken
    to be faster (an H200 is not).
    """
    slower = max(1.0, MEASURED_BYTES_PER_S / hardware.memory_bandwidth_bytes_per_s)
    return slower * _kernels(rows, hardware, version)[kind].at(rows * vocab_size)


def _kernels(rows: int, hardware: HardwareSpec, version: Version) -> Mapping[Filter, Curve]:
    first, past = FLASHINFER_IN_IMAGE
    chosen = first <= version < past or version >= FLASHINFER_SAMPLER_SINCE
    if chosen and hardware.compute_capability >= FLASHINFER_CAPABILITY:
        return FLASHINFER
    compiled = hardware.kind == "gpu" and version >= TRITON_SAMPLER_SINCE
    return TRITON if compiled and rows >= TRITON_ROWS else SORT
