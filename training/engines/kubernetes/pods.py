"""What a pod's document says: whether its agent lives, how it was lost, why it is not placed. Pure.

The words are those of the kubelet, the scheduler and the node controller from 1.20 on
(https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/,
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.kubernetes.objects import (
    AGENT,
    MEMBER,
    SCHEDULE_CNT,
    WAS_SPARE,
    Document,
)
from perdure.training.recovery.faults import FaultClass
from perdure.training.wire.agent import NO_MEMBER

# A container that waits for one of these does not start before somebody changes the job, unless
# the kubelet itself was late: one that has just come back waits for its copy of the Secrets.
HOPELESS = frozenset(
    {
        *("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"),
        *("CreateContainerError", "RunContainerError", "ErrImageInspect"),
    }
)
_PASSES = re.compile(
    r"failed to sync|timed out|deadline exceeded|unavailable|refused", re.IGNORECASE
)
# component/ascend-common/api/default_name.go of Ascend/mind-cluster: "Ascend910-0,Ascend910-1".
ALLOCATED = "huawei.com/AscendReal"
NO_NODE = "the node was deleted from the cluster"
UNSELECTED = f"{NO_NODE}, or has lost a label of engine.node_selector"
# Why the kubelet gives up a pod, beside eviction; the node itself goes down.
_NODE_GOES_DOWN = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a pod does not run.

    Attributes:
        text: in the words of the scheduler or the kubelet.
        is_room: whether there is no room for it; else something is wrong with the job.
        is_final: whether waiting is no use.
    """

    text: str
    is_room: bool = False
    is_final: bool = False


# Reasons of events about a pod.
_PREEMPTED = ("Preempted", "Preempting")
_EVICTED = ("Evicted", "TaintManagerEviction")


def name_of(pod: Document) -> str:
    """Name of the pod."""
    return str(pod["metadata"]["name"])


def member_of(pod: Document) -> int:
    """Index of its member; NO_MEMBER while it stands by."""
    return int(pod["metadata"]["labels"].get(MEMBER, NO_MEMBER))


def is_spare(pod: Document) -> bool:
    """Whether it is no member's yet."""
    return MEMBER not in pod["metadata"]["labels"]


def was_spare(pod: Document) -> bool:
    """Whether it was started before its member needed it."""
    return WAS_SPARE in pod["metadata"]["labels"]


def schedule_cnt_of(pod: Document) -> int:
    """How many times its member had been scheduled with it; 0 while it stands by."""
    return int(pod["metadata"]["labels"].get(SCHEDULE_CNT, 0))


def node_of(pod: Document) -> str:
    """Name of its node, "" while it has none."""
    return str(pod["spec"].get("nodeName") or "")


def host_of(pod: Document) -> str:
    """Its address, "" while it has none."""
    return str(_status(pod).get("podIP") or "")


def chips_of(pod: Document) -> tuple[int, ...]:
    """Physical numbers of its chips, as Ascend's device plugin notes them; empty: not known."""
    text = (pod["metadata"].get("annotations") or {}).get(ALLOCATED, "")
    return tuple(int(number) for number in re.findall(r"-(\d+)\s*(?:,|$)", text))


def is_leaving(pod: Document) -> bool:
    """Whether it was deleted, and its node has not confirmed that yet."""
    return pod["metadata"].get("deletionTimestamp") is not None


def is_over(pod: Document) -> bool:
    """Whether its container has ended."""
    return _status(pod).get("phase") in ("Succeeded", "Failed") or _ended(pod) is not None


def has_run(pod: Document) -> bool:
    """Whether its container was ever started."""
    status = _agent_status(pod)
    return "running" in (status.get("state") or {}) or _ended(pod) is not None


def is_up(pod: Document) -> bool:
    """Whether its agent listens."""
    if _status(pod).get("phase") != "Running" or is_over(pod):
        return False
    return bool(_agent_status(pod).get("started"))


def _status(pod: Document) -> Mapping[str, Any]:
    return pod.get("status") or {}


def _agent_status(pod: Document) -> Mapping[str, Any]:
    statuses = _status(pod).get("containerStatuses") or ()
    return next((status for status in statuses if status.get("name") == AGENT), {})


def _ended(pod: Document) -> Mapping[str, Any] | None:
    state: Mapping[str, Any] | None = (_agent_status(pod).get("state") or {}).get("terminated")
    return state


def _condition(document: Document, kind: str) -> Mapping[str, Any]:
    conditions = (document.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def loss_of(pod: Document, notes: Sequence[Document] = ()) -> NodeLoss | None:
    """How its container was lost, or is being lost; None while nothing speaks of that.

    Args:
        pod: of a member.
        notes: events about the pod, oldest first, where they may be read.
    """
    status, node = _status(pod), node_of(pod)
    reason, message = status.get("reason") or "", status.get("message") or ""
    if (why := _disruption(pod, notes)) is not None:
        return NodeLoss(node, FaultClass.CONTAINER_LOST, why[0], why[1])
    if reason in _NODE_GOES_DOWN:
        return NodeLoss(node, FaultClass.NODE_LOST, "NODE_LOST", f"{reason}: {message}")
    if is_leaving(pod):
        text = "the pod was deleted"
        return NodeLoss(node, FaultClass.CONTAINER_LOST, "POD_DELETED", text)
    ended = _ended(pod)
    if ended is not None and ended.get("reason") == "OOMKilled":
        text = "the agent of the pod was ended by the kernel: OOMKilled"
        return NodeLoss(node, FaultClass.HOST_OOM, "OOMKilled", text)
    if is_over(pod):
        text = message or f"the pod's container ended {_how(ended or {})}"
        return NodeLoss(node, FaultClass.CONTAINER_LOST, "POD_ENDED", text)
    return None


def _how(ended: Mapping[str, Any]) -> str:
    number = ended.get("signal")
    how = f"by signal {number}" if number else f"with exit code {ended.get('exitCode')}"
    return f"{how} ({ended['reason']})" if ended.get("reason") else how


def _disruption(pod: Document, notes: Sequence[Document]) -> tuple[str, str] | None:
    """Who took the pod away, as code and text: a condition from 1.26 on, events before."""
    status = _status(pod)
    if status.get("reason") == "Evicted":
        return "POD_EVICTED", f"evicted: {status.get('message') or 'no reason given'}"
    target = _condition(pod, "DisruptionTarget")
    if target:
        is_preempted = "Preemption" in str(target.get("reason"))
        code = "POD_PREEMPTED" if is_preempted else "POD_EVICTED"
        return code, f"{target.get('reason')}: {target.get('message')}"
    for note in reversed(notes):
        if note.get("reason") in _PREEMPTED:
            return "POD_PREEMPTED", f"preempted: {note.get('message')}"
        if note.get("reason") in _EVICTED:
            return "POD_EVICTED", f"evicted: {note.get('message')}"
    return None


def says_who(notes: Sequence[Document]) -> bool:
    """Whether events about a pod say that it was preempted or evicted."""
    return any(note.get("reason") in (*_PREEMPTED, *_EVICTED) for note in notes)


def gone(node: str) -> NodeLoss:
    """The loss of a pod that is not in the cluster any more, and nobody saw it go."""
    text = "the pod is not there any more: it was deleted by force, or with its node"
    return NodeLoss(node, FaultClass.CONTAINER_LOST, "POD_DELETED", text)


def lost_with_node(loss: NodeLoss, absence: str) -> NodeLoss:
    """The loss of a pod whose node the cluster has no more: nobody can place it there again.

    The cluster removes such a pod 40 s or more later, from 1.26 on with a DisruptionTarget
    (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-garbage-collection).

    Args:
        loss: of the pod.
        absence: what became of its node, one sentence.
    """
    if loss.fault_class is not FaultClass.CONTAINER_LOST:
        return loss
    return NodeLoss(loss.node, FaultClass.NODE_LOST, "NODE_DELETED", f"{absence}; {loss.line}")


def why_not_up(pod: Document) -> Refusal:
    """Why its agent does not listen yet."""
    name, scheduled = name_of(pod), _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        text = scheduled.get("message") or scheduled.get("reason")
        return Refusal(f"{name} has no node: {text}", is_room=True)
    if is_over(pod):
        status = _status(pod)
        why = status.get("message") or status.get("reason") or _how(_ended(pod) or {})
        # The kubelet refuses what does not fit any more, such as OutOfhuawei.com/Ascend910.
        is_room = str(status.get("reason") or "").startswith(("OutOf", "UnexpectedAdmission"))
        text = f"{name} on {node_of(pod)} ended before it was up: {why}"
        return Refusal(text, is_room=is_room, is_final=True)
    waiting = (_agent_status(pod).get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason"), waiting.get("message")
    if reason and message:
        text = f"{name} on {node_of(pod)}: {reason}: {message}"
        is_final = reason in HOPELESS and _PASSES.search(message) is None
        return Refusal(text, is_final=is_final)
    if not node_of(pod):
        return Refusal(f"{name} has no node yet: no scheduler has looked at it", is_room=True)
    problem = reason or f"its agent does not listen yet (phase {_status(pod).get('phase')})"
    return Refusal(f"{name} on {node_of(pod)}: {problem}")


def node_problem(node: Document) -> str:
    """Why a node is not to be trusted, "" when it reports as it should."""
    ready = _condition(node, "Ready")
    if ready.get("status") == "True":
        return ""
    since = f" since {ready['lastTransitionTime']}" if ready.get("lastTransitionTime") else ""
    return f"node is not ready{since}: {ready.get('message') or 'it never reported'}"
