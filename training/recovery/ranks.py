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
        ending: came to the end of their loop.
        dead: have ended, and nothing has been started in their place.
        awaited: live, and will come to this coordinator.
        starting: have not connected yet.
        building: have not reported yet.
        stateless: have no state, or one not to be trusted.
        disconnected_s: since when a connection is closed, until it is known how the process ended.
        node_notice_s: for the supervisor to say that a node is lost.
    """

    living: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    starting: set[int] = field(default_factory=set)
    building: set[int] = field(default_factory=set)
    stateless: set[int] = field(default_factory=set)
    disconnected_s: dict[int, float] = field(default_factory=dict)
    node_notice_s: float = NODE_NOTICE_S

    @property
    def survivors(self) -> set[int]:
        """Ranks that may have a state: a new process has none before it reports."""
        return self.living - self.dead - self.building

    @property
    def fewest_survivors(self) -> int:
        """At least so many there are; their number alone, without looking at each rank."""
        return len(self.living) - len(self.dead) - len(self.building)

    @property
    def holders(self) -> set[int]:
        """Ranks that another one's state may be copied from."""
        return (self.survivors | self.awaited) - self.stateless

    @property
    def are_all_explained(self) -> bool:
        """Whether the end of every process whose connection closed has been reported."""
        return not self.disconnected_s

    def is_lost(self, rank: int) -> bool:
        """Whether its process has ended, and the one started in its place is not connected yet."""
        return rank in self.dead | self.starting

    def expect(self, ranks: Collection[int]) -> None:
        """Wait for ranks that live with their states, under a coordinator that is lost."""
        self.awaited = set(ranks)

    def mark_connected(self, rank: int) -> None:
        """Note that it has connected."""
        self.living.add(rank)
        self.starting.discard(rank)
        self.awaited.discard(rank)

    def mark_reported(self, rank: int, *, is_clean: bool) -> None:
        """Note that it has reported its state."""
        self.building.discard(rank)
        (self.stateless.discard if is_clean else self.stateless.add)(rank)

    def mark_disconnected(self, rank: int, *, now_s: float) -> None:
        """Note that its connection is closed."""
        self.living.discard(rank)
        # The connection may be that of the process before.
        if rank not in self.starting | self.ending:
            self.disconnected_s[rank] = now_s

    def mark_ended(self, rank: int) -> None:
        """Note that its process has ended."""
        self.disconnected_s.pop(rank, None)
        self.living.discard(rank)
        self.starting.discard(rank)
        self.awaited.discard(rank)
        self.dead.add(rank)

    def mark_starting(self, rank: int) -> None:
        """Note that a new process is started for it."""
        self.dead.discard(rank)
        self.living.discard(rank)
        self.starting.add(rank)
        self.building.add(rank)
        self.stateless.add(rank)

    def unexplained(self, *, now_s: float, without_agent: Collection[int] = ()) -> list[int]:
        """Ranks whose connection closed so long ago that a report of it is overdue.

        Args:
            now_s: the time.
            without_agent: those whose agent is gone as well; of them the supervisor reports.
        """
        limits_s = {
            rank: self.node_notice_s if rank in without_agent else END_NOTICE_S
            for rank in self.disconnected_s
        }
        since = self.disconnected_s.items()
        return [rank for rank, since_s in since if now_s > since_s + limits_s[rank]]


@dataclass(slots=True)
class Pauses:
    """Which ranks are paused; records when all of them are, and when they continue.

    Attributes:
        is_requested: whether the user wants a pause.
        paused: ranks that wait at a step boundary.
        number: of the pause that is on record and has not ended, None without one.
    """

    is_requested: bool = False
    paused: set[int] = field(default_factory=set)
    number: int | None = None

    def begin(self, rank: int, step: int, *, world_size: int, outbox: Outbox, now_s: float) -> None:
        """Note that a rank is paused at a step boundary; with the last of them a pause begins."""
        self.paused.add(rank)
        if self.number is None and len(self.paused) == world_size:
            self.number = outbox.next_number()
            outbox.record(PauseBegan(at_s=now_s, number=self.number, step=step))

    def leave(self, rank: int, step: int, *, outbox: Outbox, now_s: float) -> None:
        """Note that a rank continues; with the last of them the pause ends."""
        self.paused.discard(rank)
        if not self.paused:
            self.end(step, outbox=outbox, now_s=now_s)

    def end(self, step: int, *, outbox: Outbox, now_s: float) -> None:
        """The ranks are not paused together any more: they continue, or a recovery moves them."""
        self.paused.clear()  # a paused rank comes back to its loop, and reports it again
        if self.number is not None:
            outbox.record(PauseEnded(at_s=now_s, number=self.number, step=step))
            self.number = None
