"""A node that is lost with its ranks, and a coordinator that is lost with its node."""

from __future__ import annotations

import pytest

from perdure.training.recovery.actions import LogEvent, ToAgent, ToRank
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.ladder import InProcessDecider
from perdure.training.recovery.memory import AttemptSettings, Memory
from perdure.training.recovery.protocol import NewGeneration, RecoveryBegan
from perdure.training.recovery.ranks import END_NOTICE_S, NODE_NOTICE_S
from perdure.training.recovery.reactions import GENERATIONS_APART
from perdure.training.recovery.repair import Move, RankReport
from perdure.training.recovery.rungs import Decision, Policy, Rung
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import (
    AgentConnected,
    AgentDisconnected,
    NodeLost,
    RecoveryResumed,
)
from tests.unit.recovery.attempts import DDP, HSDP, STEP, AttemptHarness

LOST = Fault(FaultClass.NODE_LOST, 1000.0, "its agent is silent", node="node-1", step=STEP)


def lose(harness: AttemptHarness, fault: Fault = LOST) -> None:
    """The supervisor reports a node of two ranks."""
    assert fault.node is not None
    first = 2 * int(fault.node.partition("-")[2])
    for rank in (first, first + 1):
        harness.ranks.pop(rank, None)
    harness.handle(NodeLost(fault, (first, first + 1)))
    harness.collect()


def come(harness: AttemptHarness, node: str) -> None:
    """Another node has taken the place of the one with ranks 2 and 3."""
    harness.handle(AgentConnected(node, (2, 3)))
    for rank in (2, 3):
        harness.start(rank)


def test_a_lost_node_is_left_while_the_others_are_called_to_a_generation(harness):
    lose(harness)
    (began,) = harness.began()
    assert (began.decision.rung, began.decision.isolate) == (Rung.NODE_REPLACE, "node-1")
    assert (began.moved, began.replaced) == ((2, 3), frozenset({2, 3}))
    assert harness.actions[1:] == [ToRank(rank, NewGeneration(number=2)) for rank in (0, 1)]
    assert harness.replaced() == [], "no agent is ordered: the supervisor brings another node"


def test_training_goes_on_when_the_ranks_of_the_new_node_have_the_state_of_others(sharded):
    lose(sharded)
    sharded.answer()
    assert sharded.stage() is Stage.GATHERING
    come(sharded, "node-2")
    sharded.answer()
    assert set(sharded.plan().moves) == {Move(source=0, target=2), Move(source=1, target=3)}
    (ended,) = sharded.ended()
    assert (ended.succeeded, ended.replaced, ended.steps_lost) == (True, (2, 3), 0)
    assert sharded.attempt.nodes[2] == sharded.attempt.nodes[3] == "node-2"


def test_the_same_loss_reported_again_changes_nothing(harness):
    lose(harness)
    count = len(harness.actions)
    lose(harness)
    come(harness, "node-2")
    harness.answer()
    lose(harness)
    assert len(harness.began()) == 1
    assert len(harness.actions) > count
    assert harness.stage() is Stage.TRAINING


def test_where_the_node_had_all_that_holds_a_shard_the_survivors_end():
    harness = AttemptHarness.of(((0, 1), (2, 3)))
    lose(harness)
    assert harness.began() == []
    harness.answer()
    (why,) = harness.given_up()
    assert "node_replace: no replica of rank 2 is left" in why


def test_a_node_that_cannot_be_had_costs_the_processes_once_they_have_saved(harness):
    lose(harness)
    harness.answer()
    harness.not_replaced(2, "no healthy spare")
    harness.answer()
    assert [one.succeeded for one in harness.ended()] == [False]
    assert harness.last_save().step == STEP
    (why,) = harness.given_up()
    assert "node_replace: the last one failed" in why


def test_ranks_whose_agent_is_gone_as_well_wait_for_the_supervisors_word(harness):
    harness.handle(AgentDisconnected("node-1"))
    for rank in (2, 3):
        harness.kill(rank, is_reported=False)
    harness.advance(END_NOTICE_S + 1.0)
    assert harness.began() == []
    lose(harness)
    assert harness.rungs() == [Rung.NODE_REPLACE]


def test_without_that_word_the_survivors_save_and_end(harness):
    harness.handle(AgentDisconnected("node-1"))
    for rank in (2, 3):
        harness.kill(rank, is_reported=False)
    harness.advance(NODE_NOTICE_S + 0.1)
    harness.answer()
    assert harness.began() == []
    assert harness.last_save().step == STEP
    (why,) = harness.given_up()
    assert "no supervisor brings another node" in why


def test_ranks_wait_longer_where_the_supervisor_may_be_lost_with_the_node(harness):
    harness.attempt.memory.ranks.node_notice_s = 3 * NODE_NOTICE_S
    harness.handle(AgentDisconnected("node-1"))
    for rank in (2, 3):
        harness.kill(rank, is_reported=False)
    harness.advance(2 * NODE_NOTICE_S)
    assert harness.began() == []
    lose(harness)
    assert harness.rungs() == [Rung.NODE_REPLACE]


def test_a_device_that_never_heals_takes_its_node_along(harness):
    harness.kill(2, exit_code=76)
    (began,) = harness.began()
    assert (began.decision.rung, began.moved) == (Rung.NODE_REPLACE, (2, 3))


# The coordinator itself is lost.

FIRST_LOST = Fault(FaultClass.NODE_LOST, 1000.0, "its agent is silent", node="node-0", step=STEP)
BEGAN = RecoveryBegan(
    at_s=1001.0,
    number=4,
    generation=3,
    fault=FIRST_LOST,
    decision=Decision(Rung.NODE_REPLACE, "node-0", "node_lost at node-0: node_replace"),
    moved=(0, 1),
)


@pytest.fixture
def resumed() -> AttemptHarness:
    """Another coordinator, which no rank has come to yet."""
    harness = resumed_by_another(DDP)
    harness.collect()
    return harness


def resumed_by_another(groups: tuple[tuple[int, ...], ...]) -> AttemptHarness:
    """A coordinator that takes the recovery up."""
    attempt = Attempt(
        Memory(sum(map(len, groups)), groups),
        AttemptSettings(repair_limit_s=30.0, save_limit_s=60.0),
        InProcessDecider(Policy(), frozenset(Rung)),
        checks_invariants=True,
    )
    harness = AttemptHarness(attempt, now_s=1002.0)
    harness.handle(RecoveryResumed(BEGAN))
    return harness


def come_back(harness: AttemptHarness, *ranks: int) -> None:
    """Survivors connect with what they have."""
    harness.handle(AgentConnected(f"node-{ranks[0] // 2}", ranks))
    for rank in ranks:
        harness.start(rank)
        harness.ranks[rank].report = RankReport(rank=rank, step=STEP)


def test_another_coordinator_goes_on_in_a_generation_that_none_before_can_have_announced(resumed):
    assert resumed.actions == [LogEvent(BEGAN)]
    come_back(resumed, 2, 3)
    number = BEGAN.generation + GENERATIONS_APART + 1
    assert resumed.collect() == [ToRank(rank, NewGeneration(number=number)) for rank in (2, 3)]
    resumed.handle(AgentConnected("node-2", (0, 1)))
    for rank in (0, 1):
        resumed.start(rank)
    resumed.answer()
    (ended,) = resumed.ended()
    assert (ended.number, ended.succeeded, ended.generation) == (4, True, number)
    assert resumed.stage() is Stage.TRAINING
    resumed.kill(3)
    assert resumed.began()[-1].number == 5, "numbers go on after those of the one before"


def test_a_second_node_may_be_lost_before_the_survivors_have_come_to_another_coordinator():
    harness = resumed_by_another(((0, 1, 2, 3, 4, 5),))
    lose(harness)
    assert [one.moved for one in harness.began()] == [(0, 1), (2, 3)]
    assert harness.rungs() == [Rung.NODE_REPLACE] * 2


@pytest.mark.parametrize("groups", [DDP, HSDP])
def test_agents_hear_nothing_of_a_node_that_the_supervisor_replaces(groups):
    harness = AttemptHarness.of(groups)
    lose(harness)
    assert not any(isinstance(action, ToAgent) for action in harness.actions)
