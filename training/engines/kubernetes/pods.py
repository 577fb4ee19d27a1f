"""The pods of a run, read from their documents: place, loss, reasons for not being up. Pure.

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
from perdure.training.recovery.faults import POD_PREEMPTED, FaultClass
from perdure.training.wire.agent import NO_MEMBER

# A container that waits for one of these starts only once somebody changes the job, unless the
# kubelet itself was late: just after its start, it waits for its copy of the Secrets.
HOPELESS = frozenset(
    {
        *("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"),
        *("CreateContainerError", "RunContainerError", "ErrImageInspect"),
    }
)
_PULLS = ("ErrImagePull", "ImagePullBackOff")  # another node may have the image
_PASSES = re.compile(
    r"failed to sync|timed out|deadline exceeded|unavailable|refused", re.IGNORECASE
)
# component/ascend-common/api/default_name.go of Ascend/mind-cluster: "Ascend910-0,Ascend910-1".
ALLOCATED = "huawei.com/AscendReal"
# The kubelet gives up a pod for these reasons, beside eviction, when the node itself goes down.
_NODE_GOES_DOWN = frozenset({"NodeLost", "NodeShutdown", "Shutdown", "Terminated"})
# Kueue sets this condition, and deletes the pods of a group (pkg/controller/jobs/pod).
_STOPPED_BY_KUEUE = "TerminationTarget"
# Reasons of events about a pod.
_PREEMPTED = ("Preempted", "Preempting")
_EVICTED = ("Evicted", "TaintManagerEviction")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a pod does not run.

    Attributes:
        text: in the words of the scheduler or the kubelet.
        is_room: whether there is no room for the pod; else something is wrong with the job.
        is_final: whether waiting is useless.
        pod: its name.
        is_pull: whether the pod's image cannot be pulled at the moment.
    """

    text: str
    is_room: bool = False
    is_final: bool = False
    pod: str = ""
    is_pull: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as its document describes it."""

    document: Document

    @property
    def name(self) -> str:
        """Unique in the namespace."""
        return str(self.document["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Differs from that of a later pod with the same name."""
        return str(self.document["metadata"]["uid"])

    @property
    def member(self) -> int:
        """Index of the pod's member; NO_MEMBER for a spare."""
        return int(self._labels.get(MEMBER, NO_MEMBER))

    @property
    def is_spare(self) -> bool:
        """Whether no member has taken the pod yet."""
        return MEMBER not in self._labels

    @property
    def was_spare(self) -> bool:
        """Whether the pod was started before its member needed it."""
        return WAS_SPARE in self._labels

    @property
    def schedule_cnt(self) -> int:
        """How many times the member was scheduled, this pod included; 0 for a spare."""
        return int(self._labels.get(SCHEDULE_CNT, 0))

    @property
    def node(self) -> str:
        """Name of the pod's node, "" while it has none."""
        return str(self.document["spec"].get("nodeName") or "")

    @property
    def host(self) -> str:
        """The pod's address, "" while it has none."""
        return str(self._status.get("podIP") or "")

    @property
    def chips(self) -> tuple[int, ...]:
        """Physical numbers of the pod's chips, from Ascend's device plugin; empty: unknown."""
        text = (self.document["metadata"].get("annotations") or {}).get(ALLOCATED, "")
        return tuple(int(number) for number in re.findall(r"-(\d+)\s*(?:,|$)", text))

    @property
    def is_leaving(self) -> bool:
        """Whether the pod was deleted and its node has not confirmed that yet."""
        return self.document["metadata"].get("deletionTimestamp") is not None

    @property
    def is_over(self) -> bool:
        """Whether the container has ended."""
        return self._status.get("phase") in ("Succeeded", "Failed") or self._end is not None

    @property
    def has_run(self) -> bool:
        """Whether the container was ever started."""
        return "running" in (self._agent.get("state") or {}) or self._end is not None

    @property
    def is_up(self) -> bool:
        """Whether the agent listens."""
        if self._status.get("phase") != "Running" or self.is_over:
            return False
        return bool(self._agent.get("started"))

    @property
    def is_ready(self) -> bool:
        """Whether the cluster calls the pod ready; not once its node has stopped to report."""
        return self.is_up and condition_of(self.document, "Ready").get("status") == "True"

    @property
    def _labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.document["metadata"]["labels"]
        return labels

    @property
    def _status(self) -> Mapping[str, Any]:
        return self.document.get("status") or {}

    @property
    def _agent(self) -> Mapping[str, Any]:
        """Status of the agent's container."""
        statuses = self._status.get("containerStatuses") or ()
        return next((status for status in statuses if status.get("name") == AGENT), {})

    @property
    def _end(self) -> Mapping[str, Any] | None:
        """How the container ended."""
        end: Mapping[str, Any] | None = (self._agent.get("state") or {}).get("terminated")
        return end

    def loss(self, events: Sequence[Document] = ()) -> NodeLoss | None:
        """Describe how the container was lost, or is being lost; None: it is not.

        Args:
            events: about the pod, oldest first, where they may be read.
        """
        reason, message = self._status.get("reason") or "", self._status.get("message") or ""
        lost = FaultClass.CONTAINER_LOST
        if (disruption := self._disruption(events)) is not None:
            fault_class = FaultClass.PREEMPTED if disruption[0] == POD_PREEMPTED else lost
            return NodeLoss(self.node, fault_class, *disruption)
        if reason in _NODE_GOES_DOWN:
            text = f"{reason}: {message}"
            return NodeLoss(self.node, FaultClass.NODE_LOST, "NODE_LOST", text)
        if self.is_leaving:
            return NodeLoss(self.node, lost, "POD_DELETED", "the pod was deleted")
        if self._end is not None and self._end.get("reason") == "OOMKilled":
            text = "the kernel killed the agent of the pod: OOMKilled"
            return NodeLoss(self.node, FaultClass.HOST_OOM, "OOMKilled", text)
        if self.is_over:
            text = message or f"the pod's container ended {_how(self._end or {})}"
            return NodeLoss(self.node, lost, "POD_ENDED", text)
        return None

    def _disruption(self, events: Sequence[Document]) -> tuple[str, str] | None:
        """Why the cluster took the pod away, as code and text.

        A condition has the reason from 1.26 on, events have it before.
        """
        if self._status.get("reason") == "Evicted":
            return "POD_EVICTED", f"evicted: {self._status.get('message') or 'no reason given'}"
        target = condition_of(self.document, "DisruptionTarget")
        if target:
            is_preempted = "Preemption" in str(target.get("reason"))
            code = POD_PREEMPTED if is_preempted else "POD_EVICTED"
            return code, f"{target.get('reason')}: {target.get('message')}"
        if stopped := condition_of(self.document, _STOPPED_BY_KUEUE):
            return POD_PREEMPTED, f"{stopped.get('reason')}: {stopped.get('message')}"
        for event in reversed(events):
            if event.get("reason") in _PREEMPTED:
                return POD_PREEMPTED, f"preempted: {event.get('message')}"
            if event.get("reason") in _EVICTED:
                return "POD_EVICTED", f"evicted: {event.get('message')}"
        return None

    def refusal(self) -> Refusal:
        """Explain why the agent does not listen yet."""
        name, status = self.name, self._status
        scheduled = condition_of(self.document, "PodScheduled")
        if scheduled.get("status") == "False":
            text = scheduled.get("message") or scheduled.get("reason")
            if scheduled.get("reason") == "SchedulingGated":
                gates = self.document["spec"].get("schedulingGates") or ()
                text = f"a queue holds it back ({', '.join(gate['name'] for gate in gates)})"
            return Refusal(f"{name} has no node: {text}", is_room=True)
        if self.is_over:
            why = status.get("message") or status.get("reason") or _how(self._end or {})
            # The kubelet refuses pods that do not fit after all: OutOfhuawei.com/Ascend910.
            is_room = str(status.get("reason") or "").startswith(("OutOf", "UnexpectedAdmission"))
            text = f"{name} on {self.node} ended before it was up: {why}"
            return Refusal(text, is_room=is_room, is_final=True)
        waiting = (self._agent.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason"), waiting.get("message")
        if reason and message:
            is_final = reason in HOPELESS and _PASSES.search(message) is None
            text, is_pull = f"{name} on {self.node}: {reason}: {message}", reason in _PULLS
            return Refusal(text, is_final=is_final, pod=name, is_pull=is_pull)
        if not self.node:
            return Refusal(f"{name} has no node yet: no scheduler has tried it", is_room=True)
        problem = reason or f"its agent does not listen yet (phase {status.get('phase')})"
        return Refusal(f"{name} on {self.node}: {problem}")


def read_pods(objects: Mapping[str, Document]) -> dict[str, Pod]:
    """Wrap the documents of pods, by name."""
    return {name: Pod(document) for name, document in objects.items()}


def condition_of(document: Document, kind: str) -> Mapping[str, Any]:
    """Find a condition in the status of a pod or a node; empty: it has none of this kind."""
    conditions = (document.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def _how(end: Mapping[str, Any]) -> str:
    signal = end.get("signal")
    how = f"by signal {signal}" if signal else f"with exit code {end.get('exitCode')}"
    return f"{how} ({end['reason']})" if end.get("reason") else how


def explain_loss(events: Sequence[Document]) -> bool:
    """Whether events about a pod report that it was preempted or evicted."""
    return any(event.get("reason") in (*_PREEMPTED, *_EVICTED) for event in events)


def vanished(node: str) -> NodeLoss:
    """The loss of a pod that is not in the cluster any more, without a trace."""
    text = "the pod is not there any more: it was deleted by force, or with its node"
    return NodeLoss(node, FaultClass.CONTAINER_LOST, "POD_DELETED", text)


def not_replaced(loss: NodeLoss | None) -> NodeLoss | None:
    """The loss of a pod that Perdure took down for another: the one before, if there was any."""
    if loss is None or loss.code != "POD_ENDED":
        return loss
    text = "its pod was taken down for another, which has not come up"
    return NodeLoss(loss.node, FaultClass.CONTAINER_LOST, "NOT_REPLACED", text)


def without_token(pod: Pod) -> NodeLoss:
    """The loss of a pod whose agent obeys nobody, since the Secret with its token is gone."""
    text = f"Secret {pod.name} with the token of its agent is gone, so that nobody can speak to it"
    return NodeLoss(pod.node, FaultClass.CONTAINER_LOST, "SECRET_LOST", text)


def lost_with_node(loss: NodeLoss, absence: str) -> NodeLoss:
    """The loss of a pod whose node has left the cluster, as the loss of a node.

    The cluster removes such a pod 40 s or more later, from 1.26 on with a DisruptionTarget
    (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-garbage-collection).

    Args:
        loss: the pod's.
        absence: what became of its node, one sentence.
    """
    if loss.fault_class is not FaultClass.CONTAINER_LOST:
        return loss
    return NodeLoss(loss.node, FaultClass.NODE_LOST, "NODE_DELETED", f"{absence}; {loss.line}")
