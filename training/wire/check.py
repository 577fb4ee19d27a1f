"""One check of a node before it is used, and what a node is asked to check.

Written by the program that checks and read by whoever asked. Times are seconds.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, TypeAdapter

from storage.model import FrozenModel


class CheckOutcome(StrEnum):
    """How a check came out, from good to bad."""

    SKIPPED = "skipped"  # it does not apply here, `seen` says why
    OK = "ok"
    WARNING = "warning"  # it can be used, and somebody should look
    FAILED = "failed"  # it must not be used


class Check(FrozenModel):
    """One check.

    Attributes:
        name: of the check.
        node: that was checked; None: the job or the gang as a whole.
        seen: what was found.
        allowed: what it is compared with; "" where nothing is.
        seconds: it took.
        figures: what was measured, by name with its unit.
    """

    name: str
    outcome: CheckOutcome
    seen: str
    allowed: str = ""
    node: str | None = None
    seconds: float = 0.0
    figures: dict[str, float] = Field(default={})


class NodeTask(FrozenModel):
    """What a node is asked to check.

    Attributes:
        job: as JSON, without secrets.
        folder: of the container.
        node_folder: that outlives its containers; None: there is none.
        first_rank: of the ranks of this node, one for each slot.
        state_bytes: model and optimizer state of the whole job; None: not known.
        is_new: whether the node itself is checked; otherwise it takes part in the gang alone.
        gang_host: where the first rank listens; None: no check of the gang.
        with_store: whether the keys of the store are there.
    """

    job: str
    node: str
    folder: str
    node_folder: str | None
    slots: int
    first_rank: int
    world_size: int
    state_bytes: int | None = None
    is_new: bool
    gang_host: str | None
    gang_port: int = 0
    timeout_s: float
    with_store: bool = True


CHECKS: TypeAdapter[tuple[Check, ...]] = TypeAdapter(tuple[Check, ...])


def unanswered(node: str, why: str) -> Check:
    """The check of a node that could not even be asked."""
    return Check(name="agent", node=node, outcome=CheckOutcome.FAILED, seen=why)


def worst(outcomes: list[CheckOutcome]) -> CheckOutcome:
    """The worst of several outcomes; skipped when there is none."""
    order = list(CheckOutcome)
    return max(outcomes, key=order.index, default=CheckOutcome.SKIPPED)
