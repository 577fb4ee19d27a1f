"""The life of an attempt: what holds whatever happens, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.training.recovery.actions import LogEvent, ToAgent, ToRank
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.invariants import InvariantBroken
from perdure.training.recovery.protocol import (
    LastSaved,
    NewGeneration,
    Plan,
    Reconnected,
    RecoveryBegan,
    RecoveryEnded,
    ReplaceWorker,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import RankReport, RepairMode, StepPhase, Vote
from perdure.training.recovery.rungs import IN_PROCESS, Policy
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import (
    AgentConnected,
    AgentDisconnected,
    ChipFailed,
    ConnectionsRestored,
    LastSaveReported,
    LoopEnded,
    NodeLost,
    NodeSlow,
    PauseWanted,
    RankConnected,
    RankPaused,
    StateReported,
    StepCommitted,
    Stimulus,
)
from perdure.training.recovery.transitions import Reaction, reaction_to
from tests.unit.recovery.attempts import ALONE, DDP, HSDP, AttemptHarness, is_plan
from tests.unit.recovery.ladder_invariants import CHIP_CODE, RESET_CODE, SEPARATE_CODE

RANKS = st.integers(0, 3)
STEPS = st.integers(8, 12)
OFFSETS = st.sampled_from([0, 0, 0, -1])  # mostly of the present generation
POLICIES = st.builds(
    Policy,
    operator_retry=st.booleans(),
    memory_retry=st.sampled_from([True] * 7 + [False]),
    collective_retry=st.sampled_from([True] * 7 + [False]),
    process_replace=st.sampled_from([True] * 7 + [False]),
    numeric_retry=st.booleans(),
    end_of_life_checkpoint=st.booleans(),
)
Event = Callable[[AttemptHarness], Any]


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
    return lambda harness: harness.trains(
        rank, generation=harness.attempt.generation + offset, step=step
    )


def worker_fault(rank: int, kind: WorkerFaultKind, offset: int, step: int, **changes: Any) -> Event:
    def act(harness: AttemptHarness) -> None:
        generation = harness.attempt.generation + offset
        harness.worker_fault(rank, kind, generation=generation, step=step, **changes)

    return act


def progresses_to(report: RankReport, offset: int) -> Event:
    return lambda harness: harness.handle(
        StateReported(harness.attempt.generation + offset, report)
    )


def happens(harness: AttemptHarness, stimulus: Stimulus) -> None:
    """It comes in, where it can; where it cannot, that is an error which changes nothing."""
    if reaction_to(type(stimulus), harness.attempt.memory.state) is Reaction.REFUSE:
        with pytest.raises(InvariantBroken, match=f"{stimulus.kind} is impossible"):
            harness.handle(stimulus)
    else:
        harness.handle(stimulus)


def has_saved(rank: int, report: LastSaved) -> Event:
    return lambda harness: happens(harness, LastSaveReported(rank, report))


def has_connections(rank: int, offset: int, connection: int, problem: str | None) -> Event:
    def act(harness: AttemptHarness) -> None:
        generation = harness.attempt.generation + offset
        report = Reconnected(generation=generation, connection=connection, problem=problem)
        happens(harness, ConnectionsRestored(rank, report))

    return act


def ends(rank: int) -> Event:
    return lambda harness: harness.handle(LoopEnded(rank))


def pauses(rank: int, step: int, is_paused: bool) -> Event:  # noqa: FBT001 drawn by hypothesis
    return lambda harness: harness.handle(RankPaused(rank, step, is_paused=is_paused))


def loses(node: int, is_slow: bool) -> Event:  # noqa: FBT001 drawn by hypothesis
    def act(harness: AttemptHarness) -> None:
        kind = FaultClass.FAIL_SLOW if is_slow else FaultClass.NODE_LOST
        fault = Fault(kind, harness.now_s, "silent", node=f"node-{node}", step=harness.attempt.step)
        lost = NodeSlow if is_slow else NodeLost
        harness.handle(lost(fault, (2 * node, 2 * node + 1)))

    return act


def reports_a_code(node: int, device: int, code: str) -> Event:
    def act(harness: AttemptHarness) -> None:
        kind = FaultClass.DEVICE_MEMORY_ERROR
        fault = Fault(kind, harness.now_s, code, node=f"node-{node}", device=device, code=code)
        harness.handle(ChipFailed(fault))

    return act


PROBLEMS = st.sampled_from([None, None, "the disk is full"])
FAULTS: st.SearchStrategy[Event] = st.one_of(
    RANKS.map(lambda rank: lambda harness: harness.kill(rank)),
    st.builds(loses, st.integers(0, 1), st.booleans()),
    st.builds(
        reports_a_code,
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([CHIP_CODE, RESET_CODE, SEPARATE_CODE]),
    ),
    st.integers(0, 1).map(
        lambda node: lambda harness: harness.handle(AgentDisconnected(f"node-{node}"))
    ),
    RANKS.map(lambda rank: lambda harness: harness.kill(rank, is_reported=False)),
    st.builds(
        worker_fault,
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
    st.just(lambda harness: harness.answer()),
    st.just(lambda harness: harness.answer(until=is_plan)),
    RANKS.map(lambda rank: lambda harness: harness.answer(silent={rank})),
)
OTHERS: st.SearchStrategy[Event] = st.one_of(
    st.sampled_from([0.01, 0.1, 6, 31]).map(
        lambda delay_s: lambda harness: harness.advance(delay_s)
    ),
    RANKS.map(lambda rank: lambda harness: harness.handle(RankConnected(rank))),
    RANKS.map(lambda rank: lambda harness: harness.not_replaced(rank)),
    st.sampled_from([(0, 1), (2, 3)]).map(
        lambda ranks: lambda harness: harness.handle(AgentConnected("node-2", ranks))
    ),
    st.builds(trains, RANKS, OFFSETS, STEPS),
    RANKS.flatmap(lambda rank: st.builds(progresses_to, reports(rank), OFFSETS)),
    st.builds(has_saved, RANKS, st.builds(LastSaved, step=STEPS, problem=PROBLEMS)),
    st.builds(has_connections, RANKS, OFFSETS, st.integers(0, 1), PROBLEMS),
    st.booleans().map(lambda wanted: lambda harness: harness.handle(PauseWanted(wanted))),
    st.builds(pauses, RANKS, STEPS, st.booleans()),
    st.just(lambda harness: harness.handle(StepCommitted(harness.attempt.step))),
    # Both end whatever can happen.
    st.builds(ends, RANKS),
    RANKS.map(lambda rank: lambda harness: harness.kill(rank, exit_code=1)),
)
# Drawn alone, most events would meet an attempt in which nothing has happened yet.
chapters = st.tuples(FAULTS, ANSWERS, st.one_of(ANSWERS, OTHERS))


def play(groups, policy, is_training, chapters) -> AttemptHarness:
    harness = AttemptHarness.of(groups, policy=policy, is_training=is_training)
    happen(harness, chapters)
    return harness


def happen(harness: AttemptHarness, chapters) -> None:
    for event in (one for chapter in chapters for one in chapter):
        event(harness)
        harness.collect()


lives = st.builds(
    play,
    st.sampled_from([DDP, HSDP, ALONE]),
    POLICIES,
    st.sampled_from([True] * 7 + [False]),
    st.lists(chapters, min_size=1, max_size=8),
)


def trains_is_given_up_or_waits_for_something_with_a_limit(harness: AttemptHarness) -> None:
    quiet = harness.stage() in (Stage.STARTING, Stage.TRAINING, Stage.ENDING, Stage.GIVEN_UP)
    assert quiet == (harness.attempt.memory.round.deadline_s is None)


def calls_a_rank_to_a_generation_before_it_plans_for_it(harness: AttemptHarness) -> None:
    newest: dict[int, int] = {}
    for action in harness.actions:
        match action:
            case ToRank(rank, NewGeneration(number=number)):
                assert number >= newest.get(rank, 0)
                newest[rank] = number
            case ToRank(rank, Plan(generation=generation)):
                assert newest[rank] == generation
            case ToAgent(message=ReplaceWorker(rank=replaced)):
                newest.pop(replaced, None)


def records_recoveries_before_it_acts_on_them_and_ends_them_once(harness: AttemptHarness) -> None:
    begun: set[int] = set()
    ended: set[int] = set()
    for action in harness.actions:
        match action:
            case LogEvent(RecoveryBegan() as event):
                assert event.decision.rung in IN_PROCESS
                assert event.number not in begun
                begun.add(event.number)
            case LogEvent(RecoveryEnded() as over):
                assert over.number in begun - ended
                ended.add(over.number)
                assert over.duration_s >= 0
                assert set(over.replaced).isdisjoint(over.repaired)
            case ToAgent(message=ReplaceWorker()):
                assert begun > ended, "a process is started for no recovery"
    if harness.stage() in (Stage.TRAINING, Stage.GIVEN_UP):
        assert begun == ended


def has_living_ranks_save_at_the_end(harness: AttemptHarness) -> None:
    to_ranks = [action for action in harness.actions if isinstance(action, ToRank)]
    for message in (one.message for one in to_ranks if isinstance(one.message, Plan)):
        assert bool(message.plan.savers) == (message.plan.mode is RepairMode.LAST_SAVE)
        assert set(message.plan.savers) <= {one.rank for one in to_ranks if one.message == message}


def stays_given_up_and_calls_no_rank(harness: AttemptHarness, later: list[Any]) -> None:
    if harness.stage() is not Stage.GIVEN_UP:
        return
    harness.actions.clear()
    harness._answered = 0
    happen(harness, later)
    assert harness.stage() is Stage.GIVEN_UP
    assert harness.began() == []
    for action in harness.actions:
        message = getattr(action, "message", None)
        assert not isinstance(message, NewGeneration | Plan | ReplaceWorker)


def comes_to_an_end_when_no_rank_answers(harness: AttemptHarness) -> None:
    for _ in range(40):
        if harness.attempt.memory.round.deadline_s is None:
            break
        harness.advance(1000.0)
    assert harness.attempt.memory.round.deadline_s is None


@settings(max_examples=400)
@given(lives, st.lists(chapters, min_size=1, max_size=4))
def test_whatever_happens_an_attempt(harness, later):
    trains_is_given_up_or_waits_for_something_with_a_limit(harness)
    calls_a_rank_to_a_generation_before_it_plans_for_it(harness)
    records_recoveries_before_it_acts_on_them_and_ends_them_once(harness)
    has_living_ranks_save_at_the_end(harness)
    stays_given_up_and_calls_no_rank(harness, later)
    comes_to_an_end_when_no_rank_answers(harness)
