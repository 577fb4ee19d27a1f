"""A wait for room on the platform, however many tries it takes: for a node, a quota, a queue.

It has one limit (`restart.spare_wait_s`), by default none, and uses no restart. Where too few
healthy nodes exist and the policy lets the job use isolated ones, it goes back to them after a
minute. Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.training.errors import NoCapacity, StopRequested
from perdure.training.journal.waits import Wait, WaitKind

GO_BACK_AFTER_S = 60.0  # to isolated nodes
SURVIVORS_WAIT_S = 60.0  # processes that hold a step only in memory save it after that
LONGEST_POLL_S = 10.0  # between two looks for room; each asks the platform


@dataclass(slots=True)
class RoomWait:
    """One wait for room.

    Attributes:
        limit_s: the limit now; None: as long as it takes.
        on_wait: called with the wait, and with None when it is over.
        stop_wanted: whether the run is to be cancelled.
        is_strict: whether the limit is also that of whatever else keeps containers from starting.
        is_outdated: whether what is waited for has changed, such as the isolated nodes.
        is_over: whether the limit has passed.
    """

    limit_s: Callable[[], float | None]
    on_wait: Callable[[Wait | None], None] = lambda _wait: None
    stop_wanted: Callable[[], bool] = lambda: False
    is_strict: bool = False
    is_outdated: Callable[[], bool] = lambda: False
    is_over: bool = False
    _since_s: float | None = None  # since the epoch
    _began_s: float = field(default_factory=time.monotonic)
    _asked_s: float = field(default_factory=time.monotonic)

    @property
    def waited_s(self) -> float:
        """How long it has lasted; 0: there was room at once."""
        return time.monotonic() - self._began_s if self._since_s is not None else 0.0

    def note(self, why: str, *, is_room: bool = True) -> None:
        """Note that there is no room yet.

        Args:
            why: in the words of the platform.
            is_room: False: something else keeps the platform from starting a container.

        Raises:
            StopRequested: the run is to be cancelled.
            NoCapacity: the limit has passed.
        """
        if self.stop_wanted():
            raise StopRequested
        self._since_s = self._since_s or time.time()
        limit_s = self.limit_s()
        counts = limit_s is not None and (is_room or self.is_strict)
        if counts and time.monotonic() - self._began_s > (limit_s or 0.0):
            self.is_over = True
            raise NoCapacity(why)
        kind = WaitKind.NODE if is_room else WaitKind.PLATFORM
        self.on_wait(Wait(kind=kind, since_s=self._since_s, why=why))

    def note_pending(self, why: str, *, is_room: bool) -> None:
        """Note the same of containers that the platform holds in its queue.

        Raises:
            NoCapacity: the limit has passed, or other containers are wanted by now.
        """
        self.note(why, is_room=is_room)
        if time.monotonic() - self._asked_s > LONGEST_POLL_S:
            self._asked_s = time.monotonic()
            if self.is_outdated():
                raise NoCapacity(why)

    def end(self) -> None:
        """Note that the wait is over."""
        if self._since_s is not None:
            self.on_wait(None)
