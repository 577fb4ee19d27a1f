"""Room for a run on a node's scratch disk: logs are given up before the run is.

Of each log the newest end stays. The older part becomes a hole, so that sizes and offsets remain as
they are: programs go on writing, and readers go on reading, as if nothing had happened. Sizes are
bytes.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOW_BYTES = 1 << 30  # on a large disk a smaller share is enough
KEPT_BYTES = 16 << 20  # of a log, at most
LEAST_KEPT_BYTES = 64 << 10  # what a diagnosis reads
BLOCK_BYTES = 512  # of st_blocks, on every file system
_LINE_BYTES = 64 << 10  # in which the end of a line is looked for
_ATTEMPTS_LOGS = "*/attempts/p????-a????/*.log"  # of every container of the node
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
_log = logging.getLogger("perdure.agent")


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """The room on the file system of a folder."""

    total_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, folder: Path) -> DiskRoom:
        """Measure it.

        Raises:
            OSError: the folder is out of reach.
        """
        disk = os.statvfs(folder)
        return cls(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)

    def low_bytes(self, low_percent: float) -> int:
        """Return the free space below which logs are given up."""
        return min(LOW_BYTES, round(self.total_bytes * low_percent / 100))

    def is_low(self, low_percent: float) -> bool:
        """Whether logs have to be given up."""
        return self.free_bytes < self.low_bytes(low_percent)

    def is_critical(self, low_percent: float) -> bool:
        """Whether logs have to be given up at once."""
        return self.free_bytes < self.low_bytes(low_percent) // 2


def logs_of(folder: Path, attempts_folder: Path | None) -> list[Path]:
    """List the logs of the run on this node.

    Args:
        folder: the container's.
        attempts_folder: where the newest attempt's logs lie, which the job may have chosen.
    """
    paths = {*folder.glob("*.log"), *folder.parent.glob(_ATTEMPTS_LOGS)}
    if attempts_folder is not None:
        paths |= set(attempts_folder.rglob("*.log"))
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def give_up_logs(paths: Sequence[Path], *, low_bytes: int) -> int:
    """Give up all but the newest end of each log. Returns the space that this has freed.

    Args:
        paths: the logs.
        low_bytes: free space that is wanted; the ends that stay take half of it at most.
    """
    kept_bytes = min(KEPT_BYTES, low_bytes // 2 // max(1, len(paths)))
    freed = 0
    for path in paths:
        # A log that is out of reach, or on a file system without holes, costs the others nothing.
        with suppress(OSError):
            freed += _cut_beginning(path, max(LEAST_KEPT_BYTES, kept_bytes))
    if freed:
        _log.warning(f"the disk is nearly full: {freed >> 20} MiB of logs were given up")
    return freed


def _cut_beginning(path: Path, kept_bytes: int) -> int:
    """Make a hole of a log's beginning. Returns the space that this has freed."""
    size_bytes, blocks = path.stat().st_size, path.stat().st_blocks
    if blocks * BLOCK_BYTES <= 2 * kept_bytes:
        return 0
    with path.open("r+b", buffering=0) as file:
        file.seek(size_bytes - kept_bytes)
        # A line without its beginning may have the end of a secret, which nothing masks.
        end_of_line = file.read(_LINE_BYTES).find(b"\n") + 1
        end = size_bytes - kept_bytes + end_of_line
        libc = ctypes.CDLL(None, use_errno=True)
        offset, length = ctypes.c_int64(0), ctypes.c_int64(end)
        if libc.fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
            raise OSError(ctypes.get_errno(), "fallocate", str(path))
    return max(0, (blocks - path.stat().st_blocks) * BLOCK_BYTES)


def first_kept_byte(path: Path) -> int:
    """Return the offset of a log's first byte that was not given up.

    Raises:
        OSError: the log cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        try:
            start = os.lseek(file.fileno(), 0, os.SEEK_DATA)
        except OSError:
            return 0  # it is empty, or its file system has no holes
        if start == 0:
            return 0
        # Holes are of whole blocks: the rest before the first line was made of zeros.
        file.seek(start)
        block = file.read(os.fstat(file.fileno()).st_blksize)
        return start + len(block) - len(block.lstrip(b"\0"))
