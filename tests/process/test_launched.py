"""Nodes that somebody has given keep a run going among themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perdure.training.recovery.rungs import Rung
from tests.process.allocation import Allocation, launched
from tests.process.harness import Workbench
from tests.process.test_warm_spares import is_warm
from tests.waiting import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def allocate(bench: Workbench) -> Iterator[Any]:
    """Makes an allocation; its processes end with the test."""
    made: list[Allocation] = []

    def make(run_id: str, num_nodes: int, **changes: Any) -> Allocation:
        made.append(Allocation(bench, launched(bench, run_id, **changes), num_nodes))
        return made[-1]

    yield make
    for allocation in made:
        allocation.stop()


def answers(allocation: Allocation) -> list[Rung]:
    (view,) = allocation.running.history.attempts
    return [recovery.began.decision.rung for recovery in view.recoveries if recovery.succeeded]


def test_the_loss_of_a_rank_and_of_the_node_with_the_supervisor_cost_a_step_each(
    allocate, undisturbed_pair
):
    nodes = allocate("given", 3).start([2], "--no-supervisor").start([0, 1])
    running = nodes.running
    running.reach(3)
    running.pace(1.0)
    assert running.local.kill_rank(0)
    wait_for(lambda: answers(nodes), what="the rank's replacement")
    wait_for(lambda: is_warm(running, "node-2"), what="the spare's imports")
    assert nodes.supervisor() == 1, "it is on a node that trains"
    nodes.power_off(1)
    wait_for(lambda: len(answers(nodes)) == 2, what="the node's replacement")
    assert nodes.finish() == {0: 0, 2: 0}, nodes.out(0)
    assert running.curve() == undisturbed_pair
    assert answers(nodes) == [Rung.PROCESS_REPLACE, Rung.NODE_REPLACE]
    (view,) = running.history.attempts
    assert [(m.node, m.schedule_cnt) for m in view.members] == [("node-0", 1), ("node-2", 2)]
    running.leave_nothing()
