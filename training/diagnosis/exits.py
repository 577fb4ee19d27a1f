"""The meanings of workers' exit codes: the codes agreed with the runtime, and signals.

A living attempt (`fault_of_end`) and the diagnosis of an ended attempt (`classify`) read the same
table.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from perdure.training.diagnosis.exceptions import judge_exception
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import WorkerEnded

EXIT_DONE = 0
EXIT_USER = 2
EXIT_RESTART_ME = 75
EXIT_ABOVE_PROCESS = 76
_EXIT_NO_COMMAND = 127
SHELL_SIGNAL_BASE = 128  # a shell whose child was ended by signal n exits with 128 + n
# Raised by training/device.py, which loads torch.
_DEVICE_BEYOND_HEALING = "DeviceBeyondHealing"


@dataclass(frozen=True, slots=True)
class ExitMeaning:
    """The meaning of an exit code.

    Attributes:
        text: a sentence for the report.
        is_symptom: whether workers that a fault elsewhere has stopped end so, too.
        alone: class of the only end in a living attempt; None where it does not differ.
    """

    fault_class: FaultClass
    text: str
    is_symptom: bool = False
    alone: FaultClass | None = None


_EXITS: Mapping[int, ExitMeaning] = {
    EXIT_USER: ExitMeaning(
        FaultClass.USER_CODE_ERROR, "The program reports that its user must fix it."
    ),
    # Every survivor of a fault asks for a restart. A rank that asks for it while the others go on
    # has lost its connection to the coordinator.
    EXIT_RESTART_ME: ExitMeaning(
        FaultClass.UNKNOWN,
        "The worker asks for a restart: a fault elsewhere, or a request, has ended it.",
        is_symptom=True,
        alone=FaultClass.COLLECTIVE_TIMEOUT,
    ),
    EXIT_ABOVE_PROCESS: ExitMeaning(
        FaultClass.DEVICE_LOST, "The worker cannot go on in this container."
    ),
    _EXIT_NO_COMMAND: ExitMeaning(
        FaultClass.LAUNCH_MISCONFIGURED,
        "The command cannot be started: it is not there, or names what nothing sets.",
    ),
    -signal.SIGTERM: ExitMeaning(
        FaultClass.PREEMPTED, "Something outside asked the process to end."
    ),
}
CRASHED = ExitMeaning(
    FaultClass.NATIVE_CRASH,
    "The process was ended by the operating system, not by an exception.",
)
# For a SIGKILL that, by its count, the OOM killer did not send.
KILLED_WHY = (
    "SIGKILL ended the process. The kernel of the node counts no kill for memory meanwhile: a "
    "person, a script or the platform has sent it."
)
KILLED_ACTION = (
    "Find who sent SIGKILL: look at who was on the node, and at the platform's events of the "
    "container. A killed process leaves neither a stack nor a core file."
)
OUT_OF_MEMORY = ExitMeaning(FaultClass.HOST_OOM, "The kernel's OOM killer was active on the node.")


def explain_exit(exit_code: int, *, is_oom: bool = False) -> ExitMeaning | None:
    """Explain an exit code; None where only the worker's output explains it.

    Args:
        exit_code: negative for a signal, or 128 + signal from a shell.
        is_oom: whether the kernel killed for memory on the node meanwhile.
    """
    number = signal_of(exit_code)
    if number == signal.SIGKILL and is_oom:
        return OUT_OF_MEMORY
    return _EXITS.get(exit_code) if number is None else _EXITS.get(-number, CRASHED)


def was_killed(exit_code: int, error: str | None) -> bool:
    """Whether a process, or a child that it names (a data loader), ended by SIGKILL."""
    return exit_code == -signal.SIGKILL or "killed" in (error or "").lower()


def signal_name(number: int) -> str | None:
    """Return the name of a signal; real-time signals have numbers without names."""
    return signal.Signals(number).name if number in set(signal.Signals) else None


def signal_of(exit_code: int) -> int | None:
    """Return the signal that ended a process, or a shell's child as the shell reports; or None."""
    if exit_code < 0:
        return -exit_code
    number = exit_code - SHELL_SIGNAL_BASE
    return number if signal_name(number) is not None else None


def fault_of_end(ended: WorkerEnded, *, node: str | None, step: int) -> Fault:
    """Build the fault of a worker that ended while its attempt lives, as its exit shows it.

    A process that ends by an exception of its own is not replaced: the whole diagnosis reads its
    output once the attempt has ended. Until then it is unknown, unless its type leaves no doubt.
    """
    meaning = OUT_OF_MEMORY if ended.is_oom else explain_exit(ended.exit_code)
    if ended.exit_code >= 0 and (ended.error or "").startswith(_DEVICE_BEYOND_HEALING):
        fault_class = FaultClass.DEVICE_MEMORY_ERROR
    elif meaning is None:
        raised = judge_exception(ended.error or "", "")
        is_theirs = raised is not None and raised.spec.fault_class is FaultClass.USER_CODE_ERROR
        fault_class = FaultClass.USER_CODE_ERROR if is_theirs else FaultClass.UNKNOWN
    else:
        fault_class = meaning.alone or meaning.fault_class
    code = ended.exit_code
    text = ended.error or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
    return Fault(
        fault_class,
        ended.at_s,
        f"rank {ended.rank}: {text}",
        node=node,
        rank=ended.rank,
        device=ended.device,
        step=step,
    )
