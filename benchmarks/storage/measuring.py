"""What a contender is, and how one is measured: wall time, CPU seconds, memory beside the state.

Every contender runs in a process of its own, so that none inherits another's memory or threads.
Times are seconds, sizes bytes.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
import psutil
from botocore.config import Config
from pydantic import BaseModel, ConfigDict
from torch import Tensor

SAMPLING_S = 0.01
BUCKET = "bench"


class Sample(BaseModel):
    """One measured run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wall_s: float
    cpu_s: float


class Measured(BaseModel):
    """What one process found out about one contender.

    Attributes:
        extra_bytes: most memory beside the state, shared memory counted once.
        missing: why there are no samples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: tuple[Sample, ...] = ()
    extra_bytes: int = 0
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What every contender is given.

    Attributes:
        state: to be saved or restored.
        endpoint: of the S3 server.
        folder: for its files; its own.
    """

    state: Mapping[str, Tensor]
    endpoint: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Action:
    """What is measured.

    Attributes:
        run: returns the seconds that count.
        before: what must be done before each run, not measured.
        after: done once, after the last run; raises when the result is wrong.
    """

    run: Callable[[], float]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


Contender = Callable[[Setting], AbstractContextManager[Action]]


def measure(contender: Contender, setting: Setting, *, repeats: int) -> Measured:
    """Run a contender once for its memory and to warm up, then `repeats` times for its time."""
    samples = []
    with MemoryWatch() as memory:
        try:
            with contender(setting) as action:
                action.before()
                action.run()
                memory.pause()
                for _ in range(repeats):
                    action.before()
                    cpu_s = cpu_seconds()
                    wall_s = action.run()
                    samples.append(Sample(wall_s=wall_s, cpu_s=cpu_seconds() - cpu_s))
                action.after()
        except ImportError as exc:
            return Measured(missing=f"{exc.name} is not installed")
    return Measured(samples=tuple(samples), extra_bytes=memory.extra_bytes)


def cpu_seconds() -> float:
    """User and system time of this process and its children, living and ended."""
    me = psutil.Process()
    times = me.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in me.children(recursive=True):
        with suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system
    return total


@dataclass(slots=True)
class MemoryWatch:
    """The most memory that this process and its children had, beyond what they began with.

    Private pages of each, and once every piece of shared memory that one of them holds open:
    a checkpoint server's slot counts whether or not its pages are mapped.
    """

    extra_bytes: int = 0
    _began_bytes: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._began_bytes = _memory_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pause()

    def pause(self) -> None:
        """Look no more: looking costs a little."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLING_S):
            self.extra_bytes = max(self.extra_bytes, _memory_bytes() - self._began_bytes)


def _memory_bytes() -> int:
    me = psutil.Process()
    total = 0
    shared: dict[tuple[int, int], int] = {}
    for process in (me, *me.children(recursive=True)):
        with suppress(OSError, psutil.Error):
            total += _private_bytes(process.pid)
            shared |= _shared_files(process.pid)
    return total + sum(shared.values())


def _private_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Bytes of the memory files that a process holds open, by identity."""
    found = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            name = str(Path(entry.path).readlink())
            if name.startswith(("/memfd:", "/dev/shm/")):  # noqa: S108 looked at, not written
                info = entry.stat()
                if stat.S_ISREG(info.st_mode):
                    found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return found


def s3_client(setting: Setting, *, num_threads: int) -> Any:
    """boto3's client as a program sets it up that wants its best speed."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=setting.endpoint,
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=4 * num_threads,
        ),
    )


class MemoryBody:
    """What botocore takes for a file: pieces of memory, sent without a copy."""

    PIECE_BYTES = 2**20

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def read(self, _size: int = -1) -> memoryview:
        """The next piece: larger than what urllib3 asks for, which it does not mind."""
        piece = self._view[self._at : self._at + self.PIECE_BYTES]
        self._at += piece.nbytes
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place, as signing does before sending."""
        base = (0, self._at, self._view.nbytes)[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._at
