"""What a command leaves running when it exits with 0, in real processes."""

from __future__ import annotations

import os
import sys

import pytest

from perdure.training.commands import leftovers
from perdure.training.commands.ranks import CommandRanks
from perdure.training.processes import MARKER
from perdure.training.wire.agent_status import LeftProcess
from tests.waiting import wait_for

SLEEP = "sleep 300"


@pytest.fixture
def left_by(new_group, tmp_path, monkeypatch):
    """What a script of a shell leaves, after a second in which it may end by itself."""
    monkeypatch.setattr(leftovers, "WAIT_S", 1.0)

    def left_by(script: str, **changes) -> tuple[LeftProcess, ...]:
        (tmp_path / "torchrun").write_text(f"#!/bin/sh\n{SLEEP}\n")
        (tmp_path / "torchrun").chmod(0o700)
        group = new_group("sh", "-c", script, is_command=True, grace_s=0.1, **changes)
        group.start({**os.environ, MARKER: str(tmp_path)}, proc_start_cnt=1)
        wait_for(group.poll)
        assert all(status.exit_code == 0 for status in group.statuses())
        return group.leftovers.processes

    return left_by


def test_a_launcher_or_a_rank_in_the_background_of_a_script_that_has_ended_trains(left_by):
    (torchrun, sleep) = left_by("./torchrun --nproc_per_node 2 train.py & sleep 0.2")
    assert (torchrun.trains, sleep.trains) == (True, False)
    assert f"torchrun --nproc_per_node 2 train.py (pid {torchrun.pid})" in torchrun.name
    (rank,) = left_by(f"RANK=1 LOCAL_RANK=1 {SLEEP} & sleep 0.2")
    assert rank.trains


def test_what_else_is_left_does_not_train_and_what_ends_by_itself_is_not_left(left_by):
    (other,) = left_by(f"{SLEEP} & sleep 0.2")
    assert not other.trains
    assert left_by("sleep 0.05 & exit 0") == ()
    assert left_by("true") == ()
    tracker = f"{sys.executable} -c 'import time; time.sleep(300)' multiprocessing.resource_tracker"
    assert left_by(f"{tracker} & sleep 0.2") == ()


PARENT = "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"


@pytest.mark.parametrize(
    ("command", "are_helpers"),
    [((sys.executable, "-c", PARENT), True), (("sh", "-c", f"{SLEEP} & wait"), False)],
    ids=["program", "shell"],
)
def test_what_a_rank_has_started_is_its_helper_and_what_a_shell_runs_may_be_the_rank(
    new_group, tmp_path, command, are_helpers
):
    group = new_group(*command, is_command=True, is_launcher=False)
    group.start(dict(os.environ), proc_start_cnt=1)
    ranks = CommandRanks(list(group.pids().values()), tmp_path)
    wait_for(lambda: len(sleeps_of(ranks)) == 2)
    assert ranks.helpers == (sleeps_of(ranks) if are_helpers else frozenset())


def sleeps_of(ranks: CommandRanks) -> set[int]:
    return {process.pid for process in ranks.processes(age_s=0.0) if process.name == "sleep"}
