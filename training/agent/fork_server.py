"""The fork server of a node: a process that has imported torch, and forks the workers from itself.

Most of a process's start is importing torch: a worker that is forked starts in milliseconds,
which is what makes replacing it within a step possible. The fork server starts no thread and opens
no device, so its forks may do both. A fork leaves it an orphan at once, so the agent, which is
the subreaper of its container, becomes its parent and learns its exit status.

    agent -> fork server    one JSON object per line, `Fork`
    fork server -> agent    one line with the pid

Times are seconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.storage.frozen_model import FrozenModel
from perdure.training.processes import PRELOAD

KILL_WAIT_S = 5.0
# Everything a worker would import before its first step; an optimizer loads torch._dynamo.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "boto3",
    "perdure.training.coordinator.server",
    "perdure.training.runtime.worker",
    "perdure.training.trainer.pretrain",
)
ALONE = "--alone"
READY = b"ready\n"
START_TIMEOUT_S = 120.0
# At the end of an allocation every process gets one: the agent alone decides when this one ends.
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_COMM_BYTES = 15  # Linux keeps 16 of a process's name, with the zero at its end


class Fork(FrozenModel):
    """A request for a new process.

    Attributes:
        function: module:function that the new process runs, without arguments.
        name: name that ps shows.
        arguments: sys.argv after the first.
        environment: all variables of the process.
        stdout: file to which its output is appended.
        stderr: file to which its error output is appended.
    """

    function: str
    name: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str]
    cwd: str
    stdout: str
    stderr: str


@dataclass(slots=True)
class ForkedProcess:
    """A child that the fork server has started for us; has the methods of subprocess.Popen."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = -signal.SIGKILL  # collected elsewhere: its exit code is lost
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it and wait for its end, but not for ever: a driver may hold it."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        until_s = time.monotonic() + KILL_WAIT_S
        while self.poll() is None and time.monotonic() < until_s:
            time.sleep(0.002)


class ForkServer:
    """The fork server of a container, as its agent sees it.

    Args:
        variables: environment of its forks, as far as it decides how libraries load: threads,
            allocators, drivers.
        log: file for its output.
    """

    def __init__(self, variables: Mapping[str, str], log: Path) -> None:
        self._variables = dict(variables)
        self._log = log
        self._lock = threading.Lock()  # each answer belongs to a request
        self._process: subprocess.Popen[bytes] | None = None

    def serves(self, variables: Mapping[str, str]) -> bool:
        """Whether it lives, and was started with these variables."""
        alive = self._process is not None and self._process.poll() is None
        return alive and self._variables == dict(variables)

    @property
    def pids(self) -> frozenset[int]:
        """Pid of the process, empty when there is none."""
        return frozenset({self._process.pid}) if self._process is not None else frozenset()

    def start(self) -> None:
        """Start the process, and wait until it has imported everything.

        Raises:
            OSError: it did not start.
        """
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "perdure.training.agent.fork_server"],
                env=self._variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None  # noqa: S101 opened above
        in_time, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        if not in_time or self._line() != READY:
            self.close()
            raise OSError(f"the fork server did not start; see {self._log}")

    def fork(self, request: Fork) -> ForkedProcess:
        """Fork a new process, a child of the calling one.

        Raises:
            OSError: the fork server is gone.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise OSError("the fork server is not started")
        with self._lock:
            process.stdin.write(request.model_dump_json().encode() + b"\n")
            process.stdin.flush()
            line = self._line()
        if not line.strip().isdigit():
            raise OSError(f"the fork server is gone; see {self._log}")
        return ForkedProcess(int(line))

    def close(self) -> None:
        """End the process; its forks live on."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._process = None

    def _line(self) -> bytes:
        assert self._process is not None  # noqa: S101 start() comes first
        assert self._process.stdout is not None  # noqa: S101 opened by start()
        return self._process.stdout.readline()


def start_alone(request: Fork) -> subprocess.Popen[bytes]:
    """Start an interpreter for what a fork server would fork: it imports what it needs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "perdure.training.agent.fork_server", ALONE],
        env=request.environment,
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None  # noqa: S101 opened above
    with process.stdin:  # not an argument: the environment holds keys, and ps shows arguments
        process.stdin.write(request.model_dump_json().encode())
    return process


def serve() -> None:
    """Import everything, then fork until the agent closes the pipe."""
    # Blocked, not ignored: a fork gets what comes before it can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # Modules may print as they are imported: the pipe is for pids alone.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
        try:
            importlib.import_module(name)
        except ImportError as error:  # the log of the rank that imports it tells more
            sys.stderr.write(f"{name} is not imported in advance: {error}\n")
    gc.collect()
    gc.freeze()  # or the first collection in a fork would copy every page
    answers.write(READY)
    for line in sys.stdin.buffer:
        request = Fork.model_validate_json(line)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            answers.close()  # or the end of this process would go unnoticed while a fork lives
            _leave_orphan(request, writer)
        os.close(writer)
        os.waitpid(between, 0)  # from here on the agent is the parent
        with os.fdopen(reader, "rb") as pipe:
            answers.write(pipe.read() + b"\n")


def _leave_orphan(request: Fork, writer: int) -> None:
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(writer)
    while os.getppid() == between:
        time.sleep(0.0005)  # its parent must be the agent before it runs
    os._exit(_run(request))


def _run(request: Fork) -> int:
    """Become the requested process. Returns its exit code."""
    code = 1
    try:
        _become(request)
        module, _, function = request.function.partition(":")
        getattr(importlib.import_module(module), function)()
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:  # noqa: BLE001 the end of the process, as the interpreter would have it
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code


def _become(request: Fork) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # Appended: a rank's new process continues the log of the one that it replaces.
    for descriptor, path in ((1, request.stdout), (2, request.stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv = [request.function, *request.arguments]
    Path("/proc/self/comm").write_text(request.name[:_COMM_BYTES], encoding="utf-8")


def _exit_code(argument: Any) -> int:
    """Translate sys.exit's argument as the interpreter does."""
    if argument is None:
        return 0
    if isinstance(argument, int):
        return argument & 0xFF
    sys.stderr.write(f"{argument}\n")
    return 1


if __name__ == "__main__":
    if sys.argv[1:] == [ALONE]:
        os._exit(_run(Fork.model_validate_json(sys.stdin.buffer.read())))
    serve()
