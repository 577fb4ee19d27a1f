"""What can go wrong: fault classes and the record of one diagnosed fault.

Evidence (the line), class (what broke) and action (the rung) are three different things and
never share a field. Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


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
    STORAGE_ERROR = "storage_error"
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"
    DATALOADER_ERROR = "dataloader_error"
    NUMERIC_ANOMALY = "numeric_anomaly"
    NATIVE_CRASH = "native_crash"
    PREEMPTED = "preempted"
    USER_CODE_ERROR = "user_code_error"
    LAUNCH_MISCONFIGURED = "launch_misconfigured"
    VERSION_MISMATCH = "version_mismatch"
    UNKNOWN = "unknown"


USER_MUST_MEND = frozenset(
    {FaultClass.USER_CODE_ERROR, FaultClass.LAUNCH_MISCONFIGURED, FaultClass.VERSION_MISMATCH}
)

# Faults that point at a machine or a chip by themselves, whatever the program does.
NODE_OR_CHIP = frozenset(
    {
        FaultClass.DEVICE_MEMORY_ERROR,
        FaultClass.DEVICE_LOST,
        FaultClass.LINK_DOWN,
        FaultClass.NODE_LOST,
    }
)

# AI core / vector core report wrong input of the application: the chip is healthy
# (MindCluster faultCode.json, class User; ModelArts does not isolate the node for them).
USER_CAUSED_CODES = frozenset({"80C98002", "80CB8002"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One diagnosed fault.

    Attributes:
        fault_class: what broke.
        at_s: first symptom, seconds since the epoch.
        evidence: the shortest text that supports the class.
        node: name of the node, None when not localised.
        rank: global rank that was first, None when not localised.
        device: local device index.
        code: chip fault code such as "80E01801", or a symptom code such as "SIGKILL".
        step: last completed step when it happened; None when unknown.
        explanation: one sentence for a person.
    """

    fault_class: FaultClass
    at_s: float
    evidence: str
    node: str | None = None
    rank: int | None = None
    device: int | None = None
    code: str | None = None
    step: int | None = None
    explanation: str = ""

    @property
    def chip_code(self) -> str | None:
        """The code when a chip reported it (eight hexadecimal digits), else None."""
        is_chip = self.code is not None and re.fullmatch(r"[0-9A-F]{8}", self.code)
        return self.code if is_chip else None

    @property
    def where(self) -> str:
        """Node and rank as a person would say it."""
        if self.rank is None:
            return self.node or "unknown node"
        return f"rank {self.rank} on {self.node or 'unknown node'}"
