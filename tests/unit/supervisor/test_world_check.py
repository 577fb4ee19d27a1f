"""Launchers of a command that start fewer ranks than the job has."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.diagnosis.evidence import SmallWorld
from perdure.training.engines.base import Snapshot
from perdure.training.supervisor.watch import EndKind, Progress, WatchResult
from perdure.training.supervisor.world_check import WorldCheck
from perdure.training.wire.agent_status import AgentState, AgentStatus, RankStatus, ShownStep
from perdure.training.wire.logs import WorkerLog
from tests.jobs import small_job
from tests.values import not_none

STEP = ShownStep(step=1, age_s=0.1)


def node(member: int, size: int, first_rank: int = 0, **changes: Any) -> AgentStatus:
    rank = RankStatus(rank=first_rank, local_rank=0, pid=10 + member)
    fields: dict[str, Any] = {
        "node": f"node-{member}", "member": member, "state": AgentState.RUNNING,
        "schedule_cnt": 1, "proc_start_cnt": 1, "placement": 1, "attempt": 1,
        "is_command": True, "is_launcher": True, "ranks": (rank,), "world_size": size,
    }  # fmt: skip
    return AgentStatus(**{**fields, **changes})


def check(*nodes: AgentStatus, slots: int = 2, output: str = "") -> WatchResult | None:
    engine = {"nodes": len(nodes), "slots_per_node": slots}
    job = small_job(worker={"command": ["torchrun", "t.py"]}, engine=engine)
    log = WorkerLog(rank=0, path="/log", text=output)
    snapshot = Snapshot({status.member: status for status in nodes})
    return WorldCheck(job, lambda: {0: [log]}).check(Progress(snapshot=snapshot))


@pytest.mark.parametrize(
    ("nodes", "slots", "size", "separate"),
    [
        ([node(0, 2, shown=STEP), node(1, 2)], 2, 2, ("node-0", "node-1")),
        ([node(0, 1, shown=STEP)], 8, 1, ("node-0",)),
        ([node(0, 4, shown=STEP), node(1, 4, first_rank=2)], 8, 4, ("node-0",)),
        ([node(n, 2, state=AgentState.ENDED) for n in (0, 1)], 2, 2, ("node-0", "node-1")),
        ([node(n, 8, shown=STEP) for n in range(3)], 8, 8, ("node-0", "node-1", "node-2")),
        ([node(0, 1, ranks=(), shown=STEP), node(1, 1, ranks=())], 2, 1, ("node-0", "node-1")),
    ],
    ids=["two worlds", "one rank", "half of each node", "at the end", "three nodes", "accelerate"],
)  # fmt: skip
def test_ranks_that_are_too_few_end_the_attempt_once_they_train(nodes, slots, size, separate):
    result = not_none(check(*nodes, slots=slots))
    assert result.end is EndKind.FAILED
    assert isinstance(result.culprit, SmallWorld)
    assert (result.culprit.size, result.culprit.separate_nodes) == (size, separate)


@pytest.mark.parametrize(
    "nodes",
    [
        [node(0, 4, shown=STEP), node(1, 4, first_rank=2)],
        [node(0, 2, shown=STEP), node(1, 0, ranks=())],
        [node(0, 2), node(1, 2)],
        [node(0, 0, ranks=(), shown=STEP), node(1, 0, ranks=())],
        [node(0, 8, shown=STEP), node(1, 8)],
        [node(0, 2, is_launcher=False, shown=STEP), node(1, 2, is_launcher=False)],
    ],
    ids=["a gang", "one still starts", "no step yet", "no launcher", "more ranks", "per device"],
)
def test_ranks_that_may_still_be_enough_go_on(nodes):
    assert check(*nodes) is None


@pytest.mark.parametrize(
    ("line", "is_over"),
    [("iter 10: loss 3.2175, time 102.33ms\n", True), ("step 3\n", True), ("reading\n", False)],
)
def test_steps_in_the_output_show_that_ranks_train(line, is_over):
    assert (check(node(0, 2), node(1, 2), output=line) is not None) is is_over
