"""The base of settings, messages and documents: values that stay, fields that are known."""

from __future__ import annotations

from typing import Any, get_args

from annotated_types import Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class FrozenModel(BaseModel):
    """A model that cannot change, and that refuses fields which it does not have.

    A misspelled field of a job file, and a message of another version, are errors where they
    come in, not values that go missing. The text of such an error has no values: a token, or a key
    in the wrong place, would get into logs with it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


MAX_DURATION_S = 10 * 366 * 86_400  # ten years
MAX_NUMBER = 10**15  # of a field without a limit of its own; its floats are whole


class SettingsModel(FrozenModel):
    """A section that people write: each of its numbers is one, is finite, and has a limit."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        is_number = bool(kinds & {int, float}) and not kinds & {bool, Any}
        parts = value if isinstance(value, list | tuple) else [value]
        if is_number and any(isinstance(part, bool) for part in parts):
            raise ValueError("true and false are no numbers here, give a number")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _is_within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if any(isinstance(rule, Le | Lt) for rule in cls.model_fields[name].metadata):
            return value
        limit = MAX_DURATION_S if name.endswith("_s") else MAX_NUMBER
        if abs(value) > limit:
            unit = " seconds, ten years" if name.endswith("_s") else ""
            raise ValueError(f"{_short(value)} is too much: at most {limit}{unit}")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of; numbers of a Literal by their type."""
    arguments = get_args(annotation)
    if not arguments:
        return {annotation if isinstance(annotation, type) or annotation is Any else None}
    return {
        kind
        for argument in arguments
        for kind in (_kinds(argument) if not isinstance(argument, int | str) else {type(argument)})
    }


def _short(number: float) -> str:
    """Return a number as text; of one with thousands of digits only how many."""
    if isinstance(number, float) or number.bit_length() < 256:
        return str(number)
    return f"a number of more than {int(number.bit_length() * 0.301)} digits"
