"""What only the comparison of ranks shows: one of them was in another collective."""

from __future__ import annotations

import pytest

from training.diagnosis.cause import LogSource
from training.diagnosis.peers import compare, laggard, missing_ranks
from training.diagnosis.recognise import Finding
from training.diagnosis.rules import Role
from training.diagnosis.scan import scan_text
from training.recovery.faults import FaultClass, RecoverableBy


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
    compared = compare(sources)
    extra = [
        (index, after.findings[-1])
        for index, (before, after) in enumerate(zip(sources, compared, strict=True))
        if len(after.findings) > len(before.findings)
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
    found = odd(*(source(order, line) for order, line in enumerate(lines)))
    assert found is not None
    index, finding = found
    assert (index, finding.line) == (2, lines[2])
    assert (finding.fault_class, finding.role) == (FaultClass.LAUNCH_MISCONFIGURED, Role.ROOT)
    assert finding.recoverable_by is RecoverableBy.USER_FIX


def test_the_explanation_names_both_collectives():
    found = odd(
        source(0, nccl(0, "ALLGATHER", group="7(TP)")),
        source(1, nccl(1, "ALLREDUCE")),
        source(2, nccl(2, "BROADCAST")),
    )
    assert found is not None
    assert "ALLREDUCE and BROADCAST" in found[1].why


def test_ranks_in_the_same_collective_say_nothing_more():
    assert odd(*(source(rank, nccl(rank, "ALLREDUCE")) for rank in range(4))) is None
    assert odd(*(source(rank, hccl("AllReduce")) for rank in range(4))) is None


def test_collectives_of_different_groups_may_differ():
    tensor, data = nccl(0, "ALLGATHER", group="3(TP)"), nccl(1, "ALLREDUCE", group="4(DP)")
    assert odd(source(0, tensor), source(1, data)) is None
    assert odd(source(0, hccl("AllGather", "a")), source(1, hccl("AllReduce", "b"))) is None


def test_collectives_with_different_numbers_may_differ():
    early, late = nccl(0, "ALLGATHER", number=12), nccl(1, "ALLREDUCE", number=13)
    assert odd(source(0, early), source(1, late)) is None


def test_one_rank_that_reports_two_starts_does_not_disagree_with_itself():
    assert odd(source(0, nccl(0, "ALLGATHER"), nccl(0, "ALLREDUCE"))) is None


def test_ranks_that_share_one_log_are_compared():
    found = odd(source(0, nccl(0, "ALLREDUCE"), nccl(1, "BROADCAST")))
    assert found is not None
    assert found[1].origin.rank == 1


def test_sources_without_reports_are_passed_through():
    sources = [source(0, "TypeError: x"), LogSource("b", [])]
    assert compare(sources) == sources
    assert compare([]) == []


def test_ranks_that_reported_nothing_are_missing_when_most_others_did():
    sources = [source(rank, nccl(rank, "ALLREDUCE"), rank=rank) for rank in (0, 1, 3)]
    assert missing_ranks(sources, 4) == (2,)
    assert missing_ranks(sources, 8) == ()
    assert missing_ranks(sources[:2], 2) == ()


def test_a_report_without_a_rank_is_its_sources():
    sources = [source(order, hccl("AllReduce"), rank=order) for order in (0, 2, 3)]
    assert missing_ranks(sources, 4) == (1,)


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
    found = laggard(findings)
    assert found is not None
    assert found.origin.rank == 1
    assert laggard(findings[::2]) is None
    assert laggard([]) is None


def test_the_one_rank_without_a_timeout_is_named_in_every_others():
    sources = [source(rank, nccl(rank, "ALLREDUCE"), rank=rank) for rank in (0, 1, 3)]
    found = [f for s in compare(sources) for f in s.findings]
    assert {f.origin.rank for f in found} == {2}
    assert all("All but rank 2" in f.why for f in found)


def test_the_log_of_one_rank_says_nothing_about_the_others():
    alone = [source(1, nccl(1, "ALLREDUCE"), rank=1)]
    assert compare(alone) == alone
