"""Names of a rank's tensors in checkpoints.

Where ranks hold different parts of the model, plain tensors of one name are different ones on
different ranks: they are named after the part. A DTensor says itself which part it is, but for the
pipeline stage, whose layers may have the names of another stage's. All ranks of a part are replicas
of each other, so that each of its tensors is saved once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.distributed.tensor import DTensor

from perdure.training.errors import InputError
from perdure.training.recovery.replicas import Axis
from perdure.training.runtime.context import WorkerContext
from perdure.training.runtime.state.live import MODEL, OPTIMIZER, STATE
from perdure.training.runtime.state.program_state import PROGRAM

_TAG = re.compile(r"(?:part|stage)\d{5}(?=/)")
_PREFIXES = (MODEL, STATE, OPTIMIZER, PROGRAM)  # the first that fits


@dataclass(frozen=True, slots=True)
class PartNames:
    """Names for one rank.

    Attributes:
        part: part that its plain tensors belong to; None: they are alike on all ranks.
        num_parts: number of parts; 0: the layout has none.
        stage: pipeline stage; None: the pipeline has a single stage.
    """

    part: int | None = None
    num_parts: int = 0
    stage: int | None = None

    @classmethod
    def of(cls, context: WorkerContext) -> Self:
        """Make the names for a rank of this layout."""
        layout = context.layout
        if not context.holds_parts:
            return cls()
        groups = layout.replica_groups()
        part = next(n for n, group in enumerate(groups) if context.rank in group)
        stage = layout.place(context.rank)[Axis.PP] if layout.pp > 1 else None
        return cls(part, len(groups), stage)

    @property
    def settings(self) -> str | None:
        """The name of this part's settings, whose parameters another part does not have."""
        return None if self.part is None else f"settings/{_part_tag(self.part)}"

    def tensors(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map tensors to the names they are saved with."""
        return {self._saved(name, tensor): tensor for name, tensor in live.items()}

    def live_names(self, saved_names: Iterable[str], prefix: str) -> dict[str, str]:
        """Map this rank's names of a checkpoint that begin so to those that they were made of."""
        names = (n for n in saved_names if n.startswith(prefix) and not self.is_anothers(n))
        return {name: name.replace(f"{_tag_of(name)}/", "", 1) for name in names}

    def is_anothers(self, name: str) -> bool:
        """Whether a checkpoint has this name for another part or stage."""
        tag = _tag_of(name)
        return tag is not None and tag not in self._tags

    def check(self, names: Iterable[str], *, step: int) -> None:
        """Check that a checkpoint was saved with as many parts. The same on every rank.

        Raises:
            InputError: it was not.
        """
        tags = {tag for tag in map(_tag_of, names) if tag is not None and tag.startswith("part")}
        if tags != {_part_tag(number) for number in range(self.num_parts)}:
            raise InputError(
                "parallelism",
                f"the checkpoint of step {step} is of a model in {len(tags) or 'no'} parts, and "
                f"the layout has {self.num_parts or 'none'}: go on with the sizes of tensor, "
                "pipeline and expert parallelism that it was saved with",
            )

    @property
    def _tags(self) -> frozenset[str]:
        tags = {_part_tag(self.part)} if self.part is not None else set()
        return frozenset(tags | ({_stage_tag(self.stage)} if self.stage is not None else set()))

    def _saved(self, name: str, tensor: Tensor) -> str:
        if not isinstance(tensor, DTensor):
            tag = None if self.part is None else _part_tag(self.part)
        else:
            tag = None if self.stage is None else _stage_tag(self.stage)
        prefix = _prefix_of(name)
        return name if tag is None else f"{prefix}{tag}/{name.removeprefix(prefix)}"


ALIKE = PartNames()  # every rank has the same, or DTensors


def _part_tag(part: int) -> str:
    return f"part{part:05d}"


def _stage_tag(stage: int) -> str:
    return f"stage{stage:05d}"


def _prefix_of(name: str) -> str:
    return next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")


def _tag_of(name: str) -> str | None:
    match = _TAG.match(name, len(_prefix_of(name)))
    return match.group() if match is not None else None
