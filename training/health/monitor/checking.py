"""Running the program that checks a node, from outside of it. Times are seconds."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping

from pydantic import ValidationError

from training.health.monitor.sources.vendor_tools import end_session
from training.wire.check import CHECKS, Check, NodeTask, Outcome

NODE_PROGRAM = "training.health.preflight.node"


class NodeProgram:
    """The program on this machine, one at a time: a new task ends the one before it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: NodeTask, environment: Mapping[str, str]) -> tuple[Check, ...]:
        """Check; that there is no result in time is a failed check, too."""
        self.end()
        try:
            process = self._start(environment)
        except OSError as error:
            return (_failed(task, f"the program does not start: {error}"),)
        try:
            out, _ = process.communicate(task.model_dump_json().encode(), task.timeout_s)
            return CHECKS.validate_json(out)
        except subprocess.TimeoutExpired:
            seen = f"no answer within {task.timeout_s:g} s"
        except ValidationError:
            code = process.returncode
            seen = f"the program ended with exit code {code} and no result"
        finally:
            end_session(process)
        return (_failed(task, seen),)

    def end(self) -> None:
        """End the program that runs, if one does; its caller gets a failed check."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.poll() is None:
            end_session(process)

    def _start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._lock:
            self._process = subprocess.Popen(
                [sys.executable, "-m", NODE_PROGRAM],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            return self._process


def _failed(task: NodeTask, seen: str) -> Check:
    return Check(name="node", node=task.node, outcome=Outcome.FAILED, seen=seen)
