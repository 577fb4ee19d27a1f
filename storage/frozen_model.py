"""The base of settings, messages and documents: values that stay, fields that are known."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A model that cannot change, and that refuses fields which it does not have.

    A misspelled field of a job file, and a message of another version, are errors where they
    come in, not values that go missing. The text of such an error has no values: a token, or a key
    in the wrong place, would get into logs with it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
