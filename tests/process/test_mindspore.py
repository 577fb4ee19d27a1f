"""MindSpore itself, on the CPU, two ranks of msrun: broken in every way, it loses no digit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.training.config.job import Job
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.processes import environment_of
from perdure.training.recovery.faults import FaultClass
from tests.local_run import LocalRun
from tests.process.harness import REPO
from tests.process.mindspore_runs import (
    BIN,
    EPOCHS,
    MARKS,
    PATH,
    PER_EPOCH,
    STEPS,
    losses,
    losses_by_hand,
)
from tests.process.program_jobs import (
    AtStep,
    after_saves,
    broken,
    example_job,
    fault_of,
    output_of,
    recorded,
)
from tests.values import not_none

ARGUMENTS = ("--epochs", str(EPOCHS), "--pause-s", "0.3")
pytestmark = MARKS


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """What the program prints without Perdure."""
    return losses_by_hand()


def job_of(home: Path, name: str, *arguments: str, **changes: Any) -> Job:
    restart = {"hang_timeout_s": 20}
    job = example_job(
        home, "mindspore.yaml", name, *ARGUMENTS, *arguments,
        steps=STEPS, restart=restart, env={"PATH": PATH}, **changes,
    )  # fmt: skip
    command = [
        str(REPO / "tests/recipes/mindspore_faulty.py") if part == "mindspore_train.py" else part
        for part in job.worker.command or ()
    ]
    return job.model_copy(update={"worker": job.worker.model_copy(update={"command": command})})


def printed_losses(home: Path, job: Job) -> dict[int, str]:
    """What the ranks of all attempts have printed, in whichever log."""
    logs = sorted((home / job.run_id).glob("mindspore-logs/worker_0.log"))
    lines = [line for path in logs for line in path.read_text().splitlines()]
    return losses([*output_of(home, job), *lines])


def assert_recovered(
    home: Path, job: Job, done: tuple[RunOutcome, AtStep], alone: dict[int, str]
) -> None:
    outcome, hook = done
    assert hook.done, "the fault was made"
    assert outcome.ended == "completed"
    assert len(outcome.history.attempts) == 2
    assert printed_losses(home, job) == alone, "every digit"
    assert recorded(job) == {step: float(loss) for step, loss in alone.items()}
    assert not_none(not_none(outcome.history.attempts[1].resume).step) >= PER_EPOCH
    assert LocalRun(home, job.run_id).processes() == []


def processes_with(local: LocalRun, role: str) -> list[psutil.Process]:
    return [p for p in local.processes() if environment_of(p.pid).get("MS_ROLE") == role]


def send(rank: int, number: int) -> Any:
    """Sends a signal to the process of a rank."""

    def act(local: LocalRun) -> int:
        worker, *_ = [
            process for process in processes_with(local, "MS_WORKER")
            if environment_of(process.pid)["RANK_ID"] == str(rank)
        ]  # fmt: skip
        worker.send_signal(number)
        return worker.pid

    return act


def kill_scheduler(local: LocalRun) -> int:
    scheduler, *_ = processes_with(local, "MS_SCHED")
    scheduler.kill()
    return scheduler.pid


def kill_msrun(local: LocalRun) -> int:
    launcher, *_ = [p for p in local.processes() if "msrun" in " ".join(p.cmdline()[:2])]
    launcher.kill()
    return launcher.pid


def test_nothing_happens(home, undisturbed):
    job = job_of(home, "undisturbed")
    outcome = RunDriver(home).run(job)
    assert (outcome.ended, len(outcome.history.attempts)) == ("completed", 1)
    assert recorded(job) == {step: float(loss) for step, loss in undisturbed.items()}


def test_a_rank_that_is_killed(home, undisturbed):
    job = job_of(home, "rank-killed")
    done = broken(home, job, send(1, signal.SIGKILL))
    assert_recovered(home, job, done, undisturbed)
    fault = fault_of(done[0])
    assert (fault.rank, fault.code) == (1, "SIGKILL")


def test_a_rank_that_raises(home, undisturbed):
    job = job_of(home, "rank-raises")

    def request(_local: LocalRun) -> bool:
        (home / job.run_id / "mindspore" / "raise").touch()
        return True

    done = broken(home, job, request)
    assert_recovered(home, job, done, undisturbed)
    fault = fault_of(done[0])
    assert fault.rank == 1
    assert "the batch is not as it was" in fault.evidence


def test_a_rank_that_a_signal_stops(home, undisturbed):
    job = job_of(home, "rank-stopped")
    done = broken(home, job, send(1, signal.SIGSTOP))
    assert_recovered(home, job, done, undisturbed)
    fault = fault_of(done[0])
    assert (fault.rank, fault.fault_class) == (1, FaultClass.HANG)


def test_a_scheduler_that_is_killed(home, undisturbed):
    job = job_of(home, "scheduler-killed")
    done = broken(home, job, kill_scheduler)
    assert_recovered(home, job, done, undisturbed)
    assert fault_of(done[0]).code == "SCHEDULER_LOST"


def test_a_launcher_that_is_killed(home, undisturbed):
    job = job_of(home, "msrun-killed")
    done = broken(home, job, kill_msrun)
    assert_recovered(home, job, done, undisturbed)
    assert fault_of(done[0]).code == "SIGKILL"


def test_a_newest_checkpoint_that_is_cut_short(home, undisturbed):
    job = job_of(home, "torn")

    def tear_and_kill(local: LocalRun) -> int:
        saved = (home / job.run_id / "mindspore" / "rank_1").glob("*.safetensors")
        path = max(saved, key=lambda file: file.stat().st_mtime)
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-100])
        pid: int = send(1, signal.SIGKILL)(local)
        return pid

    hook = AtStep(home, 12, after_saves(job, 2, tear_and_kill))
    outcome = RunDriver(home).run(job, hook=hook)
    assert_recovered(home, job, (outcome, hook), undisturbed)
    assert not_none(outcome.history.attempts[1].resume).step == PER_EPOCH


@pytest.mark.parametrize("kills", [False, True], ids=["undisturbed", "a rank is killed"])
def test_a_launcher_that_does_not_wait_for_its_ranks(kills, home, undisturbed):
    job = job_of(home, "not-joined-killed" if kills else "not-joined")
    command = ["--join=False" if p == "--join=True" else p for p in job.worker.command or ()]
    job = job.model_copy(update={"worker": job.worker.model_copy(update={"command": command})})
    if not kills:
        outcome = RunDriver(home).run(job)
        assert (outcome.ended, len(outcome.history.attempts)) == ("completed", 1)
        assert recorded(job) == {step: float(loss) for step, loss in undisturbed.items()}
        return

    outcome, hook = broken(home, job, send(1, signal.SIGKILL))
    assert hook.done
    assert outcome.ended == "completed"
    assert recorded(job) == {step: float(loss) for step, loss in undisturbed.items()}
    fault = fault_of(outcome)
    assert (fault.rank, fault.code) == (1, "SIGKILL")


def job_per_device(home: Path, name: str) -> Job:
    """The program without msrun: the agent starts each rank, and the scheduler."""
    program = str(REPO / "tests/recipes/mindspore_faulty.py")
    command = [str(BIN / "python"), program, "--out", str(home / name / "mindspore"), *ARGUMENTS]
    job = job_of(home, name, worker={"per": "device", "integration": "mindspore"})
    return job.model_copy(update={"worker": job.worker.model_copy(update={"command": command})})


def test_a_rank_that_is_killed_without_msrun(home, undisturbed):
    job = job_per_device(home, "per-device-killed")
    done = broken(home, job, send(1, signal.SIGKILL))
    assert_recovered(home, job, done, undisturbed)
    fault = fault_of(done[0])
    assert (fault.rank, fault.code) == (1, "SIGKILL")


def test_a_scheduler_that_is_killed_without_msrun(home, undisturbed):
    job = job_per_device(home, "per-device-scheduler")
    done = broken(home, job, kill_scheduler)
    assert_recovered(home, job, done, undisturbed)
    assert fault_of(done[0]).code == "SCHEDULER_LOST"
