"""What the replacement of a node takes of the coordinator grows with the ranks, not with pairs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.scale.estimate import ROUNDS, Costs, protocol_s
from benchmarks.scale.state_machine import Course, Replacement
from perdure.training.recovery import operations
from perdure.training.recovery.actions import last_save_of
from perdure.training.recovery.protocol import LastSave
from perdure.training.recovery.repair import StepPhase
from perdure.training.recovery.rungs import Rung
from perdure.training.recovery.stages import Stage
from tests.unit.recovery.attempts import AttemptHarness

SIZES = (4, 64, 512, 8192)
RANKS_PER_NODE = 8
PER_RANK = 5  # a fault, a generation, a report, a plan, and that it trains


def replaced(num_ranks: int, phase: StepPhase = StepPhase.RUN) -> Course:
    return Replacement(num_ranks, min(RANKS_PER_NODE, num_ranks // 2), phase=phase).run()


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_is_sent_two_messages_and_sends_three(size):
    course = replaced(size)
    lost = min(RANKS_PER_NODE, size // 2)
    assert course.stage is Stage.TRAINING
    assert dict(course.received) == {
        "worker_fault": size - lost,
        "node_gone": 1,
        "generation_report": size,
        "trains": size,
    }
    assert dict(course.sent) == {
        "generation": size,
        "plan": size,
        "recovery_began": 1,
        "recovery_ended": 1,
    }


@pytest.mark.parametrize("phase", [StepPhase.RUN, StepPhase.VOTED])
def test_no_message_grows_with_the_number_of_ranks(phase):
    small, large = replaced(64, phase), replaced(8192, phase)
    # Numbers of ranks have more digits.
    assert large.largest_bytes < small.largest_bytes + 100
    assert large.sent_bytes / large.num_ranks < small.sent_bytes / small.num_ranks + 100
    assert large.received_bytes / large.num_ranks < 1.2 * small.received_bytes / small.num_ranks


def test_every_new_rank_takes_its_state_from_a_holder_of_its_own():
    course = replaced(512)
    assert sorted(move.target for move in course.moves) == list(range(8, 16))
    assert len({move.source for move in course.moves}) == len(course.moves)


def test_time_grows_with_the_number_of_ranks_and_not_with_its_square():
    small_s = min(replaced(512).machine_s for _ in range(3))
    large_s = min(replaced(4096).machine_s for _ in range(3))
    assert large_s < 24 * small_s, "8 times as many ranks; their square would be 64 times"


def test_a_last_save_is_looked_at_when_the_last_of_its_savers_is_done(monkeypatch):
    looks = []

    def look(*given: Any, **named: Any) -> LastSave | None:
        looks.append(given)
        return last_save_of(*given, **named)

    monkeypatch.setattr(operations, "last_save_of", look)
    half = 512
    groups = [(rank, half + rank) for rank in range(half)]
    rungs = frozenset(Rung) - {Rung.PROCESS_REPLACE, Rung.NODE_REPLACE}
    harness = AttemptHarness.of(groups, supported=rungs, ranks_per_node=8)
    harness.kill(3)
    harness.answer()
    assert len(harness.last_save().ranks) == half
    assert len(looks) == 1, "each look goes through all savers"


def test_the_estimate_is_what_all_messages_cost_and_the_two_waits_for_all_ranks():
    course = replaced(8192)
    costs = Costs(message_s=1e-4, round_trip_s=0.5, source="an example")
    expected_s = (PER_RANK * 8192 - RANKS_PER_NODE + 3) * 1e-4 + ROUNDS * 0.5
    assert protocol_s(course, costs) == pytest.approx(expected_s)
