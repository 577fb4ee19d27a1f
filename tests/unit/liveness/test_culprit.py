"""Which rank holds the others up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, SilentRank
from perdure.training.liveness.culprit import find_standstill
from perdure.training.recovery.faults import FaultClass
from perdure.training.wire.rank_snapshot import RankSnapshot
from tests.values import not_none

ALLREDUCE = "allreduce in world"


def rank_at(rank: int, **changes: Any) -> RankSnapshot:
    """A rank that waits in the second collective of step 13."""
    fields: dict[str, Any] = {
        "rank": rank,
        "node": f"node-{rank // 2}",
        "device": rank % 2,
        "pid": 100 + rank,
        "step": 12,
        "phase": "step",
        "entered": 2,
        "left": 1,
        "operation": ALLREDUCE,
        "silent_s": 70.0,
        "process_state": "S",
    }
    return RankSnapshot(**{**fields, **changes})


OUTSIDE = {"entered": 0, "left": 0}


def missing(*ranks: RankSnapshot) -> list[int]:
    return [rank.rank for rank in not_none(find_standstill(ranks)).missing]


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ([{}, {}, {"entered": 1}, {}], [2]),
        ([{}, {"entered": 1, "left": 0}, {}], [1]),
        ([{}, {"step": 11, "entered": 5, "left": 4}, {}], [1]),
        ([{}, {"process_state": "T"}, {"entered": 1}], [1]),
        ([{}, OUTSIDE, OUTSIDE], [1, 2]),
        ([{"phase": "data", **OUTSIDE, "silent_s": silent_s} for silent_s in (70, 90, 70)], [1]),
        ([OUTSIDE], [0]),
    ],
    ids=[
        "outside of the collective", "has entered fewer", "at an older step",
        "stopped whatever it does", "several", "silent longest where none waits", "alone",
    ],
)  # fmt: skip
def test_a_rank_that_holds_the_others_up_is_missing(changes, ranks):
    assert missing(*(rank_at(rank, **change) for rank, change in enumerate(changes))) == ranks


def test_ranks_that_wait_for_each_other_in_different_places_are_told_with_their_places():
    place = "session.evaluation(), which all ranks must enter"
    standstill = not_none(find_standstill([rank_at(0, operation=place), rank_at(1), rank_at(2)]))
    assert standstill.missing == ()
    assert standstill.line.startswith("all 3 ranks wait, but not in the same collective: rank 0:")
    assert f"waiting in {place}" in standstill.line
    assert f"ranks 1 to 2: waiting in {ALLREDUCE}" in standstill.line


def test_when_all_wait_in_the_same_collective_none_is_named():
    standstill = not_none(find_standstill([rank_at(rank) for rank in range(4)]))
    assert standstill.missing == ()
    assert standstill.line == (
        "all 4 ranks wait in allreduce in world: a link or a device between them"
    )


def test_the_line_names_who_waits_for_whom():
    standstill = not_none(
        find_standstill([rank_at(0), rank_at(1), rank_at(2, entered=1, left=1), rank_at(3)])
    )
    assert standstill.line == (
        "rank 2 on node-1: in no collective, phase step, 1 entered after step 12; "
        "ranks 0 to 1, 3: waiting in allreduce in world"
    )


def test_thousands_of_ranks_fit_into_a_few_lines():
    standstill = not_none(
        find_standstill([rank_at(rank, entered=2 - (rank == 777)) for rank in range(4096)])
    )
    assert [rank.rank for rank in standstill.missing] == [777]
    assert len(standstill.ranks) == 2
    assert "ranks 0 to 776, 778 to 4095" in standstill.ranks[0]


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


UNKNOWN = {"phase": "", "step": -1, "entered": 0, "left": 0, "operation": ""}
BEATS = {"phase": "step", "entered": 0, "left": 0, "operation": ""}


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ([UNKNOWN, {**UNKNOWN, "process_state": "T"}, UNKNOWN], [1]),
        ([{**UNKNOWN, "process_state": "T"}] * 2, [0, 1]),
        ([{**BEATS, "silent_s": silent_s} for silent_s in (70, 90, 70)], []),
        ([BEATS, {**BEATS, "step": 11}, UNKNOWN], [1]),
        ([UNKNOWN, UNKNOWN], []),
    ],
    ids=["stopped", "all are stopped", "silent longest", "at an older step", "nothing known"],
)
def test_of_a_command_nobody_is_named_for_being_silent_longest(changes, ranks):
    readings = [rank_at(r, counts_collectives=False, **change) for r, change in enumerate(changes)]
    assert missing(*readings) == ranks


def test_the_silence_of_a_command_names_its_node_and_what_a_signal_has_stopped_but_no_rank():
    quiet = SilentRank(None, "node-0", 9.0, 8.0, "command", "neither output nor I/O")
    stopped = SilentRank(None, "node-1", 9.0, 8.0, "command", "", ("process 7 (python3)",))
    ranks = [rank_at(rank, counts_collectives=False, **UNKNOWN) for rank in (0, 1)]
    evidence = Evidence(at_s=1.0, step=None, silent=(quiet,), rank_progress=ranks)
    fault = diagnose(evidence).fault
    assert (fault.rank, fault.node) == (None, "node-0")
    assert fault.evidence == (
        "the command on node-0: no progress for 9 s in phase command, limit 8 s: "
        "neither output nor I/O"
    )
    fault = diagnose(Evidence(at_s=1.0, step=None, silent=(quiet, stopped))).fault
    assert fault.evidence == "the command on node-1: stopped by a signal: process 7 (python3)"


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
        unique_by=lambda rank: rank.rank,
    )
)
def test_some_but_never_all_of_several_ranks_are_missing(ranks):
    standstill = not_none(find_standstill(ranks))
    assert len(standstill.missing) < len(ranks) or len(ranks) == 1
    assert standstill.line
