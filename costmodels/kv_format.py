"""Number formats of the KV cache: what a token takes in them, scales included."""

import re
from dataclasses import dataclass

from servecast.costmodels.errors import InputError
from servecast.costmodels.specs import ModelSpec
from servecast.costmodels.versions import LATEST, Version

FP32_BITS = 32
FP16_BITS = 16


@dataclass(frozen=True)
class KvFormat:
    """How a key or a value vector of one head is stored.

    Attributes
    ----------
    bits : of one number
    group : numbers that share a scale; 0 without scales, -1 for the whole vector of a head
    scale_bits : of one scale, and its zero point where it has one
    unpack : operations that turn a number into 16 bits before it is used
    in_vllm : a name that vLLM 0.32 takes
    """

    name: str
    bits: float
    group: int = 0
    scale_bits: int = 0
    unpack: int = 0
    in_vllm: bool = True

    def vector_bytes(self, width: int) -> float:
        """Bytes of a vector of `width` numbers with its scales."""
        if self.group == 0:
            return width * self.bits / 8
        scales = 1 if self.group < 0 else -(-width // self.group)
        return (width * self.bits + scales * self.scale_bits) / 8


#: vLLM's `--kv-cache-dtype`, but for its turboquant names. Per-token-head formats keep a 32-bit
#: scale for each key and each value of a head (v1/attention/backends/triton_attn.py,
#: `customize_spec`); NVFP4 one of 8 bits for 16 numbers. Plain fp8 has one scale a layer.
VLLM_FORMATS = {
    "float32": KvFormat("float32", 32),
    "bfloat16": KvFormat("bfloat16", 16),
    "float16": KvFormat("float16", 16),
    "fp8": KvFormat("fp8", 8, unpack=1),
    "fp8_e4m3": KvFormat("fp8_e4m3", 8, unpack=1),
    "fp8_e5m2": KvFormat("fp8_e5m2", 8, unpack=1),
    "fp8_inc": KvFormat("fp8_inc", 8, unpack=1),
    "fp8_ds_mla": KvFormat("fp8_ds_mla", 8, unpack=1),
    "fp8_per_token_head": KvFormat("fp8_per_token_head", 8, -1, FP32_BITS, unpack=2),
    "int8_per_token_head": KvFormat("int8_per_token_head", 8, -1, FP32_BITS, unpack=2),
    "int4_per_token_head": KvFormat("int4_per_token_head", 4, -1, FP32_BITS, unpack=4),
    "nvfp4": KvFormat("nvfp4", 4, 16, 8, unpack=4),
    "nvfp4_4over6": KvFormat("nvfp4_4over6", 4, 16, 8, unpack=4),
}

BFLOAT16 = VLLM_FORMATS["bfloat16"]

#: Published formats that vLLM has no kernel for: what they would hold. KIVI (arXiv 2402.02750)
#: groups 32 numbers under a 16-bit scale and zero point; its window of the newest 128 tokens in
#: 16 bits is left out, being 1 % of a long context and half of a short one. KVQuant (arXiv
#: 2401.18079) stores keys by channel, whose scales no token pays for, and 1 % outliers beside
#: (32 bits of value and index each).
RESEARCH_FORMATS = {
    "kivi4": KvFormat("kivi4", 4, 32, 2 * FP16_BITS, unpack=4, in_vllm=False),
    "kivi2": KvFormat("kivi2", 2, 32, 2 * FP16_BITS, unpack=4, in_vllm=False),
    "kvquant4": KvFormat("kvquant4", 4 + 0.01 * 32, unpack=6, in_vllm=False),
    "kvquant3": KvFormat("kvquant3", 3 + 0.01 * 32, unpack=6, in_vllm=False),
}

#: `int4_g64`: so many bits, a 16-bit scale and zero point for so many numbers.
GROUPED = re.compile(r"int(8|4|3|2)(?:_g(\d+))?")
DEFAULT_GROUP = 64

#: fp8_ds_mla, the format of sparse MLA: 512 numbers of 8 bits, four 32-bit scales, and the
#: rotary part in 16 bits (DeepSeek-V3.2).
SPARSE_MLA_BYTES = 512 + 4 * 4 + 64 * 2

AUTO = "auto"


#: `auto` follows the checkpoint (`kv_cache_quant_algo`) from this release (utils/torch_utils.py;
#: 0.13.0 does not).
CHECKPOINT_SINCE = Version(0, 14)


def kv_format(model: ModelSpec, kv_cache_dtype: str = AUTO, version: Version = LATEST) -> KvFormat:
    """The format that a name means for a model.

    `auto` is what the checkpoint asks for, and else the model's own 16 or 32 bits.

    Raises InputError for a name that is not known.
    """
    name = kv_cache_dtype
    if name == AUTO and version >= CHECKPOINT_SINCE:
        name = model.kv_cache_dtype
    try:
        return named_format(model.dtype if name == AUTO else name)
    except InputError as error:
        raise InputError(f"kv_cache_dtype: {error}") from None


def named_format(name: str) -> KvFormat:
    """A format by its name; `auto` needs a model.

    Raises InputError for a name that is not known.
    """
    known = VLLM_FORMATS.get(name) or RESEARCH_FORMATS.get(name)
    if known is not None:
        return known
    grouped = GROUPED.fullmatch(name)
    if grouped is None:
        raise InputError(f"{name!r} is not known; one of {', '.join(format_names())}")
    bits, group = int(grouped[1]), int(grouped[2] or DEFAULT_GROUP)
    if not 8 <= group <= 1024:
        raise InputError(f"{name!r}: a group has 8 to 1024 numbers")
    unpack = 2 if bits == 8 else 4
    return KvFormat(name, bits, group, 2 * FP16_BITS, unpack, in_vllm=False)


def format_names() -> tuple[str, ...]:
    """Every fixed name, and the pattern of the grouped ones."""
    return (AUTO, *VLLM_FORMATS, *RESEARCH_FORMATS, "int{8,4,3,2}_g{group}")
