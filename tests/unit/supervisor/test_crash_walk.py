"""A supervisor may die between any two actions: the next one finishes the run all the same.

The engine here is a model of containers in memory, which survives its supervisors as real
containers do; ledger and checkpoints are real, in a folder.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.training.config.job import Job
from perdure.training.journal.records import DecisionMade, NodeReleased
from perdure.training.recovery.protocol import PauseBegan, PauseEnded
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.unit.supervisor.cluster import Cluster, FakeFleet, supervise


class Killed(BaseException):
    """The supervisor is gone at this very moment."""


class WalkedRun(RunSupervisor):
    """A run whose ledger and engine count their calls."""

    cluster: Cluster
    tick: Callable[[str], None]

    def _make_fleet(self, epoch: int) -> Any:
        append = self.ledger.append

        def counted(build: Any, **fields: Any) -> None:
            self.tick(f"before {build.__name__}")
            append(build, **fields)
            self.tick(f"after {build.__name__}")

        self.ledger.append = counted  # type: ignore[method-assign]
        return FakeFleet(self.cluster, self.tick)


def walk(job: Job, home, cluster: Cluster, *, die_at: int | None) -> tuple[RunSupervisor, bool]:
    """One supervisor, killed at its `die_at`-th action. Returns the run and whether it was."""
    count = itertools.count()

    def tick(_action: str) -> None:
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


NOTES = "".join(
    event.model_dump_json() + "\n"
    for event in (PauseBegan(at_s=1.0, number=1, step=3), PauseEnded(at_s=2.0, number=1, step=3))
)
SCRIPTS = {
    "done": (["done"], "completed"),
    "crash, then done": (["crash", "done"], "completed"),
    "node lost, then done": (["node lost", "done"], "completed"),
    "user error": (["user"], "failed"),
    "a chip stays ill": (["memory", "done"], "completed"),
}


LONG = ("crash, then done", "a chip stays ill")


@pytest.mark.parametrize(
    "name",
    [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in SCRIPTS],
)
def test_a_supervisor_killed_between_any_two_actions_is_followed_to_the_same_end(
    name, job, tmp_path, without_waits
):
    outcomes, end = SCRIPTS[name]
    for die_at in itertools.count():
        cluster = Cluster(outcomes)
        cluster.ill = {"node-0", "node-1"} if "ill" in name else set()
        cluster.live[1, 1] = NOTES
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
            assert (view.decision is not None) == failed, f"killed at action {die_at}"
            noted = [event.kind for event in view.events]
            expected = ["pause_began", "pause_ended"] if view.key == (1, 1) else []
            expected += ["chips_healed"] if view.healed is not None else []
            assert noted == expected, f"killed at action {die_at}"
        if cluster.ill:
            first = history.attempts[0]
            assert first.healed is not None, f"killed at action {die_at}"
            assert not first.healed.succeeded
            assert first.failed_rungs == (Rung.IN_PLACE_RESTART,)
            assert (len(history.placements), len(history.isolated)) == (2, 1)
        counts = [m.schedule_cnt for p in history.placements for m in p.members]
        assert max(counts) <= len(history.placements)
        if not died:
            assert die_at > 5, "the walk really walked"
            break


def test_an_agent_that_is_gone_before_the_start_is_a_lost_node_and_not_the_end(
    job, tmp_path, without_waits
):
    cluster = Cluster(["done"])
    run = WalkedRun(job, home=tmp_path)

    def tick(action: str) -> None:
        if action == "start 1" and not cluster.started.get((2, 1)):
            cluster.lost.add("node-1")

    run.cluster, run.tick = cluster, tick
    supervise(run)
    history = run.ledger.read()
    assert history.ended_well
    assert [a.ended.fault.fault_class for a in history.attempts if a.ended and a.ended.fault] == [
        "node_lost"
    ]
    assert history.isolated == ("node-1",)


def test_a_node_that_is_released_while_the_run_waits_for_a_spare_is_used_at_once(
    job, tmp_path, without_waits, monkeypatch
):
    waits = job.restart.model_copy(update={"spare_wait_s": 60.0})
    job = job.model_copy(update={"restart": waits})
    cluster = Cluster(["node lost", "node lost", "done"])  # two nodes are needed, two are lost
    run = WalkedRun(job, home=tmp_path)
    run.cluster, run.tick = cluster, lambda _action: None

    def release(_seconds: float) -> None:
        if run.history.isolated == ("node-1", "node-2"):
            RunSupervisor(job, home=tmp_path).ledger.note(NodeReleased, node="node-1")

    monkeypatch.setattr("perdure.training.supervisor.placing.time.sleep", release)
    supervise(run)
    history = run.ledger.read()
    assert history.ended_well
    assert history.isolated == ("node-2",)
    assert {member.node for member in history.placements[-1].members} == {"node-0", "node-1"}


def test_each_lost_node_is_isolated_and_the_reason_counts_the_nodes_that_are_left(
    job, tmp_path, without_waits
):
    job = job.model_copy(update={"restart": job.restart.model_copy(update={"max_restarts": 9})})
    run = WalkedRun(job, home=tmp_path)
    run.cluster, run.tick = Cluster(["node lost", "node lost", "done"]), lambda _action: None
    supervise(run)
    history = run.ledger.read()
    lost = [attempt.fault for attempt in history.attempts if attempt.fault is not None]
    assert [fault.node for fault in lost] == ["node-1", "node-2"] == list(history.isolated)
    records = run.ledger._records
    reasons = [record.decision.reason for record in records if isinstance(record, DecisionMade)]
    left = "no healthy spare: 1 of 2 nodes left without it"
    assert [left in reason for reason in reasons] == [False, True, False]
    # For want of another node the run may use an isolated one again, which counts until it is lost.
    decision = run._decider.decide(history.attempts[-1], lost[0])
    assert decision.isolate == "node-1"
    assert decision.reason.endswith(left)


def with_an_open_attempt(job: Job, home: Path) -> WalkedRun:
    """Supervise a run whose attempt crashes, up to the moment at which that is seen."""
    run = WalkedRun(job, home=home)
    run.cluster, run.tick = Cluster(["crash"]), lambda _action: None
    run.take()
    placement = run.place()
    with pytest.raises(Killed):
        run.attempt(placement, data_manifest_key=None, stop_wanted=lambda: False, on_progress=die)
    return run


def test_a_run_that_is_ended_before_its_fault_was_concluded_keeps_the_fault(
    job, tmp_path, without_waits
):
    run = with_an_open_attempt(job, tmp_path)
    run.end("cancelled", "cancelled")
    (attempt,) = run.refresh().attempts
    assert attempt.ended is not None
    assert attempt.ended.fault is not None
    assert (attempt.ended.outcome, attempt.ended.fault.fault_class) == ("failed", "native_crash")
    assert run.history.ended is not None
    assert run.history.ended.outcome == "cancelled"


def test_a_run_that_is_cancelled_after_a_signal_does_not_leave_its_processes(
    job, tmp_path, without_waits
):
    run = with_an_open_attempt(job, tmp_path)
    run.termination.since_s, run.termination.leave = time.monotonic() - 60, lambda: die(None)
    run.end("cancelled", "cancelled")
    assert run.refresh().open_attempt is None
    assert run.history.ended is not None
    assert run.history.ended.outcome == "cancelled"


def die(_progress: Progress | None) -> None:
    raise Killed


def test_a_run_with_an_open_attempt_is_not_started_from_another_home(job, tmp_path):
    cluster = Cluster(["done"])
    run, died = walk(job, tmp_path / "one", cluster, die_at=8)
    assert died
    assert run.ledger.read().open_attempt is not None
    other = WalkedRun(job, home=tmp_path / "two")
    other.cluster, other.tick = cluster, lambda _action: None
    with pytest.raises(Exception, match=r"PERDURE_HOME=.*one; start it there"):
        other.take()
