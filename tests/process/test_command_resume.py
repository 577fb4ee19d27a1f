"""Commands that keep their own checkpoints: broken, they go on from the newest and lose nothing."""

from __future__ import annotations

import signal

import pytest

from tests.process.program_jobs import (
    EXAMPLES,
    AtStep,
    by_hand,
    example_job,
    lines_with,
    output_of,
    printed,
    send,
)
from tests.values import not_none
from training.drill.driver import RunDriver

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STEPS = 40
ARGUMENTS = (f"--max_iters={STEPS}", "--eval_interval=10")


def test_a_program_that_must_be_told_to_resume_goes_on_from_its_checkpoint(home):
    out = home / "by-hand"
    data = EXAMPLES.parent / "README.md"
    alone = printed(
        by_hand("nanogpt_train.py", f"--out_dir={out}", f"--dataset={data}", *ARGUMENTS)
    )
    assert list(alone) == list(range(STEPS))

    job = example_job(home, "nanogpt.yaml", "killed", *ARGUMENTS, "--pause_s=0.2", steps=STEPS)
    kill = AtStep(home, 14, send(1, signal.SIGKILL))
    outcome = RunDriver(home).run(job, hook=kill)
    assert kill.done, "the rank was killed"
    assert outcome.ended == "completed"
    (killed, again) = outcome.history.attempts
    reached = not_none(not_none(killed.ended).to_step)
    assert not_none(again.first_step).step == reached // 10 * 10 + 1, "from the newest checkpoint"
    lines = output_of(home, job)
    assert len(lines_with(lines, "Initializing a new model from scratch")) == 1
    assert len(lines_with(lines, "Resuming training from")) == 1
    assert printed(lines) == alone, "every digit"
