"""Plans that bring the ranks of an attempt back to one step: examples, and what always holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.recovery.repair import (
    Move,
    RankReport,
    RepairMode,
    RepairPlan,
    SkippedBatch,
    StepPhase,
    Unrepairable,
    Vote,
    plan_repair,
    steps_lost,
)

DDP = ((0, 1, 2, 3),)
HSDP = ((0, 2), (1, 3))
EIGHT = ((0, 4), (1, 5), (2, 6), (3, 7))
PREPARED, VOTED, APPLYING = StepPhase.PREPARED, StepPhase.VOTED, StepPhase.APPLYING


def vote_of(step: int) -> Vote:
    return Vote(step=step, loss=1.0 / (step + 1), grad_norm=2.0)


def at(rank: int, step: int = 10, **changes) -> RankReport:
    """A rank at the beginning of a step."""
    return RankReport(rank=rank, step=step, **changes)


def fresh(rank: int) -> RankReport:
    return RankReport(rank=rank, step=0, is_fresh=True)


def skipped(*starts: int) -> tuple[SkippedBatch, ...]:
    """Batches of 8 samples that were to become step 11."""
    return tuple(
        SkippedBatch(step=11, start=start, stop=start + 8, loss=9.0, grad_norm=1e4)
        for start in starts
    )


# Examples.

PAIR = ((0, 1),)
TRAIN, ACCEPT = RepairMode.TRAIN, RepairMode.ACCEPT
ROLL_BACK, LAST_SAVE = RepairMode.ROLL_BACK, RepairMode.LAST_SAVE
VOTED_11: dict[str, Any] = {"phase": VOTED, "votes": (vote_of(11),)}
EXAMPLES: dict[str, tuple[list[RankReport], Sequence[Sequence[int]], RepairPlan]] = {
    "ranks that are all at one step do nothing": (
        [at(rank) for rank in range(4)], DDP, RepairPlan(mode=TRAIN, step=10),
    ),
    "a step in flight without a vote is done again": (
        [at(0, phase=PREPARED), at(1), at(2, phase=PREPARED), at(3)], DDP,
        RepairPlan(mode=TRAIN, step=10),
    ),
    "a gradient that one rank knew all to hold is applied by those who have not": (
        [
            at(0, phase=VOTED, votes=(vote_of(10), vote_of(11))),
            at(1, phase=PREPARED, votes=(vote_of(10),)),
            at(2, 11, votes=(vote_of(11),)),
            at(3, phase=PREPARED),
        ],
        DDP, RepairPlan(mode=TRAIN, step=11, applies=(0, 1, 3), vote=vote_of(11)),
    ),
    "a new process gets the state of a replica in its group": (
        [at(0), fresh(1), at(2), at(3)], HSDP,
        RepairPlan(mode=TRAIN, step=10, moves=(Move(source=3, target=1),)),
    ),
    "a new process gets the state after the step that its replica applies": (
        [at(0, 11), at(1, **VOTED_11), at(2, 11), fresh(3)], HSDP,
        RepairPlan(mode=TRAIN, step=11, applies=(1,), moves=(Move(source=1, target=3),),
                   vote=vote_of(11)),
    ),
    "a rank in the middle of its optimizer is repaired however far it was": (
        [at(0, phase=APPLYING, is_dirty=True), at(1, 11), at(2, 11), at(3, 11)], DDP,
        RepairPlan(mode=TRAIN, step=11, moves=(Move(source=1, target=0),)),
    ),
    "a damaged rank that was ahead is brought back to the others": (
        [at(0, 11, is_dirty=True), at(1), at(2, phase=PREPARED), at(3)], DDP,
        RepairPlan(mode=TRAIN, step=10, moves=(Move(source=1, target=0),)),
    ),
    "the work of giving states is spread over the replicas": (
        [fresh(0), at(1), fresh(2), at(3)], DDP,
        RepairPlan(mode=TRAIN, step=10,
                   moves=(Move(source=1, target=0), Move(source=3, target=2))),
    ),
    "what some rank had still to do at this step is done by all once": (
        [
            at(0, pending=("save", "pause")), at(1, pending=("pause",)), at(2),
            at(3, 9, phase=VOTED, pending=("prepare",)),
        ],
        DDP, RepairPlan(mode=TRAIN, step=10, applies=(3,), pending=("save", "pause")),
    ),
    "a step that some ranks have accepted already is accepted by the others": (
        [at(0, 11, votes=(vote_of(11),)), at(1, phase=PREPARED), at(2, 11), fresh(3)], HSDP,
        RepairPlan(mode=ACCEPT, step=11, applies=(1,), moves=(Move(source=1, target=3),),
                   vote=vote_of(11)),
    ),
    "a step that was voted after the accepted one is not lost": (
        [at(0, 11, phase=VOTED), at(1, 11, phase=PREPARED)], PAIR,
        RepairPlan(mode=ACCEPT, step=12, applies=(0, 1)),
    ),
    "a batch that one rank has passed over is tried by no other again": (
        [at(0, skipped=skipped(80, 88)), at(1, phase=PREPARED, skipped=skipped(80)), at(2)],
        ((0, 1, 2),), RepairPlan(mode=TRAIN, step=10, skipped=skipped(80, 88)),
    ),
    "what was passed over on the way to a step is over once a rank has completed it": (
        [at(0, 11), at(1, **VOTED_11, skipped=skipped(80))], PAIR,
        RepairPlan(mode=TRAIN, step=11, applies=(1,), vote=vote_of(11)),
    ),
    "a last save has the position after the batches that were passed over": (
        [at(0, skipped=skipped(80)), at(1)], PAIR,
        RepairPlan(mode=LAST_SAVE, step=10, savers=(0,), skipped=skipped(80)),
    ),
    "all ranks roll back to the snapshot that they have in common": (
        [at(rank, snapshot_step=8, phase=PREPARED) for rank in range(4)], DDP,
        RepairPlan(mode=ROLL_BACK, step=8, rolls_back=True),
    ),
    "a snapshot from before the first step counts": (
        [at(rank, 3, snapshot_step=0) for rank in range(2)], PAIR,
        RepairPlan(mode=ROLL_BACK, step=0, rolls_back=True),
    ),
    "all go back to the newest snapshot that every group has": (
        [at(rank, snapshot_step=9 if rank == 2 else 8) for rank in range(4)], HSDP,
        RepairPlan(mode=ROLL_BACK, step=8, rolls_back=True, moves=(Move(source=0, target=2),)),
    ),
    "ranks that went back already go back with those who have not": (
        [at(0, 8, snapshot_step=8), at(1, snapshot_step=8, phase=PREPARED), fresh(2)],
        ((0, 1, 2),),
        RepairPlan(mode=ROLL_BACK, step=8, rolls_back=True, moves=(Move(source=0, target=2),)),
    ),
    "one rank of each group that lives saves at the end": (
        [at(rank) for rank in range(8) if rank != 1], EIGHT,
        RepairPlan(mode=LAST_SAVE, step=10, savers=(0, 5, 2, 3)),
    ),
    "a rank that is damaged or behind saves nothing": (
        [at(0, is_dirty=True), at(1, 9), at(2), at(3)], HSDP,
        RepairPlan(mode=LAST_SAVE, step=10, savers=(2, 3)),
    ),
    "survivors apply what was voted before they save": (
        [at(0, **VOTED_11), at(1, phase=PREPARED)], HSDP,
        RepairPlan(mode=LAST_SAVE, step=11, applies=(0, 1), savers=(0, 1), vote=vote_of(11)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reports", "groups", "plan"), EXAMPLES.values(), ids=EXAMPLES)
def test_a_plan_brings_the_ranks_to_one_step(reports, groups, plan):
    assert plan_repair(reports, groups, mode=plan.mode, accepted=11) == plan


def test_a_state_that_no_living_rank_has_cannot_be_repaired():
    with pytest.raises(Unrepairable, match="no rank that lives has the state of rank 1"):
        plan_repair([at(0), fresh(1), at(2), at(3, is_dirty=True)], HSDP)


@pytest.mark.parametrize("mode", [RepairMode.TRAIN, RepairMode.ACCEPT, RepairMode.LAST_SAVE])
def test_nothing_is_repaired_without_any_state_to_trust(mode):
    with pytest.raises(Unrepairable, match="no rank has a state that can be trusted"):
        plan_repair([fresh(0), at(1, is_dirty=True)], ((0, 1),), mode=mode, accepted=11)


def test_before_the_first_step_there_is_nothing_to_save():
    with pytest.raises(Unrepairable, match="nothing was trained yet"):
        plan_repair([at(0, 0), at(1, 0)], PAIR, mode=LAST_SAVE)
    assert plan_repair([at(0, 0), at(1, 0)], PAIR).step == 0


def test_survivors_that_die_one_after_the_other_leave_no_saver():
    with pytest.raises(Unrepairable, match="no rank lives any more"):
        plan_repair([], [(0, 1)], mode=RepairMode.LAST_SAVE)


def test_the_vote_of_a_plan_is_that_of_its_step_and_of_no_other():
    # Rank 0 has seen step 11 come out abnormal; rank 1 was cut off while it waited for that vote.
    reports = [
        at(0, phase=PREPARED, votes=(vote_of(10), vote_of(11))),
        at(1, phase=PREPARED, votes=(vote_of(10),)),
    ]
    groups = ((0, 1),)
    assert plan_repair(reports, groups).vote == vote_of(10)
    for order in (reports, reports[::-1]):
        plan = plan_repair(order, groups, mode=RepairMode.ACCEPT, accepted=11)
        assert (plan.step, plan.applies, plan.vote) == (11, (0, 1), vote_of(11))


@pytest.mark.parametrize(
    ("others", "stops"),
    [
        ([at(2), at(3)], True),
        ([at(2, is_dirty=True), at(3)], True),
        ([fresh(2), at(3)], False),
        ([fresh(2), fresh(3)], False),
        ([at(2, 9, phase=VOTED), fresh(3)], False),
    ],
)
def test_a_stop_that_was_agreed_with_processes_that_are_gone_is_asked_for_again(others, stops):
    asked = vote_of(10).model_copy(update={"stop": True, "save": True})
    first = at(0, votes=(asked,), pending=("last_save", "stop"))
    plan = plan_repair([first, at(1), *others], DDP)
    assert plan.vote is not None
    assert (plan.vote.stop, plan.vote.save) == (stops, True)


def test_an_abnormal_step_is_accepted_only_by_ranks_that_hold_its_gradient():
    reports = [at(0, phase=PREPARED, votes=(vote_of(11),)), at(1)]
    plan = plan_repair(reports, ((0, 1),), mode=RepairMode.ACCEPT, accepted=11)
    assert (plan.applies, plan.moves) == ((0,), (Move(source=0, target=1),))
    with pytest.raises(Unrepairable, match="state of rank 0"):
        plan_repair([at(0), at(1)], ((0, 1),), mode=RepairMode.ACCEPT, accepted=11)


WITHOUT = pytest.mark.parametrize(
    "other",
    [
        at(1, snapshot_step=None),
        at(1, 8, snapshot_step=None),  # its state is not known to be good
        at(1, snapshot_step=7),
        at(1, snapshot_step=8, is_dirty=True),
        fresh(1),
        RankReport(rank=1, step=0, is_fresh=True, snapshot_step=9),
    ],
    ids=["none", "at its step", "an older one", "damaged", "new", "new with one"],
)


@WITHOUT
def test_a_rank_without_the_snapshot_gets_it_from_a_replica_that_went_back_to_it(other):
    reports = [at(0, snapshot_step=8), other]
    plan = plan_repair(reports, ((0, 1),), mode=RepairMode.ROLL_BACK)
    assert (plan.mode, plan.step, plan.rolls_back) == (RepairMode.ROLL_BACK, 8, True)
    assert plan.moves == (Move(source=0, target=1),)


@WITHOUT
def test_without_a_snapshot_in_every_group_of_replicas_no_rank_rolls_back(other):
    with pytest.raises(Unrepairable, match="no snapshot of one step"):
        plan_repair([at(0, snapshot_step=8), other], ((0,), (1,)), mode=RepairMode.ROLL_BACK)


def test_a_group_without_a_living_rank_makes_the_last_save_impossible():
    reports = [at(rank) for rank in range(8) if rank not in (1, 5)]
    with pytest.raises(Unrepairable, match=r"no rank of \[1, 5\] lives"):
        plan_repair(reports, EIGHT, mode=RepairMode.LAST_SAVE)


def test_steps_are_lost_only_when_ranks_go_back():
    reports = {0: at(0, 12), 1: at(1, 12), 2: at(2, 14, is_dirty=True)}
    assert steps_lost(reports, RepairPlan(mode=RepairMode.ROLL_BACK, step=8)) == 4
    assert steps_lost(reports, RepairPlan(mode=RepairMode.TRAIN, step=12)) == 0
    assert steps_lost(reports, RepairPlan(mode=RepairMode.TRAIN, step=13)) == 0
    assert steps_lost({}, RepairPlan(mode=RepairMode.TRAIN, step=13)) == 0


# Whatever the ranks report.


@st.composite
def worlds(draw) -> tuple[list[RankReport], tuple[tuple[int, ...], ...]]:
    """Any reports at all of the ranks of some groups."""
    size, num_groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(size * num_groups)))
    groups = tuple(tuple(order[n * size : (n + 1) * size]) for n in range(num_groups))
    reports = [
        RankReport(
            rank=rank,
            step=draw(st.integers(0, 3)),
            phase=draw(st.sampled_from(StepPhase)),
            is_dirty=draw(st.sampled_from([False, False, True])),
            is_fresh=draw(st.sampled_from([False, False, True])),
            snapshot_step=draw(st.sampled_from([None, 0, 2])),
            votes=tuple(vote_of(step) for step in draw(st.sets(st.integers(0, 4)))),
            pending=draw(st.sampled_from([(), ("save",), ("prepare", "pause")])),
        )
        for rank in range(size * num_groups)
    ]
    return reports, groups


def planned(reports, groups, mode: RepairMode, *, accepted: int = 3) -> RepairPlan | None:
    try:
        return plan_repair(reports, groups, mode=mode, accepted=accepted)
    except Unrepairable:
        return None


def carried_out(plan: RepairPlan, reports: Sequence[RankReport]) -> dict[int, int | None]:
    """The step of each rank after the plan, None where its state is not a step's.

    Fails where a rank would have to do what it cannot.
    """
    steps = {r.rank: r.step if r.is_clean else None for r in reports}
    by_rank = {r.rank: r for r in reports}
    for rank in plan.applies:
        report = by_rank[rank]
        assert report.is_clean
        assert report.phase >= PREPARED
        steps[rank] = report.step + 1
    if plan.rolls_back:
        targets = {move.target for move in plan.moves}
        steps |= {r.rank: r.snapshot_step for r in reports if r.rank not in targets}
    for move in plan.moves:
        assert steps[move.source] is not None, "a state that is not to be trusted is given away"
        steps[move.target] = steps[move.source]
    return steps


def needs_no_other(report: RankReport, plan: RepairPlan) -> bool:
    """Whether a rank can come to the plan's step by itself, in the plan's way."""
    if plan.rolls_back:
        return report.is_clean and report.snapshot_step == plan.step
    return report.can_be_at(plan.step)


TRAINING_MODES = st.sampled_from([RepairMode.TRAIN, RepairMode.ROLL_BACK, RepairMode.ACCEPT])


@given(worlds(), TRAINING_MODES, st.integers(1, 4))
def test_a_plan_leaves_every_rank_at_the_same_step(world, mode, accepted):
    reports, groups = world
    plan = planned(reports, groups, mode, accepted=accepted)
    if plan is not None:
        assert set(carried_out(plan, reports).values()) == {plan.step}


@given(worlds(), TRAINING_MODES)
def test_a_state_comes_from_a_clean_rank_of_the_same_group_and_goes_to_one_in_want(world, mode):
    reports, groups = world
    plan = planned(reports, groups, mode)
    by_rank = {report.rank: report for report in reports}
    if plan is None:
        return
    for move in plan.moves:
        assert by_rank[move.source].is_clean
        assert any({move.source, move.target} <= set(group) for group in groups)
        assert not needs_no_other(by_rank[move.target], plan)


@given(worlds())
def test_a_step_that_a_rank_to_be_trusted_knows_as_voted_is_never_lost(world):
    reports, groups = world
    plan = planned(reports, groups, RepairMode.TRAIN)
    if plan is not None:
        for report in reports:
            if report.is_clean:
                assert plan.step >= report.step + (report.phase >= VOTED)


@given(worlds())
def test_training_can_be_repaired_exactly_when_each_group_can_reach_the_step(world):
    reports, groups = world
    clean = [report for report in reports if report.is_clean]
    target = max((report.reachable_step for report in clean), default=None)
    able = {report.rank for report in clean if target is not None and report.can_be_at(target)}
    possible = target is not None and all(able & set(group) for group in groups)
    assert (planned(reports, groups, RepairMode.TRAIN) is not None) == possible


@given(worlds(), st.data())
def test_savers_are_one_rank_of_each_group_and_all_at_the_step(world, data):
    reports, groups = world
    living = [report for report in reports if data.draw(st.booleans())]
    plan = planned(living, groups, RepairMode.LAST_SAVE)
    if plan is None:
        return
    assert [sum(rank in group for rank in plan.savers) for group in groups] == [1] * len(groups)
    assert len(plan.savers) == len(groups)
    steps = carried_out(plan, living)
    assert {steps[rank] for rank in plan.savers} == {plan.step}


@given(worlds(), st.sampled_from(RepairMode))
def test_a_vote_of_a_plan_is_about_its_step(world, mode):
    reports, groups = world
    plan = planned(reports, groups, mode)
    if plan is not None and plan.vote is not None:
        assert plan.vote.step == plan.step


@given(st.lists(st.integers(0, 40), unique=True))
def test_ranks_of_a_plan_are_ranges_as_text_and_come_back_in_their_order(ranks):
    plan = RepairPlan(mode=RepairMode.TRAIN, step=1, applies=tuple(ranks), savers=tuple(ranks))
    assert RepairPlan.model_validate_json(plan.model_dump_json()) == plan


def test_a_plan_for_thousands_of_ranks_is_a_short_text():
    applies = (*range(16), *range(24, 8192))
    plan = RepairPlan(mode=RepairMode.TRAIN, step=1, applies=applies)
    assert plan.model_dump(mode="json")["applies"] == "0-15,24-8191"


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-b"])
def test_what_is_no_range_of_ranks_is_refused(text):
    with pytest.raises(ValueError, match="applies"):
        RepairPlan.model_validate({"mode": "train", "step": 1, "applies": text})
