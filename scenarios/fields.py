"""What the blocks of a scenario are made of: numbers with bounds, and the base of all blocks."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

#: Ten years: beyond it nanoseconds would come near the range of int64.
MAX_SECONDS = 315_360_000.0
MAX_REQUESTS = 10_000_000
MAX_TOKENS = 10_000_000

Count = Annotated[int, Field(strict=True, ge=1, le=MAX_REQUESTS)]
Tokens = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
Real = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=1e-6, le=1e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Pause = Annotated[float, Field(strict=True, ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=500)]
Flag = Annotated[bool, Field(strict=True)]


def fault(key: str, message: str) -> PydanticCustomError:
    """An error of a whole block that belongs to one of its keys; `load` reads `key` back."""
    return PydanticCustomError("at_key", "{message}", {"key": key, "message": message})


class Model(BaseModel):
    """Base of all blocks: read once, never changed, no key unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
