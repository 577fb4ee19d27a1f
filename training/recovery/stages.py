"""The states of an attempt, and what may happen in which of them."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """State of the attempt."""

    STARTING = "starting"
    TRAINING = "training"
    GATHERING = "gathering"  # a generation is announced, reports come in
    REPAIRING = "repairing"  # the plan is out
    RECONNECTING = "reconnecting"  # connections are re-established, in the same generation
    SAVING = "saving"  # the survivors write the end-of-life checkpoint
    GIVEN_UP = "given_up"
    ENDING = "ending"


HOLDS = frozenset({Stage.GATHERING, Stage.SAVING, Stage.GIVEN_UP})  # no plan to train by
RECOVERING = frozenset({Stage.GATHERING, Stage.REPAIRING, Stage.RECONNECTING})
RECOVERABLE = RECOVERING | {Stage.TRAINING}
