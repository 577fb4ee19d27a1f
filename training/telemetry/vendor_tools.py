"""Calls of a driver's command-line tools, which may be missing, fail, or never come back.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

COMMAND_TIMEOUT_S = 10.0
KILL_WAIT_S = 1.0
_MAX_OUTPUT_BYTES = 64 << 10
# Places of tools that the driver package does not put into PATH.
PLACES: Mapping[str, str] = {
    name: f"/usr/local/Ascend/driver/tools/{name}" for name in ("hccn_tool", "msnpureport")
}


Ask = Callable[[Sequence[str]], str]  # runs a tool and returns its output


class NoAnswer(RuntimeError):  # noqa: N818 a state of affairs, named as it is shown
    """The tool did not start, or was killed because it gave no answer in time."""


def find_tool(name: str) -> str | None:
    """Return the path of a tool; None when it is not installed."""
    place = PLACES.get(name)
    return shutil.which(name) or (shutil.which(place) if place else None)


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float = COMMAND_TIMEOUT_S,
    answers: str = "",
    folder: Path | None = None,
) -> str:
    """Run a tool, and return its output on both streams, with any exit code.

    Args:
        command: the tool and its arguments.
        timeout_s: limit after which it is killed.
        answers: text for its stdin.
        folder: where it runs; None: here.

    Raises:
        NoAnswer: the tool did not start, or took longer than `timeout_s`.
    """
    try:
        output = tempfile.TemporaryFile()  # noqa: SIM115 closed below
    except OSError as error:
        raise NoAnswer(str(error)) from error
    with output:
        try:
            # A session of its own, so that what the tool starts ends with it.
            process = subprocess.Popen(
                [find_tool(command[0]) or command[0], *command[1:]],
                cwd=folder,
                stdin=subprocess.PIPE if answers else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise NoAnswer(str(error)) from error
        if process.stdin is not None:
            with suppress(BrokenPipeError), process.stdin as pipe:  # it asks nothing, and has ended
                pipe.write(answers.encode())
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            end_session(process)
            raise NoAnswer(str(error)) from error
        output.seek(0)
        return output.read(_MAX_OUTPUT_BYTES).decode(errors="replace")


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all processes of the session."""
    with suppress(ProcessLookupError):  # all of it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a driver may not let go of it
        process.wait(KILL_WAIT_S)


def parse_fields(text: str) -> dict[str, str]:
    """Parse `name : value` lines of a tool; a later line of a name wins."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon and name.strip()}


def read_assignments(path: Path) -> dict[str, str]:
    """Read `name=value` lines of a version file; empty when there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def parse_number(text: str | None) -> float | None:
    """Parse a number of a tool; None for NA, - or no text."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None
