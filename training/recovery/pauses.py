"""Pauses of an attempt: somebody wants one, the ranks stand still, and it is put on record.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from training.recovery.actions import Outbox
from training.recovery.events import PauseBegan, PauseEnded


@dataclass(slots=True)
class Pauses:
    """Which ranks stand.

    Attributes:
        world_size: ranks that stand together in a pause.
        is_wanted: somebody wants one.
    """

    world_size: int
    _outbox: Outbox
    is_wanted: bool = False
    _standing: set[int] = field(default_factory=set)
    _number: int | None = None

    def told(self, rank: int, step: int, *, is_paused: bool, now_s: float) -> None:
        """A rank stands at a step boundary, or goes on from it."""
        (self._standing.add if is_paused else self._standing.discard)(rank)
        if self._number is None and len(self._standing) == self.world_size:
            self._number = self._outbox.next_number()
            self._outbox.note(PauseBegan(at_s=now_s, number=self._number, step=step))
        elif not self._standing:
            self.end(step, now_s=now_s)

    def end(self, step: int, *, now_s: float) -> None:
        """The ranks do not stand together any more: they go on, or a recovery has them move."""
        self._standing.clear()  # whoever stood comes back to its loop, and says so again
        if self._number is not None:
            self._outbox.note(PauseEnded(at_s=now_s, number=self._number, step=step))
            self._number = None
