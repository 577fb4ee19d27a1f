"""What an attempt wants done, in the order in which it is to be done."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.recovery.events import RecoveryEvent
from training.recovery.protocol import ToMember


@dataclass(frozen=True, slots=True)
class ToRank:
    """A message for one worker."""

    rank: int
    message: ToMember


@dataclass(frozen=True, slots=True)
class ToAgent:
    """A message for the agent of a rank's node; `rank` None: for every agent."""

    rank: int | None
    message: ToMember


@dataclass(frozen=True, slots=True)
class Noted:
    """Something for the ledger, to be written before the actions after it."""

    note: RecoveryEvent


@dataclass(frozen=True, slots=True)
class NormAccepted:
    """An abnormal step is taken as it is: the norms before and after its repetition."""

    step: int
    norms: tuple[float, ...]


Action = ToRank | ToAgent | Noted | NormAccepted


@dataclass(slots=True)
class Outbox:
    """Actions that nobody has taken yet, and the numbers of what is noted."""

    _actions: list[Action] = field(default_factory=list)
    _number: int = 0

    def add(self, action: Action) -> None:
        """One more action, after the others."""
        self._actions.append(action)

    def note(self, note: RecoveryEvent) -> None:
        """Something for the ledger."""
        self.add(Noted(note))

    def next_number(self) -> int:
        """Of a recovery, pause or last save, from 1."""
        self._number += 1
        return self._number

    def take(self) -> list[Action]:
        """All of them; each is handed out once."""
        actions, self._actions = self._actions, []
        return actions
