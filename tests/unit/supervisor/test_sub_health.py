"""Nodes that work, but not as they should: how they are known; placements take them last."""

from __future__ import annotations

import logging

import pytest

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.journal.events import AlertCleared, AlertKind
from perdure.training.journal.history import replay
from perdure.training.journal.records import (
    AttemptEnded,
    AttemptEventRecorded,
    AttemptStarted,
    DecisionMade,
    NodeReleased,
)
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.rungs import Decision, Rung
from perdure.training.supervisor.sub_health import sub_healthy_nodes
from tests.unit.journal.histories import (
    BEGINNING,
    CRASH,
    HOT,
    LINK,
    LINK_BEGAN,
    NOW,
    began,
    decided,
    ended,
    over,
    seen,
)
from tests.unit.supervisor.cluster import Cluster, ClusterRun

# A code of MindCluster's level SubHealthFault (faultCode.json): some lanes of a RoCE port failed.
LANES = "[ERROR] device fault, fault code: 0x81078605, device id: 1"
RECONNECTED = LINK_BEGAN.model_copy(
    update={"decision": Decision(Rung.OPERATOR_RETRY, None, "link_down", sub_healthy=True)}
)


def diagnosed(line: str, *, node: str = "node-1") -> Fault:
    worker = WorkerEnd(rank=1, node=node, device=1, exit_code=1, ended_s=20.0, log=line)
    return diagnose(Evidence(at_s=20.0, step=40, workers=[worker])).fault


def sub_healthy(*records) -> dict[str, str]:
    return {node.node: node.why for node in sub_healthy_nodes(replay([*BEGINNING, *records]))}


def test_a_code_of_the_sub_healthy_level_in_a_log_makes_its_node_sub_healthy():
    fault = diagnosed(LANES)
    assert fault.code == "81078605"
    result = sub_healthy(over(1, fault=fault), decided(1))
    assert result == {"node-1": "code 81078605 of device 1 (RoCE port: some lanes failed)"}


def test_a_link_that_was_mended_under_a_collective_leaves_its_node_sub_healthy():
    assert sub_healthy(*seen(RECONNECTED, ended(1))) == {
        "node-1": "its connections broke and were made again at step 14"
    }
    assert sub_healthy(*seen(LINK_BEGAN, ended(1))) == {}, "a step that was re-executed is not"
    assert sub_healthy(*seen(RECONNECTED, ended(1, succeeded=False))) == {}


@pytest.mark.parametrize(
    ("point", "is_sub_healthy"),
    [
        (AlertKind.STRAGGLER, True),
        (AlertKind.DEVICE_UNHEALTHY, True),
        (AlertKind.LINK_DOWN, True),
        (AlertKind.MEMORY_HIGH, False),
        (AlertKind.DATA_STARVED, False),
    ],
    ids=str,
)
def test_open_alerts_about_a_machine_make_it_sub_healthy(point, is_sub_healthy):
    raised = HOT.model_copy(update={"point": point})
    assert ("node-1" in sub_healthy(*seen(raised))) is is_sub_healthy
    assert sub_healthy(*seen(raised, AlertCleared(at_s=50.0, number=1))) == {}


def test_an_ordinary_crash_and_an_isolated_node_are_not_sub_healthy():
    assert sub_healthy(over(1, fault=CRASH), decided(1)) == {}
    isolated = decided(1, Rung.POD_RESCHEDULE, isolate="node-1")
    assert sub_healthy(*seen(RECONNECTED, ended(1)), over(1), isolated) == {}


def test_a_released_node_begins_anew():
    previous = (*seen(RECONNECTED, ended(1)),)
    later = NOW | {"at_s": LINK.at_s + 100}
    assert sub_healthy(*previous, NodeReleased(**later, node="node-1")) == {}
    second = began(2, Rung.OPERATOR_RETRY, LINK).model_copy(
        update={"at_s": 500.0, "decision": RECONNECTED.decision}
    )
    fault = LINK.__class__(LINK.fault_class, 500.0, "EI0006", node="node-1", step=90)
    second = second.model_copy(update={"fault": fault})
    result = sub_healthy(
        *previous, NodeReleased(**later, node="node-1"), *seen(second, ended(2, 90))
    )
    assert list(result) == ["node-1"]


@pytest.fixture
def run(job, tmp_path):
    run = ClusterRun(job, home=tmp_path / "home")
    run.cluster = Cluster(["crash", "done"])
    run.take()
    return run


def fail(run: ClusterRun, fault: Fault, rung: Rung, *, isolate: str | None = None) -> None:
    """An attempt on the newest placement that ends by a fault, and what answers it."""
    at = {"placement": run.place().number, "attempt": 1}
    run.ledger.append(AttemptStarted, **at, from_step=0)
    run.ledger.append(AttemptEventRecorded, **at, event=RECONNECTED)
    run.ledger.append(AttemptEventRecorded, **at, event=ended(1))
    run.ledger.append(
        AttemptEnded, **at, outcome="failed", to_step=4, proc_start_cnt={}, fault=fault,
        duration_s=5.0,
    )  # fmt: skip
    run.ledger.append(DecisionMade, **at, decision=Decision(rung, isolate, "test"))
    run.refresh()


def test_a_new_placement_leaves_a_sub_healthy_node_and_says_why(run, caplog):
    assert run.place().nodes == ("node-0", "node-1")
    fail(run, CRASH, Rung.JOB_RESCHEDULE)
    with caplog.at_level(logging.WARNING, logger="perdure.supervisor"):
        assert run.place().nodes == ("node-0", "node-2")
    why = "its connections broke and were made again at step 14"
    assert f"placement 2 does without node-1, which is sub-healthy: {why}" in caplog.text
    placed = run.refresh().placement
    assert placed is not None
    assert placed.sub_healthy == {"node-1": why}


def test_without_another_node_a_sub_healthy_one_is_used(run, caplog):
    run.place()
    fail(run, CRASH, Rung.JOB_RESCHEDULE_ISOLATED, isolate="node-0")
    with caplog.at_level(logging.WARNING, logger="perdure.supervisor"):
        assert run.place().nodes == ("node-2", "node-1")
    assert "placement 2 uses node-1, which is sub-healthy" in caplog.text
