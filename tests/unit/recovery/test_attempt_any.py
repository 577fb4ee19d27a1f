"""The life of an attempt: what holds whatever happens, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.recovery.attempts import ALONE, DDP, HSDP, RunOutcome
from training.recovery.actions import LogEvent, ToAgent, ToRank
from training.recovery.attempt import Stage
from training.recovery.events import RecoveryBegan, RecoveryEnded
from training.recovery.protocol import (
    LastSaved,
    NewGeneration,
    Plan,
    Reconnected,
    ReplaceWorker,
    WorkerFaultKind,
)
from training.recovery.repair import RankReport, RepairMode, StepPhase, Vote
from training.recovery.rungs import IN_PROCESS, Policy

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
    return lambda played: played.attempt.generation_report(
        played.attempt.generation + offset, report, now_s=played.now_s
    )


def has_saved(rank: int, told: LastSaved) -> Event:
    return lambda played: played.attempt.last_saved(rank, told, now_s=played.now_s)


def has_links(rank: int, offset: int, link: int, problem: str | None) -> Event:
    def act(played: RunOutcome) -> None:
        generation = played.attempt.generation + offset
        told = Reconnected(generation=generation, connection=link, problem=problem)
        played.attempt.reconnected(rank, told, now_s=played.now_s)

    return act


def ends(rank: int) -> Event:
    return lambda played: played.attempt.ending(rank, now_s=played.now_s)


def pauses(rank: int, step: int, stands: bool) -> Event:  # noqa: FBT001 drawn by hypothesis
    return lambda played: played.attempt.paused(rank, step, is_paused=stands, now_s=played.now_s)


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
        connection=st.sampled_from([None, 0, 1]),
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
    happen(played, chapters)
    return played


def happen(played: RunOutcome, chapters) -> None:
    for event in (one for chapter in chapters for one in chapter):
        event(played)
        played.collect()


lives = st.builds(
    play,
    st.sampled_from([DDP, HSDP, ALONE]),
    POLICIES,
    st.sampled_from([True] * 7 + [False]),
    st.lists(chapters, min_size=1, max_size=8),
)


def trains_is_given_up_or_waits_for_something_with_a_limit(played: RunOutcome) -> None:
    quiet = played.stage() in (Stage.STARTING, Stage.TRAINING, Stage.ENDING, Stage.GIVEN_UP)
    assert quiet == (played.attempt._deadline_s is None)


def calls_a_rank_to_a_generation_before_it_plans_for_it(played: RunOutcome) -> None:
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


def records_recoveries_before_it_acts_on_them_and_ends_them_once(played: RunOutcome) -> None:
    begun: set[int] = set()
    ended: set[int] = set()
    for action in played.actions:
        match action:
            case LogEvent(RecoveryBegan() as note):
                assert note.decision.rung in IN_PROCESS
                assert note.number not in begun
                begun.add(note.number)
            case LogEvent(RecoveryEnded() as over):
                assert over.number in begun - ended
                ended.add(over.number)
                assert over.duration_s >= 0
                assert set(over.replaced).isdisjoint(over.repaired)
            case ToAgent(message=ReplaceWorker()):
                assert begun > ended, "a process is started for no recovery"
    if played.stage() in (Stage.TRAINING, Stage.GIVEN_UP):
        assert begun == ended


def has_living_ranks_save_at_the_end(played: RunOutcome) -> None:
    to_ranks = [action for action in played.actions if isinstance(action, ToRank)]
    for message in (one.message for one in to_ranks if isinstance(one.message, Plan)):
        assert bool(message.plan.savers) == (message.plan.mode is RepairMode.LAST_SAVE)
        assert set(message.plan.savers) <= {one.rank for one in to_ranks if one.message == message}


def stays_given_up_and_calls_no_rank(played: RunOutcome, later: list[Any]) -> None:
    if played.stage() is not Stage.GIVEN_UP:
        return
    played.actions.clear()
    played._answered = 0
    happen(played, later)
    assert played.stage() is Stage.GIVEN_UP
    assert played.began() == []
    for action in played.actions:
        message = getattr(action, "message", None)
        assert not isinstance(message, NewGeneration | Plan | ReplaceWorker)


def comes_to_an_end_when_no_rank_answers(played: RunOutcome) -> None:
    for _ in range(40):
        if played.attempt._deadline_s is None:
            break
        played.passes(1000.0)
    assert played.attempt._deadline_s is None


@settings(max_examples=400)
@given(lives, st.lists(chapters, min_size=1, max_size=4))
def test_whatever_happens_an_attempt(played, later):
    trains_is_given_up_or_waits_for_something_with_a_limit(played)
    calls_a_rank_to_a_generation_before_it_plans_for_it(played)
    records_recoveries_before_it_acts_on_them_and_ends_them_once(played)
    has_living_ranks_save_at_the_end(played)
    stays_given_up_and_calls_no_rank(played, later)
    comes_to_an_end_when_no_rank_answers(played)
