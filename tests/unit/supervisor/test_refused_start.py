"""Starts that nodes refuse because they take no files: what is recorded, and where it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.training.config.job import Job, parse_job
from perdure.training.drill.driver import RunOutcome
from perdure.training.engines.base import Snapshot
from perdure.training.errors import EngineError
from perdure.training.recovery.faults import NODE_UNWRITABLE
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import StartOrder
from perdure.training.wire.agent_status import SavedCheckpoint
from tests.unit.supervisor.cluster import Cluster, FakeFleet
from tests.unit.supervisor.test_runbook import ClusterDriver
from tests.values import not_none

FULL = "No space left on device: /scratch/run"


class FillingFleet(FakeFleet):
    """Nodes named by the test refuse every start but the first, with a new save in each poll."""

    full: frozenset[str] = frozenset()
    num_polls = 0

    def _full_members(self) -> list[int]:
        return [i for i, (m, _) in self.cluster.members.items() if m.node in self.full]

    def start(self, order: StartOrder) -> None:
        if self._full_members() and self.cluster.orders:
            self.cluster.orders.append(order)
            raise EngineError(f"agent at 127.0.0.1:1 refused rendezvous: {FULL}")
        super().start(order)

    def poll(self) -> Snapshot:
        snapshot = super().poll()
        FillingFleet.num_polls += 1
        step = 1000 + FillingFleet.num_polls  # an attempt that is over commits no more
        saved = SavedCheckpoint(step=step, path=f"/c/{step}", size_bytes=1, written_s=4.0)
        agents = {
            i: status.model_copy(
                update={
                    "saved": (saved,),
                    "unwritable": FULL if i in self._full_members() else "",
                }
            )
            for i, status in snapshot.agents.items()
        }
        return replace(snapshot, agents=agents)


@pytest.fixture
def play(tmp_path, without_waits, monkeypatch):
    """Play a run whose first attempt crashes; these nodes are full from then on."""

    def play(job: Job, *full: str) -> RunOutcome:
        fleet = type("Fleet", (FillingFleet,), {"full": frozenset(full)})
        monkeypatch.setattr("tests.unit.supervisor.cluster.FakeFleet", fleet)
        driver = ClusterDriver(tmp_path)
        driver.cluster = Cluster(["crash", "done"])
        return driver.run(job)

    return play


def without_pods(job: Job, **engine: int) -> Job:
    document = job.model_dump(mode="json")
    document["engine"] |= engine
    document["restart"] |= {"pod_retries": 0}
    return parse_job(document)


def test_a_refused_start_leaves_the_node_for_another(job, play):
    played = play(without_pods(job), "node-1")
    assert played.ended == "completed"
    first, refused, last = played.history.attempts
    assert refused.ended is not None
    assert refused.ended.fault is not None
    assert (refused.ended.fault.node, refused.ended.fault.code) == ("node-1", NODE_UNWRITABLE)
    assert FULL in refused.ended.fault.evidence
    assert refused.decision is not None
    assert (refused.decision.rung, refused.decision.isolate) == (
        Rung.JOB_RESCHEDULE_ISOLATED,
        "node-1",
    )
    assert "node-1" not in [member.node for member in last.members]
    assert first.key != last.key


def test_without_another_node_the_run_ends_with_what_a_person_must_do(job, play):
    played = play(without_pods(job, spares=0), "node-0", "node-1")
    assert not_none(played.history.ended).outcome == "failed"
    _, refused = played.history.attempts
    assert refused.decision is not None
    assert refused.decision.rung is Rung.STOP
    assert FULL in not_none(played.history.ended).message
    assert "no other node is free; make room there" in not_none(played.history.ended).message
    assert not played.history.isolated


def test_an_attempt_that_never_trained_has_no_step_and_no_checkpoint(job, play):
    history = play(without_pods(job), "node-1").history
    refused = history.attempts[1]
    assert refused.ended is not None
    assert (refused.ended.to_step, refused.ended.stepped_s, refused.first_step) == (
        None,
        None,
        None,
    )
    assert [c.step for c in history.checkpoints if (c.placement, c.attempt) == refused.key] == []


def test_starts_that_every_node_refuses_use_up_the_budget(job, play):
    played = play(without_pods(job), "node-0", "node-1", "node-2")
    assert not_none(played.history.ended).outcome == "failed"
    assert len(played.history.attempts) <= 1 + 3 + 1
