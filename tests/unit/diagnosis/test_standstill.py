"""Which rank holds the others up."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from training.diagnosis.classify import Evidence, SilentRank, diagnose
from training.diagnosis.standstill import RankProgress, standstill_of
from training.recovery.faults import FaultClass

ALLREDUCE = "allreduce in world"


def rank_at(rank: int, **changes: Any) -> RankProgress:
    """A rank that waits in the second collective of step 13."""
    fields: dict[str, Any] = {
        "rank": rank,
        "node": f"node-{rank // 2}",
        "device": rank % 2,
        "step": 12,
        "phase": "step",
        "entered": 2,
        "left": 1,
        "operation": ALLREDUCE,
        "silent_s": 70.0,
        "process_state": "S",
    }
    return RankProgress(**{**fields, **changes})


def missing(*ranks: RankProgress) -> list[int]:
    found = standstill_of(ranks)
    assert found is not None
    return [one.rank for one in found.missing]


def test_a_rank_outside_of_the_collective_is_missing():
    absent = rank_at(2, entered=1, left=1)
    assert missing(rank_at(0), rank_at(1), absent, rank_at(3)) == [2]


def test_a_rank_that_has_entered_fewer_is_missing():
    assert missing(rank_at(0), rank_at(1, entered=1, left=0), rank_at(2)) == [1]


def test_a_rank_of_an_older_step_is_missing():
    assert missing(rank_at(0), rank_at(1, step=11, entered=5, left=4), rank_at(2)) == [1]


def test_a_stopped_process_is_missing_whatever_it_does():
    assert missing(rank_at(0), rank_at(1, process_state="T"), rank_at(2, entered=1, left=1)) == [1]


def test_several_ranks_may_be_missing():
    outside = {"entered": 0, "left": 0}
    assert missing(rank_at(0), rank_at(1, **outside), rank_at(2, **outside)) == [1, 2]


def test_when_no_rank_waits_the_one_silent_longest_is_named():
    outside = {"entered": 0, "left": 0, "phase": "data"}
    ranks = [rank_at(0, **outside), rank_at(1, **outside, silent_s=90.0), rank_at(2, **outside)]
    assert missing(*ranks) == [1]


def test_when_all_wait_in_the_same_collective_none_is_named():
    found = standstill_of([rank_at(rank) for rank in range(4)])
    assert found is not None
    assert found.missing == ()
    assert found.line == ("all 4 ranks wait in allreduce in world: a link or a device between them")


def test_a_lone_rank_is_the_one():
    assert missing(rank_at(0, entered=0, left=0)) == [0]


def test_the_line_names_who_waits_for_whom():
    found = standstill_of([rank_at(0), rank_at(1), rank_at(2, entered=1, left=1), rank_at(3)])
    assert found is not None
    assert found.line == (
        "rank 2 on node-1: in no collective, phase step, 1 entered after step 12; "
        "ranks 0 to 1, 3: waiting in allreduce in world"
    )


def test_thousands_of_ranks_fit_into_a_few_lines():
    found = standstill_of([rank_at(rank, entered=2 - (rank == 777)) for rank in range(4096)])
    assert found is not None
    assert [one.rank for one in found.missing] == [777]
    assert len(found.ranks) == 2
    assert "ranks 0 to 776, 778 to 4095" in found.ranks[0]


def test_the_fault_of_a_hang_names_the_missing_rank_and_not_who_was_silent_first():
    silent = (SilentRank(0, "node-0", 90.0, 60.0, "step"),)
    ranks = (rank_at(0), rank_at(1), rank_at(2, entered=1, left=1), rank_at(3))
    fault = diagnose(Evidence(at_s=1.0, step=12, silent=silent, rank_progress=ranks)).fault
    assert fault.fault_class is FaultClass.HANG
    assert (fault.rank, fault.node, fault.device) == (2, "node-1", 0)
    assert "ranks 0 to 1, 3: waiting in allreduce in world" in fault.evidence


def test_where_ranks_are_is_no_fault_without_silence():
    ranks = (rank_at(0), rank_at(1, entered=1, left=1))
    fault = diagnose(Evidence(at_s=1.0, step=12, rank_progress=ranks)).fault
    assert fault.fault_class is FaultClass.UNKNOWN


@given(
    st.lists(
        st.builds(
            rank_at,
            st.integers(0, 30),
            step=st.integers(0, 2),
            entered=st.integers(0, 3),
            left=st.just(0),
            silent_s=st.floats(0, 100),
            process_state=st.sampled_from("SRT"),
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda one: one.rank,
    )
)
def test_some_but_never_all_of_several_ranks_are_missing(ranks):
    found = standstill_of(ranks)
    assert found is not None
    assert len(found.missing) < len(ranks) or len(ranks) == 1
    assert found.line
