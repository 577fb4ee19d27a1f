"""Which rank holds the others up."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from training.diagnosis.classify import Evidence, SilentRank, diagnose
from training.diagnosis.standstill import Stand, holding_up
from training.recovery.faults import FaultClass

ALLREDUCE = "allreduce in world"


def stand(rank: int, **changes: Any) -> Stand:
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
    return Stand(**{**fields, **changes})


def missing(*stands: Stand) -> list[int]:
    found = holding_up(stands)
    assert found is not None
    return [one.rank for one in found.missing]


def test_a_rank_outside_of_the_collective_is_missing():
    absent = stand(2, entered=1, left=1)
    assert missing(stand(0), stand(1), absent, stand(3)) == [2]


def test_a_rank_that_has_entered_fewer_is_missing():
    assert missing(stand(0), stand(1, entered=1, left=0), stand(2)) == [1]


def test_a_rank_of_an_older_step_is_missing():
    assert missing(stand(0), stand(1, step=11, entered=5, left=4), stand(2)) == [1]


def test_a_stopped_process_is_missing_wherever_it_stands():
    assert missing(stand(0), stand(1, process_state="T"), stand(2, entered=1, left=1)) == [1]


def test_several_ranks_may_be_missing():
    outside = {"entered": 0, "left": 0}
    assert missing(stand(0), stand(1, **outside), stand(2, **outside)) == [1, 2]


def test_when_nobody_waits_the_one_silent_longest_is_named():
    outside = {"entered": 0, "left": 0, "phase": "data"}
    ranks = [stand(0, **outside), stand(1, **outside, silent_s=90.0), stand(2, **outside)]
    assert missing(*ranks) == [1]


def test_when_all_wait_in_the_same_collective_none_is_named():
    found = holding_up([stand(rank) for rank in range(4)])
    assert found is not None
    assert found.missing == ()
    assert found.line == ("all 4 ranks wait in allreduce in world: a link or a device between them")


def test_a_lone_rank_is_the_one():
    assert missing(stand(0, entered=0, left=0)) == [0]


def test_the_line_says_who_waits_for_whom():
    found = holding_up([stand(0), stand(1), stand(2, entered=1, left=1), stand(3)])
    assert found is not None
    assert found.line == (
        "rank 2 on node-1: in no collective, phase step, 1 entered after step 12; "
        "ranks 0 to 1, 3: waiting in allreduce in world"
    )


def test_thousands_of_ranks_are_told_in_a_few_lines():
    found = holding_up([stand(rank, entered=2 - (rank == 777)) for rank in range(4096)])
    assert found is not None
    assert [one.rank for one in found.missing] == [777]
    assert len(found.ranks) == 2
    assert "ranks 0 to 776, 778 to 4095" in found.ranks[0]


def test_the_fault_of_a_hang_names_the_missing_rank_and_not_who_was_silent_first():
    silent = (SilentRank(0, "node-0", 90.0, 60.0, "step"),)
    stands = (stand(0), stand(1), stand(2, entered=1, left=1), stand(3))
    fault = diagnose(Evidence(at_s=1.0, step=12, silent=silent, stands=stands)).fault
    assert fault.fault_class is FaultClass.HANG
    assert (fault.rank, fault.node, fault.device) == (2, "node-1", 0)
    assert "ranks 0 to 1, 3: waiting in allreduce in world" in fault.evidence


def test_where_ranks_stand_is_no_fault_without_silence():
    stands = (stand(0), stand(1, entered=1, left=1))
    fault = diagnose(Evidence(at_s=1.0, step=12, stands=stands)).fault
    assert fault.fault_class is FaultClass.UNKNOWN


@given(
    st.lists(
        st.builds(
            stand,
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
def test_some_but_never_all_of_several_ranks_are_missing(stands):
    found = holding_up(stands)
    assert found is not None
    assert len(found.missing) < len(stands) or len(stands) == 1
    assert found.line
