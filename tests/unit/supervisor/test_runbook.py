"""What follows from each step of a run, in the driver of drills as in every other supervisor."""

from __future__ import annotations

import pytest

from perdure.storage.local import LocalStore
from perdure.training.config.job import Job, parse_job
from perdure.training.drill.driver import RunDriver, RunHook, RunOutcome
from perdure.training.engines.base import Placement
from perdure.training.errors import EngineError, NoCapacity
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.job_registry import job_path
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from perdure.training.wire.node import Check, CheckOutcome
from tests.unit.supervisor.cluster import Cluster, ClusterRun, FakeFleet


class ClusterDriver(RunDriver):
    """The driver of drills on a cluster in memory."""

    cluster: Cluster

    def _run(self, job: Job) -> ClusterRun:
        run = ClusterRun(job, home=self.home)
        run.cluster = self.cluster
        return run


@pytest.fixture
def play(tmp_path, without_waits):
    def play(job: Job, cluster: Cluster, hook: RunHook | None = None) -> RunOutcome:
        driver = ClusterDriver(tmp_path)
        driver.cluster = cluster
        return driver.run(job, hook=hook)

    return play


def test_no_attempt_is_started_on_a_node_that_failed_its_check(job, play):
    cluster = Cluster(["done"])
    cluster.checks["node-1"] = [
        Check(name="devices", node="node-1", outcome=CheckOutcome.FAILED, seen="device 0: Alarm")
    ]
    played = play(job, cluster)
    assert played.ended == "completed"
    assert [placed.placement for placed in played.history.placements] == [1, 2]
    (view,) = played.history.attempts
    assert view.key == (2, 1)
    assert [member.node for member in view.members] == ["node-0", "node-2"]


def test_the_first_failure_is_told_when_the_containers_cannot_be_taken_down_either(
    job, play, monkeypatch
):
    def refuse(self: FakeFleet, action: object) -> None:
        raise EngineError("no pods" if isinstance(action, Placement) else "no answer")

    monkeypatch.setattr(FakeFleet, "submit", refuse)
    monkeypatch.setattr(FakeFleet, "cancel", refuse)
    end = play(job, Cluster(["done"])).history.ended
    assert (end.outcome, end.message) == ("failed", "no placement: no pods")
    assert end.leftovers == "containers: no answer"


@pytest.mark.usefixtures("without_waits")
def test_a_run_that_is_cancelled_while_it_looks_for_nodes_is_cancelled_not_failed(
    job, play, monkeypatch, tmp_path
):
    def refuse(_fleet: FakeFleet, _action: object) -> None:
        job_path(tmp_path, job.run_id).with_name("cancel-wanted").touch()
        raise NoCapacity("no node is free")

    monkeypatch.setattr(FakeFleet, "submit", refuse)
    played = play(job, Cluster(["done"]))
    end = played.history.ended
    assert (end.outcome, end.message) == ("cancelled", "stopped on request")


class Damage:
    """Overwrites every token shard while the first attempt runs."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store

    def __call__(self, run: RunSupervisor, progress: Progress) -> None:
        if run.history.attempts[-1].key == (1, 1):
            for shard in self.store.list("data/shards/"):
                self.store.put(shard.key, b"damaged")


def test_a_shard_that_was_damaged_is_made_again_before_the_next_attempt(job, play, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Text to train on. " * 100)
    document = job.model_dump(mode="json", exclude={"worker"})
    with_data = parse_job({**document, "data": {"sources": [str(corpus)]}})
    cluster = Cluster(["storage error", "done"])
    played = play(with_data, cluster, Damage(LocalStore(tmp_path / "store")))
    assert played.ended == "completed"
    (failed, _) = played.history.attempts
    assert failed.ended.fault.fault_class is FaultClass.STORAGE_ERROR
    assert [data.damaged_shards for data in played.history.data] == [0, 1]
