"""The ranks of an attempt, as saves and restores need them: who there is, and what all say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Ranks(Protocol):
    """The ranks that save or restore together. `gather` is collective."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def gather(self, document: Any) -> list[Any]:
        """Gather a JSON document of every rank, by rank."""


def from_first(answer: Callable[[], Any], ranks: Ranks) -> Any:
    """Return the first rank's answer, JSON, on every rank; the others do not call `answer`."""
    return ranks.gather(answer() if ranks.rank == 0 else None)[0]
