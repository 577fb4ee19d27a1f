"""Drills, one after the other, each compared with the same job without a fault.

They run on this machine, or on the engine of a job with its store. Of that job they take where and
how its processes run; model, data and policies are the drills' own, so that the same is expected
of them everywhere. Times are seconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.storage.address import Credentials, clear
from perdure.storage.errors import StorageError
from perdure.training.config.drill import DrillFault, DrillPoint
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import LIMIT_S, Pauser, RunDriver, RunOutcome, SpareAwaiter
from perdure.training.drill.evaluation import DrillOutcome, judge
from perdure.training.drill.job import NO_CHANGES, NUM_RANKS, drill_job, write_corpus
from perdure.training.drill.table import DRILLS, STEPS, Drill
from perdure.training.errors import InputError, PerdureError
from perdure.training.preflight.job import check_job
from perdure.training.recovery.rungs import ISOLATES
from perdure.training.supervisor.watch import EndKind

ALL = "all"
MIN_NODES = 2
KINDS = (ParallelKind.DDP, ParallelKind.HSDP, ParallelKind.FSDP2)


def chosen(name: str) -> tuple[Drill, ...]:
    """The drills of a name on the command line.

    Raises:
        InputError: there is none of that name.
    """
    if name == ALL:
        return DRILLS
    matches = tuple(drill for drill in DRILLS if drill.name == name)
    if not matches:
        names = ", ".join(drill.name for drill in DRILLS)
        raise InputError("name", f"{name!r}: no such drill; there are {ALL}, {names}")
    return matches


def parallel_kind(name: str | None, job: Job | None = None) -> ParallelKind:
    """The kind of parallelism of a name on the command line.

    Args:
        name: as it was given; None: that of the job where drills have it, else ddp.
        job: whose nodes are drilled, if any.

    Raises:
        InputError: drills have no such kind.
    """
    if name is None:
        job_kind = job.parallelism.kind if job is not None else ParallelKind.DDP
        return job_kind if job_kind in KINDS else ParallelKind.DDP
    if name not in KINDS:
        raise InputError("parallelism", f"{name!r}: must be one of {', '.join(KINDS)}")
    return ParallelKind(name)


def drills_on(
    job: Job | None,
    drills: Sequence[Drill],
    kind: ParallelKind,
    *,
    home: Path,
    credentials: Credentials | None = None,
) -> DrillRunner:
    """What runs drills on the nodes of a job, which are checked; None: on this machine.

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
        return DrillRunner(home, kind)
    try:
        able(drills, job)
        runner = DrillRunner(home, kind, target_sections(job, home.name, kind), credentials)
        undisturbed = runner.job(None)
        write_corpus(home, undisturbed.world_size)
        check_job(undisturbed, read_credentials=lambda _job: credentials)
    except InputError:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return runner


@dataclass(slots=True)
class DrillRunner:
    """Runs drills below a folder.

    Attributes:
        home: Perdure's folder for their runs.
        kind: of parallelism.
        target: where they run, as `target_sections` has it; by default on this machine.
        credentials: keys of the target's store.
    """

    home: Path
    kind: ParallelKind
    target: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    credentials: Credentials | None = None
    _undisturbed: RunOutcome | None = field(default=None, init=False)

    def run(self, drill: Drill) -> DrillOutcome:
        """Run one drill, and before the first one the undisturbed run.

        Raises:
            PerdureError: the undisturbed run did not reach its end.
            StorageError: it could not be started.
        """
        undisturbed = self.undisturbed()
        job = self.job(drill)
        pauser = Pauser(drill.pauses_at, job.world_size) if drill.pauses_at is not None else None
        hook = SpareAwaiter() if job.engine.warm_spares else pauser
        try:
            outcome = self._driver(job).run(job, hook=hook, starts=drill.starts)
        except (PerdureError, StorageError) as error:
            # The results of the other drills are kept.
            return DrillOutcome(
                drill.name,
                self.kind.value,
                drill.injected,
                differs_from=drill.differs_from,
                problems=(f"could not be run: {error}",),
            )
        expected = drill.expected
        if drill.without_replicas is not None and job.layout.copies == 1:
            expected = drill.without_replicas
        return judge(drill, outcome, undisturbed, job=job, expected=expected, pauser=pauser)

    def undisturbed(self) -> RunOutcome:
        """The run without a fault, made once.

        Raises:
            PerdureError: it did not reach its end.
            StorageError: it could not be started.
        """
        if self._undisturbed is None:
            job = self.job(None)
            write_corpus(self.home, job.world_size)
            outcome = self._driver(job).run(job)
            if outcome.ended != EndKind.COMPLETED:
                faults = [view.ended.fault for view in outcome.history.attempts if view.ended]
                why = "".join(f": {fault.evidence}" for fault in faults[-1:] if fault is not None)
                raise PerdureError(f"the run without a fault ended: {outcome.ended}{why}")
            self._undisturbed = outcome
        return self._undisturbed

    @property
    def places(self) -> tuple[str, ...]:
        """Where logs and ledgers of the runs are: a folder, and the address in a job's store."""
        address = (self.job(None).storage.address,) if self.target else ()
        return (str(self.home), *address)

    def clear(self) -> None:
        """Delete everything they left, also in a job's store.

        Raises:
            StorageError: the store refuses.
        """
        if self.target:
            clear(self.job(None).storage, self.credentials)
        shutil.rmtree(self.home, ignore_errors=True)

    def _driver(self, job: Job) -> RunDriver:
        limit_s = LIMIT_S
        if self.target:  # its nodes start slowly: before the first fault, and after it
            limit_s += 2 * job.restart.start_timeout_s
        return RunDriver(self.home, limit_s, self.credentials)

    def job(self, drill: Drill | None) -> Job:
        """The job that a drill runs; None: the one without a fault.

        Raises:
            InputError: it cannot be run on this target.
        """
        if drill is None:
            return self._job("undisturbed")
        changes, faults = drill.changes, drill.faults
        if drill.num_nodes is not None:
            changes, faults = self._spread(drill, drill.num_nodes)
        job = self._job(drill.name, drill.pace_s, changes, faults)
        if drill.hits_replicas:
            faults = tuple(_on_replicas(job, faults))
            job = self._job(drill.name, drill.pace_s, changes, faults)
        return job

    def _spread(
        self, drill: Drill, num_nodes: int
    ) -> tuple[Mapping[str, Mapping[str, Any]], tuple[DrillFault, ...]]:
        """The changes and faults of a drill whose faults are on nodes of their own."""
        slots = NUM_RANKS // num_nodes
        if self.target:
            slots, engine = self.job(None).engine.slots_per_node, {}
        else:
            engine = {"nodes": num_nodes, "slots_per_node": slots}
        changes = {**drill.changes, "engine": {**drill.changes.get("engine", {}), **engine}}
        faults = (fault.model_copy(update={"rank": fault.rank * slots}) for fault in drill.faults)
        return changes, tuple(faults)

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
            target=self.target,
        )


def target_sections(job: Job, folder: str, kind: ParallelKind) -> Mapping[str, Mapping[str, Any]]:
    """What the jobs of drills take from a job, by section.

    Args:
        job: whose engine, store and environment are meant.
        folder: below the address of its store, for the drills alone.
        kind: of parallelism of the drills.
    """
    address = f"{job.storage.address.rstrip('/')}/{folder}"
    is_own = kind is ParallelKind.HSDP and kind is job.parallelism.kind
    return {
        "parallelism": {"replicas": job.parallelism.replicas} if is_own else {},
        "storage": {**job.storage.model_dump(), "address": address},
        "engine": {**job.engine.model_dump(), "warm_spares": 0},
        # Each drill decides about operator retry by itself.
        "comm": {**job.comm.model_dump(exclude_unset=True), "link_retry": False},
        "preflight": job.preflight.model_dump(),
        "restart": {"start_timeout_s": job.restart.start_timeout_s},
        "worker": {"cwd": job.worker.cwd},
        "env": job.env,  # and no env_from: the drills' own program needs no secret
    }


def why_not(drill: Drill, job: Job | None, *, num_devices: int = 0) -> str:
    """Why a drill cannot run on the nodes of a job, "" when it can; None: on this machine.

    Args:
        drill: that is asked about.
        job: whose nodes are meant.
        num_devices: accelerators of this machine; 0: its ranks compute on the CPU.
    """
    if job is None:
        return _why_not_on_devices(drill, num_devices) if num_devices else ""
    engine = job.engine
    if engine.nodes < MIN_NODES or engine.world_size < NUM_RANKS:
        return (
            f"engine.nodes={engine.nodes}, slots_per_node={engine.slots_per_node}: drills need "
            f"{MIN_NODES} nodes and {NUM_RANKS} ranks at least"
        )
    if drill.num_nodes is not None and engine.nodes < drill.num_nodes:
        return f"engine.nodes={engine.nodes}: it needs {drill.num_nodes} nodes"
    left = sum(rung in ISOLATES for rung in drill.expected.rungs)
    if engine.spares < left:
        loss = "a node and needs another one" if left == 1 else f"{left} nodes and needs others"
        return f"engine.spares={engine.spares}: it leaves {loss}"
    return ""


def _why_not_on_devices(drill: Drill, num_devices: int) -> str:
    if drill.is_of_gloo:
        return "it breaks connections of gloo, and devices have their own"
    if num_devices < NUM_RANKS:
        return f"it has {NUM_RANKS} ranks, and this machine {num_devices} devices"
    return ""


def able(drills: Sequence[Drill], job: Job | None, *, num_devices: int = 0) -> tuple[Drill, ...]:
    """Those of the drills that can run; the arguments are those of `why_not`.

    Raises:
        InputError: none can.
    """
    reasons = [why_not(drill, job, num_devices=num_devices) for drill in drills]
    possible = tuple(drill for drill, reason in zip(drills, reasons, strict=True) if not reason)
    if not possible:
        raise InputError("name", f"{drills[0].name}: {reasons[0]}")
    return possible


def _on_replicas(job: Job, faults: tuple[DrillFault, ...]) -> Iterator[DrillFault]:
    """Each fault, and for every other rank with the same state during the recovery from it."""
    for fault in faults:
        yield fault
        for group in job.layout.replica_groups():
            replicas = [rank for rank in group if fault.rank in group and rank != fault.rank]
            for rank in replicas:
                # In the same step, one death would mostly prevent the other.
                yield fault.model_copy(update={"rank": rank, "point": DrillPoint.RECOVERY})
