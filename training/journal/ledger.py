"""The ledger of a run: append-only records in the object store, one object per record.

Keys are `runs/<run_id>/ledger/<sequence>.json` with consecutive sequence numbers, written with
a conditional put: of two supervisors that append the same number one wins, the other re-reads
and finds the other's epoch. Every record carries the epoch of its supervisor; a supervisor that
sees a higher epoch than its own has been superseded and must end.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from perdure.storage.errors import Corrupt, NotFound, PreconditionFailed
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.objects import ObjectStore
from perdure.training.errors import AlreadySupervised
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.records import RECORD, AnyRecord, SupervisorAcquired
from perdure.training.journal.waits import Wait
from perdure.training.processes import is_alive

LEASE_S = 30.0  # a supervisor on another host counts as lost after this long without renewal
RENEW_S = 5.0  # five renewals in a row may fail before another host takes over
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # pids from before a reboot mean nothing
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class Identity(FrozenModel):
    """A process that may supervise a run.

    Attributes:
        flow_run: id of the flow run of the process; None without Prefect.
        pid_namespace: where its pid means something; containers of a host may share its name.
    """

    supervisor: str
    host: str
    boot_id: str
    pid: int
    process_started_s: float
    flow_run: str | None = None
    pid_namespace: str = ""

    @classmethod
    def of_this_process(cls, *, flow_run: str | None = None) -> Identity:
        """The identity of the calling process."""
        return cls(
            supervisor=uuid.uuid4().hex[:12],
            host=socket.gethostname(),
            boot_id=_BOOT_ID.read_text(encoding="ascii").strip(),
            pid=os.getpid(),
            process_started_s=psutil.Process().create_time(),
            flow_run=flow_run,
            pid_namespace=str(_PID_NAMESPACE.stat().st_ino),
        )


class SupervisorLease(Identity):
    """The lease of a run's supervisor, renewed while it lives. It is a hint, not the lock.

    Attributes:
        wait: what the supervisor waits for.
    """

    epoch: int
    renewed_s: float
    lease_s: float = LEASE_S
    wait: Wait | None = None


class Ledger:
    """The records of a run: a reader and, once it has taken the run, a writer.

    Attributes:
        wait: what its supervisor waits for; readers elsewhere learn it from the lease.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        *,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
    ) -> None:
        self._store = store
        self._prefix = f"runs/{run_id}/ledger/"
        self._lease_key = f"runs/{run_id}/supervisor.json"
        self._run_id = run_id
        self._clock = clock
        self._lease_s = lease_s
        self._records: list[AnyRecord] = []
        self._epoch = 0
        self._identity: Identity | None = None
        self.wait: Wait | None = None
        # The lease is renewed from a thread of its own. Never held while the store is asked: a
        # thread that waits for it would hold up another, which is asked to cancel the run.
        self._lock = threading.Lock()

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._run_id

    @property
    def renew_s(self) -> float:
        """How often the lease is to be renewed."""
        return min(RENEW_S, self._lease_s / 5)

    @property
    def epoch(self) -> int:
        """The epoch of this supervisor; 0 while it only reads."""
        return self._epoch

    def read(self) -> RunHistory:
        """Read the history up to now; fetches only new records.

        Raises:
            Corrupt: a record is not what a ledger holds.
        """
        self._catch_up()
        return self._replay()

    def _replay(self) -> RunHistory:
        with self._lock:
            return replay(self._records)

    def take(self, identity: Identity) -> RunHistory:
        """Become the run's supervisor.

        Raises:
            AlreadySupervised: another supervisor is alive, or took the run at the same moment.
        """
        history = self.read()
        while True:
            # In this order the second check sees a lease that comes between the two.
            self._refuse_if_just_taken(history, identity)
            self._refuse_if_alive(identity)
            record = SupervisorAcquired(
                at_s=self._clock(),
                epoch=history.epoch + 1,
                supervisor=identity.supervisor,
                host=identity.host,
                pid=identity.pid,
                flow_run=identity.flow_run,
            )
            if self._put_next(record):
                break
            previous, history = history, self.read()
            if history.supervisor != previous.supervisor and history.supervisor is not None:
                raise AlreadySupervised(
                    f"run {self._run_id}: another supervisor took it at the same moment",
                    flow_run=history.supervisor.flow_run,
                )
        self._epoch, self._identity = record.epoch, identity
        self.renew()
        return self._replay()

    def append(self, build: type[AnyRecord], **fields: Any) -> None:
        """Append a record of this supervisor.

        Raises:
            AlreadySupervised: this supervisor has been superseded.
        """
        assert self._epoch > 0, "take() first"  # noqa: S101 our own bug, not an input
        record = build(at_s=self._clock(), epoch=self._epoch, **fields)
        self.ensure_current()  # the thread that renews the lease may have read of a successor
        while not self._put_next(record):
            self._catch_up()
            self.ensure_current()

    def note(self, build: type[AnyRecord], **fields: Any) -> None:
        """Append a record of a user; the run may be supervised by another process, or by none.

        A supervisor that appends at the same moment reads it and appends after it.
        """
        while True:
            epoch = max(1, self.read().epoch)
            if self._put_next(build(at_s=self._clock(), epoch=epoch, **fields)):
                return

    def ensure_current(self) -> None:
        """Check, from the records already read, that no other supervisor took the run.

        Raises:
            AlreadySupervised: one did.
        """
        newest = self._replay().supervisor
        if newest is not None and newest.epoch > self._epoch > 0:
            raise AlreadySupervised(
                f"run {self._run_id} is now supervised by process {newest.pid} on {newest.host}",
                flow_run=newest.flow_run,
            )

    def renew(self) -> None:
        """Renew the lease of this supervisor; call every `renew_s` seconds.

        Raises:
            AlreadySupervised: another supervisor took the run.
        """
        identity = self._identity
        if identity is None:
            return  # given up a moment ago
        self._catch_up()
        self.ensure_current()
        lease = SupervisorLease(
            **identity.model_dump(),
            epoch=self._epoch,
            renewed_s=self._clock(),
            wait=self.wait,
            lease_s=self._lease_s,
        )
        # Without a field that an older version does not know, unless there is something to tell.
        self._store.put(self._lease_key, lease.model_dump_json(exclude_none=True).encode())

    def release(self) -> None:
        """Give the run up, so that the next supervisor need not wait for the lease to run out."""
        if self._identity is not None:
            self._store.delete(self._lease_key)
            self._identity = None

    def is_supervised(self) -> bool:
        """Whether a supervisor of the run lives, as far as the store shows."""
        lease = self.lease()
        return lease is not None and self._is_held(lease, Identity.of_this_process())

    def lease(self) -> SupervisorLease | None:
        """Read the newest lease, of a living holder or not; None when its holder gave it up."""
        try:
            return self._read_lease()
        except Corrupt:
            return None

    def _read_lease(self) -> SupervisorLease | None:
        try:
            return SupervisorLease.model_validate_json(self._store.get(self._lease_key))
        except NotFound:
            return None
        except ValidationError as error:
            raise Corrupt(f"{self._lease_key} is not a supervisor lease") from error

    def _is_held(self, lease: SupervisorLease, identity: Identity) -> bool:
        """Whether another holder lives: by process on the same host, by time on another."""
        is_here = (lease.host, lease.boot_id) == (identity.host, identity.boot_id)
        if not is_here or lease.pid_namespace not in ("", identity.pid_namespace):
            return self._clock() - lease.renewed_s < lease.lease_s
        return lease.pid != identity.pid and is_alive(lease.pid, lease.process_started_s)

    def _refuse_if_alive(self, identity: Identity) -> None:
        lease = self._read_lease()
        if lease is not None and self._is_held(lease, identity):
            raise AlreadySupervised(
                f"run {self._run_id} is supervised by process {lease.pid} on {lease.host}; "
                "one supervisor at a time",
                flow_run=lease.flow_run,
            )

    def _refuse_if_just_taken(self, history: RunHistory, identity: Identity) -> None:
        """Refuse a run whose supervisor has put its record but not yet its lease."""
        newest = history.supervisor
        if newest is None or history.ended is not None or newest.supervisor == identity.supervisor:
            return
        age_s = self._clock() - newest.at_s
        is_same_host = newest.host == identity.host
        alive = not is_same_host or (newest.pid != identity.pid and psutil.pid_exists(newest.pid))
        if not alive or not 0 <= age_s < RENEW_S:
            return
        lease = self._read_lease()
        if lease is None or lease.epoch < newest.epoch:
            holder = f"process {newest.pid} on {newest.host}"
            message = f"run {self._run_id} was taken by {holder} a moment ago"
            raise AlreadySupervised(message, flow_run=newest.flow_run)

    def _catch_up(self) -> None:
        first = len(self._records)
        keys = [info.key for info in self._store.list(self._prefix)]
        new_keys = [key for key in keys if key >= _key(self._prefix, first)]
        for sequence, key in enumerate(new_keys, first):
            if key != _key(self._prefix, sequence):
                raise Corrupt(f"{self._prefix}: record {sequence} is missing")
            self._know(sequence, self._read_record(key))

    def _know(self, sequence: int, record: AnyRecord) -> None:
        """Keep a record, unless another thread has read it already."""
        with self._lock:
            if sequence == len(self._records):
                self._records.append(record)

    def _read_record(self, key: str) -> AnyRecord:
        try:
            return RECORD.validate_json(self._store.get(key))
        except ValidationError as error:
            raise Corrupt(f"{key} is not a ledger record") from error

    def _put_next(self, record: AnyRecord) -> bool:
        """Append a record after those that are known; False: there is another already."""
        sequence = len(self._records)
        try:
            data = RECORD.dump_json(record)
            self._store.put(_key(self._prefix, sequence), data, if_absent=True)
        except PreconditionFailed:
            return False
        self._know(sequence, record)
        return True


def _key(prefix: str, sequence: int) -> str:
    # Padded: stores list keys as text, and records are read in the order of the list.
    return f"{prefix}{sequence:08d}.json"
