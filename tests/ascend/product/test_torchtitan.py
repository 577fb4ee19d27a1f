"""Torchtitan itself on NPUs, which it finds by itself: a rank that is killed costs no digit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from perdure.training.config.job import Job
from perdure.training.drill.driver import RunDriver
from tests.process.harness import REPO
from tests.process.program_jobs import (
    AtStep,
    after_saves,
    example_job,
    lines_with,
    output_of,
    send,
    status_of,
)
from tests.process.torchtitan_jobs import LOADED, PACE, STEPS, VENV, losses, needs_torchtitan

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), needs_torchtitan]


def job_on_npus(home: Path, name: str) -> Job:
    (packages,) = VENV.glob("lib/python*/site-packages")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(packages)])  # the lab's own before it
    job = example_job(
        home, "torchtitan.yaml", name, *PACE,
        steps=STEPS,
        env={"PYTHON_EXEC": sys.executable, "PYTHONPATH": path, "PAUSE_S": "0.1"},
    )  # fmt: skip
    command = []
    for part in job.worker.command or ():
        command += ["-m", "torchtitan.train"] if part == "torchtitan_cpu.py" else [part]
    command[0] = str(REPO / ".venv/bin/torchrun")
    worker = job.worker.model_copy(update={"command": tuple(command)})
    return job.model_copy(update={"worker": worker})


def test_torchtitan_on_npus_goes_on_from_its_checkpoint(home):
    undisturbed = job_on_npus(home, "torchtitan")
    assert RunDriver(home).run(undisturbed).ended == "completed"
    alone = losses(output_of(home, undisturbed))
    assert list(alone) == list(range(1, STEPS + 1))

    job = job_on_npus(home, "torchtitan-killed")
    kill = AtStep(home, 12, after_saves(job, 1, send(1, signal.SIGKILL)))
    outcome = RunDriver(home).run(job, hook=kill)
    assert kill.done, "the rank was killed"
    assert outcome.ended == "completed"
    lines = output_of(home, job)
    assert len(lines_with(lines, "NPU memory usage for model")) == 4, "two ranks, twice"
    assert len(lines_with(lines, LOADED)) == 2
    assert losses(lines) == alone, "every digit"
    end = status_of(home, job)
    assert (end["step"], end["committed_step"], end["loss"]) == (STEPS, STEPS, float(alone[STEPS]))
