"""Drills, one after the other, each beside the same job without a fault.

Times are seconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.address import Credentials, clear
from storage.errors import StorageError
from training.drill.driver import LIMIT_S, RunDriver, RunOutcome
from training.drill.hooks import Pauser, RunHook
from training.drill.job import NO_CHANGES, drill_job, write_corpus
from training.drill.table import DRILLS, STEPS, Drill
from training.drill.target import check_site, sections_of
from training.drill.verdict import Outcome, judge, not_played
from training.errors import InputError, PerdureError
from training.job import Job
from training.specs.drill import DrillFault, DrillPoint
from training.specs.model import ParallelKind
from training.supervisor.job_checks import check_job
from training.supervisor.watch import EndKind

ALL = "all"
KINDS = (ParallelKind.DDP, ParallelKind.HSDP, ParallelKind.FSDP2)


def chosen(name: str) -> tuple[Drill, ...]:
    """The drills of a name on the command line.

    Raises:
        InputError: there is none of that name.
    """
    if name == ALL:
        return DRILLS
    found = tuple(drill for drill in DRILLS if drill.name == name)
    if not found:
        known = ", ".join(drill.name for drill in DRILLS)
        raise InputError("name", f"{name!r}: no such drill; there are {ALL}, {known}")
    return found


def parallel_kind(name: str | None, job: Job | None = None) -> ParallelKind:
    """The kind of parallelism of a name on the command line.

    Args:
        name: as it was given; None: that of the job where drills have it, else ddp.
        job: whose nodes are drilled, if any.

    Raises:
        InputError: drills have no such kind.
    """
    if name is None:
        own = job.parallelism.kind if job is not None else ParallelKind.DDP
        return own if own in KINDS else ParallelKind.DDP
    if name not in KINDS:
        raise InputError("parallelism", f"{name!r}: must be one of {', '.join(KINDS)}")
    return ParallelKind(name)


def drilling_on(
    job: Job | None,
    drills: Sequence[Drill],
    kind: ParallelKind,
    *,
    home: Path,
    credentials: Credentials | None = None,
) -> Drilling:
    """Drills on the nodes of a job, checked; None: on this machine.

    Args:
        job: whose engine, store and environment they take.
        drills: to be run.
        kind: of parallelism.
        home: folder that nothing else has used.
        credentials: keys of the job's store; None: boto3's default chain.

    Raises:
        InputError: they cannot be run there, and `home` is gone.
    """
    if job is None:
        return Drilling(home, kind)
    try:
        check_site(job, drills)
        drilling = Drilling(home, kind, sections_of(job, home.name, kind), credentials)
        undisturbed = drilling.job(None)
        write_corpus(home, undisturbed.world_size)
        check_job(undisturbed, credentials=credentials)
    except InputError:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return drilling


@dataclass(slots=True)
class Drilling:
    """Runs drills below a folder.

    Attributes:
        home: Perdure's folder for their runs.
        kind: of parallelism.
        site: where they run, as `sections_of` tells it; by default on this machine.
        credentials: keys of the site's store.
    """

    home: Path
    kind: ParallelKind
    site: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    credentials: Credentials | None = None
    _undisturbed: RunOutcome | None = field(default=None, init=False)

    def run(self, drill: Drill) -> Outcome:
        """Run one drill, and before the first the undisturbed run.

        Raises:
            PerdureError: the undisturbed run did not reach its end.
            StorageError: it could not be started.
        """
        undisturbed = self.undisturbed()
        job = self.job(drill)
        pauser = None
        if drill.pauses_at is not None:
            pauser = Pauser(drill.pauses_at, job.world_size)
        try:
            played = self._play(job, person=pauser, starts=drill.starts)
        except (PerdureError, StorageError) as error:
            # What came of the others is not lost for it.
            return not_played(drill, self.kind, str(error))
        expected = drill.expected
        if drill.without_replicas is not None and job.layout.copies == 1:
            expected = drill.without_replicas
        return judge(
            drill,
            played,
            undisturbed,
            job=job,
            expected=expected,
            pauser=pauser,
        )

    def undisturbed(self) -> RunOutcome:
        """The run without a fault, made once.

        Raises:
            PerdureError: it did not reach its end.
            StorageError: it could not be started.
        """
        if self._undisturbed is None:
            job = self.job(None)
            write_corpus(self.home, job.world_size)
            played = self._play(job)
            if played.ended != EndKind.COMPLETED:
                faults = [view.ended.fault for view in played.history.attempts if view.ended]
                why = "".join(f": {fault.evidence}" for fault in faults[-1:] if fault is not None)
                raise PerdureError(f"the run without a fault ended: {played.ended}{why}")
            self._undisturbed = played
        return self._undisturbed

    @property
    def places(self) -> tuple[str, ...]:
        """Where logs and ledgers of the runs are: a folder, and the address of a job's store."""
        address = (self.job(None).storage.address,) if self.site else ()
        return (str(self.home), *address)

    def clear(self) -> None:
        """Delete all that they have left, in a job's store, too.

        Raises:
            StorageError: the store refuses.
        """
        if self.site:
            clear(self.job(None).storage, self.credentials)
        shutil.rmtree(self.home, ignore_errors=True)

    def _play(self, job: Job, *, person: RunHook | None = None, starts: int = 1) -> RunOutcome:
        limit_s = LIMIT_S
        if self.site:  # at its pace: before the first fault, and after it
            limit_s += 2 * job.restart.start_timeout_s
        play = RunDriver(self.home, limit_s, self.credentials)
        return play.play(job, person=person, starts=starts)

    def job(self, drill: Drill | None) -> Job:
        """The job that a drill runs; None: the one without a fault.

        Raises:
            InputError: it cannot be run at this site.
        """
        if drill is None:
            return self._job("undisturbed")
        job = self._job(drill.name, drill.pace_s, drill.changes, drill.faults)
        if drill.hits_replicas:
            faults = tuple(_on_replicas(job, drill.faults))
            job = self._job(drill.name, drill.pace_s, drill.changes, faults)
        return job

    def _job(
        self,
        name: str,
        pace_s: float = 0.0,
        changes: Mapping[str, Mapping[str, Any]] = NO_CHANGES,
        faults: tuple[DrillFault, ...] = (),
    ) -> Job:
        return drill_job(
            self.home,
            f"{name}-{self.kind}",
            kind=self.kind,
            steps=STEPS,
            pace_s=pace_s,
            changes={**changes, "drill": {"faults": faults}},
            site=self.site,
        )


def _on_replicas(job: Job, faults: tuple[DrillFault, ...]) -> Iterator[DrillFault]:
    """Each fault, and for every other rank with the same state as soon as that is mended."""
    for fault in faults:
        yield fault
        for group in job.layout.replica_groups():
            others = [rank for rank in group if fault.rank in group and rank != fault.rank]
            for rank in others:
                # In the same step one would mostly be cut short by the death of the other.
                yield fault.model_copy(update={"rank": rank, "point": DrillPoint.RECOVERY})
