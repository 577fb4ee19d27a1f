"""The meanings of workers' exit codes: those agreed with the runtime, signals, and conventions.

A living attempt (`fault_of_end`) and the diagnosis of an ended attempt (`classify`) read the same
table.
"""

from __future__ import annotations

import os
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
_EXIT_NOT_EXECUTABLE = 126
_EXIT_NO_COMMAND = 127
SHELL_SIGNAL_BASE = 128  # a shell whose child was ended by signal n exits with 128 + n
# A launcher that calls sys.exit(-n) for a child that signal n has ended exits with 256 - n. Codes
# 253 to 255 are those of sys.exit(-1) and the like in too many programs.
_WRAPPED_BASE = 256
_WRAPPED_SIGNALS = range(signal.SIGILL, signal.SIGTERM + 1)
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


_OF_RUNTIME: Mapping[int, ExitMeaning] = {
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
}
_OF_ANY: Mapping[int, ExitMeaning] = {
    EXIT_USER: ExitMeaning(
        FaultClass.USER_CODE_ERROR,
        "The program reports that its user must fix it; by convention: wrong arguments.",
    ),
    _EXIT_NOT_EXECUTABLE: ExitMeaning(
        FaultClass.LAUNCH_MISCONFIGURED, "The command cannot be started: it may not be executed."
    ),
    _EXIT_NO_COMMAND: ExitMeaning(
        FaultClass.LAUNCH_MISCONFIGURED,
        "The command cannot be started: it is not there, or names what nothing sets.",
    ),
    -signal.SIGTERM: ExitMeaning(
        FaultClass.PREEMPTED, "Something outside asked the process to end."
    ),
    -signal.SIGINT: ExitMeaning(
        FaultClass.PREEMPTED, "A person or a launcher interrupted the process (Ctrl-C)."
    ),
    -signal.SIGHUP: ExitMeaning(
        FaultClass.PREEMPTED, "The terminal or session that the process belonged to was closed."
    ),
    -signal.SIGUSR1: ExitMeaning(
        FaultClass.PREEMPTED, "A scheduler's signal before its time limit; nothing handled it."
    ),
    -signal.SIGUSR2: ExitMeaning(
        FaultClass.PREEMPTED, "A scheduler's signal before its time limit; nothing handled it."
    ),
    -signal.SIGXCPU: ExitMeaning(
        FaultClass.PREEMPTED, "The process reached its limit of processor time."
    ),
    -signal.SIGXFSZ: ExitMeaning(
        FaultClass.STORAGE_ERROR, "The process reached the largest size that a file may have."
    ),
    -signal.SIGPIPE: ExitMeaning(FaultClass.UNKNOWN, "The program that read its output has ended."),
    -signal.SIGALRM: ExitMeaning(
        FaultClass.UNKNOWN, "A timer that the program had set itself ran out."
    ),
}
# Words for codes that name no fault class: sysexits.h, and what schedulers and launchers agree on.
_CONVENTIONS: Mapping[int, str] = {
    os.EX_USAGE: "sysexits: the command was used in a wrong way",
    os.EX_DATAERR: "sysexits: the input data is wrong",
    os.EX_NOINPUT: "sysexits: an input file is not there or not readable",
    os.EX_NOUSER: "sysexits: no such user",
    os.EX_NOHOST: "sysexits: no such host",
    os.EX_UNAVAILABLE: "sysexits: a service is not available",
    os.EX_SOFTWARE: "sysexits: an internal error of the program",
    os.EX_OSERR: "sysexits: an error of the operating system",
    os.EX_OSFILE: "sysexits: a system file is missing or wrong",
    os.EX_CANTCREAT: "sysexits: an output file cannot be created",
    os.EX_IOERR: "sysexits: an input or output error",
    os.EX_TEMPFAIL: "sysexits: a temporary failure, try again",
    os.EX_PROTOCOL: "sysexits: the other side broke the protocol",
    os.EX_NOPERM: "sysexits: no permission",
    os.EX_CONFIG: "sysexits: a configuration error",
    85: "by convention: saved, start me again",
    99: "by convention: requeue me",
    100: "by convention of Grid Engine: put me on hold",
    120: "Python could not write out its output as it exited",
    124: "timeout: the time of the command was over",
    125: "the container or the wrapper around the command failed",
    255: "exit(-1), or ssh lost its connection",
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


def explain_exit(
    exit_code: int, *, is_oom: bool = False, is_command: bool = False
) -> ExitMeaning | None:
    """Explain an exit code; None where only the worker's output explains it.

    Args:
        exit_code: negative for a signal, or 128 + signal from a shell.
        is_oom: whether the kernel killed for memory on the node meanwhile.
        is_command: whether the program knows nothing of the codes agreed with the runtime.
    """
    number = signal_of(exit_code)
    if number == signal.SIGKILL and is_oom:
        return OUT_OF_MEMORY
    if number is not None:
        return _OF_ANY.get(-number, CRASHED)
    return _OF_ANY.get(exit_code) or (None if is_command else _OF_RUNTIME.get(exit_code))


def describe_exit(exit_code: int) -> str:
    """Describe an exit code that names no fault, with its meaning in words where it has one."""
    words = _CONVENTIONS.get(exit_code)
    return f"exit code {exit_code} ({words})" if words is not None else f"exit code {exit_code}"


def was_killed(exit_code: int, error: str | None) -> bool:
    """Whether a process, or a child that it names (a data loader), ended by SIGKILL."""
    return exit_code == -signal.SIGKILL or "killed" in (error or "").lower()


def signal_name(number: int) -> str | None:
    """Return the name of a signal; real-time signals have numbers without names."""
    return signal.Signals(number).name if number in set(signal.Signals) else None


def signal_of(exit_code: int) -> int | None:
    """Return the signal that ended a process, or a child as its shell or launcher reports."""
    if exit_code < 0:
        return -exit_code
    wrapped = _WRAPPED_BASE - exit_code
    number = wrapped if wrapped in _WRAPPED_SIGNALS else exit_code - SHELL_SIGNAL_BASE
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
