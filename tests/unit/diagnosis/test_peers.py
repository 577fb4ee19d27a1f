"""What only a comparison of ranks shows: other collectives, missing ranks, clocks that are off."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from perdure.training.diagnosis.cause import LogSource
from perdure.training.diagnosis.peers import (
    MAX_ANCHORS,
    clock_offsets,
    compare_sources,
    find_laggard,
    find_missing_ranks,
    find_step_times,
)
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.scan import scan_text
from perdure.training.recovery.faults import FaultClass, RecoverableBy
from tests.values import not_none

YEAR = 2026
STARTED_S = datetime(2026, 8, 1, 10, tzinfo=UTC).timestamp()


def nccl(rank: int, op: str, *, number: int = 12, group: str = "0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:629] "
        f"[PG ID 1 PG GUID {group} Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran "
        "for 600020 milliseconds before timing out."
    )


def hccl(op: str, group: str = "group_name_0") -> str:
    return (
        "[ERROR] HCCL(4711,python):2026-03-21-02:07:08.639.860 [task_exception_handler.cc:900]"
        "[4711][TaskExecStage][Timeout][host]Task run failed, base information is streamId:[1], "
        f"taskId[2], tag[{op}_{group}], AlgType(level 0-1-2):[ring-ring-ring]."
    )


def source(order: int, *lines: str, rank: int | None = None) -> LogSource:
    findings = scan_text("\n".join(lines), year=2026).findings
    assert len(findings) == len(lines)
    return LogSource(f"rank_{order}.log", findings, order=order, rank=rank)


def odd(*sources: LogSource) -> tuple[int, Finding] | None:
    """Position of the source that something was put on record for, and what."""
    compared = compare_sources(sources)
    extra = [
        (index, later.findings[-1])
        for index, (earlier, later) in enumerate(zip(sources, compared, strict=True))
        if len(later.findings) > len(earlier.findings)
    ]
    assert len(extra) <= 1
    return extra[0] if extra else None


@pytest.mark.parametrize(
    "lines",
    [
        (nccl(0, "ALLREDUCE"), nccl(1, "ALLREDUCE"), nccl(2, "BROADCAST")),
        (hccl("AllReduce"), hccl("AllReduce"), hccl("Broadcast")),
    ],
    ids=["nccl", "hccl"],
)
def test_ranks_of_one_group_in_different_collectives_are_the_programs_fault(lines):
    index, finding = not_none(odd(*(source(order, line) for order, line in enumerate(lines))))
    assert (index, finding.line) == (2, lines[2])
    assert (finding.fault_class, finding.role) == (FaultClass.LAUNCH_MISCONFIGURED, Role.ROOT)
    assert finding.recoverable_by is RecoverableBy.USER_FIX


def test_the_explanation_names_both_collectives():
    finding = not_none(
        odd(
            source(0, nccl(0, "ALLGATHER", group="7(TP)")),
            source(1, nccl(1, "ALLREDUCE")),
            source(2, nccl(2, "BROADCAST")),
        )
    )
    assert "ALLREDUCE and BROADCAST" in finding[1].why


@pytest.mark.parametrize(
    "reports",
    [
        [[nccl(rank, "ALLREDUCE")] for rank in range(4)],
        [[hccl("AllReduce")] for _ in range(4)],
        [[nccl(0, "ALLGATHER", group="3(TP)")], [nccl(1, "ALLREDUCE", group="4(DP)")]],
        [[hccl("AllGather", "a")], [hccl("AllReduce", "b")]],
        [[nccl(0, "ALLGATHER", number=12)], [nccl(1, "ALLREDUCE", number=13)]],
        [[nccl(0, "ALLGATHER"), nccl(0, "ALLREDUCE")]],
    ],
    ids=["same", "same in hccl", "other groups", "other groups in hccl", "other numbers",
         "two starts of one rank"],
)  # fmt: skip
def test_collectives_that_may_differ_add_nothing(reports):
    assert odd(*(source(order, *lines) for order, lines in enumerate(reports))) is None


def test_ranks_that_share_one_log_are_compared():
    finding = not_none(odd(source(0, nccl(0, "ALLREDUCE"), nccl(1, "BROADCAST"))))
    assert finding[1].origin.rank == 1


def test_sources_without_reports_are_passed_through():
    sources = [source(0, "TypeError: x"), LogSource("b", [])]
    assert compare_sources(sources) == sources
    assert compare_sources([]) == []


def test_ranks_that_reported_nothing_are_missing_when_most_others_did():
    sources = [source(rank, nccl(rank, "ALLREDUCE"), rank=rank) for rank in (0, 1, 3)]
    assert find_missing_ranks(sources, 4) == (2,)
    assert find_missing_ranks(sources, 8) == ()
    assert find_missing_ranks(sources[:2], 2) == ()


def test_a_report_without_a_rank_is_its_sources():
    sources = [source(order, hccl("AllReduce"), rank=order) for order in (0, 2, 3)]
    assert find_missing_ranks(sources, 4) == (1,)


def enqueued(rank: int, last: int) -> str:
    return (
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID "
        f"0(default_pg) Rank {rank}] Exception (either an error or timeout) detected by watchdog "
        f"at work: 12, last enqueued NCCL work: {last}, last completed NCCL work: 11."
    )


def test_the_rank_that_enqueued_the_fewest_collectives_lags():
    findings = [
        f for rank, n in enumerate((14, 12, 14)) for f in source(rank, enqueued(rank, n)).findings
    ]
    finding = not_none(find_laggard(findings))
    assert finding.origin.rank == 1
    assert find_laggard(findings[::2]) is None
    assert find_laggard([]) is None


def test_the_one_rank_without_a_timeout_is_named_in_every_others():
    sources = [source(rank, nccl(rank, "ALLREDUCE"), rank=rank) for rank in (0, 1, 3)]
    finding = [f for s in compare_sources(sources) for f in s.findings]
    assert {f.origin.rank for f in finding} == {2}
    assert all("All but rank 2" in f.why for f in finding)


def test_the_log_of_one_rank_shows_nothing_about_the_others():
    alone = [source(1, nccl(1, "ALLREDUCE"), rank=1)]
    assert compare_sources(alone) == alone


def iterations(numbers: range, *, ahead_s: float = 0.0) -> str:
    return "".join(
        f"{datetime.fromtimestamp(STARTED_S + 10 * n + ahead_s, UTC):%Y-%m-%d %H:%M:%S} "
        f"iteration {n}/ 1000 | lm loss: 2.0 |\n"
        for n in numbers
    )


def steps(numbers: range, *, ahead_s: float = 0.0) -> dict[int, float]:
    return {n: STARTED_S + 10 * n + ahead_s for n in numbers}


def test_steps_are_read_with_the_time_of_their_first_mention():
    text = iterations(range(3)) + iterations(range(3), ahead_s=5)
    assert find_step_times(text, year=YEAR) == steps(range(3))


@pytest.mark.parametrize("words", ["step 7", "Step: 7", "global_step=7", "'step': 7", "step[7]"])
def test_steps_are_read_in_each_trainers_form(words):
    assert find_step_times(f"2026-08-01 10:00:00 {words} loss 2\n", year=YEAR) == {7: STARTED_S}


@pytest.mark.parametrize(
    "line",
    ["step 7 loss 2", "2026-08-01 10:00:00 steps done", f"2026-08-01 10:00:00 step {'1' * 5000}"],
    ids=["without a time", "without a step", "thousands of digits"],
)
def test_lines_without_a_step_and_a_time_are_no_anchors(line):
    assert find_step_times(f"{line}\n", year=YEAR) == {}


def test_only_the_newest_steps_are_kept():
    finding = find_step_times(iterations(range(MAX_ANCHORS + 50)), year=YEAR)
    assert (len(finding), min(finding)) == (MAX_ANCHORS, 50)


@pytest.mark.parametrize("ahead_s", [-3600.0, -7.5, 7.5, 3600.0])
def test_a_clock_that_is_off_is_corrected(ahead_s):
    shifts = clock_offsets(
        [steps(range(20)), steps(range(5, 18), ahead_s=ahead_s), steps(range(9))]
    )
    assert shifts == [0.0, -ahead_s, 0.0]


@pytest.mark.parametrize(
    ("other", "shift"),
    [
        ({**steps(range(10), ahead_s=60.0), 4: STARTED_S + 5000}, -60.0),
        (steps(range(20), ahead_s=0.9), 0.0),
        (steps(range(0), ahead_s=60.0), 0.0),
        (steps(range(19, 25), ahead_s=60.0), 0.0),
        (steps(range(30, 40), ahead_s=60.0), 0.0),
    ],
    ids=["one late step", "a small difference", "no steps", "few in common", "none in common"],
)
def test_an_offset_needs_several_common_steps_and_is_not_misled_by_one(other, shift):
    assert clock_offsets([steps(range(20)), other]) == [0.0, shift]


def test_no_sources_have_no_offsets():
    assert clock_offsets([]) == []
