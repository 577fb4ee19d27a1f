"""SIGTERM to a supervisor: for it alone, or for everything at once, and what goes on record."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import Snapshot, terminated
from perdure.training.errors import AgentUnreachable
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor import termination as module
from perdure.training.supervisor.attempt_watch import AttemptWatch
from perdure.training.supervisor.termination import Termination, is_first_process
from perdure.training.supervisor.watch import AttemptStart, EndKind
from perdure.training.wire.agent_status import (
    AgentState,
    AgentStatus,
    ShownStep,
    WorkerStatus,
)
from tests.jobs import small_job
from tests.unit.supervisor.cluster import Cluster, ClusterRun, FakeFleet, supervise

COMMAND: dict[str, Any] = {"worker": {"command": ["train"]}, "steps": 40}


class Left(BaseException):
    """Ends the process of the supervisor alone."""


def status(code: int | None, *, asked: bool, step: int | None = None) -> AgentStatus:
    """The only node, whose only worker has ended with a code, or runs."""
    state = AgentState.RUNNING if code is None else AgentState.ENDED
    worker = WorkerStatus(rank=0, local_rank=0, pid=1, exit_code=code, ended_s=5.0)
    return AgentStatus(
        node="node-0",
        member=0,
        state=state,
        schedule_cnt=1,
        proc_start_cnt=1,
        placement=1,
        attempt=1,
        workers=(worker,),
        is_terminated=asked,
        shown=ShownStep(step=step, age_s=0.0) if step is not None else None,
    )


class Agents(FakeFleet):
    """A fleet whose polls follow a script; the last one goes on for all others."""

    def __init__(self, *polls: Snapshot, losses: tuple[NodeLoss, ...] = ()) -> None:
        super().__init__(Cluster(["done"]), lambda _call: None)
        self.polls = list(polls)
        self.stops: list[float] = []
        self.lost = losses

    @property
    def are_terminated(self) -> bool:
        return bool(self.lost)

    def poll(self) -> Snapshot:
        return self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]

    def stop(self, grace_s: float) -> None:
        self.stops.append(grace_s)


GONE = Snapshot({}, ("node-0",))


def of(*statuses: AgentStatus) -> Snapshot:
    return Snapshot(dict(enumerate(statuses)))


def leave() -> None:
    raise Left


def watched(fleet: Agents, *, since_s: float | None = None, owns: bool = False, **job: Any):
    asked_s = time.monotonic() if since_s is None else since_s
    termination = Termination(leave=leave, owns_machine=owns, since_s=asked_s)
    return AttemptWatch(
        fleet,  # type: ignore[arg-type]
        small_job(**job),
        AttemptStart((1, 1), 0.0),
        stop_wanted=lambda: False,
        on_progress=lambda _progress: None,
        termination=termination,
    )


@pytest.mark.parametrize(
    "polls",
    [
        (of(status(None, asked=True)), of(status(75, asked=True)), GONE),
        (of(status(75, asked=True)), GONE),
        (of(status(-15, asked=True)), GONE),
        (of(status(1, asked=False)), of(status(1, asked=True)), GONE),
    ],
    ids=["saves first", "has saved", "dies of it", "ends before its agent notes it"],
)
def test_an_attempt_whose_agents_are_asked_to_end_too_has_no_fault(polls, without_waits):
    fleet = Agents(*polls)
    end = watched(fleet).run()
    assert end.kind is EndKind.ENDED_FROM_OUTSIDE
    assert fleet.stops == [], "the agents stop their workers by themselves"


def test_an_agent_that_has_gone_before_a_poll_has_left_why(without_waits):
    fleet = Agents(GONE, losses=(terminated("node-0"),))
    assert watched(fleet).run().kind is EndKind.ENDED_FROM_OUTSIDE


def test_the_only_process_of_a_container_takes_its_agents_along(without_waits):
    fleet = Agents(of(status(None, asked=False)), of(status(75, asked=False)))
    end = watched(fleet, owns=True).run()
    assert end.kind is EndKind.ENDED_FROM_OUTSIDE
    assert fleet.stops == [small_job().engine.grace_s]


def test_a_supervisor_that_is_asked_alone_leaves_the_attempt(without_waits):
    fleet = Agents(of(status(None, asked=False)))
    with pytest.raises(Left):
        watched(fleet, since_s=time.monotonic() - module.ALONE_AFTER_S).run()
    assert fleet.stops == []


@pytest.mark.parametrize(
    ("step", "kind"),
    [(12, EndKind.ENDED_FROM_OUTSIDE), (None, EndKind.ENDED_FROM_OUTSIDE), (40, EndKind.COMPLETED)],
)
def test_a_command_that_saves_and_exits_with_0_has_only_ended_at_its_target(
    step, kind, without_waits
):
    ended = of(status(0, asked=True, step=step))
    assert watched(Agents(ended, ended, GONE), **COMMAND).run().kind is kind


def test_a_drained_node_takes_its_supervisor_along_and_not_the_attempt(without_waits):
    drained, other = status(None, asked=True), status(None, asked=False)
    fleet = Agents(of(drained, other.model_copy(update={"node": "node-1", "member": 1})))
    with pytest.raises(Left):
        watched(fleet, since_s=time.monotonic() - module.ALONE_AFTER_S).run()


def test_processes_that_outlive_the_grace_period_delay_no_record(without_waits):
    fleet = Agents(of(status(None, asked=True)))
    long_ago = time.monotonic() - 3600
    assert watched(fleet, since_s=long_ago).run().kind is EndKind.ENDED_FROM_OUTSIDE


class Terminated(FakeFleet):
    """The platform ends everything while the first attempt starts."""

    run: ClusterRun

    def start(self, order) -> None:
        if not self.cluster.orders:
            self.cluster.orders.append(order)
            self.run.termination.since_s = time.monotonic()
            self.cluster.members = {}
            raise AgentUnreachable("the agent of node-0 is gone")
        super().start(order)

    @property
    def are_terminated(self) -> bool:
        return not self.cluster.members


class TerminatedRun(ClusterRun):
    def _make_fleet(self, epoch: int):
        fleet = Terminated(self.cluster, lambda _call: None)
        fleet.run = self
        return fleet


def test_the_next_start_goes_on_without_a_decision_and_needs_no_reopening(
    job, tmp_path, without_waits
):
    cluster = Cluster(["done"])
    for number in (1, 2):
        run = TerminatedRun(job, home=tmp_path)
        run.cluster = cluster
        supervise(run)
        history = run.refresh()
        ends = [view.ended.outcome for view in history.attempts if view.ended is not None]
        assert ends == ["ended from outside", "completed"][:number]
    first = history.attempts[0]
    assert (first.decision, first.fault, history.isolated) == (None, None, ())
    assert history.recoveries() == []
    assert [placed.placement for placed in history.placements] == [1, 2]
    assert history.ended_well


def test_a_lost_agent_that_left_its_mark_is_preempted_and_no_lost_node():
    loss = terminated("node-3")
    assert (loss.node, loss.fault_class) == ("node-3", FaultClass.PREEMPTED)


@pytest.mark.parametrize(
    ("pid", "parent", "first", "is_first"),
    [
        (1, 0, "python", True),
        (7, 1, "tini", True),
        (7, 1, "docker-init", True),
        (7, 1, "systemd", False),
        (7, 3, "tini", False),
    ],
)
def test_the_first_process_of_a_container_is_known(pid, parent, first, is_first, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: pid)
    monkeypatch.setattr(os, "getppid", lambda: parent)
    monkeypatch.setattr(Path, "read_text", lambda _path, **_options: f"{first}\n")
    assert is_first_process() is is_first
