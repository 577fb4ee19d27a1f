"""Replica groups: the documented eight-card examples, and what holds for every layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.recovery.replicas import (
    Axis,
    Mechanism,
    ParallelLayout,
    RankOrder,
    feasibility,
    groups_text,
)

EIGHT_CARDS = ((0, 4), (1, 5), (2, 6), (3, 7))
sizes = st.integers(1, 4)


@st.composite
def layouts(draw) -> ParallelLayout:
    shards, copies = draw(sizes), draw(sizes)
    return ParallelLayout(
        dp=shards * copies,
        tp=draw(sizes),
        pp=draw(sizes),
        optimizer_shards=shards,
        order=draw(st.sampled_from(RankOrder)),
    )


@given(layouts())
def test_groups_partition_the_ranks_into_equal_parts(layout):
    groups = layout.replica_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {layout.copies}


@given(layouts())
def test_members_of_a_group_hold_the_same_part_of_the_model(layout):
    for group in layout.replica_groups():
        places = [layout.place(rank) for rank in group]
        assert len({(place[Axis.TP], place[Axis.PP]) for place in places}) == 1
        assert len({place[Axis.DP] % layout.optimizer_shards for place in places}) == 1
        assert len({place[Axis.DP] for place in places}) == layout.copies


@given(layouts())
def test_every_rank_has_a_place_of_its_own(layout):
    places = {tuple(sorted(layout.place(rank).items())) for rank in range(layout.world_size)}
    assert len(places) == layout.world_size


@given(layouts(), st.sampled_from(Mechanism))
def test_recovery_from_replicas_needs_two_copies(layout, mechanism):
    found = feasibility(mechanism, layout)
    assert found.is_possible == (layout.dp / layout.optimizer_shards >= 2)
    assert str(layout.copies) in found.reason


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=2, tp=4),
        ParallelLayout(dp=4, tp=2, optimizer_shards=2),
        ParallelLayout(dp=8, optimizer_shards=4),
        ParallelLayout(dp=2, tp=2, pp=2, order=RankOrder.TP_PP_DP),
    ],
    ids=["dp2-mp4", "dp4-mp2-shard2", "dp8-shard4", "tp2-pp2-dp2"],
)
def test_eight_cards_as_in_mindformers_documentation(layout):
    assert layout.replica_groups() == EIGHT_CARDS
    assert groups_text(layout.replica_groups()) == "[0, 4] [1, 5] [2, 6] [3, 7]"


def test_pipeline_stages_are_blocks_of_ranks():
    assert ParallelLayout(dp=2, tp=2, pp=2).replica_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_eight_cards_with_as_many_shards_as_data_parallel_ranks_have_no_replicas():
    found = feasibility(Mechanism.PROCESS_REPLACE, ParallelLayout(dp=2, tp=4, optimizer_shards=2))
    assert not found.is_possible
    assert found.reason == ("data_parallel / optimizer_weight_shard_size = 2 / 2 = 1, needs >= 2")


def test_without_replicas_a_step_is_retried_only_after_what_leaves_the_state_whole():
    found = feasibility(Mechanism.MEMORY_RETRY, ParallelLayout(dp=2, optimizer_shards=2))
    assert not found.is_possible
    assert "HCCE" in found.reason


@pytest.mark.parametrize(("ranks_per_node", "is_lost"), [(8, True), (4, False), (None, False)])
def test_a_group_inside_one_node_is_lost_with_it(ranks_per_node, is_lost):
    layout = ParallelLayout(dp=8, optimizer_shards=4)
    found = feasibility(Mechanism.PROCESS_REPLACE, layout, ranks_per_node=ranks_per_node)
    assert found.is_possible
    assert ("a lost node takes every copy of [0, 4]" in found.reason) is is_lost


@pytest.mark.parametrize(
    ("sizes_", "words"),
    [
        ({"dp": 4, "optimizer_shards": 3}, ["optimizer_shards=3", "dp=4"]),
        ({"dp": 0}, ["dp=0", "1 or more"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(sizes_, words):
    with pytest.raises(ValueError, match="must") as caught:
        ParallelLayout(**sizes_)
    assert all(word in str(caught.value) for word in words)


def test_many_and_large_groups_are_shortened_in_a_line():
    assert groups_text(ParallelLayout(dp=64).replica_groups()) == "[0, 1, 2, 3, 4, 5, ..., 63]"
    many = ParallelLayout(dp=2, tp=16).replica_groups()
    assert groups_text(many).endswith("[3, 19] and 12 more")
