"""A container that stands by takes the place of a lost one, with the processes that are in it."""

from __future__ import annotations

import os

import pytest

from perdure.training.agent.control import ADDRESS_FILE
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import AgentAddress
from tests.process.harness import Running, Workbench
from tests.waiting import wait_for

pytestmark = pytest.mark.process

ENGINE = {"nodes": 2, "slots_per_node": 2, "spares": 2, "warm_spares": 1, "grace_s": 10}


def start(bench: Workbench, name: str, **restart: object) -> Running:
    """A run whose spare node has a container that stands by, with everything imported."""
    policy = {"pod_retries": 1, **restart}
    running = bench.start(
        bench.job(name, engine=ENGINE, restart=policy, checkpoint={"every_s": 900})
    )
    running.reach(3)
    running.pace(1.0)
    wait_for(lambda: agent_of(running, "node-2"), what="its agent")
    wait_for(lambda: is_warm(running, "node-2"), what="its imports")
    return running


def agent_of(running: Running, node: str) -> int | None:
    """Process of the agent on a node, None while there is none."""
    files = (running.folder / "nodes" / node).glob(f"*/{ADDRESS_FILE}")
    newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
    return AgentAddress.model_validate_json(newest.read_text()).pid if newest else None


def is_warm(running: Running, node: str) -> bool:
    """Whether a fork server on a node has imported torch."""
    return any("libtorch" in maps_of(one.pid) for one in running.local.processes(node))


def maps_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/maps") as file:  # noqa: PTH123 not a file of ours
            return file.read()
    except OSError:
        return ""


@pytest.mark.long
def test_the_member_of_a_lost_node_takes_it_and_another_one_stands_by(bench, undisturbed):
    running = start(bench, "warm", node_replace=True)
    agent = agent_of(running, "node-2")
    assert running.local.kill_node("node-1")
    wait_for(lambda: agent_of(running, "node-3"), what="the next one")
    assert (agent_of(running, "node-2"), agent is not None) == (agent, True), "not a new container"
    running.complete(undisturbed)
    (view,) = running.history.attempts
    assert [one.began.decision.rung for one in view.recoveries] == [Rung.NODE_REPLACE]
    assert [(m.node, m.schedule_cnt) for m in view.members] == [("node-0", 1), ("node-2", 2)]


@pytest.mark.long
def test_a_pod_that_is_rescheduled_takes_it(bench, undisturbed):
    running = start(bench, "warm-rescheduled", node_replace=False)
    agent = agent_of(running, "node-2")
    assert running.local.kill_node("node-1")
    wait_for(lambda: len(running.history.attempts) == 2, what="the next attempt")
    assert agent_of(running, "node-2") == agent
    running.complete(undisturbed)
    assert running.rungs() == [Rung.POD_RESCHEDULE]


@pytest.mark.long
def test_one_that_is_lost_is_told_of_and_another_one_is_made(bench, undisturbed):
    running = start(bench, "warm-lost", node_replace=True)
    agent = agent_of(running, "node-2")
    assert running.local.kill_node("node-2")
    wait_for(lambda: agent_of(running, "node-2") not in (None, agent), what="another")
    running.complete(undisturbed)
    assert "warm spare on node-2 is ended" in running.out
    assert len(running.history.attempts) == 1
    assert running.rungs() == []


@pytest.mark.long
def test_the_next_supervisor_finds_it(bench, undisturbed):
    running = start(bench, "warm-adopted", node_replace=True)
    agent = agent_of(running, "node-2")
    running.kill_supervisor()
    assert agent is not None
    os.kill(agent, 0)  # it lives
    second = bench.start(running.job.model_dump(mode="json"))
    wait_for(lambda: second.history.epoch == 2, what="the next supervisor")
    assert second.local.kill_node("node-1")
    second.complete(undisturbed)
    (view,) = second.history.attempts
    assert [one.began.decision.rung for one in view.recoveries] == [Rung.NODE_REPLACE]
    assert agent_of(second, "node-2") in (None, agent)
    assert (view.members[1].node, view.members[1].schedule_cnt) == ("node-2", 2)
