"""Publishing an object once on a store that has no conditional put.

Writers of one key exclude each other with claims: empty objects whose names order them, as in
Lamport's bakery. A writer announces itself, takes a number above all that it sees, waits for those
before it, checks whether the object is there, publishes, and withdraws. All that the store must
give is a listing that shows what was written.

A claim that its writer left behind ends by its age. Ages are differences of two times of the
server, so that the writers' clocks play no part. A writer publishes only while its claim is
younger than half a lifetime, and others pass it only when it is older than a whole one: one
winner is certain as long as a single request ends, at the server too, within half a lifetime.
Times are seconds.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from perdure.storage.errors import PermanentError, StorageError, TimedOut
from perdure.storage.retry import Retry

CLAIMS_FOLDER = ".claims"
CLOCK_GRAIN_S = 1.0  # HTTP gives the server's time in whole seconds
FIRST_POLL_S = 0.05
LAST_POLL_S = 1.0
MAX_DRAWS = 20  # of numbers by one writer that waits

CHOOSING, TICKET = "choosing-", "ticket-"


@dataclass(frozen=True, slots=True)
class LockEntries:
    """A listing of the claims on one key, with the server's time."""

    now_s: float
    written_s: Mapping[str, float]  # name of a claim -> when, by the same clock


@dataclass(frozen=True, slots=True)
class BakeryLock:
    """The claims on one key, as the three requests that keep them."""

    write: Callable[[str], object]  # makes a claim; each name is written once
    read: Callable[[], LockEntries]  # shows every claim that was written before
    remove: Callable[[str], None]  # one that is gone already is no error


@dataclass(frozen=True, slots=True)
class Target:
    """The object to publish once."""

    exists: Callable[[], bool]
    is_ours: Callable[[], bool]  # the bytes there are those that we publish
    publish: Callable[[], None]  # one try: a repeated one would outlive its claim


def _unique() -> str:
    return uuid.uuid4().hex  # not of `retry.rng`, whose state forked processes share


def publish_once(
    target: Target,
    lock: BakeryLock,
    *,
    lifetime_s: float,
    retry: Retry,
    new_identity: Callable[[], str] = _unique,
) -> bool:
    """Publish `target` unless something is there.

    Args:
        target: object to publish.
        lock: the claims on its key; the same for all writers.
        lifetime_s: age at which a claim counts as left behind; the same for all writers, and
            more than twice what one request may take.
        retry: repeats failed requests; its `sleep` and `rng` also serve the wait for a turn.
        new_identity: never gives the same text twice, on whatever machine.

    Returns:
        Whether it was published: False when another writer was first.

    Raises:
        StorageError: it may or may not be published.
    """
    claimant = _Claimant(target, lock, lifetime_s, retry, new_identity)
    try:
        return retry.run(lambda _tries: claimant.attempt())
    finally:
        claimant.leave()


class _Claimant:
    def __init__(
        self,
        target: Target,
        lock: BakeryLock,
        lifetime_s: float,
        retry: Retry,
        new_identity: Callable[[], str],
    ) -> None:
        self._target = target
        self._lock = lock
        self._lifetime_s = lifetime_s
        self._retry = retry
        self._new_identity = new_identity
        self._ours: set[str] = set()  # claims that may be there
        self._ticket: str | None = None
        self._awaited: set[str] = set()  # writers that were choosing when our ticket appeared
        self._in_doubt = False  # a try of ours without answer may still take effect

    def attempt(self) -> bool:
        if not self._await_turn():
            was_ours = self._in_doubt and self._target.is_ours()
            self._in_doubt = False  # no writer publishes over an object: no claim is needed now
            return was_ours
        was_in_doubt, self._in_doubt = self._in_doubt, True
        try:
            self._target.publish()
        except PermanentError:  # refused, so nothing was done
            self._in_doubt = was_in_doubt
            raise
        self._in_doubt = False
        return True

    def leave(self) -> None:
        """Let the next one pass, unless a try of ours could then land on top of theirs."""
        if not self._in_doubt:
            for name in sorted(self._ours):
                with suppress(StorageError):  # the outcome is known; the claim ends by its age
                    self._remove(name)

    def _await_turn(self) -> bool:
        """Whether it is our turn; False: the object is there."""
        poll_s, num_draws, was_first = FIRST_POLL_S, 0, False
        while not self._target.exists():
            if self._ticket is None:
                num_draws += 1
                self._ticket = self._draw()
            # A store may read a listing in pieces: only one that begins after a choosing writer
            # was seen gone is sure to show its ticket.
            all_chosen = not self._awaited
            entries = self._lock.read()
            if self._ticket is None or not self._may_rely_on(self._ticket, entries):
                self._give_back()
                if num_draws == MAX_DRAWS:
                    raise TimedOut(f"claims turn old faster than they can be used: {entries.now_s}")
                was_first = False
                continue
            rivals = self._living(entries)
            self._awaited &= rivals
            earlier = {name for name in rivals if name.startswith(TICKET) and name < self._ticket}
            is_first = all_chosen and not earlier
            # The second time we know that the object was not there since those before us left,
            # and have an answer as young as can be that our claim is.
            if is_first and was_first:
                return True
            was_first = is_first
            if not is_first:
                self._retry.sleep(poll_s * (0.5 + self._retry.rng.random() / 2))
                poll_s = min(LAST_POLL_S, 2 * poll_s)
        return False

    def _draw(self) -> str | None:
        """Take a number above all others; None if it took so long that it must be done again."""
        identity = self._new_identity()
        marker = f"{CHOOSING}{identity}"
        self._write(marker)
        tickets = [name for name in self._lock.read().written_s if name.startswith(TICKET)]
        number = 1 + max((int(name.split("-")[1]) for name in tickets), default=0)
        ticket = f"{TICKET}{number:010d}-{identity}"
        self._write(ticket)
        entries = self._lock.read()
        # A writer that took our marker for an abandoned one does not wait for our ticket.
        in_time = self._may_rely_on(marker, entries)
        self._awaited = {name for name in self._living(entries) if name.startswith(CHOOSING)}
        self._remove(marker)
        return ticket if in_time else None

    def _may_rely_on(self, name: str, entries: LockEntries) -> bool:
        """Whether no writer can have taken our claim for an abandoned one, nor soon will."""
        written_s = entries.written_s.get(name)
        if written_s is None:
            return False
        return entries.now_s - written_s + CLOCK_GRAIN_S < self._lifetime_s / 2

    def _living(self, entries: LockEntries) -> set[str]:
        """LockEntries of others; those that outlived their writers are removed."""
        rivals = {name: at_s for name, at_s in entries.written_s.items() if name not in self._ours}
        oldest_s = entries.now_s - self._lifetime_s - CLOCK_GRAIN_S
        for name in [name for name, at_s in rivals.items() if at_s < oldest_s]:
            del rivals[name]
            self._lock.remove(name)
        return set(rivals)

    def _write(self, name: str) -> None:
        self._ours.add(name)
        self._lock.write(name)

    def _remove(self, name: str) -> None:
        self._lock.remove(name)
        self._ours.discard(name)

    def _give_back(self) -> None:
        """Release a ticket that others may pass; a try in doubt keeps it until they do."""
        self._ticket = None
        self.leave()
