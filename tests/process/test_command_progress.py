"""Steps and losses of commands, as real programs print them."""

from __future__ import annotations

import signal

import pytest

from perdure.training.drill.driver import RunDriver
from perdure.training.recovery.faults import FaultClass
from tests.process.program_jobs import (
    AtStep,
    example_job,
    output_of,
    printed,
    recorded,
    send,
    status_of,
)
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 40


@pytest.mark.long
def test_the_output_of_a_command_shows_its_steps_and_that_it_hangs(home):
    arguments = (f"--max_iters={STEPS}", "--pause_s=0.2")
    limit = {"hang_timeout_s": 20}
    job = example_job(home, "nanogpt.yaml", "stopped", *arguments, steps=STEPS, restart=limit)
    stop = AtStep(home, 8, send(1, signal.SIGSTOP))
    outcome = RunDriver(home).run(job, hook=stop)

    status = stop.status
    assert stop.done, "the rank was stopped"
    assert 8 <= status["step"] <= STEPS
    assert status["target_step"] == STEPS
    assert status["loss"] > 0
    assert 0 < status["ettr"] < 1
    assert status["eta_s"] > 0

    assert outcome.ended == "completed"
    (hung, again) = outcome.history.attempts
    fault = not_none(not_none(hung.ended).fault)
    assert fault.fault_class is FaultClass.HANG
    assert fault.evidence.startswith("rank 1 on node-0: stopped by a signal")
    assert fault.step == not_none(hung.ended).to_step
    assert not_none(again.ended).to_step == STEPS

    # nanoGPT prints the number of an iteration before it counts it.
    found = {n + 1: float(loss) for n, loss in printed(output_of(home, job)).items()}
    assert recorded(job) == found
    end = status_of(home, job)
    assert (end["step"], end["loss"]) == (STEPS, found[STEPS])
    assert 0 < end["ettr"] < 1
