"""What every section of the configuration has in common: strict types, known keys, sane numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticKnownError

LARGEST_INTEGER = 2**53  # exact in every format that a run writes


class Section(BaseModel):
    """Base of every section: unknown keys, silent type coercions, infinities, NaN and absurd integers are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if isinstance(value, int) and value > LARGEST_INTEGER:
            raise PydanticKnownError("less_than_equal", {"le": LARGEST_INTEGER})
        if isinstance(value, int) and value < -LARGEST_INTEGER:
            raise PydanticKnownError("greater_than_equal", {"ge": -LARGEST_INTEGER})
        return value
