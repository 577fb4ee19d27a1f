"""Torchtitan itself, unchanged, on two nodes: broken in every way, it loses no digit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.job import Job
from perdure.training.drill.driver import RunDriver
from perdure.training.recovery.faults import FaultClass
from tests.local_run import LocalRun
from tests.process.program_jobs import (
    EXAMPLES,
    assert_recovered,
    broken,
    by_hand,
    example_job,
    fault_of,
    send,
    status_of,
)
from tests.process.torchtitan_jobs import LOADED, PACE, PYTHON, STEPS, losses, needs_torchtitan

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.timeout(900),
    needs_torchtitan,
]

RANKS = {"PYTHON_EXEC": str(PYTHON)}  # with which torchrun starts them


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, str]:
    """What torchtitan prints without Perdure."""
    data, out = EXAMPLES.parent / "README.md", tmp_path_factory.mktemp("by-hand")
    found = losses(
        by_hand(
            "torchtitan_cpu.py", "--module=torchtitan_tiny", "--config=tiny", "--checkpoint.enable",
            f"--dataloader.dataset_path={data}", f"--dump_folder={out}", *PACE, env=RANKS,
        )
    )  # fmt: skip
    assert list(found) == list(range(1, STEPS + 1))
    return found


def job_of(home: Path, name: str, *arguments: str, **changes: Any) -> Job:
    restart = {"hang_timeout_s": 20, "pod_retries": 1}
    env = {**RANKS, "PAUSE_S": "0.1"}
    return example_job(
        home, "torchtitan.yaml", name, *PACE, *arguments,
        steps=STEPS, restart=restart, env=env, **changes,
    )  # fmt: skip


RESUMES: Any = {"losses": losses, "loaded": LOADED, "num_loaded": 2}


def test_a_rank_that_is_killed(home, undisturbed):
    job = job_of(home, "rank-killed")
    done = broken(home, job, send(1, signal.SIGKILL))
    assert_recovered(home, job, done, undisturbed, **RESUMES)
    assert len(done[0].history.placements) == 1


def test_a_rank_that_gets_sigterm(home, undisturbed):
    job = job_of(home, "rank-terminated")
    done = broken(home, job, send(0, signal.SIGTERM))
    assert_recovered(home, job, done, undisturbed, **RESUMES)


def test_a_rank_that_a_signal_stops(home, undisturbed):
    job = job_of(home, "rank-stopped")
    done = broken(home, job, send(0, signal.SIGSTOP))
    assert_recovered(home, job, done, undisturbed, **RESUMES)
    assert fault_of(done[0]).fault_class is FaultClass.HANG
    assert "stopped by a signal" in fault_of(done[0]).evidence


def test_a_node_that_is_lost(home, undisturbed):
    def lose(local: LocalRun) -> list[int]:
        return local.kill_node("node-0")

    job = job_of(home, "node-lost")
    done = broken(home, job, lose)
    assert_recovered(home, job, done, undisturbed, **RESUMES)
    assert fault_of(done[0]).fault_class is FaultClass.NODE_LOST
    assert len(done[0].history.placements) == 2


def test_a_wrong_argument_is_named_and_stops_the_run(home):
    job = job_of(home, "wrong-argument", "--training.stps=1")
    outcome = RunDriver(home).run(job)
    assert len(outcome.history.attempts) == 1
    fault = fault_of(outcome)
    assert fault.user_fault
    assert "--training.stps=1" in fault.evidence
    assert outcome.ended == "launch_misconfigured is for the user to fix"
    assert status_of(home, job)["step"] is None
