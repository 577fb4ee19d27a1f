"""Recovery inside the processes, with real processes and real signals.

One run for each kind of parallelism meets its faults one after the other, far enough apart for
each to be recovered from by itself, and comes out as the run of the same job that met none.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.drill import DrillFault, DrillKind, DrillPoint
from perdure.training.config.model import ParallelKind
from perdure.training.coordinator.history_writer import HISTORY_FILE
from perdure.training.drill.driver import Pauser, RunDriver, RunHook, RunOutcome
from perdure.training.drill.evaluation import differences, list_recoveries
from perdure.training.drill.job import NUM_RANKS, drill_job
from perdure.training.journal.attempt_view import AttemptView, InProcessRecovery
from perdure.training.recovery import replay
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.harness import assert_as_undisturbed

pytestmark = [pytest.mark.process, pytest.mark.alone]

DDP, HSDP, FSDP2 = ParallelKind.DDP, ParallelKind.HSDP, ParallelKind.FSDP2
KILL, UCE, HCCE, LINK, NOT_A_NUMBER = (
    DrillKind.KILL,
    DrillKind.DEVICE_MEMORY,
    DrillKind.COLLECTIVE,
    DrillKind.LINK,
    DrillKind.NOT_A_NUMBER,
)
RETRY, REPLACE = (Rung.STEP_RETRY,), (Rung.PROCESS_REPLACE,)
IN_PLACE = Rung.IN_PLACE_RESTART
STEPS = 66
PACE_S = 0.03  # a save has to reach the store between two faults, or budgets are used up
SLOW_S = 0.1  # for requests, which are looked for every other second
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "checkpoint": {"every_steps": 4},
    # No fault that is answered otherwise, and no repair, leaves ranks different.
    "watch": {"consistency_every_steps": 7},
    "restart": {
        "pod_retries": 1,
        "numeric_retry": True,
        "snapshot_every_steps": 4,
        "abnormal_grad_norm": 1e3,
    },
}


@dataclass(frozen=True)
class Fault:
    """What a run meets at a step, and the rungs that answer it, in order."""

    name: str
    made: tuple[DrillFault, ...]
    rungs: tuple[Rung, ...]


def _made(
    step: int,
    kind: DrillKind,
    *ranks: int,
    at: DrillPoint = DrillPoint.BACKWARD,
    times: int = 1,
) -> tuple[DrillFault, ...]:
    return tuple(
        DrillFault(kind=kind, rank=rank, step=step, point=at, times=times) for rank in ranks
    )


COURSES: Mapping[ParallelKind, Sequence[Fault]] = {
    DDP: (
        Fault("damaged device memory", _made(6, UCE, 2), RETRY),
        Fault("a failed collective", _made(11, HCCE, 1, at=DrillPoint.PREPARED), RETRY),
        Fault("the death of rank 0", _made(16, KILL, 0, at=DrillPoint.PREPARED), REPLACE),
        Fault("broken links", _made(21, LINK, 1), RETRY),
        Fault("an abnormal gradient", _made(26, DrillKind.GRADIENT, 3), RETRY),
        Fault("the death of rank 3", _made(31, KILL, 3, at=DrillPoint.HALF_APPLIED), REPLACE),
        Fault("the death of two ranks", _made(37, KILL, 1, 2), REPLACE * 2),
        Fault(
            "a death during another recovery",
            (*_made(43, HCCE, 1), *_made(43, KILL, 2, at=DrillPoint.RECOVERY)),
            (*RETRY, *REPLACE),
        ),
        Fault(
            "a failed collective during the recovery from an abnormal gradient",
            (*_made(49, DrillKind.GRADIENT, 2), *_made(49, HCCE, 0, at=DrillPoint.RECOVERY)),
            RETRY * 2,
        ),
        Fault(
            "a death during the recovery from an abnormal gradient",
            # Of step 54, back to the snapshot of step 52: the recovery goes on with step 53.
            (*_made(55, DrillKind.GRADIENT, 3), *_made(53, KILL, 1, at=DrillPoint.RECOVERY)),
            (*RETRY, *REPLACE),
        ),
        Fault(
            "a loss that is no number twice",
            _made(61, NOT_A_NUMBER, 2, times=2),
            (*RETRY, *REPLACE),
        ),
    ),
    HSDP: (
        Fault("damaged device memory", _made(6, UCE, 2, at=DrillPoint.HALF_APPLIED), RETRY),
        Fault("a failed collective", _made(11, HCCE, 1), RETRY),
        Fault("the death of rank 0", _made(16, KILL, 0), REPLACE),
        Fault("broken links", _made(21, LINK, 3), RETRY),
        Fault(
            "the death of a rank and of its only replica",
            (*_made(27, KILL, 1), *_made(27, KILL, 3, at=DrillPoint.RECOVERY)),
            (IN_PLACE,),
        ),
        Fault("two deaths in one step", _made(35, KILL, 2, times=2), (*REPLACE, IN_PLACE)),
        Fault(
            "the death of rank 0 during the recovery from an abnormal gradient",
            (*_made(47, DrillKind.GRADIENT, 3), *_made(45, KILL, 0, at=DrillPoint.RECOVERY)),
            (*RETRY, *REPLACE),
        ),
        Fault("an abnormal gradient", _made(58, DrillKind.GRADIENT, 1), RETRY),
    ),
    FSDP2: (
        Fault("a failed collective", _made(6, HCCE, 1), RETRY),
        Fault("broken links", _made(11, LINK, 2, at=DrillPoint.PREPARED), RETRY),
        Fault("an abnormal gradient", _made(18, DrillKind.GRADIENT, 3), RETRY),
        # The state of a rank is nowhere else: a checkpoint has it.
        Fault("damaged device memory", _made(27, UCE, 2), (IN_PLACE,)),
        Fault("the death of a rank", _made(43, KILL, 1), (IN_PLACE,)),
    ),
}
LONG = {DDP: (), HSDP: (pytest.mark.long,), FSDP2: (pytest.mark.long,)}
KINDS = [pytest.param(kind, marks=LONG[kind], id=kind.value) for kind in COURSES]
PAIRS = [
    pytest.param(kind, fault, marks=LONG[kind], id=f"{kind}, {fault.name}")
    for kind, course in COURSES.items()
    for fault in course
]


@dataclass
class Witness:
    """Sees at every poll of the supervisor which processes the ranks are.

    Attributes:
        pids: by placement, attempt and rank.
    """

    pids: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        for agent in progress.snapshot.agents.values():
            for worker in agent.workers:
                place = (agent.placement, agent.attempt, worker.rank)
                self.pids.setdefault(place, set()).add(worker.pid)


@dataclass
class Bench:
    """Runs below one folder, each made once."""

    home: Path
    played: dict[str, RunOutcome] = field(default_factory=dict)
    witnesses: dict[ParallelKind, Witness] = field(default_factory=dict)

    def play(
        self,
        name: str,
        kind: ParallelKind,
        *,
        faults: Sequence[DrillFault] = (),
        pace_s: float = PACE_S,
        hook: RunHook | None = None,
        **changes: Any,
    ) -> RunOutcome:
        if name not in self.played:
            sections = {**CHANGES, **changes, "drill": {"faults": faults}}
            job = drill_job(
                self.home, name, kind=kind, steps=STEPS, pace_s=pace_s, changes=sections
            )
            self.played[name] = RunDriver(self.home).run(job, hook=hook)
        return self.played[name]

    def course(self, kind: ParallelKind) -> RunOutcome:
        witness = self.witnesses.setdefault(kind, Witness())
        return self.play(f"course-{kind}", kind, faults=_all_made(kind), hook=witness)

    def times_restored(self, name: str, view: AttemptView) -> int:
        """How often the ranks of an attempt restored a checkpoint, as the first of them logs it."""
        folder = "p{:04d}-a{:04d}".format(*view.key)
        logs = self.home.glob(f"runs/{name}/nodes/*/*/attempts/{folder}/rank-00000.stdout.log")
        (log,) = logs
        return log.read_text().count(" restored from ")

    def undisturbed(self, kind: ParallelKind) -> RunOutcome:
        return self.play(f"undisturbed-{kind}", kind, pace_s=0)


@pytest.fixture(scope="module")
def bench(home) -> Bench:
    return Bench(home)


def _all_made(kind: ParallelKind) -> list[DrillFault]:
    return [one for fault in COURSES[kind] for one in fault.made]


def _span_s(played: RunOutcome, kind: ParallelKind, fault: Fault) -> tuple[float, float]:
    """From the first moment of a fault to the first of the next one."""
    made = _all_made(kind)
    starts = [
        min(played.fired_s[made.index(one)][0] for one in other.made) for other in COURSES[kind]
    ]
    number = list(COURSES[kind]).index(fault)
    return starts[number], [*starts, float("inf")][number + 1]


@pytest.mark.parametrize(("kind", "fault"), PAIRS)
def test_a_fault_is_recovered_from_by_the_cheapest_rung_that_answers_it(bench, kind, fault):
    played = bench.course(kind)
    made = _all_made(kind)
    for one in fault.made:
        assert len(played.fired_s[made.index(one)]) == one.times
    from_s, until_s = _span_s(played, kind, fault)
    recoveries = [r for r in list_recoveries(played.history) if from_s <= r.noticed_at_s < until_s]
    assert tuple(one.rung for one in recoveries) == fault.rungs
    replaced = {
        rank
        for one in _recoveries(played)
        if from_s <= one.began.fault.at_s < until_s and one.ended is not None and one.succeeded
        for rank in one.ended.replaced
    }
    to_blame = {one.rank for one in fault.made if one.kind in (KILL, NOT_A_NUMBER)}
    assert replaced == (to_blame if Rung.PROCESS_REPLACE in fault.rungs else set())


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_replaced_rank_gets_another_process_and_no_checkpoint_is_read(bench, kind):
    played = bench.course(kind)
    seen = bench.witnesses[kind].pids
    for view in played.history.attempts:
        ended = [one.ended for one in view.recoveries if one.ended is not None]
        replaced = Counter(rank for one in ended for rank in one.replaced)
        for rank in range(NUM_RANKS):
            # A process that is killed right away may never be seen.
            assert 1 <= len(seen[*view.key, rank]) <= 1 + replaced[rank]
        is_first = view is played.history.attempts[0]
        assert bench.times_restored(f"course-{kind}", view) == (0 if is_first else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_attempt_of_a_coordinator_can_be_played_again(bench, kind, capsys):
    played = bench.course(kind)
    folders = f"runs/course-{kind}/nodes/*/*/attempts/*"
    histories = sorted(bench.home.glob(f"{folders}/{HISTORY_FILE}"))
    assert len(histories) == len(played.history.attempts)
    for file in histories:
        assert replay.main([str(file)]) == 0, capsys.readouterr().err
    num_recoveries = sum(len(view.recoveries) for view in played.history.attempts)
    assert capsys.readouterr().out.count('"kind": "recovery_began"') == num_recoveries


@pytest.mark.parametrize("kind", KINDS)
def test_no_digit_of_a_run_with_faults_differs_from_one_without(bench, kind):
    assert_as_undisturbed(bench.course(kind), bench.undisturbed(kind), steps=STEPS)


@pytest.mark.long
def test_survivors_save_the_last_completed_step_and_the_next_attempt_goes_on_exactly_there(bench):
    first, second, third = bench.course(HSDP).history.attempts
    assert first.last_save.step is None, "the state of a rank and its replica is gone"
    assert (second.last_save.step, third.from_step) == (34, 34)


@pytest.mark.long
def test_a_death_while_an_abnormal_step_is_accepted_changes_nothing_of_it(bench):
    twice = _made(23, DrillKind.GRADIENT, 3, times=2)
    cut = _made(24, KILL, 1, at=DrillPoint.RECOVERY)  # it is accepted, and step 24 comes next
    alone = bench.play("accepted", DDP, faults=twice)
    disturbed = bench.play("accepted-cut", DDP, faults=(*twice, *cut))
    assert [len(disturbed.fired_s[number]) for number in range(2)] == [2, 1]
    assert [one.rung for one in list_recoveries(alone.history)] == [*RETRY, *RETRY]
    assert [one.rung for one in list_recoveries(disturbed.history)] == [*RETRY, *RETRY, *REPLACE]
    assert differences(disturbed.curve, alone.curve) == []
    assert disturbed.state == alone.state


class Caller:
    """Has rank 2 save by a signal, later the whole run pause and go on."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.pauser = Pauser(20, 4)
        self.signalled_at: int | None = None

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        self.pauser(run, progress)
        if progress.last is not None and progress.last.step >= 10 and self.signalled_at is None:
            self.signalled_at = progress.last.step
            (worker,) = LocalRun(self.home, run.job.run_id).rank(2)
            os.kill(worker.pid, signal.SIGUSR1)


@pytest.fixture(scope="module")
def called(bench) -> tuple[RunOutcome, Caller]:
    """A run that saves on request alone, and whose connections are re-established."""
    caller = Caller(bench.home)
    played = bench.play(
        "called",
        DDP,
        faults=_made(4, LINK, 1, at=DrillPoint.REDUCING),
        pace_s=SLOW_S,
        hook=caller,
        checkpoint={"every_steps": 1000},
        comm={"link_retry": True},
    )
    return played, caller


def test_a_signal_to_one_rank_has_the_next_step_boundary_saved(called):
    played, caller = called
    asked, last = [seen.step for seen in played.history.checkpoints]
    assert last == STEPS
    assert caller.signalled_at is not None
    # The look is as old as the supervisor's poll; the boundary is a later one.
    assert caller.signalled_at < asked < caller.pauser.paused_at[0][0]


def test_on_request_every_rank_stops_at_one_step_and_goes_on_from_it_later(called):
    played, caller = called
    (pause,) = [one for view in played.history.attempts for one in view.pauses]
    assert pause.ended.step == pause.began.step
    assert {step for look in caller.pauser.paused_at for step in look} == {pause.began.step}
    assert pause.ended.at_s - pause.began.at_s > 0.5


def test_a_broken_connection_is_re_established_under_the_operations_where_the_job_asks_for_it(
    called,
):
    played, _ = called
    assert len(played.fired_s[0]) == 1
    (recovery,) = _recoveries(played)
    assert recovery.began.decision.rung is Rung.OPERATOR_RETRY
    assert recovery.began.decision.sub_healthy
    assert recovery.succeeded


def test_no_digit_of_a_run_that_was_called_at_differs_from_one_left_alone(bench, called):
    assert_as_undisturbed(called[0], bench.undisturbed(DDP), steps=STEPS)


def _recoveries(played: RunOutcome) -> list[InProcessRecovery]:
    return [one for view in played.history.attempts for one in view.recoveries]
