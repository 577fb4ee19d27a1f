"""What follows from the checks of nodes, before anything is started on them."""

from __future__ import annotations

import pytest

from perdure.training.config.job import Job
from perdure.training.engines.base import Placement
from perdure.training.errors import EngineError
from perdure.training.journal.records import NodeRefused
from perdure.training.supervisor.finishing import AttemptResult
from perdure.training.supervisor.runbook import RunSteps
from perdure.training.supervisor.watch import EndKind
from perdure.training.wire.node import Check, CheckOutcome
from tests.unit.supervisor.cluster import Cluster, ClusterRun


def failed(node: str, name: str = "devices", seen: str = "device 0: Alarm") -> Check:
    return Check(name=name, node=node, outcome=CheckOutcome.FAILED, seen=seen)


def fine(node: str, name: str = "devices") -> Check:
    return Check(name=name, node=node, outcome=CheckOutcome.OK, seen="healthy")


NODES = ("node-0", "node-1", "node-2")


@pytest.fixture
def cluster():
    containers = Cluster(["done"])
    containers.checks = {node: [fine(node)] for node in NODES}
    return containers


@pytest.fixture
def run(job, tmp_path, cluster):
    def build(job: Job = job) -> ClusterRun:
        supervised = ClusterRun(job, home=tmp_path / "home")
        supervised.cluster = cluster
        supervised.take()
        return supervised

    return build


@pytest.fixture
def supervised(run):
    """A run that a supervisor has taken, before its nodes are checked."""
    return run()


def attempt(supervised: ClusterRun, placement: Placement) -> AttemptResult:
    return RunSteps(supervised).train(placement, None)


def test_healthy_nodes_are_used(supervised, cluster):
    placement = supervised.place()
    assert supervised.wants_checks(placement)
    assert supervised.check(placement).is_passed
    assert supervised.place() == placement
    assert cluster.checked == [{0: True, 1: True}]


def test_a_node_that_fails_is_isolated_and_its_member_moves_to_the_spare(supervised, cluster):
    cluster.checks["node-1"] = [failed("node-1")]
    first = supervised.place()
    verdict = supervised.check(first)
    assert verdict.refused == {"node-1": "devices: device 0: Alarm"}
    assert supervised.history.isolated == ("node-1",)
    second = supervised.place()
    assert (second.number, second.nodes) == (2, ("node-0", "node-2"))
    assert supervised.check(second).is_passed
    # The node that stayed was checked before; the gang is checked with every node.
    assert cluster.checked[-1] == {0: False, 1: True}
    assert supervised.history.attempts == []


def test_the_refusal_is_on_record_for_a_supervisor_that_takes_over(run, supervised, cluster):
    cluster.checks["node-0"] = [failed("node-0")]
    supervised.check(supervised.place())
    supervised.ledger.release()
    other = run()
    assert other.place().nodes == ("node-2", "node-1")
    (refusal,) = other.history.refusals
    assert isinstance(refusal, NodeRefused)
    assert refusal.why == "devices: device 0: Alarm"


def test_without_a_spare_the_run_fails_and_names_the_check(supervised, cluster, job):
    cluster.checks["node-1"] = [failed("node-1")]
    cluster.checks["node-2"] = [failed("node-2", "disk", "disk full")]
    supervised.check(supervised.place())
    supervised.check(supervised.place())
    with pytest.raises(EngineError, match="no healthy spare") as caught:
        supervised.place()
    assert "node-1 failed its checks: devices: device 0: Alarm" in str(caught.value)
    assert "node-2 failed its checks: disk: disk full" in str(caught.value)


def test_an_ended_run_that_is_started_again_has_its_nodes_checked_again(run, supervised, cluster):
    cluster.checks["node-1"] = [failed("node-1")]
    supervised.check(supervised.place())
    supervised.end("failed", "no placement")
    other = run()
    assert other.history.isolated == ()


def test_what_fails_everywhere_is_no_node_s_fault_and_ends_a_run_that_has_not_begun(
    supervised, cluster
):
    cluster.checks = {node: [failed(node, "store", "cannot write")] for node in NODES}
    with pytest.raises(EngineError, match="store: cannot write"):
        supervised.check(supervised.place())
    assert supervised.history.refusals == []


def test_later_an_attempt_is_started_all_the_same(supervised, cluster, without_waits):
    cluster.outcomes = ["node lost", "done"]
    placement = supervised.place()
    supervised.check(placement)
    assert attempt(supervised, placement).kind is EndKind.FAILED
    cluster.checks = {node: [failed(node, "all_reduce", "no route")] for node in NODES}
    moved = supervised.place()
    verdict = supervised.check(moved)
    assert verdict.common == ("all_reduce: no route",)
    assert attempt(supervised, moved).kind is EndKind.COMPLETED


def test_a_placement_with_attempts_is_not_checked(supervised, cluster, without_waits):
    cluster.outcomes = ["crash", "done"]
    placement = supervised.place()
    attempt(supervised, placement)
    assert supervised.place() == placement
    assert not supervised.wants_checks(placement)


def test_a_job_may_go_without(run, job):
    preflight = job.preflight.model_copy(update={"nodes": False})
    supervised = run(job.model_copy(update={"preflight": preflight}))
    assert not supervised.wants_checks(supervised.place())


def test_a_clock_that_is_off_is_a_warning(supervised, cluster):
    cluster.clock_s = -3.0
    verdict = supervised.check(supervised.place())
    clocks = [c for c in verdict.checks if c.name == "clock"]
    assert [(c.node, c.outcome) for c in clocks] == [
        ("node-0", CheckOutcome.WARNING),
        ("node-1", CheckOutcome.WARNING),
    ]
    assert clocks[0].seen.startswith("-3.000 s")
    assert verdict.is_passed


def test_a_refused_node_does_not_come_back_where_isolated_ones_may(
    supervised, cluster, job, without_waits
):
    """allow_without_isolation is about nodes that had a fault, not about those that cannot work."""
    cluster.checks["node-2"] = [failed("node-2")]
    cluster.outcomes = ["node lost", "done"]
    placement = supervised.place()
    supervised.check(placement)
    attempt(supervised, placement)
    moved = supervised.place()
    assert moved.nodes == ("node-0", "node-2")
    supervised.check(moved)
    assert "node-2" not in supervised.place().nodes


def test_a_spare_that_is_refused_after_a_fault_ends_the_run_when_nothing_else_is_left(
    run, cluster, job, without_waits
):
    cluster.checks["node-2"] = [failed("node-2")]
    cluster.outcomes = ["node lost", "done"]
    restart = job.restart.model_copy(update={"allow_without_isolation": False})
    supervised = run(job.model_copy(update={"restart": restart}))
    placement = supervised.place()
    supervised.check(placement)
    attempt(supervised, placement)
    supervised.check(supervised.place())
    with pytest.raises(EngineError, match="node-2 failed its checks: devices: device 0: Alarm"):
        supervised.place()
    assert supervised.history.isolated == ("node-1", "node-2")
