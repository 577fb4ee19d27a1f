"""Files that are opened for reading only where they are files.

A FIFO keeps whoever opens it waiting for a writer, a device has no end, and a link may lead
anywhere.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


class NotRegularError(OSError):
    """A FIFO, socket, device or folder, or a link out of the folder, where a file must be."""


def open_regular(path: Path, *, within: Path | None = None) -> io.FileIO:
    """Open a file for reading, without a buffer.

    Args:
        path: of the file, or of a link to it.
        within: absolute path of the folder that it must lie in, links included; None: any.

    Raises:
        NotRegularError: it is no regular file, or lies elsewhere.
        OSError: it cannot be opened.
    """
    try:
        # A FIFO is open at once, so that it can be told from a file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise not_regular(path) from error
        raise
    file = io.FileIO(descriptor, "rb")
    try:
        check_regular(os.fstat(descriptor), path)
        if within is not None:
            check_within(Path(f"/proc/self/fd/{descriptor}"), within, path)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path) -> bytes:
    """Read a whole file; see `open_regular`."""
    with open_regular(path) as file:
        return file.readall()


def check_regular(status: os.stat_result, path: Path) -> None:
    """Check that a status is that of a file.

    Raises:
        OSError: it is that of a folder, or of no regular file.
    """
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise not_regular(path)


def not_regular(path: Path) -> NotRegularError:
    """Return the error for something that is no file."""
    return NotRegularError(errno.ENXIO, "not a regular file", str(path))


def check_within(path: Path, folder: Path, name: Path) -> None:
    """Check that a path lies in a folder once all links are followed.

    Args:
        path: of the file, or of the link in /proc to an open one.
        folder: absolute path.
        name: of the file, for the message.

    Raises:
        NotRegularError: it does not.
    """
    place = os.path.realpath(path)
    if place.startswith(f"{folder}{os.sep}"):
        return
    if not place.startswith(os.path.join(os.path.realpath(folder), "")):  # noqa: PTH118 of texts
        raise NotRegularError(errno.ELOOP, f"a link out of {folder}", str(name))
