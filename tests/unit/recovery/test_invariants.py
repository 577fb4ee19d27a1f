"""Every invariant of an attempt can be broken, and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.training.recovery.actions import ToRank
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.invariants import (
    INVARIANTS,
    InvariantBroken,
    broken_invariants,
    check_invariants,
)
from perdure.training.recovery.memory import Memory, Suspicion
from perdure.training.recovery.protocol import (
    LastSaved,
    NewGeneration,
    WorkerFault,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import RepairMode, RepairPlan
from perdure.training.recovery.stages import State
from perdure.training.recovery.stimuli import FaultReported, RankConnected, StepRecorded
from tests.unit.recovery.attempts import AttemptHarness

REPORT = WorkerFault(generation=1, kind=WorkerFaultKind.CONNECTION, text="closed", step=3, at_s=1.0)
PLAN = RepairPlan(mode=RepairMode.TRAIN, step=3)
SAVE = RepairPlan(mode=RepairMode.LAST_SAVE, step=3, savers=(0, 1))


def have_a_deadline(memory: Memory) -> None:
    memory.round.deadline_s = 1.0


def recover_from_nothing(memory: Memory) -> None:
    memory.state, memory.round.deadline_s = State.REPAIRING, 1.0


def suspect_at_the_end(memory: Memory) -> None:
    memory.state, memory.round.suspicion = State.ENDING, Suspicion(1.0, 0, REPORT)


def keep_a_fault(memory: Memory) -> None:
    memory.early_faults.append(FaultReported(0, REPORT))


def keep_a_plan(memory: Memory) -> None:
    memory.round.plan = PLAN


def save_without_a_plan(memory: Memory) -> None:
    memory.state, memory.why = State.SAVING, "a fault"
    memory.round.mode, memory.round.deadline_s = RepairMode.LAST_SAVE, 1.0
    memory.round.training.clear()


def plan_a_last_save(memory: Memory) -> None:
    memory.round.mode = RepairMode.LAST_SAVE


def have_a_reason_to_end(memory: Memory) -> None:
    memory.why = "a fault"


def gather_among_ranks_that_train(memory: Memory) -> None:
    memory.state = State.GATHERING


def gather_among_paused_ranks(memory: Memory) -> None:
    memory.state = State.GATHERING
    memory.pauses.paused.add(0)


def record_a_pause_of_nobody(memory: Memory) -> None:
    memory.pauses.number = 1


def restore_what_did_not_break(memory: Memory) -> None:
    memory.round.restored.add(0)


def have_a_saver_twice(memory: Memory) -> None:
    memory.round.plan, memory.round.unsaved = SAVE, {0}
    memory.round.saved[0] = LastSaved(step=3)


def start_a_living_rank(memory: Memory) -> None:
    memory.ranks.starting.add(0)


def await_a_living_rank(memory: Memory) -> None:
    memory.ranks.awaited.add(0)


def check_the_chip_of_a_living_rank(memory: Memory) -> None:
    memory.checks[0] = HealPlan(None)


def hear_of_a_fifth_rank(memory: Memory) -> None:
    memory.ranks.ending.add(4)


def forget_an_action(memory: Memory) -> None:
    memory.outbox.add(ToRank(0, NewGeneration(number=1)))


BREAKS: tuple[Callable[[Memory], None], ...] = (
    have_a_deadline,
    recover_from_nothing,
    suspect_at_the_end,
    keep_a_fault,
    keep_a_plan,
    save_without_a_plan,
    plan_a_last_save,
    have_a_reason_to_end,
    gather_among_ranks_that_train,
    gather_among_paused_ranks,
    record_a_pause_of_nobody,
    restore_what_did_not_break,
    have_a_saver_twice,
    start_a_living_rank,
    await_a_living_rank,
    check_the_chip_of_a_living_rank,
    hear_of_a_fifth_rank,
    forget_an_action,
)


@pytest.mark.parametrize(("sentence", "break_it"), list(zip(INVARIANTS, BREAKS, strict=True)))
def test_each_sentence_is_false_of_an_attempt_that_is_broken_so(harness, sentence, break_it):
    assert broken_invariants(harness.attempt.memory) == []
    break_it(harness.attempt.memory)
    assert sentence in broken_invariants(harness.attempt.memory)


def test_the_error_names_the_stimulus_and_every_sentence_that_does_not_hold(harness):
    memory = harness.attempt.memory
    have_a_deadline(memory)
    hear_of_a_fifth_rank(memory)
    with pytest.raises(InvariantBroken) as error:
        check_invariants(memory, StepRecorded(7), State.TRAINING)
    text = str(error.value)
    assert text.startswith("after StepRecorded(step=7, kind='step_recorded') while training: ")
    assert "there is a deadline exactly while something is asked of ranks; " in text
    assert text.endswith("every rank that is known of is one of the attempt")


def test_a_state_that_a_stimulus_cannot_lead_to_is_an_error(harness):
    harness.attempt.memory.state = State.ENDING
    with pytest.raises(InvariantBroken, match="rank_connected never leads from training to ending"):
        check_invariants(harness.attempt.memory, RankConnected(0), State.TRAINING)


def test_an_attempt_checks_its_invariants_only_where_it_is_to():
    harness = AttemptHarness.of()
    have_a_deadline(harness.attempt.memory)
    with pytest.raises(InvariantBroken):
        harness.handle(StepRecorded(11))
    harness.attempt.checks_invariants = False
    harness.handle(StepRecorded(12))
    assert harness.attempt.step == 12
