"""Replica groups: the documented eight-card examples, and what holds for every layout."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from perdure.training.recovery.replicas import (
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
    """Layouts without experts."""
    shards, copies, cp = draw(sizes), draw(sizes), draw(sizes)
    return ParallelLayout(
        dp=shards * copies,
        tp=draw(sizes),
        pp=draw(sizes),
        cp=cp,
        optimizer_shards=shards,
        order=draw(st.sampled_from(RankOrder)),
    )


@st.composite
def expert_layouts(draw) -> ParallelLayout:
    fields = {name: draw(st.sampled_from([1, 2, 3, 4])) for name in ("dp", "tp", "cp", "ep", "etp")}
    fields |= {"pp": draw(st.integers(1, 2)), "optimizer_shards": draw(st.integers(1, 4))}
    try:
        return ParallelLayout(**fields, order=draw(st.sampled_from(RankOrder)))
    except ValueError:
        assume(False)
        raise


@given(st.one_of(layouts(), expert_layouts()))
def test_groups_partition_the_ranks(layout):
    groups = layout.replica_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert min(len(group) for group in groups) == layout.copies


@given(layouts())
def test_without_experts_all_groups_are_as_large_as_the_rule_says(layout):
    copies = layout.dp * layout.cp // layout.optimizer_shards
    assert {len(group) for group in layout.replica_groups()} == {copies}


@given(layouts())
def test_members_of_a_group_hold_the_same_part_of_the_model(layout):
    for group in layout.replica_groups():
        places = [layout.place(rank) for rank in group]
        assert len({(place[Axis.TP], place[Axis.PP]) for place in places}) == 1
        assert len({(place[Axis.DP], place[Axis.CP]) for place in places}) == len(group)


@given(expert_layouts())
def test_replicas_hold_the_same_dense_part_and_the_same_experts(layout):
    for group in layout.replica_groups():
        assert len({layout.dense_part(rank) for rank in group}) == 1
        assert len({layout.expert_part(rank) for rank in group}) == 1
    assert layout.copies <= layout.duplicates // layout.optimizer_shards
    if layout.has_experts:
        assert layout.copies <= layout.expert_dp // layout.expert_shards


@given(st.one_of(layouts(), expert_layouts()))
def test_every_rank_has_a_place_of_its_own(layout):
    for place in (layout.place, layout.expert_place):
        places = {tuple(sorted(place(rank).items())) for rank in range(layout.world_size)}
        assert len(places) == layout.world_size


@given(layouts())
def test_ranks_of_a_tensor_parallel_group_draw_the_same_numbers_and_no_others_do(layout):
    streams = {rank: layout.stream(rank) for rank in range(layout.world_size)}
    assert len(set(streams.values())) * layout.tp == layout.world_size
    for rank, stream in streams.items():
        assert stream == streams[rank - rank % layout.tp]
    if not layout.is_split:
        assert streams == {rank: rank for rank in streams}


@given(st.one_of(layouts(), expert_layouts()), st.sampled_from(Mechanism))
def test_recovery_from_replicas_needs_two_copies(layout, mechanism):
    found = feasibility(mechanism, layout)
    assert found.is_possible == (layout.copies >= 2)


@given(layouts(), st.sampled_from(Mechanism))
def test_the_number_of_copies_is_in_the_reason(layout, mechanism):
    assert str(layout.copies) in feasibility(mechanism, layout).reason


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=2, tp=4),
        ParallelLayout(dp=4, tp=2, optimizer_shards=2),
        ParallelLayout(dp=8, optimizer_shards=4),
        ParallelLayout(dp=2, tp=2, pp=2, order=RankOrder.DP_LAST),
    ],
    ids=["dp2-mp4", "dp4-mp2-shard2", "dp8-shard4", "tp2-pp2-dp2"],
)
def test_eight_cards_as_in_mindformers_documentation(layout):
    assert layout.replica_groups() == EIGHT_CARDS
    assert groups_text(layout.replica_groups()) == "[0, 4] [1, 5] [2, 6] [3, 7]"


SIXTEEN = tuple((r, r + 2) for r in (0, 1, 4, 5, 8, 9, 12, 13))


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        # The examples of initialize_model_parallel in megatron/core/parallel_state.py.
        (ParallelLayout(dp=2, tp=2, pp=4), SIXTEEN),
        (ParallelLayout(tp=4, cp=2), EIGHT_CARDS),
        # Distributed optimizer in two instances: neighbours of data and context share a state.
        (ParallelLayout(dp=2, cp=2, tp=2, optimizer_shards=2), EIGHT_CARDS),
        (ParallelLayout(dp=2, cp=2, tp=2), ((0, 2, 4, 6), (1, 3, 5, 7))),
        # Experts: dense parameters are alike on [0, 1, 2, 3], each expert on every second rank.
        (ParallelLayout(dp=4, ep=2, pp=2), ((0, 2), (1, 3), (4, 6), (5, 7))),
        (ParallelLayout(dp=8, ep=4), EIGHT_CARDS),
        (ParallelLayout(dp=8, ep=4, optimizer_shards=4), EIGHT_CARDS),
        # Experts without tensor parallelism: dense [0, 2, 4, 6], experts [0, 4].
        (ParallelLayout(dp=4, tp=2, ep=4, etp=1), EIGHT_CARDS),
        # Dense copies on [0, 4], copies of experts on [0, 2, 4, 6].
        (ParallelLayout(dp=2, tp=4, ep=2, etp=1), EIGHT_CARDS),
    ],
    ids=["tp2-pp4", "tp4-cp2", "tp2-cp2-shard2", "tp2-cp2", "ep2-pp2", "ep4", "ep4-shard4",
         "tp2-ep4-etp1", "tp4-ep2-etp1"],
)  # fmt: skip
def test_groups_are_those_of_megatron(layout, groups):
    assert layout.replica_groups() == groups
    assert feasibility(Mechanism.PROCESS_REPLACE, layout).is_possible


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (ParallelLayout(dp=2, cp=2, optimizer_shards=4),
         "2 x 2 / 4 = 1, needs >= 2"),
        (ParallelLayout(dp=8, ep=8),
         "ranks / (tensor x expert x pipeline) = 8 / (1 x 8 x 1) = 1, in 1 shards: 1 copies"),
        (ParallelLayout(dp=3, tp=2, ep=3, etp=1),
         "3 copies of the dense parameters and 2 of the experts, but no rank has both"),
    ],
    ids=["context", "as many experts as ranks", "copies on different ranks"],
)  # fmt: skip
def test_a_layout_without_replicas_says_what_it_lacks(layout, reason):
    found = feasibility(Mechanism.PROCESS_REPLACE, layout)
    assert not found.is_possible
    assert reason in found.reason


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
        ({"dp": 4, "optimizer_shards": 3}, ["optimizer_weight_shard_size=3", "4 x 1"]),
        ({"dp": 4, "ep": 3}, ["1 x 3 x 1", "number of ranks 4"]),
        ({"dp": 4, "ep": 2, "optimizer_shards": 1, "etp": 3}, ["3 x 2 x 1"]),
        ({"dp": 8, "ep": 8, "optimizer_shards": 2}, ["copies must divide"]),
        ({"dp": 4, "pp": 2, "ep": 2, "order": RankOrder.DP_LAST}, ["dp=4", "have 2"]),
        ({"dp": 0}, ["dp=0", "1 or more"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(sizes_, words):
    with pytest.raises(ValueError, match=r"must|needs") as caught:
        ParallelLayout(**sizes_)
    assert all(word in str(caught.value) for word in words)


def test_many_and_large_groups_are_shortened_in_a_line():
    assert groups_text(ParallelLayout(dp=64).replica_groups()) == "[0, 1, 2, 3, 4, 5, ..., 63]"
    many = ParallelLayout(dp=2, tp=16).replica_groups()
    assert groups_text(many).endswith("[3, 19] and 12 more")
