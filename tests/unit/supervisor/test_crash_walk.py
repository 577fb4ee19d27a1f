"""A supervisor may die between any two actions: the next one finishes the run all the same.

The engine here is a model of containers in memory, which survives its supervisors as real
containers do; ledger and checkpoints are real, in a folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from training.agent.protocol import (
    AgentState,
    AgentStatus,
    NodeText,
    StartOrder,
    WorkerLog,
    WorkerStatus,
)
from training.engines.base import Placement, Snapshot
from training.errors import AgentUnreachable, EngineError
from training.job import Job, parse_job
from training.policy.ladder import Rung
from training.policy.records import Member
from training.supervisor import watch
from training.supervisor.run import Run, Verdict
from training.supervisor.watch import EndKind


class Killed(BaseException):
    """The supervisor is gone at this very moment."""


class Cluster:
    """Containers that live on when a supervisor dies. Each attempt follows a script."""

    def __init__(self, outcomes: Sequence[str]) -> None:
        self.outcomes = list(outcomes)
        self.members: dict[int, tuple[Member, int]] = {}  # member and its process starts
        self.placement = 0
        self.started: dict[tuple[int, int], set[int]] = {}
        self.now: tuple[int, int] | None = None
        self.lost: set[str] = set()

    @property
    def outcome(self) -> str:
        keys = sorted(self.started)
        index = keys.index(self.now) if self.now in keys else 0
        return self.outcomes[min(index, len(self.outcomes) - 1)]


class FakeEngine:
    """The engine seam over a Cluster; every call may be the supervisor's last."""

    def __init__(self, cluster: Cluster, tick: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.tick = tick

    @property
    def capabilities(self) -> frozenset[Rung]:
        return frozenset(Rung)

    def nodes(self) -> Sequence[str]:
        return ["node-0", "node-1", "node-2"]

    def _create(self, placement: Placement, members: Collection[int]) -> None:
        self.cluster.placement = placement.number
        for member in placement.members:
            if member.index in members:
                self.tick(f"boot {member.index}")
                self.cluster.members[member.index] = (member, 0)
                self.cluster.lost.discard(member.node)

    def submit(self, placement: Placement) -> None:
        self.tick("submit")
        self.cluster.members = {}
        self._create(placement, {m.index for m in placement.members})

    def replace(self, placement: Placement, members: Collection[int]) -> None:
        self.tick("replace")
        for index in members:
            self.cluster.members.pop(index, None)
        self._create(placement, members)

    def adopt(self, placement: Placement) -> frozenset[int]:
        if self.cluster.placement != placement.number:
            return frozenset()
        return frozenset(
            i for i, (m, _) in self.cluster.members.items() if m.node not in self.cluster.lost
        )

    def start(self, order: StartOrder) -> None:
        key = (order.placement, order.attempt)
        for index in range(order.num_nodes):
            self.tick(f"start {index}")
            if index not in self.cluster.members:
                raise AgentUnreachable(f"the agent of member {index} is gone")
            member, starts = self.cluster.members[index]
            if member.node in self.cluster.lost:
                raise AgentUnreachable(f"the agent of {member.node} is gone")
            done = self.cluster.started.setdefault(key, set())
            if index not in done:
                done.add(index)
                self.cluster.members[index] = (member, starts + 1)
        self.cluster.now = key
        if self.cluster.outcome == "node lost":
            self.cluster.lost.add(self.cluster.members[1][0].node)

    def poll(self) -> Snapshot:
        cluster = self.cluster
        agents, lost = {}, []
        for index, (member, starts) in cluster.members.items():
            if member.node in cluster.lost:
                lost.append(member.node)
                continue
            key = max((k for k, done in cluster.started.items() if index in done), default=(0, 0))
            state = AgentState.ENDED if starts else AgentState.IDLE
            code = {"done": 0, "crash": -9, "node lost": 1, "user": 2}[cluster.outcome]
            worker = WorkerStatus(rank=index, local_rank=0, pid=1, exit_code=code, ended_s=5.0)
            agents[index] = AgentStatus(
                node=member.node, member=index, state=state, schedule_cnt=member.schedule_cnt,
                proc_start_cnt=starts, placement=key[0], attempt=key[1],
                workers=(worker,) if starts else (),
            )  # fmt: skip
        return Snapshot(agents, tuple(lost))

    def stop(self, grace_s: float) -> None:
        pass

    def metrics(self, offset: int) -> tuple[str, int]:
        return "", offset

    def logs(self, tail_bytes: int) -> Sequence[tuple[str, WorkerLog]]:
        return []

    def texts(self, tail_bytes: int) -> Sequence[tuple[str, NodeText]]:
        return []

    def cancel(self, grace_s: float) -> None:
        self.tick("cancel")
        self.cluster.members = {}


class WalkedRun(Run):
    """A run whose ledger and engine count their calls."""

    cluster: Cluster
    tick: Callable[[str], None]

    def _make_engine(self, epoch: int) -> Any:
        append = self.ledger.append

        def counted(build: Any, **fields: Any) -> None:
            self.tick(f"before {build.__name__}")
            append(build, **fields)
            self.tick(f"after {build.__name__}")

        self.ledger.append = counted  # type: ignore[method-assign]
        return FakeEngine(self.cluster, self.tick)


@pytest.fixture
def job(tmp_path) -> Job:
    return parse_job(
        {
            "run_id": "walk",
            "storage": {"address": f"file://{tmp_path}/store"},
            "worker": {"command": ["true"]},
            "engine": {"nodes": 2, "slots_per_node": 1, "spares": 1, "grace_s": 0.1},
            "restart": {"pod_retries": 1, "spare_wait_s": 0},
        }
    )


def supervise(run: Run) -> Verdict | None:
    """What the flow does, without Prefect."""
    history = run.take()
    if history.ended_well:
        return None
    verdict = run.pending_end()
    while verdict is None or (
        verdict.kind is EndKind.FAILED
        and verdict.decision is not None
        and verdict.decision.rung is not Rung.STOP
    ):
        try:
            placement = run.place()
        except EngineError:
            run.end("failed", "no placement")
            return None
        verdict = run.attempt(
            placement, data_manifest_key=None, stop_wanted=lambda: False, on_progress=lambda _: None
        )
    run.end("completed" if verdict.kind is EndKind.COMPLETED else "failed", "end")
    return verdict


def walk(job: Job, home, cluster: Cluster, *, die_at: int | None) -> tuple[Run, bool]:
    """One supervisor, killed at its `die_at`-th action. Returns the run and whether it was."""
    count = itertools.count()

    def tick(_what: str) -> None:
        if next(count) == die_at:
            raise Killed

    run = WalkedRun(job, home=home)
    run.cluster, run.tick = cluster, tick
    try:
        supervise(run)
    except Killed:
        run.ledger.release()  # as if its process were gone
        return run, True
    return run, False


SCRIPTS = {
    "done": (["done"], "completed"),
    "crash, then done": (["crash", "done"], "completed"),
    "node lost, then done": (["node lost", "done"], "completed"),
    "user error": (["user"], "failed"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_supervisor_killed_between_any_two_actions_is_followed_to_the_same_end(
    name, job, tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    monkeypatch.setattr(watch, "POLL_S", 0.0)
    outcomes, end = SCRIPTS[name]
    for die_at in itertools.count():
        cluster = Cluster(outcomes)
        walked = job.model_copy(update={"run_id": f"walk-{die_at}"})
        run, died = walk(walked, tmp_path, cluster, die_at=die_at)
        if died:
            run, _ = walk(walked, tmp_path, cluster, die_at=None)
        history = run.ledger.read()
        assert history.ended is not None, f"killed at action {die_at}"
        assert history.ended.outcome == end, f"killed at action {die_at}"
        assert cluster.members == {}, "no container is left"
        for view in history.attempts:
            failed = view.ended is not None and view.ended.outcome == "failed"
            assert view.ended is not None
            assert (view.decided is not None) == failed, f"killed at action {die_at}"
        counts = [m.schedule_cnt for p in history.placements for m in p.members]
        assert max(counts) <= len(history.placements)
        if not died:
            assert die_at > 5, "the walk really walked"
            break


def test_an_agent_that_is_gone_before_the_start_is_a_lost_node_and_not_the_end(
    job, tmp_path, monkeypatch
):
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    cluster = Cluster(["done"])
    run = WalkedRun(job, home=tmp_path)

    def tick(what: str) -> None:
        if what == "start 1" and not cluster.started.get((2, 1)):
            cluster.lost.add("node-1")

    run.cluster, run.tick = cluster, tick
    supervise(run)
    history = run.ledger.read()
    assert history.ended_well
    assert [a.ended.fault.fault_class for a in history.attempts if a.ended and a.ended.fault] == [
        "node_lost"
    ]
    assert history.isolated == ("node-1",)


def test_a_run_with_an_open_attempt_is_not_started_from_another_home(job, tmp_path):
    cluster = Cluster(["done"])
    run, died = walk(job, tmp_path / "one", cluster, die_at=8)
    assert died
    assert run.ledger.read().open_attempt is not None
    other = WalkedRun(job, home=tmp_path / "two")
    other.cluster, other.tick = cluster, lambda _what: None
    with pytest.raises(Exception, match=r"PERDURE_HOME=.*one; start it there"):
        other.take()
