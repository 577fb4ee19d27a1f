"""Ranks of a command that a signal has stopped, with real processes."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable

import pytest

from perdure.training.agent.hang_check import HangCheck
from perdure.training.agent.workers import WorkerGroup
from perdure.training.liveness.hang_limits import MIN_LIMIT_S
from perdure.training.processes import MARKER, process_state
from perdure.training.wire.agent_status import HangReport, RankStatus
from tests.unit.agent.conftest import agent_config
from tests.unit.commands.test_ranks import BEATING
from tests.waiting import wait_for

LIMIT_S = 0.3
# Without beats, a program is known by its state alone: nothing else here has a limit in reach.
QUIET = ("sleep", "600")
# A shell that starts the program, and stays above it.
WRAPPED = ("sh", "-c", f"{sys.executable} -c {shlex.quote(BEATING)}; true")


@pytest.fixture
def started(new_group, tmp_path) -> Callable[..., WorkerGroup]:
    """Starts a command once per device of a node, and waits until each is what it will be."""

    def start(*command: str, beats: bool = False, **changes: bool) -> WorkerGroup:
        group: WorkerGroup = new_group(
            *command, is_command=True, **{"is_launcher": False, **changes}
        )
        # With the marker, so that they can be killed.
        group.start({**os.environ, MARKER: str(tmp_path), "LASTS_S": "600"}, proc_start_cnt=1)

        def is_ready() -> bool:
            ranks = group.command_statuses()
            ready = [rank.rank for rank in ranks if not beats or rank.step == 12]
            return ready == [2, 3]

        if not group.order.is_launcher:
            wait_for(is_ready)
        return group

    return start


def check_of(limit_s: float | None = LIMIT_S) -> HangCheck:
    """Of an agent; a program that shows no sign of life may do so for ever."""
    config = agent_config(hang_timeout_s=limit_s, command_quiet_s=1e6)
    return HangCheck(config, is_command=True, marker="no process has it")


def stop(group: WorkerGroup, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: any(state_of(rank) == "T" for rank in group.command_statuses()))


def state_of(rank: RankStatus) -> str:
    return rank.pulse.process_state if rank.pulse is not None else ""


def test_a_stopped_rank_of_a_command_is_named_and_no_other(started):
    group, check = started(*QUIET), check_of()
    assert check.check(group) is None
    stop(group, group.pids()[1])
    assert check.check(group) is None, "it may be stopped for a moment"
    report: HangReport = wait_for(lambda: check.check(group))
    assert (report.rank, report.phase, report.step) == (3, "start", -1)
    assert (report.limit_s, report.silent_s > LIMIT_S) == (LIMIT_S, True)
    assert report.stopped == (), "of no rank"


def test_a_rank_that_goes_on_is_no_hang_and_has_the_whole_time_again(started):
    group, check = started(*QUIET), check_of()
    pid = group.pids()[0]
    stop(group, pid)
    report = wait_for(lambda: check.check(group))
    assert report.rank == 2
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not any(state_of(rank) == "T" for rank in group.command_statuses()))
    assert check.check(group) is None
    stop(group, pid)
    assert check.check(group) is None
    assert wait_for(lambda: check.check(group)).rank == 2


def test_of_a_rank_below_a_shell_the_program_is_judged_and_named_with_its_step(started):
    group, check = started(*WRAPPED, beats=True), check_of(None)
    assert check.stopped_limit_s == MIN_LIMIT_S
    shell, (program,) = group.pids()[1], [p.pid for p in group.command_statuses() if p.rank == 3]
    assert program != shell
    stop(group, program)
    assert check.check(group) is None
    # No step was timed yet, so that its heartbeat alone would have the time of a start.
    pass_time(check)
    report = check.check(group)
    assert report is not None
    assert (report.rank, report.phase, report.step) == (3, "step", 12)
    assert report.limit_s == MIN_LIMIT_S


def test_a_shell_that_is_stopped_above_a_program_holds_nobody_up(started):
    group, check = started(*WRAPPED, beats=True), check_of(None)
    stop(group, group.pids()[1])
    assert check.check(group) is None
    pass_time(check)
    assert check.check(group) is None


def pass_time(check: HangCheck) -> None:
    """What is stopped has been so for as long as it may."""
    check._stopped = {process: since_s - MIN_LIMIT_S for process, since_s in check._stopped.items()}


def test_what_a_launcher_stops_is_its_own_affair(started):
    group, check = started(*QUIET, is_launcher=True), check_of(0.01)
    launcher = group.pids()[0]
    os.kill(launcher, signal.SIGSTOP)
    wait_for(lambda: process_state(launcher) == "T")
    assert check.check(group) is None
    time.sleep(0.05)
    assert check.check(group) is None
