"""The states of an attempt.

A state is what decides how a stimulus is answered (transitions.py); a stage is the same for people
and for metrics, who need not tell the two kinds of gathering apart.
"""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """Stage of the attempt, as metrics show it."""

    STARTING = "starting"
    TRAINING = "training"
    GATHERING = "gathering"
    REPAIRING = "repairing"
    RECONNECTING = "reconnecting"
    SAVING = "saving"
    GIVEN_UP = "given_up"
    ENDING = "ending"


class State(StrEnum):
    """State of the attempt; each but `GATHERING_TO_SAVE` is a stage by its own name."""

    STARTING = "starting"  # some rank has not trained yet
    TRAINING = "training"
    GATHERING = "gathering"  # a generation is announced, reports come in
    REPAIRING = "repairing"  # the plan is out
    RECONNECTING = "reconnecting"  # connections are re-established, in the same generation
    GATHERING_TO_SAVE = "gathering_to_save"  # survivors report for the end-of-life checkpoint
    SAVING = "saving"  # the survivors write it
    GIVEN_UP = "given_up"
    ENDING = "ending"  # some rank came to the end of its loop

    @property
    def stage(self) -> Stage:
        """The stage that it belongs to."""
        return Stage.GATHERING if self is State.GATHERING_TO_SAVE else Stage(self.value)
