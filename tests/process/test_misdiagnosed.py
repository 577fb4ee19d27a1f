"""Deaths that leave hardly a trace: every process that is left ends in good order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint, Kill, Victim
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, RunOutcome, kill_hook
from perdure.training.drill.job import drill_job, write_corpus
from perdure.training.injection.outside import KillInjector
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

STEPS = 16
AT_STEP = 7


def job_of(
    home: Path, name: str, kind: ParallelKind, *faults: DrillFault, **changes: dict[str, Any]
) -> Job:
    write_corpus(home)
    changes |= {"drill": {"faults": faults, "kills": True}, "checkpoint": {"every_steps": 5}}
    return drill_job(home, name, kind=kind, steps=STEPS, pace_s=0.1, changes=changes)


def kill(rank: int, point: DrillPoint = DrillPoint.BACKWARD) -> DrillFault:
    return DrillFault(kind=DrillKind.KILL, rank=rank, step=AT_STEP, point=point)


def failed(played: RunOutcome) -> tuple[AttemptView, Fault]:
    """The only attempt that failed, and why."""
    assert played.ended == "completed"
    assert played.leftovers == ()
    view, _ = played.history.attempts
    assert view.ended is not None
    assert view.ended.fault is not None
    return view, view.ended.fault


def given_up(view: AttemptView) -> AttemptGivenUp:
    (event,) = (one for one in view.events if isinstance(one, AttemptGivenUp))
    return event


def test_a_killed_rank_that_shares_its_state_with_no_other_is_named_and_not_replaced(home):
    job = job_of(home, "sharded", ParallelKind.FSDP2, kill(1))
    played = RunDriver(home).run(job)
    assert played.fired_s.keys() == {0}
    view, fault = failed(played)
    assert view.recoveries == [], "nothing was tried that cannot succeed"
    assert (fault.fault_class, fault.rank, fault.code) == (FaultClass.NATIVE_CRASH, 1, "SIGKILL")
    assert view.decision is not None
    assert view.decision.rung is Rung.IN_PLACE_RESTART
    no_replica = "process_replace: no replica: data_parallel / optimizer_weight_shard_size = 4 / 4"
    assert no_replica in view.decision.reason
    assert given_up(view).fault.rank == 1


def test_a_rank_that_was_replaced_in_vain_is_named_though_all_ranks_end_in_good_order(home):
    # Rank 0 has a new process by then: only the coordinator knows how the one before ended.
    faults = (kill(0), kill(2, DrillPoint.RECOVERY))
    job = job_of(home, "replicas", ParallelKind.HSDP, *faults)
    played = RunDriver(home).run(job)
    assert played.fired_s.keys() == {0, 1}
    view, fault = failed(played)
    assert fault.fault_class is FaultClass.NATIVE_CRASH
    assert fault.rank in (0, 2)
    assert given_up(view).fault.rank == 2
    assert "no replica of rank 2 is left: [0] lost theirs" in given_up(view).why


def test_the_death_of_the_coordinator_is_blamed_on_no_rank(home):
    job = job_of(home, "coordinator", ParallelKind.DDP)
    kills = (Kill(victim=Victim.COORDINATOR, index=0, step=AT_STEP),)
    injector = KillInjector(kills)
    played = RunDriver(home).run(job, hook=kill_hook(injector))
    assert injector.fired_s.keys() == {0}
    view, fault = failed(played)
    assert (fault.fault_class, fault.rank, fault.node) == (FaultClass.NATIVE_CRASH, None, "node-0")
    assert fault.evidence == "the coordinator of the attempt on node-0 ended by SIGKILL"
    assert view.decision is not None
    assert view.decision.rung is Rung.IN_PLACE_RESTART


def test_a_coordinator_that_is_stopped_costs_no_more_than_a_hang(home):
    # Whoever is in the recovery waits for it and beats, and would never look silent.
    broken = DrillFault(kind=DrillKind.COLLECTIVE, rank=1, step=AT_STEP)
    job = job_of(home, "stopped", ParallelKind.DDP, broken, restart={"hang_timeout_s": 4.0})
    stopped: list[int] = []

    def stop(_run: RunSupervisor, progress: Progress) -> None:
        if progress.last is not None and progress.last.step >= AT_STEP - 3 and not stopped:
            (coordinator,) = LocalRun(home, job.run_id).part(Victim.COORDINATOR)
            coordinator.suspend()
            stopped.append(coordinator.pid)

    played = RunDriver(home).run(job, hook=stop)
    assert stopped
    _, fault = failed(played)
    # Ranks that still wait in their collective are silent, too: either may be seen first.
    was_ended = "was ended: a signal had stopped it for" in fault.evidence
    assert was_ended or fault.fault_class is FaultClass.HANG


def test_a_process_that_its_own_agent_ended_to_replace_it_is_not_the_cause(home):
    # Damaged twice in one step, the rank is to be replaced; nothing forks the new process.
    damaged = DrillFault(kind=DrillKind.DEVICE_MEMORY, rank=1, step=AT_STEP, times=2)
    job = job_of(home, "forkless", ParallelKind.DDP, damaged)
    kills = (Kill(victim=Victim.FORK_SERVER, index=0, step=2),)
    injector = KillInjector(kills)
    played = RunDriver(home).run(job, hook=kill_hook(injector))
    assert injector.fired_s.keys() == {0}
    view, fault = failed(played)
    last = view.recoveries[-1]
    assert last.began.decision.rung is Rung.PROCESS_REPLACE
    assert last.ended is not None
    assert not last.ended.succeeded
    assert "rank 1 is not replaced: its process does not start" in (last.ended.why or "")
    assert (fault.fault_class, fault.rank) == (FaultClass.DEVICE_MEMORY_ERROR, 1)
    assert "process_replace: the last one failed" in fault.explanation
