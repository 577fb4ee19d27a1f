"""A run as anybody may read it who reaches its store; nothing here changes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from perdure.storage.address import Credentials, open_store, worker_environment
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.objects import ObjectStore
from perdure.storage.retry import Retry
from perdure.training.config.job import Job
from perdure.training.engines.fleet import Fleet
from perdure.training.engines.registry import make_fleet
from perdure.training.journal.history import RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.supervisor.observing import AttemptObserver, placement_of
from perdure.training.supervisor.run_identity import is_complete

BRIEF_READ_S = 5.0


def open_briefly(job: Job, credentials: Credentials | None) -> ObjectStore:
    """Open the store of a job for somebody who waits: it answers soon, or not at all."""
    spec = job.storage
    limits = {
        "connect_timeout_s": min(BRIEF_READ_S, spec.connect_timeout_s),
        "read_timeout_s": min(BRIEF_READ_S, spec.read_timeout_s),
    }
    return open_store(spec.model_copy(update=limits), credentials, retry=Retry.brief())


class RunHandle:
    """The job, the store, the ledger and the checkpoints of one run.

    Attributes:
        store: raises where it cannot be used.

    Args:
        job: as the run's ledger or this machine has it.
        home: Perdure's folder on this machine.
        credentials: keys of the job's store; None: boto3's default chain.
        retry: has ledger and checkpoints wait for a store that cannot be used; None: they raise.
        is_brief: whether a silent store is given up soon, for a person who waits.
    """

    def __init__(
        self,
        job: Job,
        *,
        home: Path,
        credentials: Credentials | None = None,
        retry: Retry | None = None,
        is_brief: bool = False,
    ) -> None:
        self.job = job
        self.home = home
        self.store = (
            open_briefly(job, credentials) if is_brief else open_store(job.storage, credentials)
        )
        patient = self.store if retry is None else open_store(job.storage, credentials, retry=retry)
        self.checkpoints = CheckpointStore(patient, job.run_id)
        self.ledger = Ledger(patient, job.run_id, lease_s=job.engine.lease_s)
        self._credentials = credentials
        self._history = RunHistory()

    @cached_property
    def brief_store(self) -> ObjectStore:
        """The store for lookups that must not wait long for it."""
        return open_briefly(self.job, self._credentials)

    @property
    def history(self) -> RunHistory:
        """The ledger's content when it was last read."""
        return self._history

    def refresh(self) -> RunHistory:
        """Re-read the ledger."""
        self._history = self.ledger.read()
        return self._history

    @property
    def is_complete(self) -> bool:
        """Whether the run reached its target; a larger target than before is not reached yet."""
        return is_complete(self.job, self.history)

    def list_leftovers(self) -> Sequence[str]:
        """List by name what the run still has where its containers were."""
        return self._make_fleet(self.refresh().epoch).leftovers()

    def observer(self) -> AttemptObserver | None:
        """Return an observer of the open attempt; None where there is none."""
        history = self.refresh()
        return self.newest_observer() if history.open_attempt is not None else None

    def newest_observer(self) -> AttemptObserver | None:
        """Return an observer of the newest attempt, which may have ended; None: no agents live.

        The history is as it was last read.
        """
        placement = placement_of(self.history)
        if placement is None or self.history.ended is not None:
            return None
        attempts = self.history.attempts
        key = attempts[-1].key if attempts else None
        return AttemptObserver(self._make_fleet(self.history.epoch), placement, key=key)

    def _make_fleet(self, epoch: int) -> Fleet:
        return make_fleet(
            self.job,
            home=self.home,
            epoch=epoch,
            secrets_env=worker_environment(self.job.storage, self._credentials),
            created_s=self.history.created_s,
        )
