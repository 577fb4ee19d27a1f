"""What a fault means for a command, whose files are its own. Pure."""

from __future__ import annotations

from dataclasses import replace

from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy

CORRUPT_WHY = "It is the program's own: Perdure does not know its files, and cannot set it aside."
CORRUPT_ACTION = (
    "Move the damaged checkpoint away, so that the program resumes from the one before it."
)


def of_command(fault: Fault) -> Fault:
    """A fault as it holds for a command: what Perdure mends for sessions is the user's."""
    if fault.fault_class is not FaultClass.CHECKPOINT_CORRUPT:
        return fault
    # A reading that was cut short may succeed the next time; the ladder tries that once.
    return replace(
        fault,
        explanation=f"{fault.explanation} {CORRUPT_WHY} {CORRUPT_ACTION}".strip(),
        action=CORRUPT_ACTION,
        recoverable_by=RecoverableBy.USER_FIX,
        user_fault=True,
    )
