"""The life of an attempt: what holds whatever happens, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recovery.attempts import ALONE, DDP, HSDP, RunOutcome
from training.recovery.actions import Noted, ToAgent, ToRank
from training.recovery.attempt import Stage
from training.recovery.events import RecoveryBegan, RecoveryEnded
from training.recovery.ladder import IN_PROCESS, Policy
from training.recovery.protocol import (
    LastSaved,
    NewGeneration,
    Plan,
    Reconnected,
    ReplaceWorker,
    WorkerFaultKind,
)
from training.recovery.repair import RankReport, RepairMode, StepPhase, Vote

RANKS = st.integers(0, 3)
STEPS = st.integers(8, 12)
OFFSETS = st.sampled_from([0, 0, 0, -1])  # mostly of the present generation
POLICIES = st.builds(
    Policy,
    operator_retry=st.booleans(),
    step_retry=st.sampled_from([True] * 7 + [False]),
    process_replace=st.sampled_from([True] * 7 + [False]),
    numeric_retry=st.booleans(),
    end_of_life_checkpoint=st.booleans(),
)
Event = Callable[[RunOutcome], Any]


@st.composite
def reports(draw: Any, rank: int) -> RankReport:
    return RankReport(
        rank=rank,
        step=draw(STEPS),
        phase=draw(st.sampled_from(StepPhase)),
        is_dirty=draw(st.sampled_from([False, False, True])),
        is_fresh=draw(st.sampled_from([False, False, True])),
        snapshot_step=draw(st.sampled_from([None, 8])),
        votes=(Vote(step=draw(STEPS), loss=1.0, grad_norm=1.0),),
    )


def trains(rank: int, offset: int, step: int) -> Event:
    return lambda played: played.trains(
        rank, generation=played.attempt.generation + offset, step=step
    )


def sees(rank: int, trouble: WorkerFaultKind, offset: int, step: int, **changes: Any) -> Event:
    def act(played: RunOutcome) -> None:
        generation = played.attempt.generation + offset
        played.sees(rank, trouble, generation=generation, step=step, **changes)

    return act


def stands_at(report: RankReport, offset: int) -> Event:
    return lambda played: played.attempt.standing(
        played.attempt.generation + offset, report, now_s=played.now_s
    )


def has_saved(rank: int, told: LastSaved) -> Event:
    return lambda played: played.attempt.last_saved(rank, told, now_s=played.now_s)


def has_links(rank: int, offset: int, link: int, problem: str | None) -> Event:
    def act(played: RunOutcome) -> None:
        generation = played.attempt.generation + offset
        told = Reconnected(generation=generation, link=link, problem=problem)
        played.attempt.reconnected(rank, told, now_s=played.now_s)

    return act


def ends(rank: int) -> Event:
    return lambda played: played.attempt.ending(rank, now_s=played.now_s)


def pauses(rank: int, step: int, stands: bool) -> Event:  # noqa: FBT001 drawn by hypothesis
    return lambda played: played.attempt.paused(rank, step, stands=stands, now_s=played.now_s)


PROBLEMS = st.sampled_from([None, None, "the disk is full"])
FAULTS: st.SearchStrategy[Event] = st.one_of(
    RANKS.map(lambda rank: lambda played: played.dies(rank)),
    RANKS.map(lambda rank: lambda played: played.dies(rank, told=False)),
    st.builds(
        sees,
        RANKS,
        st.sampled_from(WorkerFaultKind),
        OFFSETS,
        STEPS,
        is_finite=st.booleans(),
        link=st.sampled_from([None, 0, 1]),
        culprit=st.sampled_from([None, 0, 2]),
    ),
)
ANSWERS: st.SearchStrategy[Event] = st.one_of(
    st.just(lambda played: played.answer()),
    st.just(lambda played: played.answer(until=lambda message: isinstance(message, Plan))),
    RANKS.map(lambda rank: lambda played: played.answer(silent={rank})),
)
OTHERS: st.SearchStrategy[Event] = st.one_of(
    st.sampled_from([0.01, 0.1, 6, 31]).map(lambda delay_s: lambda played: played.passes(delay_s)),
    RANKS.map(lambda rank: lambda played: played.attempt.joined(rank)),
    st.builds(trains, RANKS, OFFSETS, STEPS),
    RANKS.flatmap(lambda rank: st.builds(stands_at, reports(rank), OFFSETS)),
    st.builds(has_saved, RANKS, st.builds(LastSaved, step=STEPS, problem=PROBLEMS)),
    st.builds(has_links, RANKS, OFFSETS, st.integers(0, 1), PROBLEMS),
    st.booleans().map(lambda wanted: lambda played: played.attempt.pause(wanted=wanted)),
    st.builds(pauses, RANKS, STEPS, st.booleans()),
    st.just(lambda played: played.attempt.committed(played.attempt.step)),
    # Both end whatever can happen.
    st.builds(ends, RANKS),
    RANKS.map(lambda rank: lambda played: played.dies(rank, exit_code=1)),
)
# Drawn alone, most events would meet an attempt in which nothing has happened yet.
chapters = st.tuples(FAULTS, ANSWERS, st.one_of(ANSWERS, OTHERS))


def play(groups, policy, is_training, chapters) -> RunOutcome:
    played = RunOutcome.of(groups, policy=policy, is_training=is_training)
    for happens in (one for chapter in chapters for one in chapter):
        happens(played)
        played.collect()
    return played


lives = st.builds(
    play,
    st.sampled_from([DDP, HSDP, ALONE]),
    POLICIES,
    st.sampled_from([True] * 7 + [False]),
    st.lists(chapters, min_size=1, max_size=8),
)


@settings(max_examples=200, deadline=None)
@given(lives)
def test_an_attempt_trains_is_given_up_or_waits_for_something_with_a_limit(played):
    stage = played.stage()
    quiet = stage in (Stage.STARTING, Stage.TRAINING, Stage.ENDING, Stage.GIVEN_UP)
    assert quiet == (played.attempt._deadline_s is None)


@settings(max_examples=200, deadline=None)
@given(lives)
def test_a_recovery_that_nobody_answers_comes_to_an_end_by_itself(played):
    for _ in range(40):
        if played.attempt._deadline_s is None:
            break
        played.passes(1000.0)
    assert played.attempt._deadline_s is None


@settings(max_examples=200, deadline=None)
@given(lives)
def test_a_rank_gets_plans_of_the_generation_alone_that_it_was_called_to(played):
    newest: dict[int, int] = {}
    for action in played.actions:
        match action:
            case ToRank(rank, NewGeneration(number=number)):
                assert number >= newest.get(rank, 0)
                newest[rank] = number
            case ToRank(rank, Plan(generation=generation)):
                assert newest[rank] == generation
            case ToAgent(message=ReplaceWorker(rank=replaced)):
                newest.pop(replaced, None)


@settings(max_examples=200, deadline=None)
@given(lives)
def test_recoveries_are_noted_before_they_are_acted_on_and_end_once(played):
    begun: set[int] = set()
    ended: set[int] = set()
    for action in played.actions:
        match action:
            case Noted(RecoveryBegan() as note):
                assert note.decision.rung in IN_PROCESS
                assert note.number not in begun
                begun.add(note.number)
            case Noted(RecoveryEnded() as over):
                assert over.number in begun - ended
                ended.add(over.number)
                assert over.duration_s >= 0
                assert set(over.replaced).isdisjoint(over.repaired)
            case ToAgent(message=ReplaceWorker()):
                assert begun > ended, "a process is started for no recovery"
    if played.stage() in (Stage.TRAINING, Stage.GIVEN_UP):
        assert begun == ended


@settings(max_examples=200, deadline=None)
@given(lives, st.lists(chapters, min_size=1, max_size=4))
def test_what_was_given_up_stays_so_and_has_nobody_called(played, later):
    if played.stage() is not Stage.GIVEN_UP:
        return
    played.actions.clear()
    played._answered = 0
    for happens in (one for chapter in later for one in chapter):
        happens(played)
        played.collect()
    assert played.stage() is Stage.GIVEN_UP
    assert not [note for note in played.notes() if isinstance(note, RecoveryBegan)]
    for action in played.actions:
        message = getattr(action, "message", None)
        assert not isinstance(message, NewGeneration | Plan | ReplaceWorker)


@settings(max_examples=200, deadline=None)
@given(lives)
def test_savers_of_a_last_save_are_living_ranks(played):
    told = [action for action in played.actions if isinstance(action, ToRank)]
    plans = [action.message for action in told if isinstance(action.message, Plan)]
    for message in plans:
        assert bool(message.plan.savers) == (message.plan.mode is RepairMode.LAST_SAVE)
        assert set(message.plan.savers) <= {one.rank for one in told if one.message == message}
