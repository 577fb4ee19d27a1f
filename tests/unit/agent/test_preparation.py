"""Checks of a node on a supervisor's order, by a real agent."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from perdure.training.errors import EngineError
from perdure.training.wire.agent import AgentReply, CheckOrder, ClockQuery
from perdure.training.wire.node import CheckOutcome
from tests.unit.agent.conftest import Container, agent_job
from tests.waiting import wait_for


def order(folder: Path | None = None, burn_in_s: float = 0.0) -> CheckOrder:
    return CheckOrder(
        job=agent_job(folder, preflight={"burn_in_s": burn_in_s}),
        num_nodes=1,
        slots_per_node=1,
        state_bytes=None,
        is_new=True,
        gang_host=None,
        variables={"OMP_NUM_THREADS": "1"},
        timeout_s=240.0,
    )


def ask(container: Container, order: CheckOrder, replies: list[AgentReply]) -> threading.Thread:
    """Ask in a thread of its own: the answer takes its time."""

    def call() -> None:
        replies.append(container.client().call(order, timeout_s=240))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def checkers(container: Container) -> list[psutil.Process]:
    pids = []
    for process in container.processes():
        try:
            pids += [process] if "perdure.training.node_checks.program" in process.cmdline() else []
        except psutil.NoSuchProcess:
            continue
    return pids


def test_a_node_reports_its_clock_and_a_free_port(shared):
    reply = shared.call(ClockQuery())
    assert reply.at_s > 0
    assert 1024 <= reply.port <= 65535


def test_the_node_is_checked_under_its_own_name(new_container, tmp_path):
    container = new_container()
    replies: list[AgentReply] = []
    ask(container, order(tmp_path), replies).join(240)
    (reply,) = replies
    checks = {check.name: check for check in reply.checks}
    assert {check.node for check in reply.checks} == {"node-1"}
    assert [checks[name].outcome for name in ("burn_in", "store")] == [CheckOutcome.OK] * 2


def test_while_an_attempt_runs_nothing_is_checked(shared):
    shared.start("sleep", "600")
    shared.until("running")
    with pytest.raises(EngineError, match="an attempt is running"):
        shared.call(order())


def test_a_start_ends_a_check_that_a_dead_supervisor_has_left(new_container, tmp_path):
    container = new_container()
    replies: list[AgentReply] = []
    thread = ask(container, order(tmp_path, burn_in_s=50.0), replies)
    wait_for(lambda: len(checkers(container)) >= 2)
    container.start("sleep", "600")
    wait_for(lambda: not checkers(container))
    container.until("running")
    thread.join(240)
    assert replies[0].checks[0].outcome is CheckOutcome.FAILED
