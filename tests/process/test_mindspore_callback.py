"""MindSpore with Perdure's callback, on the CPU, without msrun: broken, it loses no digit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.job import Job, parse_job
from perdure.training.drill.driver import Pauser, RunDriver, RunOutcome
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.local_run import LocalRun
from tests.process.mindspore_runs import BIN, EPOCHS, MARKS, STEPS, losses, losses_by_hand
from tests.process.program_jobs import EXAMPLES, output_of, recorded
from tests.values import not_none

pytestmark = MARKS
EVERY = 10  # steps from save to save
LIMIT_S = 800.0  # each start imports MindSpore, which takes a busy machine a minute


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """What the first rank prints under msrun, without Perdure and its callback."""
    return losses_by_hand()


def job_of(home: Path, name: str, *arguments: str, **changes: Any) -> Job:
    document = {
        "run_id": name,
        "storage": {"address": f"file://{home}/store"},
        "steps": STEPS,
        "worker": {
            "script": ["mindspore_callback_train.py", "--epochs", str(EPOCHS), *arguments],
            "integration": "mindspore",
            "python": str(BIN / "python"),
            "cwd": str(EXAMPLES),
        },
        "checkpoint": {"every_steps": EVERY},
        "restart": {"hang_timeout_s": 20},
        "preflight": {"nodes": False},
        "engine": {
            "kind": "local", "nodes": 1, "slots_per_node": 2, "spares": 0, "grace_s": 30,
        },
    }  # fmt: skip
    return parse_job({**document, **changes})


def fault(kind: str, rank: int, step: int, point: str = "backward") -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def faults_of(outcome: RunOutcome) -> list[Any]:
    ends = [not_none(attempt.ended) for attempt in outcome.history.attempts]
    return [not_none(end.fault) for end in ends if end.fault is not None]


def steps_saved(outcome: RunOutcome) -> list[int]:
    return sorted(record.step for record in outcome.history.checkpoints)


def assert_whole(home: Path, job: Job, outcome: RunOutcome, curve: dict[int, str]) -> None:
    assert outcome.ended == "completed"
    assert losses(output_of(home, job)) == curve, "every digit"
    assert sorted(recorded(job)) == list(range(1, STEPS + 1))
    assert LocalRun(home, job.run_id).processes() == []


def test_ranks_that_are_killed_and_stopped_go_on_from_memory(home, undisturbed):
    faults = [fault("kill", 1, 13), fault("stop", 0, 22)]
    job = job_of(home, "callback-broken", drill={"faults": faults})
    outcome = RunDriver(home, limit_s=LIMIT_S).run(job)
    assert_whole(home, job, outcome, undisturbed)
    assert [attempt.from_step for attempt in outcome.history.attempts] == [0, 10, 20]
    killed, stopped = faults_of(outcome)
    assert (killed.rank, killed.code) == (1, "SIGKILL")
    assert (stopped.rank, stopped.fault_class) == (0, FaultClass.HANG)
    sources = [not_none(attempt.restored).shares for attempt in outcome.history.attempts[1:]]
    assert sources == [{"memory": 2}, {"memory": 2}]
    assert steps_saved(outcome) == [10, 20, 30]


def test_an_exception_in_a_rank_stops_the_run_and_names_it_until_it_is_started_again(
    home, undisturbed
):
    job = job_of(home, "callback-raises", drill={"faults": [fault("exception", 1, 8)]})
    outcome = RunDriver(home, limit_s=LIMIT_S).run(job, starts=2)
    assert_whole(home, job, outcome, undisturbed)
    (raised,) = faults_of(outcome)
    assert (raised.rank, raised.evidence) == (1, "ValueError: a drill's error of the program")


def test_a_run_that_pauses_goes_on_in_the_same_processes(home, undisturbed):
    job = job_of(home, "callback-paused", "--pause-s", "0.5")
    pauser = Pauser(at_step=8, num_ranks=2)
    outcome = RunDriver(home, limit_s=LIMIT_S).run(job, hook=pauser)
    assert_whole(home, job, outcome, undisturbed)
    (attempt,) = outcome.history.attempts
    (pause,) = attempt.pauses
    assert {steps for polled in pauser.paused_at for steps in polled} == {pause.began.step}


class Asker:
    """Asks the first rank for a save at step 7, and a while later the second one to end."""

    def __init__(self, home: Path) -> None:
        self._home, self._sent = home, 0

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        step = progress.last.step if progress.last is not None else 0
        requests = [(7, 0, signal.SIGUSR1), (12, 1, signal.SIGTERM)]
        if self._sent < len(requests) and step >= requests[self._sent][0]:
            _, rank, number = requests[self._sent]
            (process,) = LocalRun(self._home, run.job.run_id).rank(rank)
            process.send_signal(number)
            self._sent += 1


def test_ranks_save_when_they_are_asked_to_and_when_they_are_asked_to_end(home, undisturbed):
    job = job_of(home, "callback-asked", "--pause-s", "1", checkpoint={"every_steps": 1000})
    outcome = RunDriver(home, limit_s=LIMIT_S).run(job, hook=Asker(home))
    assert_whole(home, job, outcome, undisturbed)
    asked, end, last = steps_saved(outcome)
    assert 8 <= asked < 12 < end < last == STEPS
    assert [attempt.from_step for attempt in outcome.history.attempts] == [0, end]
