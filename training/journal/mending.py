"""What happened inside the processes of one attempt, read out of its notes.

A note of a beginning and a note of an end with the same number belong together; an end without
its beginning (a line that was lost with a node) says nothing and is left out. Times are seconds
since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.journal.events import AlertCleared, AlertRaised, AnyNote
from training.recovery.events import LastSave, PauseBegan, PauseEnded, RecoveryBegan, RecoveryEnded


@dataclass(frozen=True, slots=True)
class Mending:
    """One recovery inside the processes.

    Attributes:
        began: the decision.
        ended: how it went; None while it goes on, and when the attempt ended first.
    """

    began: RecoveryBegan
    ended: RecoveryEnded | None = None

    @property
    def succeeded(self) -> bool:
        """Whether training went on."""
        return self.ended is not None and self.ended.succeeded

    @property
    def left_sub_healthy(self) -> bool:
        """Whether training went on with what may break again: links that were made anew."""
        return self.succeeded and self.began.sub_healthy


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause; without an end it lasts, or ended with the attempt."""

    began: PauseBegan
    ended: PauseEnded | None = None


@dataclass(frozen=True, slots=True)
class Alert:
    """One stay of a health point outside its limits."""

    raised: AlertRaised
    cleared: AlertCleared | None = None


def alerts_in(notes: Sequence[AnyNote]) -> list[Alert]:
    """The alerts, in the order in which they were raised."""
    ends = {note.number: note for note in notes if isinstance(note, AlertCleared)}
    raised = {note.number: note for note in notes if isinstance(note, AlertRaised)}
    return [Alert(note, ends.get(number)) for number, note in raised.items()]


def mendings_in(notes: Sequence[AnyNote]) -> list[Mending]:
    """The recoveries, in the order in which they began."""
    ends = {note.number: note for note in notes if isinstance(note, RecoveryEnded)}
    began = {note.number: note for note in notes if isinstance(note, RecoveryBegan)}
    return [Mending(note, ends.get(number)) for number, note in began.items()]


def pauses_in(notes: Sequence[AnyNote]) -> list[Pause]:
    """The pauses, in the order in which they began."""
    ends = {note.number: note for note in notes if isinstance(note, PauseEnded)}
    began = {note.number: note for note in notes if isinstance(note, PauseBegan)}
    return [Pause(note, ends.get(number)) for number, note in began.items()]


def last_save_in(notes: Sequence[AnyNote]) -> LastSave | None:
    """What became of the end-of-life checkpoint, None when none was tried."""
    return next((note for note in reversed(notes) if isinstance(note, LastSave)), None)
