"""Who holds whose copies, and which save is copied next: pure."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage.checkpoint_server.protocol import PeerAddress
from perdure.storage.partner_copies import CopyPlan, CopyState, agreed, partners_of
from perdure.storage.partnering import RankPlace, nodes_of, super_pod_domains
from perdure.storage.share import SaveId

COPYING, COPIED, FAILED = CopyState.COPYING, CopyState.COPIED, CopyState.FAILED


def save(step: int) -> SaveId:
    return SaveId(step=step, placement=1, attempt=1, world_size=4)


def names(num: int) -> list[str]:
    return [f"node-{i}" for i in range(num)]


def test_without_domains_the_next_members_hold_the_copies():
    assert partners_of(names(2), domains={}, copies=1) == ((1,), (0,))
    assert partners_of(names(4), domains={}, copies=1) == ((1,), (2,), (3,), (0,))
    assert partners_of(names(4), domains={}, copies=2) == ((1, 2), (2, 3), (3, 0), (0, 1))


def test_neighbours_of_one_rack_hold_no_copies_of_each_other():
    racks = {"node-0": "a", "node-1": "a", "node-2": "b", "node-3": "b"}
    assert partners_of(names(4), domains=racks, copies=1) == ((2,), (3,), (0,), (1,))


def test_two_equal_domains_leave_some_members_without_a_second_partner():
    racks = {"node-0": "a", "node-1": "a", "node-2": "b", "node-3": "b"}
    assert partners_of(names(4), domains=racks, copies=2) == ((2, 3), (3,), (0, 1), (1,))


def test_a_domain_of_more_than_half_of_the_nodes_leaves_some_without_a_partner():
    racks = {"node-0": "a", "node-1": "a", "node-2": "a"}
    found = partners_of(names(4), domains=racks, copies=1)
    assert found == ((3,), (), (), (2,))
    assert partners_of(names(3), domains=racks, copies=1) == ((), (), ())


@st.composite
def gangs(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    nodes = names(draw(st.integers(1, 24)))
    racks = draw(st.lists(st.sampled_from(["", *"abcdef"]), min_size=len(nodes), max_size=24))
    return nodes, {node: rack for node, rack in zip(nodes, racks, strict=False) if rack}


@given(gangs(), st.integers(0, 2))
def test_copies_are_on_other_nodes_of_other_domains_and_spread_evenly(gang, copies):
    nodes, racks = gang
    found = partners_of(nodes, domains=racks, copies=copies)
    assert found == partners_of(nodes, domains=racks, copies=copies)
    for member, partners in enumerate(found):
        assert len(set(partners)) == len(partners) <= copies
        assert member not in partners
        for partner in partners:
            here, there = racks.get(nodes[member]), racks.get(nodes[partner])
            assert here is None or here != there
    held = Counter(partner for partners in found for partner in partners)
    assert all(number <= copies for number in held.values())
    largest = max(Counter(racks.values()).values(), default=1)
    if copies and len(nodes) >= 2 * largest:
        assert all(partners for partners in found), "as long as no domain has most of the nodes"


def test_the_first_save_is_copied_and_the_next_one_when_its_copies_are_whole():
    plan = CopyPlan()
    turn = plan.next([])
    assert (turn.begins, turn.keep) == (True, ())
    plan = turn.plan_after(save(10))
    turn = plan.next([COPIED, COPIED])
    assert (turn.begins, turn.keep) == (True, (save(10),))
    assert turn.plan_after(save(20)) == CopyPlan(copied=save(10), begun=save(20))


def test_a_save_is_not_copied_while_any_copy_of_another_one_is_on_its_way():
    plan = CopyPlan(copied=save(10), begun=save(20))
    turn = plan.next([COPIED, COPYING])
    assert (turn.begins, turn.keep) == (False, (save(10), save(20)))
    assert turn.plan_after(save(30)) == plan


@pytest.mark.parametrize("states", [[FAILED, COPIED], [FAILED, FAILED]])
def test_copies_that_failed_leave_the_older_ones_in_their_place(states):
    turn = CopyPlan(copied=save(10), begun=save(20)).next(states)
    assert (turn.begins, turn.has_failed, turn.keep) == (True, True, (save(10),))
    assert turn.plan_after(save(30)) == CopyPlan(copied=save(10), begun=save(30))


def test_after_a_fault_all_go_on_with_the_plan_of_the_rank_that_came_furthest():
    further = CopyPlan(copied=save(20), begun=save(30))
    stopped = CopyPlan(copied=save(10), begun=save(20))
    assert agreed([stopped, CopyPlan(), further, stopped]) == further
    assert agreed([CopyPlan(begun=save(10)), CopyPlan()]) == CopyPlan(begun=save(10))
    repeated = SaveId(step=10, placement=1, attempt=1, world_size=4, first_file=8)
    assert agreed([further, CopyPlan(save(20), repeated)]).begun == repeated


def test_ranks_of_one_checkpoint_server_are_one_node_and_those_without_one_are_none():
    first, second = (PeerAddress(host="h", port=port, token="t") for port in (1, 2))
    places = [RankPlace(node="a", address=first)] * 2 + [RankPlace(node="b", address=second)]
    nodes = nodes_of([*places, RankPlace(node="c", address=None)])
    assert [(one.name, one.ranks) for one in nodes] == [("a", (0, 1)), ("b", (2,))]


@pytest.mark.parametrize(
    ("pods", "domains"),
    [
        ("7788", {"n0": "super pod 7", "n1": "super pod 7", "n2": "super pod 8",
                  "n3": "super pod 8"}),
        ("787", {}),
        ("7777", {}),
        ("7.8.", {"n0": "super pod 7", "n2": "super pod 8"}),
        ("....", {}),
    ],
    ids=["two halves", "more than half in one", "one for all", "not known of some", "of none"],
)  # fmt: skip
def test_super_pods_are_failure_domains_where_every_node_can_have_a_partner_outside(pods, domains):
    places = [
        RankPlace(node=f"n{rank // 2}", address=None, super_pod=pod if pod != "." else None)
        for rank, pod in enumerate(pod for pod in pods for _ in range(2))
    ]
    assert super_pod_domains(places) == domains
