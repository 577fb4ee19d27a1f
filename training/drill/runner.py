"""The runner of drills, which compares each with the same job without a fault.

Drills run on this machine, or on the engine and the store of a job. They take from that job where
and how its processes run, but not model, data or policies, so that the same result is expected
everywhere. Times are seconds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.storage.address import Credentials, clear
from perdure.storage.errors import StorageError
from perdure.training.config.drill import DrillFault, DrillPoint
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import LIMIT_S, Pauser, RunDriver, RunOutcome
from perdure.training.drill.evaluation import DrillOutcome, judge
from perdure.training.drill.job import NO_CHANGES, NUM_RANKS, drill_job, write_corpus
from perdure.training.drill.table import DRILLS, STEPS, Drill
from perdure.training.errors import InputError, PerdureError
from perdure.training.preflight.job import check_job
from perdure.training.recovery.rungs import ISOLATES
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import EndKind, Progress
from perdure.training.wire.requests import write_control

ALL = "all"
MIN_NODES = 2
SPARES_S = 60.0  # for spares to be ready; on a busy machine their imports take ten seconds
KINDS = (ParallelKind.DDP, ParallelKind.HSDP, ParallelKind.FSDP2)


def select_drills(name: str) -> tuple[Drill, ...]:
    """Select drills by their name on the command line.

    Raises:
        InputError: there is no such drill.
    """
    if name == ALL:
        return DRILLS
    matches = tuple(drill for drill in DRILLS if drill.name == name)
    if not matches:
        names = ", ".join(drill.name for drill in DRILLS)
        raise InputError("name", f"{name!r}: no such drill; there are {ALL}, {names}")
    return matches


def parallel_kind(name: str | None, job: Job | None = None) -> ParallelKind:
    """Parse the kind of parallelism on the command line.

    Args:
        name: the argument; None: the job's kind where drills have it, else ddp.
        job: the job on whose nodes drills run, if any.

    Raises:
        InputError: drills have no such kind.
    """
    if name is None:
        job_kind = job.parallelism.kind if job is not None else ParallelKind.DDP
        return job_kind if job_kind in KINDS else ParallelKind.DDP
    if name not in KINDS:
        raise InputError("parallelism", f"{name!r}: must be one of {', '.join(KINDS)}")
    return ParallelKind(name)


def make_runner(
    job: Job | None,
    drills: Sequence[Drill],
    kind: ParallelKind,
    *,
    home: Path,
    credentials: Credentials | None = None,
) -> DrillRunner:
    """Make a runner of drills on the nodes of a job, after checking that job.

    Args:
        job: gives engine, store and environment; None: drills run on this machine.
        drills: the drills to run.
        kind: the drills' parallelism.
        home: folder that nothing else has used.
        credentials: keys of the job's store; None: boto3's default chain.

    Raises:
        InputError: the drills cannot run there; `home` is deleted then.
    """
    if job is None:
        return DrillRunner(home, kind)
    try:
        select_runnable(drills, job)
        runner = DrillRunner(home, kind, target_sections(job, home.name, kind), credentials)
        undisturbed = runner.job(None)
        write_corpus(home, undisturbed.world_size)
        check_job(undisturbed, read_credentials=lambda _job: credentials)
    except InputError:
        shutil.rmtree(home, ignore_errors=True)
        raise
    return runner


@dataclass(slots=True)
class _SpareAwaiter:
    """A hook that pauses a run until all its spares are ready, so that the next fault finds them.

    Attributes:
        limit_s: of the pause; a fault may have come first, and used them up.
    """

    limit_s: float = SPARES_S
    _since_s: float | None = None
    _is_over: bool = False

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        """Pause the run, or resume it."""
        if self._is_over or progress.last is None:
            return
        now_s = time.monotonic()
        if self._since_s is None:
            write_control(run.store, run.job.run_id, pause=True)
            self._since_s = now_s
            return
        is_ready = len(run.warm_spares) == run.job.engine.num_warm_spares
        if is_ready or now_s - self._since_s > self.limit_s:
            write_control(run.store, run.job.run_id, pause=False)
            self._is_over = True


@dataclass(slots=True)
class DrillRunner:
    """Runs drills below a folder.

    Attributes:
        home: Perdure's folder for the runs.
        kind: the drills' parallelism.
        target: sections of the job where drills run (`target_sections`); empty: this machine.
        credentials: keys of the target's store.
    """

    home: Path
    kind: ParallelKind
    target: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    credentials: Credentials | None = None
    _undisturbed: RunOutcome | None = field(default=None, init=False)

    def run(self, drill: Drill) -> DrillOutcome:
        """Run a drill, and the undisturbed run before the first drill.

        Raises:
            PerdureError: the undisturbed run did not reach its end.
            StorageError: the undisturbed run could not start.
        """
        undisturbed = self.undisturbed()
        job = self.job(drill)
        pauser = Pauser(drill.pauses_at, job.world_size) if drill.pauses_at is not None else None
        hook = _SpareAwaiter() if job.engine.warm_spares else pauser
        try:
            outcome = self._driver(job).run(job, hook=hook, starts=drill.starts)
        except (PerdureError, StorageError) as error:
            # The other drills still have results.
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
        """Run the job without a fault, once. Returns its remains.

        Raises:
            PerdureError: the run did not reach its end.
            StorageError: the run could not start.
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
        """The places of the runs' logs and ledgers: a folder, and an address in the job's store."""
        address = (self.job(None).storage.address,) if self.target else ()
        return (str(self.home), *address)

    def clear(self) -> None:
        """Delete all files of the runs, also in the job's store.

        Raises:
            StorageError: the store refuses.
        """
        if self.target:
            clear(self.job(None).storage, self.credentials)
        shutil.rmtree(self.home, ignore_errors=True)

    def _driver(self, job: Job) -> RunDriver:
        limit_s = LIMIT_S
        if self.target:  # its nodes start slowly, before the first fault and after it
            limit_s += 2 * job.restart.start_timeout_s
        return RunDriver(self.home, limit_s, self.credentials)

    def job(self, drill: Drill | None) -> Job:
        """Compose the job of a drill; None: the job without a fault.

        Raises:
            InputError: the target cannot run it.
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
        """Compose the changes and faults of a drill that has each fault on a different node."""
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
    """Select the fields that drills take from a job, by section.

    Args:
        job: gives engine, store and environment.
        folder: folder below the address of the job's store, for the drills alone.
        kind: the drills' parallelism.
    """
    address = f"{job.storage.address.rstrip('/')}/{folder}"
    is_own = kind is ParallelKind.HSDP and kind is job.parallelism.kind
    return {
        "parallelism": {"replicas": job.parallelism.replicas} if is_own else {},
        "storage": {**job.storage.model_dump(), "address": address},
        "engine": {**job.engine.model_dump(), "warm_spares": 0},
        # Each drill sets operator retry itself.
        "comm": {**job.comm.model_dump(exclude_unset=True), "link_retry": False},
        "preflight": job.preflight.model_dump(),
        "restart": {"start_timeout_s": job.restart.start_timeout_s},
        "worker": {"cwd": job.worker.cwd},
        "env": job.env,  # without env_from: the drills' program needs no secret
    }


def find_obstacle(drill: Drill, job: Job | None, *, num_devices: int = 0) -> str:
    """Explain why a drill cannot run on the nodes of a job; "" when it can.

    Args:
        drill: the drill to run.
        job: the job on whose nodes it runs; None: it runs on this machine.
        num_devices: accelerators of this machine; 0: its ranks compute on the CPU.
    """
    if job is None:
        return _find_device_obstacle(drill, num_devices) if num_devices else ""
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


def _find_device_obstacle(drill: Drill, num_devices: int) -> str:
    if drill.is_of_gloo:
        return "it breaks connections of gloo, and devices have their own"
    if num_devices < NUM_RANKS:
        return f"it has {NUM_RANKS} ranks, and this machine {num_devices} devices"
    return ""


def select_runnable(
    drills: Sequence[Drill], job: Job | None, *, num_devices: int = 0
) -> tuple[Drill, ...]:
    """Select the drills that can run; the arguments are those of `find_obstacle`.

    Raises:
        InputError: no drill can run.
    """
    reasons = [find_obstacle(drill, job, num_devices=num_devices) for drill in drills]
    possible = tuple(drill for drill, reason in zip(drills, reasons, strict=True) if not reason)
    if not possible:
        raise InputError("name", f"{drills[0].name}: {reasons[0]}")
    return possible


def _on_replicas(job: Job, faults: tuple[DrillFault, ...]) -> Iterator[DrillFault]:
    """Yield each fault, and another in its recovery for every other rank with the same state."""
    for fault in faults:
        yield fault
        for group in job.layout.replica_groups():
            replicas = [rank for rank in group if fault.rank in group and rank != fault.rank]
            for rank in replicas:
                # In the same step, the first death would mostly prevent the second.
                yield fault.model_copy(update={"rank": rank, "point": DrillPoint.RECOVERY})
