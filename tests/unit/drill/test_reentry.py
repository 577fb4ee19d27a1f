"""Starting a program again, before a run depends on it."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from perdure.training.drill.reentry import STEPS, check_reentry, scratch_job
from perdure.training.errors import EngineError
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job


def job_of(tmp_path, **sections):
    return small_job(tmp_path, **{"data": {"sources": ["/corpus"]}, **sections})


def test_a_scratch_run_trains_the_same_model_in_a_store_of_its_own(tmp_path):
    job = job_of(
        tmp_path,
        steps=5000,
        optimizer={"warmup_steps": 1000, "lr": 1e-3},
        restart={"from_platform": {"fault-tolerance/job-retry-num": "8"}},
        drill={"faults": [{"kind": "kill", "rank": 0, "step": 2}]},
    )
    scratch = scratch_job(job, tmp_path / "scratch", 2)
    assert (scratch.run_id, scratch.steps) == ("reentry-2", STEPS)
    assert scratch.storage.address == f"file://{tmp_path}/scratch/store"
    assert (scratch.model, scratch.batch, scratch.seed) == (job.model, job.batch, job.seed)
    assert (scratch.optimizer.lr, scratch.drill.faults) == (1e-3, ())
    assert not scratch.preflight.nodes


@pytest.mark.parametrize(
    ("script", "outcome", "word"),
    [
        ("exit 0", CheckOutcome.OK, "started twice"),
        ("echo broken; exit 4", CheckOutcome.FAILED, "start 1 ended with exit code 4: broken"),
        ("test $MA_PROC_START_CNT = 1", CheckOutcome.FAILED, "start 2 ended with exit code 1"),
        ("exec no-such-program", CheckOutcome.FAILED, "start 1 ended with exit code 127"),
    ],
)
def test_a_command_is_started_as_the_first_and_the_second_of_its_container(
    tmp_path, script, outcome, word
):
    check = check_reentry(job_of(tmp_path, worker={"command": ["sh", "-c", script]}), lasting_s=30)
    assert check.outcome is outcome
    assert check.seen.startswith(word)


def test_a_command_gets_its_secrets_and_the_check_does_not_show_them(tmp_path):
    mounted = tmp_path / "token"
    job = job_of(
        tmp_path,
        worker={"command": ["sh", "-c", "echo given $$X; exit 4"]},
        env_from={"X": {"file": str(mounted)}},
    )
    assert check_reentry(job, lasting_s=30).seen.startswith(f"env_from.X: {mounted}: No such file")
    mounted.write_text("the-secret")
    assert check_reentry(job, lasting_s=30).seen.endswith("exit code 4: given ***")


def test_a_command_gets_the_values_of_blocks_from_the_caller_at_each_start(tmp_path):
    script = 'echo "$$X" >> given; exit $$(( $$(wc -l < given) - 1 ))'
    job = job_of(
        tmp_path,
        worker={"command": ["sh", "-c", script], "cwd": str(tmp_path)},
        env_from={"X": {"block": "b"}},
    )
    values = iter(["the-first-value", "the-second-value"])
    check = check_reentry(job, lasting_s=30, secrets=lambda: {"X": SecretStr(next(values))})
    assert check.seen == "start 2 ended with exit code 1: ", check
    assert (tmp_path / "given").read_text().split() == ["the-first-value", "the-second-value"]


def test_a_block_that_cannot_be_read_fails_the_check(tmp_path):
    job = job_of(tmp_path, worker={"command": ["true"]}, env_from={"X": {"block": "b"}})

    def secrets() -> dict[str, SecretStr]:
        raise EngineError("env_from.X: the server is away")

    check = check_reentry(job, lasting_s=30, secrets=secrets)
    assert check.outcome is CheckOutcome.FAILED
    assert check.seen == "env_from.X: the server is away"
