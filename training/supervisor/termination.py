"""SIGTERM to the process of a supervisor: for it alone, or for everything of its run at once.

For it alone, the attempt goes on without it. At the end of an allocation (Slurm, systemd, a
container whose first process supervises) the agents are asked to end as well: the attempt ends
within their grace period, and its end goes on record before this process ends. Times are seconds
of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from perdure.training.errors import PerdureError

# The agents note the same signal at once; a poll of a busy machine shows it a little later.
ALONE_AFTER_S = 3.0
MARGIN_S = 4.0  # behind the grace period of the processes, for logs and the last words
FIRST_PROCESSES = frozenset({"tini", "dumb-init", "docker-init", "catatonit"})


@dataclass(slots=True)
class Termination:
    """The request of the platform to end this process.

    Attributes:
        leave: ends this process alone; it does not return.
        owns_machine: whether everything of its container ends with this process.
        since_s: time of the request; None: there is none.
        is_deferred: whether an attempt is under way, whose watch answers the request.
    """

    leave: Callable[[], object] = lambda: None
    owns_machine: bool = False
    since_s: float | None = None
    is_deferred: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the platform asks this process to end."""
        return self.since_s is not None

    def is_alone(self) -> bool:
        """Whether the agents would have shown by now that they are asked to end as well."""
        return self.since_s is not None and time.monotonic() - self.since_s > ALONE_AFTER_S

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Have the watch of an attempt answer a request that comes meanwhile."""
        self.is_deferred = True
        try:
            yield
        finally:
            self.is_deferred = False

    def leave_now(self) -> NoReturn:
        """End this process; the attempt goes on."""
        self.leave()
        raise PerdureError("SIGTERM: this supervisor ends, the attempt goes on")


def is_first_process() -> bool:
    """Whether this process is the first of its container, or a small init's only child."""
    if os.getpid() == 1:
        return True
    try:
        first = Path("/proc/1/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return False
    return os.getppid() == 1 and first in FIRST_PROCESSES
