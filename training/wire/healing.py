"""The order to heal the chips of a node between two attempts in place, and how far that is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.journal.events import ChipsHealed
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.rungs import Rung


class HealOrder(FrozenModel):
    """Heal the chips after an attempt, in the background; repeated: how far.

    Repeated after its end it gives the same answer: a supervisor may have died while it waited.

    Attributes:
        rung: that would start processes there again.
        slots_per_node: devices that the job uses on the node, from 0 on.
        variables: environment of the workers.
        cwd: their folder.
    """

    op: Literal["heal"] = "heal"
    placement: int
    attempt: int
    rung: Rung
    plan: HealPlan
    slots_per_node: int
    variables: dict[str, str]
    cwd: str


class HealReply(FrozenModel):
    """How far a node is.

    Attributes:
        done: what came of it; None while it goes on.
    """

    done: ChipsHealed | None = Field(None)
