"""Which nodes a placement stands on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence
from perdure.training.engines.base import (
    AgentEndpoint,
    Placement,
    Snapshot,
    losses_of,
    plan,
    plan_replacement,
)
from perdure.training.errors import NoCapacity
from perdure.training.journal.records import Member
from perdure.training.wire.agent_status import AgentState, AgentStatus

NODES = [f"node-{index}" for index in range(5)]


def placement(number: int, *members: tuple[str, int]) -> Placement:
    """Members in order, each as its node and schedule count."""
    return Placement(
        number,
        tuple(
            Member(index=index, node=node, schedule_cnt=count)
            for index, (node, count) in enumerate(members)
        ),
    )


def status(state: AgentState) -> AgentStatus:
    return AgentStatus(
        node="node-0",
        member=0,
        state=state,
        schedule_cnt=1,
        proc_start_cnt=1,
        placement=1,
        attempt=1,
    )


def test_a_first_placement_takes_the_nodes_in_their_order():
    first = plan(NODES, 3, previous=None, avoid=())
    assert first == placement(1, ("node-0", 1), ("node-1", 1), ("node-2", 1))
    assert first.nodes == ("node-0", "node-1", "node-2")


def test_a_first_placement_passes_over_nodes_to_be_avoided():
    assert plan(NODES, 2, previous=None, avoid={"node-0"}).nodes == ("node-1", "node-2")


TWO = placement(1, ("node-0", 1), ("node-1", 1))
THREE = placement(1, ("node-0", 1), ("node-1", 1), ("node-2", 3))


@pytest.mark.parametrize(
    ("nodes", "before", "avoid", "after"),
    [
        (NODES, placement(4, ("node-3", 2), ("node-0", 1)), (),
         placement(5, ("node-3", 3), ("node-0", 2))),
        (NODES, THREE, {"node-0", "node-2"},
         placement(2, ("node-3", 2), ("node-1", 2), ("node-4", 4))),
        (NODES, TWO, {"node-1", "node-2"}, placement(2, ("node-0", 2), ("node-3", 2))),
        (NODES[:3], placement(2, ("node-2", 2), ("node-1", 2)), {"node-2"},
         placement(3, ("node-0", 3), ("node-1", 3))),
    ],
    ids=["keeps the former nodes", "spares in order in the places of avoided nodes",
         "an avoided node is no spare", "a node that is no longer avoided"],
)  # fmt: skip
def test_a_new_placement_replaces_avoided_nodes_and_counts_every_member_up(
    nodes, before, avoid, after
):
    assert plan(nodes, len(before.members), previous=before, avoid=avoid) == after


@pytest.mark.parametrize(
    ("nodes", "before", "avoid", "last", "after"),
    [
        (NODES, None, (), {"node-0"}, ("node-1", "node-2")),
        (NODES, TWO, (), {"node-1"}, ("node-0", "node-2")),
        (NODES, TWO, (), {"node-1", "node-2"}, ("node-0", "node-3")),
        (NODES[:2], TWO, (), {"node-1"}, ("node-0", "node-1")),
        (NODES[:3], TWO, {"node-1"}, {"node-0"}, ("node-0", "node-2")),
        (NODES[:3], TWO, {"node-1"}, {"node-2"}, ("node-0", "node-2")),
    ],
    ids=["a first placement", "moves off it", "not onto another one", "no other node",
         "a member without a node comes first", "better than none"],
)  # fmt: skip
def test_sub_healthy_nodes_are_the_last_that_a_new_placement_takes(
    nodes, before, avoid, last, after
):
    assert plan(nodes, 2, previous=before, avoid=avoid, last=last).nodes == after


@pytest.mark.parametrize(
    ("nodes", "avoid", "lost", "last", "after", "moved"),
    [
        (NODES, {"node-1"}, (), {"node-2"}, ("node-0", "node-3"), (1,)),
        (NODES[:3], {"node-1"}, (), {"node-2"}, ("node-0", "node-2"), (1,)),
        (NODES, (), {"node-1"}, {"node-1"}, ("node-0", "node-2"), (1,)),
        (NODES[:2], (), {"node-1"}, {"node-1"}, ("node-0", "node-1"), (1,)),
        (NODES, (), {"node-1"}, {"node-0"}, ("node-0", "node-1"), (1,)),
        (NODES[:3], {"node-1"}, {"node-0", "node-1"}, {"node-0"}, ("node-0", "node-2"), (0, 1)),
    ],
    ids=["not onto one", "better than none", "a lost member leaves it", "no other node",
         "a member that lives stays", "a member without a node comes first"],
)  # fmt: skip
def test_members_move_to_a_sub_healthy_node_last(nodes, avoid, lost, last, after, moved):
    placement, indices = plan_replacement(nodes, previous=TWO, avoid=avoid, lost=lost, last=last)
    assert (placement.nodes, indices) == (after, moved)


def test_too_few_nodes_are_no_capacity_and_the_isolated_ones_are_named():
    with pytest.raises(NoCapacity, match=r"among 3 nodes; isolated: node-1, node-2$"):
        plan(NODES[:3], 2, previous=TWO, avoid={"node-2", "node-1"})
    with pytest.raises(NoCapacity, match=r"among 1 nodes; isolated: none$"):
        plan(NODES[:1], 2, previous=None, avoid=())


@pytest.mark.parametrize(
    ("before", "avoid", "lost", "members", "moved"),
    [
        (THREE, {"node-1"}, (), [("node-0", 1), ("node-3", 2), ("node-2", 3)], (1,)),
        (TWO, (), {"node-1"}, [("node-0", 1), ("node-1", 2)], (1,)),
        (TWO, ["node-0"], ["node-0"], [("node-2", 2), ("node-1", 1)], (0,)),
        (TWO, {"node-4"}, (), [("node-0", 1), ("node-1", 1)], ()),
    ],
    ids=["on avoided nodes", "lost on a node that is not avoided", "lost and avoided", "none"],
)
def test_a_replacement_moves_only_the_members_that_are_avoided_or_lost(
    before, avoid, lost, members, moved
):
    after = plan_replacement(NODES, previous=before, avoid=avoid, lost=lost)
    assert after == (placement(2, *members), moved)


def test_a_replacement_without_a_spare_is_no_capacity():
    with pytest.raises(NoCapacity, match="isolated: node-1"):
        plan_replacement(NODES[:2], previous=TWO, avoid={"node-1"}, lost={"node-1"})


@pytest.mark.parametrize(
    ("states", "is_over"),
    [
        ([AgentState.ENDED, AgentState.IDLE], True),
        ([AgentState.ENDED, AgentState.STOPPING], False),
        ([AgentState.STAGING], False),
        ([AgentState.RUNNING], False),
    ],
)
def test_an_attempt_is_over_when_no_agent_runs_anything(states, is_over):
    assert Snapshot(dict(enumerate(map(status, states)))).is_over is is_over


@given(
    st.integers(1, 4),
    st.lists(st.sets(st.sampled_from(NODES)), min_size=1, max_size=5),
    st.booleans(),
    st.sets(st.sampled_from(NODES)),
)
def test_a_placement_never_uses_a_node_twice_nor_one_to_be_avoided(
    needed, avoided, replacing, last
):
    current = plan(NODES, needed, previous=None, avoid=())
    for avoid in avoided:
        try:
            if replacing:
                after, _ = plan_replacement(
                    NODES, previous=current, avoid=avoid, lost=(), last=last
                )
            else:
                after = plan(NODES, needed, previous=current, avoid=avoid, last=last)
        except NoCapacity:
            assert len(set(NODES) - avoid) < needed
            continue
        assert len(set(after.nodes)) == needed
        assert not avoid.intersection(after.nodes)
        assert after.number == current.number + 1
        assert [member.index for member in after.members] == list(range(needed))
        current = after


@pytest.mark.parametrize(
    ("address", "words"),
    [(("127.0.0.1", 1), "its agent does not answer"), (None, "the agent of node-1 is gone")],
)
def test_a_container_whose_agent_is_only_silent_is_not_said_to_be_gone(address, words):
    contacts = [AgentEndpoint("node-1", "token", address, "127.0.0.1")]
    losses = losses_of(contacts, {"node-1"})
    fault = diagnose(Evidence(1.0, 5, lost_nodes=["node-1"], losses=losses)).fault
    assert (fault.code, fault.hardware_fault) == ("NODE_LOST", False)
    assert words in fault.evidence
    assert ("is still there" in fault.explanation) == (address is not None)
