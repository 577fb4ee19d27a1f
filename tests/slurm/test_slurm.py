"""A run inside Slurm allocations survives all that nodes, people and Slurm itself do to it."""

from __future__ import annotations

import time

import pytest

from perdure.training.recovery.rungs import Rung
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.prefect, pytest.mark.timeout(900)]


def test_a_killed_rank_costs_a_step(submit, undisturbed):
    run = submit("killed")
    run.reach(3)
    run.rank(1).kill()
    run.await_answer()
    run.complete(undisturbed)
    assert run.answers() == [Rung.PROCESS_REPLACE]
    assert run.running.history.isolated == ()
