"""State of the worker processes of an attempt, as far as their coordinator knows it.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from perdure.training.recovery.actions import Outbox
from perdure.training.recovery.protocol import PauseBegan, PauseEnded

END_NOTICE_S = 5.0  # for the agent to report how a process ended whose connection is closed
# For the supervisor to say that a node is lost whose agent is gone, too: one that is cut off
# counts as silent after 15 s.
NODE_NOTICE_S = 25.0


@dataclass(slots=True)
class Ranks:
    """Sets of ranks.

    Attributes:
        living: are connected.
        training: train in the present generation.
        ending: came to the end of their loop.
        dead: have ended, and nothing has been started in their place.
    """

    living: set[int] = field(default_factory=set)
    training: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    _awaited: set[int] = field(default_factory=set)  # live, and will come to this coordinator
    _starting: set[int] = field(default_factory=set)  # have not connected yet
    _building: set[int] = field(default_factory=set)  # have not reported yet
    _stateless: set[int] = field(default_factory=set)  # have none, or one not to be trusted
    _disconnected_s: dict[int, float] = field(default_factory=dict)

    @property
    def survivors(self) -> set[int]:
        """Ranks that may have a state: a new process has none before it reports."""
        return self.living - self.dead - self._building

    @property
    def fewest_survivors(self) -> int:
        """At least so many there are; their number alone, without looking at each rank."""
        return len(self.living) - len(self.dead) - len(self._building)

    @property
    def holders(self) -> set[int]:
        """Ranks that another one's state may be copied from."""
        return (self.survivors | self._awaited) - self._stateless

    def counts(self, world_size: int) -> dict[str, int]:
        """How many there are in each state; one that lives may train or come to its end."""
        return {
            "connected": len(self.living),
            "training": len(self.training),
            "ending": len(self.ending),
            "dead": len(self.dead),
            "all": world_size,
        }

    @property
    def are_all_explained(self) -> bool:
        """Whether the end of every process whose connection closed has been reported."""
        return not self._disconnected_s

    def have_lost(self, rank: int) -> bool:
        """Whether its process has ended, and the one started in its place is not connected yet."""
        return rank in self.dead | self._starting

    def awaits(self, ranks: Collection[int]) -> None:
        """They live with their states, under a coordinator that is lost."""
        self._awaited = set(ranks)

    def joined(self, rank: int) -> None:
        """It has connected."""
        self.living.add(rank)
        self._starting.discard(rank)
        self._awaited.discard(rank)

    def reported(self, rank: int, *, is_clean: bool) -> None:
        """It has reported its state."""
        self._building.discard(rank)
        (self._stateless.discard if is_clean else self._stateless.add)(rank)

    def trains(self, rank: int) -> None:
        """It is in its loop, with the state of all others."""
        self.training.add(rank)
        self._stateless.discard(rank)

    def disconnected(self, rank: int, *, now_s: float) -> None:
        """Its connection is closed."""
        self.living.discard(rank)
        # The connection may be that of the process before.
        if rank not in self._starting | self.ending:
            self._disconnected_s[rank] = now_s

    def ended(self, rank: int) -> None:
        """Its process has ended."""
        self._disconnected_s.pop(rank, None)
        self.living.discard(rank)
        self.training.discard(rank)
        self._starting.discard(rank)
        self._awaited.discard(rank)
        self.dead.add(rank)

    def replaced(self, rank: int) -> None:
        """A new process is started for it."""
        self.dead.discard(rank)
        self.living.discard(rank)
        self._starting.add(rank)
        self._building.add(rank)
        self._stateless.add(rank)

    def unexplained(self, *, now_s: float, without_agent: Collection[int] = ()) -> list[int]:
        """Ranks whose connection closed so long ago that a report of it is overdue.

        Args:
            now_s: the time.
            without_agent: those whose agent is gone as well; of them the supervisor reports.
        """
        limits_s = {
            rank: NODE_NOTICE_S if rank in without_agent else END_NOTICE_S
            for rank in self._disconnected_s
        }
        since = self._disconnected_s.items()
        return [rank for rank, since_s in since if now_s > since_s + limits_s[rank]]


@dataclass(slots=True)
class Pauses:
    """Which ranks are paused; records when all of them are, and when they continue.

    Attributes:
        world_size: ranks that a pause holds together.
        is_requested: whether the user wants one.
    """

    world_size: int
    _outbox: Outbox
    is_requested: bool = False
    _paused: set[int] = field(default_factory=set)
    _number: int | None = None

    def reported(self, rank: int, step: int, *, is_paused: bool, now_s: float) -> None:
        """A rank is paused at a step boundary, or continues from it."""
        (self._paused.add if is_paused else self._paused.discard)(rank)
        if self._number is None and len(self._paused) == self.world_size:
            self._number = self._outbox.next_number()
            self._outbox.record(PauseBegan(at_s=now_s, number=self._number, step=step))
        elif not self._paused:
            self.end(step, now_s=now_s)

    def end(self, step: int, *, now_s: float) -> None:
        """The ranks are not paused together any more: they continue, or a recovery moves them."""
        self._paused.clear()  # a paused rank comes back to its loop, and reports it again
        if self._number is not None:
            self._outbox.record(PauseEnded(at_s=now_s, number=self._number, step=step))
            self._number = None
