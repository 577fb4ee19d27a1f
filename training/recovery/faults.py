"""What can go wrong: fault classes and the record of one diagnosed fault.

Evidence (the line), class (what broke) and action (the rung) are three different things and
never share a field. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field


class FaultClass(StrEnum):
    """What broke."""

    DEVICE_MEMORY_ERROR = "device_memory_error"
    DEVICE_LOST = "device_lost"
    OPERATOR_ERROR = "operator_error"
    DEVICE_OOM = "device_oom"
    HOST_OOM = "host_oom"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    LINK_DOWN = "link_down"
    HANG = "hang"
    NODE_LOST = "node_lost"
    CONTAINER_LOST = "container_lost"
    FAIL_SLOW = "fail_slow"
    STORAGE_ERROR = "storage_error"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    LEFTOVER = "leftover"
    DATALOADER_ERROR = "dataloader_error"
    NUMERIC_ANOMALY = "numeric_anomaly"
    NATIVE_CRASH = "native_crash"
    PREEMPTED = "preempted"
    RESTART_REQUESTED = "restart_requested"
    USER_CODE_ERROR = "user_code_error"
    LAUNCH_MISCONFIGURED = "launch_misconfigured"
    VERSION_MISMATCH = "version_mismatch"
    UNKNOWN = "unknown"


class RecoverableBy(StrEnum):
    """The cheapest kind of answer that can help."""

    RETRY = "retry"
    RESCHEDULE = "reschedule"
    ISOLATE = "isolate"
    USER_FIX = "user-fix"


@dataclass(frozen=True, slots=True)
class Traits:
    """What holds for a class unless the evidence shows otherwise.

    Attributes:
        meaning: one sentence for the user.
        action: what the user should do.
        recoverable_by: the cheapest kind of answer that can help.
        user_fault: whether the user's program, configuration or sizes cause it.
        hardware_fault: whether a machine, chip or link is broken, whatever the program does.
        is_worth_saving: whether survivors hold a state worth keeping: it is sound, and something
            was trained.
    """

    meaning: str
    action: str
    recoverable_by: RecoverableBy = RecoverableBy.RETRY
    user_fault: bool = False
    hardware_fault: bool = False
    is_worth_saving: bool = True


TRAITS: Mapping[FaultClass, Traits] = {
    FaultClass.DEVICE_MEMORY_ERROR: Traits(
        "The device's memory returned data that its error correction could not repair.",
        "Read the device's ECC counters; replace the device when the error comes back.",
        RecoverableBy.ISOLATE,
        hardware_fault=True,
    ),
    FaultClass.DEVICE_LOST: Traits(
        "The device does not answer any more, or could not be opened.",
        "Keep the node out of the job and have the device reset or replaced.",
        RecoverableBy.RESCHEDULE,
        hardware_fault=True,
    ),
    FaultClass.OPERATOR_ERROR: Traits(
        "A kernel failed while it ran on the device.",
        "If it comes back on another device, look at the operator and its inputs.",
    ),
    FaultClass.DEVICE_OOM: Traits(
        "The device has no memory left for what the program asked for.",
        "Make the micro batch, sequence or model share of a rank smaller, use mixed precision, or "
        "recompute more.",
        RecoverableBy.USER_FIX,
        user_fault=True,
    ),
    FaultClass.HOST_OOM: Traits(
        "The host ran out of memory and a process was ended or refused memory.",
        "Give the container more memory, or use fewer loader workers and less offloading.",
        RecoverableBy.USER_FIX,
        user_fault=True,
    ),
    FaultClass.COLLECTIVE_TIMEOUT: Traits(
        "Ranks waited for a peer in a collective, or could not connect to it.",
        "Look for the rank that is missing from the collective: it failed, left, or is slow. On "
        "NPUs, HCCL_CONNECT_TIMEOUT (links) and HCCL_EXEC_TIMEOUT (collectives) are the limits.",
    ),
    FaultClass.LINK_DOWN: Traits(
        "A network port or link between devices failed.",
        "Have the port, the optical module and the switch side checked.",
        RecoverableBy.RESCHEDULE,
        hardware_fault=True,
    ),
    FaultClass.HANG: Traits(
        "The processes live but make no progress.",
        "Compare the stacks of the ranks: the one outside the collective holds the others up.",
    ),
    FaultClass.NODE_LOST: Traits(
        "A node, or the container on it, is lost.",
        "Look at the node's own log before it takes part again.",
        RecoverableBy.RESCHEDULE,
        hardware_fault=True,
    ),
    FaultClass.CONTAINER_LOST: Traits(
        "The platform took a node's container away: deleted or evicted.",
        "None, if it was meant; else find who deleted it, or what the node ran out of.",
        RecoverableBy.RESCHEDULE,
    ),
    FaultClass.FAIL_SLOW: Traits(
        "A rank is later than all others, step after step; nothing has failed.",
        "Look for a throttled device, a busy host or a slow link on its node.",
        RecoverableBy.ISOLATE,
        hardware_fault=True,
    ),
    FaultClass.STORAGE_ERROR: Traits(
        "A file system or object store refused or failed a request.",
        "Check that the storage is up and not throttled; a retry may do.",
    ),
    FaultClass.CHECKPOINT_CORRUPT: Traits(
        "A checkpoint is damaged or incomplete.",
        "Go back to the checkpoint before it, or fetch the file again.",
        is_worth_saving=False,
    ),
    FaultClass.LEFTOVER: Traits(
        "An earlier process left something on the machine that is in the way of a new one.",
        "Remove what the line names, or end the process that holds it.",
        RecoverableBy.RESCHEDULE,
        is_worth_saving=False,
    ),
    FaultClass.DATALOADER_ERROR: Traits(
        "A process that loads the training data died or failed.",
        "Look at the loader's own error, its memory and its shared memory.",
    ),
    FaultClass.NUMERIC_ANOMALY: Traits(
        "Loss or gradient norm is not finite, or jumped.",
        "Go back to a checkpoint before it; if it comes back, change the data order, lower the "
        "learning rate (does it suit the number of ranks and the global batch?) and check mixed "
        "precision: bf16, or fp16 with a loss scaler.",
        RecoverableBy.USER_FIX,
        is_worth_saving=False,
    ),
    FaultClass.NATIVE_CRASH: Traits(
        "The process was ended by the operating system, not by an exception.",
        "Read the native stack or core file; compare library versions if it comes back.",
    ),
    FaultClass.PREEMPTED: Traits(
        "Something outside asked the process to end.",
        "None, if the scheduler took the node back; else find who sent the signal.",
        RecoverableBy.RESCHEDULE,
    ),
    FaultClass.RESTART_REQUESTED: Traits(
        "The program left with an exit code by which it asks to be started again: no fault.",
        "None. The code is one of worker.restart_codes.",
    ),
    FaultClass.USER_CODE_ERROR: Traits(
        "The training program raised an error that it will raise again.",
        "Fix the program at the line shown.",
        RecoverableBy.USER_FIX,
        user_fault=True,
    ),
    FaultClass.LAUNCH_MISCONFIGURED: Traits(
        "The job was started with settings that cannot work.",
        "Correct the setting that the line names.",
        RecoverableBy.USER_FIX,
        user_fault=True,
        is_worth_saving=False,
    ),
    FaultClass.VERSION_MISMATCH: Traits(
        "Installed libraries, driver or firmware do not fit together.",
        "Install versions that belong together; the line names the odd one.",
        RecoverableBy.USER_FIX,
        is_worth_saving=False,
    ),
    FaultClass.UNKNOWN: Traits(
        "Nothing that was left explains the failure.",
        "Read the last lines of the rank that ended first.",
    ),
}

# AI core / vector core report wrong input of the application: the chip is healthy
# (MindCluster faultCode.json, class User; ModelArts does not isolate the node for them).
USER_CAUSED_CODES = frozenset({"80C98002", "80CB8002"})

MIN_CONFIDENCE = 0.55  # a fault that is less likely what it seems to be is treated as unknown

# Our own codes.
STORE_FULL = "STORE_FULL"  # the run's store has no room left
NODE_UNWRITABLE = "NODE_UNWRITABLE"  # a node's scratch folder takes no files
POD_PREEMPTED = "POD_PREEMPTED"  # for others: what the run still holds is wanted, too
SLOW_START = "SLOW_START"  # the time before the first step of new processes was over
IDLE_START = "IDLE_START"  # the same, and they did not compute
LATE_STARTS = frozenset({SLOW_START, IDLE_START})
LOSSES = frozenset({FaultClass.NODE_LOST, FaultClass.CONTAINER_LOST})


@dataclass(frozen=True, slots=True)
class Fault:
    """One diagnosed fault; messages and records embed it as it is.

    Attributes:
        fault_class: what broke.
        at_s: first symptom, seconds since the epoch.
        evidence: the shortest text that supports the class.
        node: name of the node, None when not localised.
        rank: global rank that was first, None when not localised.
        device: local device index.
        code: chip fault code such as "80E01801", or a symptom code such as "SIGKILL".
        step: last completed step when it happened; None when unknown.
        explanation: one paragraph for the user.
        action: what the user should do about it.
        recoverable_by: the cheapest kind of answer that can help; None: as its class has it.
        user_fault: whether the user's program or settings cause it; None: as its class has it.
        hardware_fault: whether hardware is broken; None: as its class has it.
        severity: the driver's, 0 hint to 3 critical; None: it reported none.
        num_other_nodes: further nodes that showed the same in the same event.
        frame: of a hang that the program may cause: the functions of the program that its rank
            was in, such as "main (train.py) > evaluate (train.py)".
        confidence: how likely its class is right, from 0 to 1; None: it is no inference.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fault_class: FaultClass
    at_s: float
    evidence: str
    node: str | None = None
    rank: int | None = None
    device: int | None = None
    code: str | None = None
    step: int | None = None
    explanation: str = ""
    action: str = ""
    recoverable_by: RecoverableBy | None = None
    user_fault: bool | None = None
    hardware_fault: bool | None = None
    severity: Annotated[int, Field(ge=0, le=3)] | None = None
    num_other_nodes: Annotated[int, Field(ge=0)] = 0
    frame: str | None = None
    confidence: Annotated[float, Field(ge=0.0, le=1.0)] | None = None

    def of_class(self, fault_class: FaultClass) -> Fault:
        """Return the fault as one of another class, with the meaning and advice of that class."""
        traits = TRAITS[fault_class]
        return replace(
            self,
            fault_class=fault_class,
            explanation=traits.meaning,
            action=traits.action,
            recoverable_by=traits.recoverable_by,
            user_fault=traits.user_fault,
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether its class is too uncertain to act on it."""
        return self.confidence is not None and self.confidence < MIN_CONFIDENCE

    @property
    def chip_code(self) -> str | None:
        """The code when a chip reported it (eight hexadecimal digits), else None."""
        is_chip = self.code is not None and re.fullmatch(r"[0-9A-F]{8}", self.code)
        return self.code if is_chip else None

    @property
    def is_of_unwritable_node(self) -> bool:
        """Whether no process can start on the node, because it takes no files."""
        return self.code == NODE_UNWRITABLE

    @property
    def where(self) -> str:
        """Rank and node, for messages."""
        if self.rank is None:
            return self.node or "unknown node"
        return f"rank {self.rank} on {self.node or 'unknown node'}"
