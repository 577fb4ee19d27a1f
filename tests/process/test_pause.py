"""Pausing by command: every rank stops at one step, and the curve stays the same."""

from __future__ import annotations

import pytest

from perdure.storage.address import open_store
from perdure.training.wire.requests import write_control
from tests.waiting import wait_for

pytestmark = pytest.mark.process

WAIT = ("--wait-s", "120")


def start_paused(bench, run_id: str):
    """A run that is asked to pause while its processes start, and the step it stops at.

    The request stands before the command does: on a busy machine the run could end while the
    command starts.
    """
    running = bench.start(bench.pair(run_id))
    wait_for(lambda: running.history.attempts, what=running.out)
    write_control(open_store(running.job.storage), run_id, pause=True)
    printed = bench.perdure("pause", run_id, *WAIT)
    assert f"'perdure resume {run_id}' continues it" in printed
    return running, running.step()


def pids(running) -> list[int]:
    return sorted(process.pid for rank in (0, 1) for process in running.local.rank(rank))


def test_a_run_pauses_and_goes_on_by_command_in_the_same_processes(bench, api, undisturbed_pair):
    running, stood_at = start_paused(bench, "paused")
    api.wait_for("paused", "Paused")
    workers = pids(running)
    status = running.status()
    assert (status["state"], status["pause"]["step"]) == ("paused", stood_at)
    assert pids(running) == workers
    assert running.step() == stood_at, "no rank trained meanwhile"

    assert "paused: training continues" in bench.perdure("resume", "paused", *WAIT)
    running.complete(undisturbed_pair)
    (attempt,) = running.history.attempts
    (pause,) = attempt.pauses
    assert (pause.began.step, pause.ended.step) == (stood_at, stood_at)
    assert f"every rank is paused at step {stood_at}" in running.out


@pytest.mark.long
def test_a_process_that_dies_in_a_pause_is_replaced_and_waits_until_the_ui_resumes_the_run(
    bench, api, undisturbed_pair
):
    running, stood_at = start_paused(bench, "paused-and-hurt")
    before = pids(running)
    assert running.local.kill_rank(1)
    wait_for(
        lambda: running.rungs() == ["process_replace"] and running.history.pause is not None,
        what="a new process that is paused",
    )
    assert pids(running) != before
    assert running.step() == stood_at

    api.wait_for("paused-and-hurt", "Paused")
    api.resume("paused-and-hurt")  # as the button does
    running.complete(undisturbed_pair)
    (attempt,) = running.history.attempts
    assert [pause.began.step for pause in attempt.pauses] == [stood_at, stood_at]
