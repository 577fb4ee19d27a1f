"""Ranks that exit with 0 while the others train."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.diagnosis.ending import RANK_CODE
from perdure.training.engines.base import Snapshot
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.early_ranks import WAIT_S, EarlyRanks
from perdure.training.wire.agent_status import AgentState, AgentStatus, FormerRank, WorkerStatus
from perdure.training.wire.logs import WorkerLog


def status(*exit_codes: int | None, **fields: Any) -> AgentStatus:
    workers = tuple(
        WorkerStatus(rank=rank, local_rank=rank, pid=1, exit_code=code, ended_s=5.0)
        for rank, code in enumerate(exit_codes)
    )
    return AgentStatus(
        node="node-0", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
        placement=1, attempt=1, workers=workers, is_command=True, **fields,
    )  # fmt: skip


def logs(*texts: str) -> dict[int, list[WorkerLog]]:
    return {rank: [WorkerLog(rank=rank, path="x", text=t)] for rank, t in enumerate(texts)}


def steps(*numbers: int) -> str:
    return "".join(f"step {number}/100 loss 2.1\n" for number in numbers)


def note(early: EarlyRanks, now: AgentStatus, *, step: int | None, now_s: float) -> None:
    early.note(Snapshot({0: now}), step=step, now_s=now_s)


@pytest.mark.parametrize(
    ("words", "fault_class", "text"),
    [
        ("", FaultClass.UNKNOWN, ("rank 1 ended at 30 of 100 with exit code 0, while the other "
         "ranks trained on")),
        ("SIGTERM received: saved\n", FaultClass.PREEMPTED, ("rank 1 ended at 30 of 100: SIGTERM "
         "received: saved")),
        ("no more samples left\n", FaultClass.UNKNOWN, ("rank 1 ended at 30 of 100 with exit code "
         "0, while the other ranks trained on (no more samples left)")),
    ],
    ids=["silent", "signal", "uneven data"],
)  # fmt: skip
def test_a_rank_that_left_short_of_its_target_is_named_once_the_others_train_on(
    words, fault_class, text
):
    early = EarlyRanks()
    left = steps(29, 30) + words
    note(early, status(None, 0), step=30, now_s=10.0)
    assert early.judge(lambda: logs(steps(30), left), now_s=10.0) == {}, "others may end, too"
    note(early, status(None, 0), step=33, now_s=20.0)
    (found,) = early.judge(lambda: logs(steps(33), left), now_s=20.0).items()
    assert (found[0], found[1].fault_class, found[1].text) == (1, fault_class, text)
    assert early.judge(lambda: logs(steps(40), left), now_s=30.0) == {}, "once"


def test_the_output_shows_that_the_others_train_on_where_nothing_else_counts_steps():
    early = EarlyRanks()
    note(early, status(None, 0), step=None, now_s=10.0)
    assert early.judge(lambda: logs(steps(30), steps(29, 30)), now_s=10.0) == {}
    found = early.judge(lambda: logs(steps(30, 34), steps(29, 30)), now_s=20.0)
    assert found[1].code == RANK_CODE


def test_a_rank_that_a_signal_ended_is_named_even_if_the_others_wait_for_it():
    early = EarlyRanks()
    left = steps(29, 30) + "SIGTERM received: saved\n"
    note(early, status(None, 0), step=30, now_s=10.0)
    assert early.judge(lambda: logs(steps(30), left), now_s=10.0) == {}
    assert early.judge(lambda: logs(steps(30), left), now_s=11.0 + WAIT_S).keys() == {1}


def test_ranks_that_end_one_after_the_other_at_their_end_are_no_evidence():
    early = EarlyRanks()
    note(early, status(None, 0), step=100, now_s=10.0)
    done = logs(steps(99, 100), steps(99, 100))
    assert early.judge(lambda: done, now_s=11.0 + WAIT_S) == {}
    assert [rank.went_on for rank in early.ranks(step=100)] == [False]
    both = EarlyRanks()
    note(both, status(0, 0), step=100, now_s=10.0)
    assert both.ranks(step=100) == ()


def test_a_rank_of_a_launcher_that_ended_is_evidence_with_its_step():
    former = FormerRank(rank=3, local_rank=1, ended_s=9.0, step=12)
    early = EarlyRanks()
    note(early, status(None, is_launcher=True, former_ranks=(former,)), step=12, now_s=10.0)
    (rank,) = early.ranks(step=None)
    assert rank.line == (
        "rank 3 ended with exit code 0 after step 12, while the other ranks had not come to their "
        "end"
    )
    note(early, status(1, is_launcher=True, former_ranks=(former,)), step=20, now_s=10.0)
    assert early.ranks(step=None)[0].line.endswith("while the other ranks trained on")
