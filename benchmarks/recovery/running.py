"""One run of one contender: in its own process and folder, with a deadline.

Times are seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.recovery.measuring import Logs
from benchmarks.recovery.processes import sweep
from benchmarks.recovery.workload import Workload
from perdure.training.processes import MARKER

RUN_TIMEOUT_S = 240.0


class NotRunError(Exception):
    """A run that did not reach its end; the text is the reason."""


def run(
    kind: str, name: str, *, steps: int, kill_step: int | None = None, loses_node: bool = False
) -> Logs:
    """Run a contender, and read what it leaves.

    Args:
        kind: of the contender, as the command line knows it.
        name: of the contender.
        steps: target.
        kill_step: when there is a fault, None: there is none.
        loses_node: whether a whole node is killed.

    Raises:
        NotRunError: it is not installed, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        workload = Workload(folder=folder, steps=steps, kill_step=kill_step, loses_node=loses_node)
        try:
            _run_child(kind, name, workload)
        finally:
            sweep(folder)
        logs = Logs.of(folder)
        if logs.newest != steps:
            raise NotRunError(f"reached step {logs.newest} of {steps}")
        return logs


def _run_child(kind: str, name: str, workload: Workload) -> None:
    child = start_child(kind, name, workload)
    try:
        _, errors = child.communicate(timeout=RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired as exc:
        raise NotRunError(f"failed: not over after {RUN_TIMEOUT_S:g} s") from exc
    finally:
        child.kill()
    if child.returncode != 0:
        last = errors.strip().splitlines()[-1:] or [f"exit {child.returncode}"]
        raise NotRunError(last[0][:200])


def start_child(kind: str, name: str, workload: Workload) -> subprocess.Popen[str]:
    """A process that runs a contender; what it starts carries the folder as its marker."""
    command = [sys.executable, "-m", "benchmarks.recovery", "--run", kind, name]
    return subprocess.Popen(
        [*command, workload.model_dump_json()],
        env={**os.environ, MARKER: str(workload.folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
