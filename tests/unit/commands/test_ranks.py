"""The processes of a command, with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from perdure.training.agent.evidence import read_stacks
from perdure.training.commands.ranks import CommandRanks
from perdure.training.liveness.heartbeat import ANY_RANK
from tests.waiting import wait_for

# Two ranks as torchrun starts them, and a helper of each, as a data loader is.
LAUNCHER = """
RANK=4 WORLD_SIZE=6 LOCAL_RANK=0 sh -c 'sleep 600 & wait' &
RANK=5 WORLD_SIZE=6 LOCAL_RANK=1 sh -c 'sleep 600 & wait' &
wait
"""
BEATING = """
import os, pathlib, time
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
HeartbeatWriter(pathlib.Path(os.environ["PERDURE_HEARTBEAT"])).beat(phase=Phase.STEP, step=12)
time.sleep(float(os.environ["LASTS_S"]))
"""


@pytest.fixture
def command(tmp_path) -> Iterator[CommandRanks]:
    process = subprocess.Popen(["sh", "-c", LAUNCHER], start_new_session=True)
    ranks = CommandRanks([process.pid], tmp_path)
    # A helper is a shell until it executes its program.
    wait_for(lambda: [p.name for p in ranks.processes(age_s=0)].count("sleep") == 2)
    yield ranks
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def beat(folder, lasts_s: float, **launched: str) -> subprocess.Popen[bytes]:
    path = str(folder / f"heartbeat-{ANY_RANK}")
    variables = {"PERDURE_HEARTBEAT": path, "LASTS_S": str(lasts_s), **launched}
    return subprocess.Popen([sys.executable, "-c", BEATING], env={**os.environ, **variables})


def test_ranks_are_known_by_what_their_launcher_gave_them_and_helpers_are_none(command):
    assert [(rank.rank, rank.local_rank, rank.step) for rank in command.statuses()] == [
        (4, 0, None),
        (5, 1, None),
    ]
    assert [process.rank for process in command.processes()].count(5) == 2
    assert [process.is_rank for process in command.processes()].count(True) == 2


def test_the_largest_gang_of_a_command_is_kept_when_its_ranks_have_ended(command):
    assert command.world_size == 6
    os.killpg(command.pids[0], signal.SIGKILL)
    wait_for(lambda: not command.processes(age_s=0))
    assert command.world_size == 6


def test_a_helper_that_is_stopped_stops_its_rank_and_comes_first_in_the_stacks(command):
    (helper,) = [
        process for process in command.processes() if process.rank == 5 and not process.is_rank
    ]
    os.kill(helper.pid, signal.SIGSTOP)
    wait_for(command.stopped)
    assert [process.text for process in command.stopped()] == [
        f"process {helper.pid} (sleep) of rank 5"
    ]
    assert [rank.rank for rank in command.statuses() if rank.pulse.process_state == "T"] == [5]
    first, *running = command.stacks_targets()
    assert (first.pid, first.name) == (
        helper.pid,
        f"stacks of process {helper.pid} (sleep) of rank 5",
    )
    assert len(running) == 4, "the whole tree"
    (text,) = read_stacks([first])
    assert text.text.startswith(f"process {helper.pid} is stopped")


def test_a_rank_that_ends_while_its_launcher_lives_is_known_as_a_former_one(command):
    assert command.former() == ()
    (leader,) = [p for p in command.processes(age_s=0) if p.is_rank and p.rank == 5]
    for process in [p for p in command.processes() if p.rank == 5]:
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: [p for p in command.processes(age_s=0) if p.pid == leader.pid] == [])
    wait_for(lambda: len(command.former()) == 1)  # the list of processes may be a moment old
    (former,) = command.former()
    assert (former.rank, former.local_rank, former.ended_s is None) == (5, 1, False)


def test_ranks_that_end_with_their_launcher_are_former_ones_without_a_time(tmp_path):
    process = subprocess.Popen(["sh", "-c", LAUNCHER], start_new_session=True)
    ranks = CommandRanks([process.pid], tmp_path)
    wait_for(lambda: len(ranks.processes(age_s=0)) == 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    former = ranks.former(is_over=True)
    assert [(rank.rank, rank.ended_s) for rank in former] == [(4, None), (5, None)]


def test_the_step_of_a_rank_is_known_after_its_end_and_only_a_living_one_is_judged(tmp_path):
    with beat(tmp_path, 600, RANK="0") as living, beat(tmp_path, 0, RANK="1") as ended:
        ended.wait()
        ranks = CommandRanks([living.pid], tmp_path)
        wait_for(lambda: len(ranks.heartbeats()) == 1)
        assert ranks.heartbeats().keys() == {living.pid}
        readings = [(rank.rank, rank.pid, rank.step) for rank in ranks.statuses()]
        assert readings == [(0, living.pid, 12), (1, ended.pid, 12)]
        living.kill()


def test_a_rank_that_started_after_the_last_look_is_found_by_its_first_heartbeat(tmp_path):
    go = tmp_path / "go"
    rank = f"RANK=4 LOCAL_RANK=2 {sys.executable} -c '{BEATING}'"
    launcher = f"until [ -e {go} ]; do sleep 0.01; done; {rank} & wait"
    variables = {"PERDURE_HEARTBEAT": str(tmp_path / f"heartbeat-{ANY_RANK}"), "LASTS_S": "600"}
    process = subprocess.Popen(
        ["sh", "-c", launcher], start_new_session=True, env={**os.environ, **variables}
    )
    ranks = CommandRanks([process.pid], tmp_path)
    assert {process.name for process in ranks.processes()} <= {"sh", "sleep"}
    go.touch()
    wait_for(ranks.heartbeats)
    (status,) = ranks.statuses()
    assert (status.rank, status.local_rank, status.step) == (4, 2, 12)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
