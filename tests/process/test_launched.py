"""Nodes that somebody has given keep a run going among themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.training.recovery.rungs import Rung
from tests.process.allocation import Allocation, launched
from tests.process.harness import Workbench
from tests.process.program_jobs import by_hand, example_job, output_of, printed
from tests.process.test_warm_spares import is_warm
from tests.values import not_none
from tests.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def allocate(bench: Workbench) -> Iterator[Any]:
    """Makes an allocation; its processes end with the test."""
    made: list[Allocation] = []

    def make(run_id: str, num_nodes: int, **changes: Any) -> Allocation:
        suffix = f"-{len(made)}" if made else ""
        made.append(Allocation(bench, launched(bench, run_id, **changes), num_nodes, suffix))
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


def exit_line(allocation: Allocation, rank: int) -> str:
    """The exit code and the last line of a node that may not take part."""
    code = allocation.nodes.pop(rank).wait(PATIENCE_S)
    return f"{code} {allocation.out(rank).splitlines()[-1]}"


@pytest.mark.long
def test_a_node_that_comes_back_is_a_spare_and_one_that_may_not_come_is_told_why(
    allocate, undisturbed_pair
):
    nodes = allocate("given-back", 3).start()
    running = nodes.running
    running.reach(3)
    running.pace(1.0)

    twice = allocate("given-back", 3).start([1], "--node-name", "other")
    assert exit_line(twice, 1).startswith("2 perdure: --node-rank: node 1 is there already: proc")
    same_name = allocate("given-back", 9).start([7], "--node-name", "node-0")
    assert exit_line(same_name, 7).startswith("2 perdure: --node-name: node-0 is there already, as")
    other_job = allocate("given-back", 9, seed=12).start([8])
    assert exit_line(other_job, 8).startswith("2 perdure: job file: differs from that of node-")

    wait_for(lambda: is_warm(running, "node-2"), what="the spare's imports")
    nodes.power_off(1)
    wait_for(lambda: len(answers(nodes)) == 1, what="the replacement of node-1")
    running.pace(3.0)
    nodes.start([1])  # as the platform starts a container again
    wait_for(lambda: is_warm(running, "node-1"), what="node-1 is a warm spare")
    assert running.history.isolated == ()
    nodes.power_off(0)
    wait_for(lambda: len(answers(nodes)) == 2, what="the replacement of node-0")
    assert nodes.finish() == {1: 0, 2: 0}, nodes.out(2)
    assert running.curve() == undisturbed_pair
    assert answers(nodes) == [Rung.NODE_REPLACE] * 2
    assert {m.node for m in running.history.attempts[0].members} == {"node-1", "node-2"}
    running.leave_nothing()


@pytest.mark.long
def test_a_supervisor_elsewhere_takes_over_from_a_spare_that_is_lost(
    bench, allocate, undisturbed_pair
):
    nodes = allocate("given-spare", 3).start([0, 1], "--no-supervisor").start([2])
    nodes.running.reach(3)
    nodes.running.pace(1.0)
    assert nodes.supervisor() == 2
    nodes.power_off(2)
    outside = bench.start(nodes.document)
    outside.complete(undisturbed_pair)
    assert nodes.finish() == {0: 0, 1: 0}, nodes.out(0)
    assert answers(nodes) == []
    nodes.running.leave_nothing()


@pytest.mark.long
def test_three_allocations_train_as_one(allocate, undisturbed_pair):
    nodes = allocate("given-thrice", 2, engine={"spares": 0, "warm_spares": 0})
    running = nodes.running
    nodes.start()
    running.reach(5)
    for process in nodes.nodes.values():  # a warning signal of the platform
        process.terminate()
    assert [process.wait(PATIENCE_S) for process in nodes.nodes.values()] == [75, 75]
    assert "start me again: exit code 75" in nodes.out(0)

    (first,) = running.history.attempts
    assert first.ended is not None
    assert first.ended.outcome == "ended from outside"
    assert running.history.committed_step >= 5
    running.pace(2.0)  # the steps that are left last longer than the allocation
    nodes.start(None, "--deadline", f"{time.time() + 60:.0f}", "--leave-before", "0")
    assert [process.wait(PATIENCE_S) for process in nodes.nodes.values()] == [75, 75]
    assert running.history.ended is None

    nodes.start()
    assert nodes.finish() == {0: 0, 1: 0}, nodes.out(0)
    assert running.curve() == undisturbed_pair
    assert running.rungs() == []
    assert first.from_step == 0
    assert all(view.fault is None for view in running.history.attempts)
    running.leave_nothing()


@pytest.mark.long
def test_a_plain_torch_command_goes_on_after_the_loss_of_a_node(bench, allocate):
    name, arguments = "given-command", ("--max_iters=40", "--eval_interval=10", "--log_interval=1")
    engine = {"nodes": 2, "slots_per_node": 1, "spares": 1}
    job = example_job(
        bench.home, "nanogpt.yaml", name, *arguments, "--pause_s=0.5", steps=40, engine=engine
    )
    nodes = allocate(name, 3)
    document = job.model_dump(mode="json", exclude_none=True)
    given = {**nodes.document["engine"], "warm_spares": 0}
    nodes.document = {**document, "engine": given, "restart": {"pod_retries": 1}}
    nodes.start()
    wait_for(lambda: len(printed(output_of(bench.home, job))) >= 12, what="a checkpoint")
    nodes.power_off(0)
    assert nodes.finish() == {1: 0, 2: 0}, nodes.out(2)
    assert nodes.running.rungs() == [Rung.POD_RESCHEDULE]
    assert {m.node for m in nodes.running.history.attempts[-1].members} == {"node-1", "node-2"}
    out = f"--out_dir={bench.home / 'given-whole'}"
    dataset = next(a for a in not_none(job.worker.command) if a.startswith("--dataset"))
    expected = printed(by_hand("nanogpt_train.py", out, dataset, *arguments))
    assert printed(output_of(bench.home, job)) == expected
    nodes.running.leave_nothing()
