"""Servers as child processes of the tests: started in a folder of their own, ended for certain.

Unless a test says otherwise, they listen on the loopback interface only. Times are seconds.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import wait_for

HOST = "127.0.0.1"
START_S = 240.0
END_S = 5.0
PR_SET_PDEATHSIG = 1


def find_program(name: str) -> str | None:
    """Path of a program beside the interpreter or on PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def listens(port: int, host: str = HOST) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


class Program:
    """One running program; its output goes to a file."""

    def __init__(self, command: Sequence[str], *, log: Path, user: str | None = None) -> None:
        self._log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                user=user,
                start_new_session=True,  # an interrupt at the terminal ends pytest, which ends us
                preexec_fn=_die_with_parent,  # noqa: PLW1509 no thread of ours holds a lock it needs
            )

    def wait_for_port(self, port: int, host: str = HOST) -> None:
        """Return when it accepts connections."""

        def ready() -> bool:
            if self._process.poll() is not None:
                raise AssertionError(
                    f"{self._process.args!r} ended: {self._log.read_text()[-2000:]}"
                )
            return listens(port, host)

        wait_for(ready, timeout_s=START_S, what=f"{self._process.args!r} listens on {port}")

    def kill(self) -> None:
        """End it as a power cut would."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Ask it to end, and make sure."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()


def _die_with_parent() -> None:
    """For a pytest that is killed and runs no teardown.

    The system counts the thread that started us as the parent: that must be the main thread.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
