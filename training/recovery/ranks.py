"""How the worker processes of an attempt stand, as far as their coordinator knows.

Times are seconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

END_NOTICE_S = 5.0  # for the agent to tell how a process ended whose connection is gone


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
    _coming: set[int] = field(default_factory=set)  # started, and not heard of yet
    _building: set[int] = field(default_factory=set)  # likewise, or without a report yet
    _gone_s: dict[int, float] = field(default_factory=dict)

    @property
    def survivors(self) -> set[int]:
        """Ranks that may have a state: a new process has none before it reports."""
        return self.living - self.dead - self._building

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
        """Whether no connection is closed without a word on how its process ended."""
        return not self._gone_s

    def have_lost(self, rank: int) -> bool:
        """Whether its process has ended, and what is started in its place has not come yet."""
        return rank in self.dead | self._coming

    def joined(self, rank: int) -> None:
        """It has connected."""
        self.living.add(rank)
        self._coming.discard(rank)

    def reported(self, rank: int) -> None:
        """It has told how it stands."""
        self._building.discard(rank)

    def gone(self, rank: int, *, now_s: float) -> None:
        """Its connection is closed."""
        self.living.discard(rank)
        # The connection may be that of the process before.
        if rank not in self._coming | self.ending:
            self._gone_s[rank] = now_s

    def ended(self, rank: int) -> None:
        """Its process has ended."""
        self._gone_s.pop(rank, None)
        self.living.discard(rank)
        self.training.discard(rank)
        self._coming.discard(rank)
        self.dead.add(rank)

    def replaced(self, rank: int) -> None:
        """A new process is started for it."""
        self.dead.discard(rank)
        self.living.discard(rank)
        self._coming.add(rank)
        self._building.add(rank)

    def unexplained(self, *, now_s: float) -> list[int]:
        """Ranks that are gone, and nobody has told in time how they ended."""
        return [rank for rank, since_s in self._gone_s.items() if now_s > since_s + END_NOTICE_S]
