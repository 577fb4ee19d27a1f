"""Keeps the account of a run's time up to date while the run goes on.

Steps are in the store when a checkpoint covers them; those since are known to whoever watches
the attempt, and lost when it ends. Times are seconds since the epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from storage.objects import ObjectStore
from training.journal.accounting import account
from training.journal.attempt_log import StepReader, StepRecord, identity_of, kept_of
from training.journal.history import RunHistory
from training.journal.wall_time import Account, Key


class Accountant:
    """Knows every step of one run; safe for use from several threads."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._reader = StepReader(store, run_id)
        self._seen: dict[tuple[int, int, int, float], StepRecord] = {}
        self._attempt: Key | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()

    def saw(self, steps: Iterable[StepRecord]) -> None:
        """Steps that a living attempt told of; returns at once."""
        with self._lock:
            for record in steps:
                key = record.placement, record.attempt
                if key != self._attempt:
                    self._seen, self._attempt = {}, key
                self._seen[identity_of(record)] = record

    def records(self, history: RunHistory) -> list[StepRecord]:
        """Every step that is known of, also those of which a later record of the same step counts.

        Raises:
            StorageError: the store did not give them.
        """
        with self._reading:
            stored = {identity_of(record): record for record in self._reader.read()}
        with self._lock:
            # What is in the store need not be remembered twice.
            self._seen = {key: r for key, r in self._seen.items() if key not in stored}
            living = history.open_attempt
            lives = living is not None and living.key == self._attempt
            seen = list(self._seen.values()) if lives else []
        return [*stored.values(), *seen]

    def account(self, history: RunHistory, *, now_s: float) -> Account:
        """Where the time went.

        Raises:
            StorageError: the store did not give the steps.
        """
        return account(history, self.records(history), now_s=now_s)

    def kept(self) -> dict[int, StepRecord]:
        """The record of every step in the store that counts.

        Raises:
            StorageError: the store did not give the steps.
        """
        with self._reading:
            return kept_of(self._reader.read())
