"""Hangs, with real processes that are stopped, hold the lock, or do not come."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.storage.address import open_store
from perdure.training.config.job import parse_job
from perdure.training.drill.driver import RunDriver, RunHook, RunOutcome
from perdure.training.journal.events import AlertKind, AlertRaised
from perdure.training.liveness.stalled_rank import FACTOR
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.harness import faulty_job

pytestmark = [pytest.mark.process, pytest.mark.alone, pytest.mark.long]

STEPS = 34
LIMIT_S = 2.0
RESOLUTION_S = 1.0  # the agent looks once a second
SETTLE_S = 2.0  # the supervisor's poll, and its wait for the reports of the others
STOPPED_AT = 8


@dataclass
class Stopper:
    """Stops the process of a rank, once."""

    home: Path
    rank: int
    stopped_s: list[float] = field(default_factory=list)

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        is_due = progress.last is not None and progress.last.step >= STOPPED_AT
        if is_due and not self.stopped_s:
            (worker,) = LocalRun(self.home, run.job.run_id).rank(self.rank)
            os.kill(worker.pid, signal.SIGSTOP)
            self.stopped_s.append(time.time())


@dataclass
class Freezer(Stopper):
    """Has the process that it stopped go on once the ledger has an alert about it."""

    continued_s: float | None = None

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        super().__call__(run, progress)
        alerts = [one for one in progress.events if isinstance(one, AlertRaised)]
        if self.continued_s is None and any(one.point is AlertKind.HANG for one in alerts):
            (worker,) = LocalRun(self.home, run.job.run_id).rank(self.rank)
            assert worker.status() == psutil.STATUS_STOPPED
            os.kill(worker.pid, signal.SIGCONT)
            self.continued_s = time.time()


@dataclass
class Bench:
    """Runs of the faulty program."""

    home: Path

    def play(self, name: str, *, hook: RunHook | None = None, **changes: Any) -> RunOutcome:
        sections = {"checkpoint": {"every_steps": 5}, "restart": {"hang_timeout_s": LIMIT_S}}
        job = faulty_job(self.home, name, steps=STEPS, **{**sections, **changes})
        return RunDriver(self.home).run(job, hook=hook)

    def marks(self, name: str) -> Path:
        return self.home / f"marks-{name}"

    def fired_s(self, name: str, mark: str) -> float:
        return float((self.marks(name) / mark).read_text())

    def report_of(self, played: RunOutcome, fault: Fault) -> str:
        """The stacks that a fault points at."""
        found = re.search(r"Stacks of all ranks: (\S+)\.$", fault.explanation)
        assert found is not None, fault
        return self.stored(played, found[1])

    def stored(self, played: RunOutcome, key: str) -> str:
        assert played.history.job is not None
        return open_store(parse_job(played.history.job).storage).get(key).decode()


@pytest.fixture(scope="module")
def bench(home) -> Bench:
    return Bench(home)


@pytest.fixture(scope="module")
def undisturbed(bench) -> RunOutcome:
    # No false alarm: evaluations longer than the limit of a step.
    played: RunOutcome = bench.play("undisturbed", pace_s=0.0, env={"EVALUATE_S": str(2 * LIMIT_S)})
    return played


@pytest.fixture(scope="module")
def hung(bench) -> tuple[RunOutcome, Stopper]:
    """One run that hangs four times, each for a reason of its own."""
    stopper = Stopper(bench.home, 2)
    faults = "hold_lock:1:17,absent:3:27,lost_in_save:0:30"
    return bench.play("hung", faults=faults, hook=stopper), stopper


def fault_of(played: RunOutcome, number: int) -> Fault:
    """What ended one of the attempts, after asserting that it hung and was started again."""
    view = played.history.attempts[number]
    assert view.ended is not None
    assert view.ended.fault is not None
    assert view.ended.fault.fault_class is FaultClass.HANG
    assert view.decision is not None
    assert view.decision.rung is Rung.HANG_RESTART, view.decision
    return view.ended.fault


def assert_in_time(fault: Fault, fired_s: float) -> None:
    assert fault.at_s - fired_s < LIMIT_S + 3 * RESOLUTION_S + SETTLE_S


def test_evaluations_longer_than_a_step_may_be_are_no_hang(undisturbed):
    assert undisturbed.ended == "completed"
    assert len(undisturbed.history.attempts) == 1


def test_a_run_that_hangs_four_times_comes_out_like_one_that_did_not(hung, undisturbed):
    played, _ = hung
    assert played.ended == "completed"
    assert len(played.history.attempts) == 5
    assert played.curve == undisturbed.curve
    assert played.leftovers == ()


def test_a_stopped_process_is_found_and_named(bench, hung):
    played, stopper = hung
    (fired_s,) = stopper.stopped_s
    fault = fault_of(played, 0)
    assert fault.rank == 2
    assert_in_time(fault, fired_s)
    assert fault.evidence.startswith("rank 2 on node-1: stopped by a signal")
    assert "is stopped" in bench.report_of(played, fault)


def test_a_process_that_holds_the_interpreters_lock_is_found_with_its_stack(bench, hung):
    played, _ = hung
    fault = fault_of(played, 1)
    assert fault.rank == 1
    assert_in_time(fault, bench.fired_s("hung", "hold_lock-1-17"))
    assert "rank 1 on node-0: in no collective" in fault.evidence
    assert "waiting in allreduce in world" in fault.evidence
    report = bench.report_of(played, fault)
    assert "hold_the_lock" in report.partition("stacks of rank 1 ")[2]
    assert "stacks of rank 3 on node-1" in report


def test_a_rank_that_does_not_come_to_the_collective_is_named(bench, hung):
    played, _ = hung
    fault = fault_of(played, 2)
    assert fault.rank == 3
    assert_in_time(fault, bench.fired_s("hung", "absent-3-27"))
    report = bench.report_of(played, fault)
    assert "leave_for_good" in report.partition("stacks of rank 3 ")[2]


def test_a_rank_that_is_lost_in_a_save_is_found_as_soon_as_one_in_a_step(bench, hung):
    played, _ = hung
    fault = fault_of(played, 3)
    assert_in_time(fault, bench.fired_s("hung", "lost_in_save-0-30"))
    assert fault.rank == 0
    assert "leave_for_good" in bench.report_of(played, fault).partition("stacks of rank 0 ")[2]


@pytest.mark.timeout(900)
def test_a_rank_that_never_comes_to_the_first_collective_is_found_by_the_progress_of_the_others(
    bench, undisturbed
):
    # Nothing was learned yet, and it is not stopped: the start alone would have 600 s.
    played = bench.play("lost-at-start", faults="absent:3:1")
    fault = fault_of(played, 0)
    assert fault.rank == 3
    started_s = played.history.attempts[0].started.at_s
    came_s = bench.fired_s("lost-at-start", "absent-3-1")
    late_s = LIMIT_S + FACTOR * (came_s - started_s)
    assert fault.at_s - came_s < late_s + 30.0, "in the time that the others took, not in 600 s"
    assert "rank 3 on node-1: in no collective" in fault.evidence
    assert "leave_for_good" in bench.report_of(played, fault).partition("stacks of rank 3 ")[2]
    assert (played.ended, played.curve) == ("completed", undisturbed.curve)


def test_a_slow_first_step_and_long_saves_are_no_hang(bench):
    played = bench.play(
        "slow-start",
        faults=f"pause:1:1:{2 * LIMIT_S}",
        pace_s=0.0,
        env={"SAVE_S": str(2 * LIMIT_S)},
        checkpoint={"every_steps": 15},
    )
    assert played.ended == "completed"
    assert (bench.marks("slow-start") / "pause-1-1").exists()
    assert len(played.history.attempts) == 1


def test_a_command_that_neither_writes_nor_computes_is_found(bench):
    script = bench.home / "quiet.py"
    script.write_text(
        "import os, sys, time\n"
        "print('attempt', os.environ['MA_PROC_START_CNT'], flush=True)\n"
        "if os.environ['MA_PROC_START_CNT'] == '1' and os.environ['NODE_RANK'] == '1':\n"
        "    time.sleep(3600)\n"
        "for number in range(60):\n"
        "    print('step', number, flush=True)\n"
        "    time.sleep(0.1)\n"
    )
    played = bench.play(
        "quiet-command",
        worker={"command": ["python3", str(script)], "recipe": None, "cwd": str(bench.home)},
        watch={"command_quiet_s": 4.0},
    )
    assert played.ended == "completed"
    fault = fault_of(played, 0)
    assert fault.node == "node-1"
    assert "neither output nor I/O" in fault.evidence
    assert len(played.history.attempts) == 2


def test_a_command_that_prints_nothing_though_it_computes_is_found(bench):
    """One node never prints, as most ranks do; the other one falls silent and computes on."""
    script = bench.home / "silent.py"
    script.write_text(
        "import os, time\n"
        "first = os.environ['MA_PROC_START_CNT'] == '1'\n"
        "prints = os.environ['NODE_RANK'] == '0'\n"
        "began = time.monotonic()\n"
        "while time.monotonic() - began < (3600 if first else 1.0):\n"
        "    if prints and (not first or time.monotonic() - began < 8.0):\n"
        "        print('step', flush=True)\n"
        "    open('noise', 'a').write('x')\n"
        "    sum(range(200_000))\n"
    )
    played = bench.play(
        "silent-command",
        worker={"command": ["python3", str(script)], "recipe": None, "cwd": str(bench.home)},
        watch={"output_quiet_s": 5.0},
    )
    assert played.ended == "completed"
    fault = fault_of(played, 0)
    assert fault.fault_class is FaultClass.HANG
    assert fault.node is None
    assert "no output on any of 2 nodes" in fault.evidence
    first, _ = played.history.attempts
    # Longer than the limit, so that the silence of one node alone was none.
    assert fault.at_s - first.started.at_s > 8.0
    assert first.decision.rung is Rung.HANG_RESTART


def test_a_hang_that_is_only_reported_ends_nothing_and_is_over_when_the_rank_goes_on(
    bench, undisturbed
):
    freezer = Freezer(bench.home, 2)
    played = bench.play(
        "reported",
        hook=freezer,
        pace_s=0.5,
        restart={"hang_timeout_s": 2 * LIMIT_S},
        watch={"hang_action": "alert"},
    )
    assert freezer.stopped_s
    assert freezer.continued_s is not None
    assert played.ended == "completed"
    (attempt,) = played.history.attempts
    (alert,) = [one for one in attempt.alerts if one.began.point is AlertKind.HANG]
    assert alert.began.rank == 2
    assert "stopped by a signal" in alert.began.text
    assert alert.ended is not None
    assert alert.ended.at_s > freezer.continued_s
    report = bench.stored(played, "runs/reported/logs/p0001-a0001/hang.txt")
    assert "rank 2" in report.splitlines()[0]
    assert "waiting in allreduce" in report.splitlines()[0]
    assert report.count("stacks of rank ") == 4
    assert played.curve == undisturbed.curve
    assert played.leftovers == ()
