"""The choice of what to restore from: pure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage import restoring
from perdure.storage.checkpoint import Tier
from perdure.storage.restorable import NodeShare, lacking_of, restorable_saves
from perdure.storage.restoring import GAP_BYTES, in_pieces, merged
from perdure.storage.share import SaveId

NOW = (2, 1)


def save(step: int, *, owner: tuple[int, int] = (1, 1), world_size: int = 4) -> SaveId:
    return SaveId(step=step, placement=owner[0], attempt=owner[1], world_size=world_size)


def node_shares(of: SaveId, *ranks: int, tier: Tier = Tier.MEMORY) -> list[NodeShare]:
    return [NodeShare(save=of, rank=rank, tier=tier) for rank in ranks]


def two_nodes(first: list[NodeShare], second: list[NodeShare]) -> dict[int, list[NodeShare]]:
    """What ranks 0 and 1 get from one checkpoint server, 2 and 3 from another."""
    return {0: first, 1: first, 2: second, 3: second}


def test_a_save_of_which_every_share_is_on_some_node_is_offered():
    (only,) = restorable_saves(
        two_nodes(node_shares(save(10), 0, 1), node_shares(save(10), 2, 3)), owner=NOW
    )
    assert only.save == save(10)
    assert only.holders == {0: 0, 1: 0, 2: 2, 3: 2}
    assert only.local[3] == {2: Tier.MEMORY, 3: Tier.MEMORY}


def test_the_newest_whole_save_comes_first_and_a_newer_half_is_none():
    first = node_shares(save(10), 0, 1) + node_shares(save(20), 0, 1) + node_shares(save(30), 0, 1)
    second = node_shares(save(10), 2, 3) + node_shares(save(20), 2, 3) + node_shares(save(30), 2)
    found = restorable_saves(two_nodes(first, second), owner=NOW)
    assert [one.save.step for one in found] == [20, 10]


def test_shares_of_different_saves_of_a_step_do_not_mix():
    first, second = node_shares(save(10), 0, 1), node_shares(save(10, owner=(1, 2)), 2, 3)
    assert restorable_saves(two_nodes(first, second), owner=NOW) == []


def test_of_two_saves_of_a_step_the_newer_attempts_comes_first():
    whole = [0, 1, 2, 3]
    here = node_shares(save(10), *whole) + node_shares(save(10, owner=(1, 2)), *whole)
    found = restorable_saves({0: here}, owner=NOW)
    assert [one.save.owner for one in found] == [(1, 2), (1, 1)]


def test_a_save_of_this_attempt_or_a_later_one_is_of_another_life_of_the_run():
    here = [h for o in ((2, 1), (2, 2), (3, 1)) for h in node_shares(save(90, owner=o), 0, 1, 2, 3)]
    assert restorable_saves({0: here}, owner=NOW) == []
    assert len(restorable_saves({0: here}, owner=(3, 2))) == 3


def test_memory_is_nearer_than_disk_on_a_node_and_between_nodes():
    both = node_shares(save(10), 0, 1, tier=Tier.DISK) + node_shares(save(10), 0, 1)
    disk = node_shares(save(10), 0, 1, 2, 3, tier=Tier.DISK)
    (only,) = restorable_saves(two_nodes(disk, both), owner=NOW)
    assert only.holders == {0: 2, 1: 2, 2: 0, 3: 0}
    assert only.local[2] == {0: Tier.MEMORY, 1: Tier.MEMORY}
    assert only.local[0][3] is Tier.DISK


def test_a_save_of_another_world_size_is_whole_with_its_own_ranks():
    eight = save(10, world_size=8)
    (only,) = restorable_saves(
        {0: node_shares(eight, *range(5)), 1: node_shares(eight, 5, 6, 7)}, owner=NOW
    )
    assert set(only.holders) == set(range(8))
    assert restorable_saves({0: node_shares(eight, *range(4))}, owner=NOW) == []


def test_nodes_that_hold_nothing_or_one_rank_of_two_offer_nothing():
    assert restorable_saves({}, owner=NOW) == []
    assert restorable_saves({0: [], 1: []}, owner=NOW) == []
    assert restorable_saves({0: node_shares(save(10, world_size=2), 0)}, owner=NOW) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # reader
            st.integers(1, 3),  # step
            st.integers(1, 4),  # attempt
            st.integers(0, 2),  # rank
            st.sampled_from([Tier.MEMORY, Tier.DISK]),
        ),
        max_size=60,
    )
)
def test_what_is_offered_is_held_and_in_order(shares):
    held: dict[int, list[NodeShare]] = {reader: [] for reader in range(4)}
    for reader, step, attempt, rank, tier in shares:
        of = save(step, owner=(1, attempt), world_size=3)
        held[reader] += node_shares(of, rank, tier=tier)
    found = restorable_saves(held, owner=(1, 4))
    keys = [(one.save.step, one.save.owner) for one in found]
    assert keys == sorted(keys, reverse=True)
    everything = {(h.save, h.rank) for shares in held.values() for h in shares}
    for one in found:
        assert one.save.owner < (1, 4)
        assert set(one.holders) == {0, 1, 2}
        for rank, holder in one.holders.items():
            tier = one.local[holder][rank]
            assert NodeShare(save=one.save, rank=rank, tier=tier) in held[holder]
            best = min(t[rank] != Tier.MEMORY for t in one.local.values() if rank in t)
            assert (tier != Tier.MEMORY) == best
    offered = {one.save for one in found}
    for of in {h for h, _ in everything if h.owner < (1, 4)} - offered:
        assert {rank for s, rank in everything if s == of} != {0, 1, 2}


def test_what_is_missing_of_a_newer_save_is_named_and_of_an_older_one_is_not():
    first = node_shares(save(10), 0, 1, 2, 3) + node_shares(save(20), 0, 1)
    held = two_nodes(first, node_shares(save(20), 2))
    assert lacking_of(held, owner=NOW, than=save(10)) == (
        "of step 20 the nodes lack the shares of ranks 3"
    )
    assert lacking_of(held, owner=NOW, than=save(20)) == ""
    assert lacking_of({}, owner=NOW, than=None) == ""


def test_of_many_missing_shares_a_few_are_named():
    held = {0: node_shares(save(20, world_size=20), *range(5))}
    assert lacking_of(held, owner=NOW, than=None).endswith(
        "ranks 5, 6, 7, 8, 9, 10, 11, 12 and 7 more"
    )


RANGES = st.lists(
    st.tuples(st.integers(0, 100_000), st.integers(1, 20_000)).map(lambda r: (r[0], sum(r))),
    max_size=20,
)


@given(RANGES, st.integers(1, 30_000))
def test_ranges_of_a_file_are_sent_once_in_order_and_in_pieces_of_a_bounded_size(ranges, size):
    joined = merged(ranges)
    for (_, end), (begin, _) in itertools.pairwise(joined):
        assert begin > end + GAP_BYTES
    assert all(any(b <= begin and end <= e for b, e in joined) for begin, end in ranges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "PIECE_BYTES", size)
        pieces = list(in_pieces(joined))
    assert all(sum(end - begin for begin, end in piece) <= size for piece in pieces)
    sent = [one for piece in pieces for one in piece]
    assert sum(end - begin for begin, end in sent) == sum(end - begin for begin, end in joined)
    assert merged(sent) == joined
