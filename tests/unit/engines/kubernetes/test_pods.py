"""What is read from a pod's document, in the forms that the kubelet and the scheduler write."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.training.engines.kubernetes import pods
from perdure.training.engines.kubernetes.nodes import NO_NODE, node_problem
from perdure.training.engines.kubernetes.objects import AGENT, MEMBER, SCHEDULE_CNT
from perdure.training.engines.kubernetes.pods import Pod
from perdure.training.recovery.faults import FaultClass

UNSCHEDULABLE = (
    "0/3 nodes are available: 1 node(s) were unschedulable, 2 Insufficient huawei.com/Ascend910."
)


def pod(
    phase: str = "Running",
    *,
    state: dict[str, Any] | None = None,
    started: bool = True,
    deleted: bool = False,
    conditions: list[dict[str, Any]] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """A pod of member 1 on n1."""
    container = {"name": AGENT, "state": state or {"running": {}}, "started": started}
    metadata: dict[str, Any] = {
        "name": "perdure-a-m1-s2-xyz",
        "labels": {MEMBER: "1", SCHEDULE_CNT: "2"},
    }
    if deleted:
        metadata["deletionTimestamp"] = "2026-11-24T02:00:00Z"
    return {
        "metadata": metadata,
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": phase,
            "podIP": "10.88.1.5",
            "conditions": conditions or [],
            "containerStatuses": [container],
            **status,
        },
    }


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason}}


def event(reason: str, message: str) -> dict[str, Any]:
    return {"reason": reason, "message": message}


EVICTED = pod(
    "Failed", reason="Evicted", message="The node was low on resource: memory.", state=ended(137)
)
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "message": "by a pod of priority 10"}


@pytest.mark.parametrize(
    ("document", "events", "expected"),
    [
        (pod(), [], None),
        (pod(deleted=True), [], (FaultClass.CONTAINER_LOST, "POD_DELETED")),
        (EVICTED, [], (FaultClass.CONTAINER_LOST, "POD_EVICTED")),
        (pod(deleted=True, conditions=[{**DISRUPTED, "reason": "PreemptionByScheduler"}]), [],
         (FaultClass.PREEMPTED, "POD_PREEMPTED")),
        (pod(deleted=True, conditions=[{**DISRUPTED, "reason": "PreemptionByKubeScheduler"}]), [],
         (FaultClass.PREEMPTED, "POD_PREEMPTED")),
        (pod(deleted=True, conditions=[{**DISRUPTED, "type": "TerminationTarget",
                                        "reason": "StoppedByKueue"}]), [],
         (FaultClass.PREEMPTED, "POD_PREEMPTED")),
        (pod(deleted=True, conditions=[{**DISRUPTED, "type": "TerminationTarget",
                                        "reason": "WorkloadEvictedDueToPreempted"}]), [],
         (FaultClass.PREEMPTED, "POD_PREEMPTED")),
        (pod(deleted=True, conditions=[{**DISRUPTED, "reason": "DeletionByTaintManager"}]), [],
         (FaultClass.CONTAINER_LOST, "POD_EVICTED")),
        (pod(deleted=True, conditions=[{**DISRUPTED, "reason": "EvictionByEvictionAPI"}]), [],
         (FaultClass.CONTAINER_LOST, "POD_EVICTED")),
        (pod(deleted=True), [event("Preempted", "by default/big on node n1")],
         (FaultClass.PREEMPTED, "POD_PREEMPTED")),
        (pod(deleted=True), [event("Scheduled", "to n1"), event("Started", "agent")],
         (FaultClass.CONTAINER_LOST, "POD_DELETED")),
        (pod("Failed", state=ended(137, "OOMKilled")), [], (FaultClass.HOST_OOM, "OOMKilled")),
        (pod("Failed", state=ended(137)), [], (FaultClass.CONTAINER_LOST, "POD_ENDED")),
        (pod("Failed", reason="Shutdown", message="Node is shutting down"), [],
         (FaultClass.NODE_LOST, "NODE_LOST")),
    ],
    ids=["it runs", "deleted by a person", "evicted by its kubelet",
         "preempted, as told from 1.26 on", "and later", "stopped by Kueue", "preempted by Kueue",
         "its node has a taint",
         "drained, as told from 1.26 on", "preempted, as an event tells", "events of its start",
         "its agent used too much memory", "its agent was killed", "its node shuts down"],
)  # fmt: skip
def test_how_a_pod_was_lost_has_a_class_and_a_code(document, events, expected):
    loss = Pod(document).loss(events)
    assert (loss and (loss.fault_class, loss.code)) == expected
    assert loss is None or (loss.node == "n1" and loss.line)


@pytest.mark.parametrize(
    "loss",
    [
        pods.vanished("n1"),
        # As the collector of pods marks them from 1.26 on, before it deletes them.
        Pod(pod("Failed", conditions=[{**DISRUPTED, "reason": "DeletionByPodGC"}])).loss(),
    ],
    ids=["nobody saw it go", "it is marked"],
)
def test_a_pod_that_was_lost_with_its_node_is_a_node_lost(loss):
    combined = pods.lost_with_node(loss, NO_NODE)
    assert (combined.node, combined.fault_class, combined.code) == (
        "n1", FaultClass.NODE_LOST, "NODE_DELETED"
    )  # fmt: skip
    assert combined.line == f"{NO_NODE}; {loss.line}"


def test_what_ended_a_pod_before_its_node_was_deleted_stays_the_fault():
    loss = Pod(pod("Failed", state=ended(137, "OOMKilled"))).loss()
    assert loss is not None
    assert pods.lost_with_node(loss, NO_NODE) is loss


def test_the_words_of_an_eviction_are_the_evidence():
    loss = Pod(EVICTED).loss()
    assert loss is not None
    assert loss.line == "evicted: The node was low on resource: memory."


@pytest.mark.parametrize(
    ("document", "is_up"),
    [
        (pod(), True),
        (pod(deleted=True), True),
        (pod(started=False), False),
        (pod("Pending", state={"waiting": {"reason": "ContainerCreating"}}, started=False), False),
        (pod(state=ended(0, "Completed")), False),
    ],
    ids=["its agent listens", "and goes on to until its node ends it", "its agent does not yet",
         "its container is made", "its container has ended, its phase says so later"],
)  # fmt: skip
def test_an_agent_can_be_reached_from_when_it_listens_to_its_end(document, is_up):
    assert Pod(document).is_up is is_up


def waiting(reason: str, message: str | None = None) -> dict[str, Any]:
    return pod("Pending", state={"waiting": {"reason": reason, "message": message}}, started=False)


UNPLACED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
NOT_PLACED = pod("Pending", conditions=[{**UNPLACED, "message": UNSCHEDULABLE}], started=False)
GATED = pod("Pending", conditions=[{**UNPLACED, "reason": "SchedulingGated"}], started=False) | {
    "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
}
NO_ROOM_LEFT = pod(
    "Failed", reason="OutOfhuawei.com/Ascend910", message="Node didn't have enough resource"
)


@pytest.mark.parametrize(
    ("document", "text", "is_room", "is_final"),
    [
        (NOT_PLACED, f"has no node: {UNSCHEDULABLE}", True, False),
        (GATED, "no node: a queue holds it back (kueue.x-k8s.io/admission)", True, False),
        (waiting("ImagePullBackOff", 'Back-off pulling image "a:1"'),
         'on n1: ImagePullBackOff: Back-off pulling image "a:1"', False, False),
        (waiting("InvalidImageName", "couldn't parse image reference"),
         "on n1: InvalidImageName: couldn't parse image reference", False, True),
        (waiting("CreateContainerConfigError", 'secret "keys" not found'),
         'on n1: CreateContainerConfigError: secret "keys" not found', False, True),
        (waiting("CreateContainerConfigError", "failed to sync secret cache: timed out waiting"),
         "on n1: CreateContainerConfigError: failed to sync secret cache", False, False),
        (NO_ROOM_LEFT, "on n1 ended before it was up: Node didn't have enough resource",
         True, True),
        (pod("Failed", state=ended(1)), "ended before it was up: with exit code 1 (Error)",
         False, True),
        (waiting("ContainerCreating"), "on n1: ContainerCreating", False, False),
        (pod(started=False), "its agent does not listen yet (phase Running)", False, False),
    ],
    ids=["no node has room", "its queue has none", "its image cannot be pulled",
         "its image has no valid name", "a secret is missing", "its kubelet is late",
         "its node has no room after all",
         "its agent fails", "it is being made", "its agent starts"],
)  # fmt: skip
def test_why_a_pod_is_not_up_is_in_the_words_of_scheduler_and_kubelet(
    document, text, is_room, is_final
):
    refusal = Pod(document).refusal()
    assert text in refusal.text
    assert (refusal.is_room, refusal.is_final) == (is_room, is_final)


def test_a_node_that_does_not_report_is_a_problem_with_the_time_and_the_reason():
    ready = {"type": "Ready", "status": "True"}
    silent = {
        "type": "Ready",
        "status": "Unknown",
        "lastTransitionTime": "2026-11-24T02:00:00Z",
        "message": "Kubelet stopped posting node status.",
    }
    assert node_problem({"status": {"conditions": [ready]}}) == ""
    assert node_problem({"status": {"conditions": [silent]}}) == (
        "node is not ready since 2026-11-24T02:00:00Z: Kubelet stopped posting node status."
    )


@pytest.mark.parametrize(
    ("document", "has_run"),
    [
        (pod(), True),
        (pod("Failed", state=ended(137)), True),
        (waiting("InvalidImageName"), False),
        ({**pod("Pending"), "status": {"phase": "Pending"}}, False),
    ],
    ids=["it runs", "it has ended", "its image has no valid name", "nobody has placed it"],
)
def test_a_pod_that_never_ran_leaves_no_process_behind(document, has_run):
    assert Pod(document).has_run is has_run
