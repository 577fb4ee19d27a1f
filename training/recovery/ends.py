"""The cases in which no rung but `stop` can help, each with the reason to give.

Pure functions over a `LadderInput`; the ladder asks them before any guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perdure.training.recovery.faults import (
    SLOW_START,
    STORE_FULL,
    TRAITS,
    Fault,
    FaultClass,
    RecoverableBy,
)
from perdure.training.recovery.guards import LadderInput
from perdure.training.recovery.rungs import Recovery


def _is_oom_again(case: LadderInput) -> bool:
    """Whether the device ran out of memory at this step before.

    It will a third time: the program's sizes are to be changed.
    """
    oom, step = FaultClass.DEVICE_OOM, case.fault.step
    return (
        case.fault.fault_class is oom
        and step is not None
        and any(past.fault.fault_class is oom and past.fault.step == step for past in case.streak)
    )


def hung_before(fault: Fault, *, history: Sequence[Recovery], streak: Sequence[Recovery]) -> bool:
    """Whether the same rank hung at this step in the same function of the program before.

    Without a known step, only hangs without progress in between are at the same place. A start that
    computes may only be slow, so that another such start says nothing about it.

    Args:
        fault: what is to be answered.
        history: every past recovery of the run, oldest first.
        streak: those without progress.
    """
    if fault.fault_class is not FaultClass.HANG or fault.frame is None:
        return False
    place = (fault.step, fault.rank, fault.frame)
    hangs = [past.fault for past in (streak if fault.step is None else history)]
    if fault.code == SLOW_START:
        hangs = [hang for hang in hangs if hang.code != SLOW_START]
    return any((hang.step, hang.rank, hang.frame) == place for hang in hangs)


def _is_hang_again(case: LadderInput) -> bool:
    """Whether new processes hang where others did: the program does, whatever the limit is."""
    return case.hung_before


def _is_store_full(case: LadderInput) -> bool:
    """Whether the run's own store is full: new processes would fill it as these have."""
    fault = case.fault
    return fault.fault_class is FaultClass.STORAGE_ERROR and fault.code == STORE_FULL


def _is_cancelled(case: LadderInput) -> bool:
    """Whether a person ended the job: who starts it again by itself works against that person."""
    fault = case.fault
    is_end = fault.fault_class is FaultClass.PREEMPTED
    return is_end and fault.recoverable_by is RecoverableBy.USER_FIX


def _is_the_users_again(case: LadderInput) -> bool:
    """Whether, by the evidence, only the user can fix it, and it came back so soon.

    Another process may free another full disk in the meantime, or the end of this one does, so
    the first one is answered like any other of its class. A class that is always the user's has
    a ladder of its own.
    """
    return _needs_user_fix(case.fault) and any(
        not past.failed
        and _needs_user_fix(past.fault)
        and past.fault.fault_class is case.fault.fault_class
        for past in case.streak
    )


def _needs_user_fix(fault: Fault) -> bool:
    theirs = RecoverableBy.USER_FIX
    if fault.fault_class is FaultClass.NATIVE_CRASH or fault.chip_code is not None:
        return False  # nothing in them shows whose it is: they are counted
    return fault.recoverable_by is theirs and TRAITS[fault.fault_class].recoverable_by != theirs


def _hang_again_text(fault: Fault) -> str:
    rank = f" of rank {fault.rank}" if fault.rank is not None else ""
    place = f"at step {fault.step}{rank} in {fault.frame}"
    return f" again {place} is for the user to fix: {fault.action}"


# By the case; the reason follows the name of the class.
ENDS: Mapping[Callable[[LadderInput], bool], Callable[[Fault], str]] = {
    _is_cancelled: lambda _fault: ": the job was ended by a person, who may start it again",
    _is_oom_again: lambda fault: f" again at step {fault.step} is for the user to fix",
    _is_hang_again: _hang_again_text,
    _is_store_full: lambda _fault: ": the run's store is full; make room, then start the run again",
    _is_the_users_again: lambda _fault: " again, and its evidence is for the user to fix",
}
