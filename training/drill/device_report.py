"""The report of `perdure preflight --device`: every device of a machine, tried, and drilled.

It holds versions, checks, and exceptions word for word, and nothing about the user. Times are
seconds.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel
from perdure.training.drill.evaluation import DrillOutcome
from perdure.training.errors import InputError
from perdure.training.files import write_whole
from perdure.training.node_checks.versions import check_versions, read_installed
from perdure.training.processes import free_port
from perdure.training.wire.node import Check, CheckOutcome

HOST = "127.0.0.1"
BURN_IN_S = 1.0
LIMIT_S = 600.0
COUNT_LIMIT_S = 120.0
_PROGRAM = (sys.executable, "-m", "perdure.training.drill.device_trial")


class TrialTask(FrozenModel):
    """The task of a process: its device, by its rank. The first process serves the store."""

    rank: int
    size: int
    host: str
    port: int
    burn_in_s: float


class ProvokedError(FrozenModel):
    """An exception that a trial provoked.

    Attributes:
        provoked_by: the action that provoked it.
        type: qualified name of the exception's class.
        text: the whole message.
        is_fault: whether a worker takes it for a fault that it outlives.
        kind: the kind of fault that a worker would report; None: it is the result of another fault.
        fault_class: the class by the diagnosis; None: no rule matches.
    """

    provoked_by: str
    type: str
    text: str
    is_fault: bool
    kind: str | None
    fault_class: str | None


class Trial(FrozenModel):
    """The results of a device."""

    rank: int
    device: str
    name: str
    checks: tuple[Check, ...]
    exceptions: tuple[ProvokedError, ...]


class DeviceReport(FrozenModel):
    """The results of a machine's devices.

    Attributes:
        perdure: Perdure's version.
        machine: operating system and processor.
        versions: versions of torch, torch_npu, CANN and drivers, and whether they fit.
        trials: a trial for each device.
        unanswered: a check for each process that gave no answer.
        drills: outcomes of the drills.
        left_out: drills that could not run, with the reasons.
    """

    perdure: str
    machine: str
    versions: tuple[Check, ...]
    trials: tuple[Trial, ...]
    unanswered: tuple[Check, ...] = ()
    drills: tuple[dict[str, Any], ...] = ()
    left_out: dict[str, str] = Field(default={})

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All checks, each with its device."""
        by_device = [(trial.device, check) for trial in self.trials for check in trial.checks]
        general = [("", check) for check in (*self.versions, *self.unanswered)]
        return [*general, *by_device]

    @property
    def is_fine(self) -> bool:
        """Whether nothing failed, and every drill went as expected."""
        failed = any(check.outcome is CheckOutcome.FAILED for _, check in self.checks)
        return not failed and all(drill["as_expected"] for drill in self.drills)

    def with_drills(
        self, outcomes: Sequence[DrillOutcome], left_out: dict[str, str]
    ) -> DeviceReport:
        """The report with the outcomes of drills."""
        rows = tuple(
            {**asdict(outcome), "as_expected": outcome.as_expected} for outcome in outcomes
        )
        return self.model_copy(update={"drills": rows, "left_out": left_out})

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        write_whole(path, self.model_dump_json(indent=2))


def count_devices() -> int:
    """Count the accelerators that a process on this machine sees.

    Raises:
        InputError: their library does not load.
    """
    try:
        asked = subprocess.run(
            (*_PROGRAM, "--count"),
            capture_output=True, text=True, check=True, timeout=COUNT_LIMIT_S,
        )  # fmt: skip
        return int(asked.stdout.split()[-1])
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        raise InputError("devices", f"their library does not load: {last[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise InputError("devices", f"no answer within {COUNT_LIMIT_S:g} s") from error


def try_devices(
    count: int, *, burn_in_s: float = BURN_IN_S, limit_s: float = LIMIT_S
) -> DeviceReport:
    """Try the first devices of this machine, each in a separate process, all at once.

    Args:
        count: number of devices.
        burn_in_s: how long each device multiplies matrices.
        limit_s: limit for all processes; those that are late are killed.
    """
    port = free_port(HOST)
    tasks = [
        TrialTask(rank=rank, size=count, host=HOST, port=port, burn_in_s=burn_in_s)
        for rank in range(count)
    ]
    processes = [_start(task) for task in tasks]
    until_s = time.monotonic() + limit_s
    answers = [_answer(rank, process, until_s) for rank, process in enumerate(processes)]
    return DeviceReport(
        perdure=version("perdure"),
        machine=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions=check_versions(read_installed()),
        trials=tuple(answer for answer in answers if isinstance(answer, Trial)),
        unanswered=tuple(answer for answer in answers if isinstance(answer, Check)),
    )


def _start(task: TrialTask) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        _PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None  # noqa: S101 it is a pipe
    process.stdin.write(task.model_dump_json().encode())
    process.stdin.close()
    process.stdin = None  # or communicate() would flush it
    return process


def _answer(rank: int, process: subprocess.Popen[bytes], until_s: float) -> Trial | Check:
    """Read the results of a process, or how it ended without any."""
    try:
        output, log = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        _, log = process.communicate()
        return _unanswered(rank, "no answer in time", log)
    if process.returncode != 0:
        return _unanswered(rank, f"ended with {process.returncode}", log)
    return Trial.model_validate_json(output.strip().splitlines()[-1])


def _unanswered(rank: int, why: str, log: bytes) -> Check:
    tail = "\n".join(log.decode(errors="replace").splitlines()[-20:])
    finding = f"device {rank}: {why}\n{tail}"
    return Check(name="trial", outcome=CheckOutcome.FAILED, seen=finding)
