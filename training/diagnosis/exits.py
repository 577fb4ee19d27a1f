"""What the exit code of a worker says: the codes agreed with the runtime, and signals."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from training.recovery.faults import Fault, FaultClass
from training.recovery.protocol import WorkerEnded

EXIT_DONE = 0
EXIT_USER = 2
EXIT_RESTART_ME = 75
EXIT_ABOVE_PROCESS = 76
EXIT_NO_COMMAND = 127
SHELL_SIGNAL_BASE = 128  # a shell whose child was ended by signal n exits with 128 + n

AGREED: Mapping[int, tuple[FaultClass, str]] = {
    EXIT_USER: (FaultClass.USER_CODE_ERROR, "The program says that its user must mend it."),
    EXIT_RESTART_ME: (FaultClass.UNKNOWN, "The worker saved its state and asks for a restart."),
    EXIT_ABOVE_PROCESS: (FaultClass.DEVICE_LOST, "The worker cannot go on in this container."),
    EXIT_NO_COMMAND: (FaultClass.LAUNCH_MISCONFIGURED, "The command was not found."),
}


def signal_name(number: int) -> str | None:
    """Name of a signal; real-time signals have numbers without names."""
    return signal.Signals(number).name if number in set(signal.Signals) else None


def signal_of(exit_code: int) -> int | None:
    """The signal that ended a process, or the child of a shell that reports it; None for none."""
    if exit_code < 0:
        return -exit_code
    number = exit_code - SHELL_SIGNAL_BASE
    return number if signal_name(number) is not None else None


# Raised by training/device.py, which loads torch.
DEVICE_BEYOND_HEALING = "DeviceBeyondHealing"
_CLASS_OF_EXIT: Mapping[int, FaultClass] = {
    # It lost its line to the coordinator: only then does a rank alone ask for a restart.
    EXIT_RESTART_ME: FaultClass.COLLECTIVE_TIMEOUT,
    EXIT_ABOVE_PROCESS: FaultClass.DEVICE_LOST,
}


def fault_of_end(ended: WorkerEnded, *, node: str | None, step: int) -> Fault:
    """The fault that a worker's end is, as far as its exit tells.

    A process that ends by an exception of its own is the program's business: the whole diagnosis
    looks at it once the attempt has ended.
    """
    if ended.is_oom:
        fault_class = FaultClass.HOST_OOM
    elif ended.exit_code < 0:
        fault_class = FaultClass.NATIVE_CRASH
    elif (ended.error or "").startswith(DEVICE_BEYOND_HEALING):
        fault_class = FaultClass.DEVICE_MEMORY_ERROR
    else:
        fault_class = _CLASS_OF_EXIT.get(ended.exit_code, FaultClass.USER_CODE_ERROR)
    text = ended.error or _exit_text(ended.exit_code)
    return Fault(
        fault_class,
        ended.at_s,
        f"rank {ended.rank}: {text}",
        node=node,
        rank=ended.rank,
        device=ended.device,
        step=step,
    )


def _exit_text(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
