"""The plan of a save, as the savers use it: the split of a state over the ranks that save together.

`staging.SavePlans` splits torch tensors, `arrays.ArrayPlans` numpy arrays. Sizes are bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, Protocol

from perdure.storage.manifest import TensorRecord


class Staging(Protocol):
    """A rank's share of a state, laid out; the values are still where they were."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""

    def copy_into(self, memory: mmap.mmap | bytearray) -> None:
        """Write the file into memory of at least `size_bytes`."""

    def parts(self) -> dict[str, TensorRecord]:
        """Return the records of the tensors in the file."""


class Plans(Protocol):
    """Splits a state over the ranks that save together. Every method is collective."""

    def stage(self, state: Mapping[str, Any], shard: str) -> Staging:
        """Stage this rank's share of a state, for a file of this name."""

    def gather_json(self, document: Any) -> list[Any]:
        """Gather a document of every rank, by its rank in the group."""

    def gather_to_first(self, document: Any) -> list[Any] | None:
        """Gather a document of every rank on the first rank; None on the others."""
