"""A fault as it is stored: in the ledger, in notes, in start orders.

Apart from the ledger's other records, because the notes that those hold name faults, too.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from training.recovery.faults import FaultClass, RecoverableBy


class FaultRecord(BaseModel):
    """A `Fault` as it is stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    severity: int | None = Field(None, ge=0, le=3)
