"""Drills, one after the other, each beside the same job without a fault.

Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from training.drill.job import drill_job, write_corpus
from training.drill.outside import Pauser, Person, Saboteur
from training.drill.play import Play, Played
from training.drill.table import DRILLS, STEPS, Drill
from training.drill.verdict import Outcome, judge
from training.errors import InputError
from training.job import Job
from training.specs.drill import DrillFault, DrillPoint
from training.specs.model import ParallelKind

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
        raise InputError("NAME", f"{name!r}: no such drill; there are {ALL}, {known}")
    return found


def parallel_kind(name: str) -> ParallelKind:
    """The kind of parallelism of a name on the command line.

    Raises:
        InputError: drills have no such kind.
    """
    if name not in KINDS:
        raise InputError("--parallelism", f"{name!r}: must be one of {', '.join(KINDS)}")
    return ParallelKind(name)


@dataclass(slots=True)
class Drilling:
    """Runs drills below a folder.

    Attributes:
        home: Perdure's folder for their runs.
        kind: of parallelism.
    """

    home: Path
    kind: ParallelKind
    _undisturbed: Played | None = field(default=None, init=False)

    def run(self, drill: Drill) -> Outcome:
        """Run one drill, and before the first the undisturbed run.

        Raises:
            PerdureError: a run could not be started.
            StorageError: likewise.
        """
        undisturbed = self.undisturbed()
        job = self.job(drill)
        saboteur = Saboteur(self.home, drill.kills)
        pauser = None
        if drill.pauses_at is not None:
            pauser = Pauser(drill.pauses_at, job.world_size)
        person: Person = pauser or saboteur
        played = Play(self.home).play(job, person=person, starts=drill.starts)
        expected = drill.expected
        if drill.without_replicas is not None and job.layout.copies == 1:
            expected = drill.without_replicas
        return judge(
            drill,
            played,
            undisturbed,
            job=job,
            expected=expected,
            outside_at_s=saboteur.fired_s,
            pauser=pauser,
        )

    def undisturbed(self) -> Played:
        """The run without a fault, made once."""
        if self._undisturbed is None:
            write_corpus(self.home)
            job = drill_job(
                self.home, f"undisturbed-{self.kind}", kind=self.kind, steps=STEPS, changes={}
            )
            self._undisturbed = Play(self.home).play(job)
        return self._undisturbed

    def job(self, drill: Drill) -> Job:
        """The job that a drill runs."""

        def made(faults: tuple[DrillFault, ...]) -> Job:
            return drill_job(
                self.home,
                f"{drill.name}-{self.kind}",
                kind=self.kind,
                steps=STEPS,
                pace_s=drill.pace_s,
                changes={**drill.changes, "drill": {"faults": faults}},
            )

        job = made(drill.faults)
        if drill.hits_replicas:
            job = made(tuple(_on_replicas(job, drill.faults)))
        return job


def _on_replicas(job: Job, faults: tuple[DrillFault, ...]) -> Iterator[DrillFault]:
    """Each fault, and for every other rank with the same state as soon as that is mended."""
    for fault in faults:
        yield fault
        for group in job.layout.replica_groups():
            others = [rank for rank in group if fault.rank in group and rank != fault.rank]
            for rank in others:
                # In the same step one would mostly be cut short by the death of the other.
                yield fault.model_copy(update={"rank": rank, "point": DrillPoint.RECOVERY})
