"""Small files of this machine: their folder, writes of whole files, reads from their end."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HOME_ENV = "PERDURE_HOME"
PROBE_BYTES = 4096
# Of a file system that is full, read-only, ill or gone, whichever file is written.
REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})


def home_folder() -> Path:
    """Return `$PERDURE_HOME`, else `~/.perdure`; absolute."""
    return Path(os.environ.get(HOME_ENV) or Path.home() / ".perdure").expanduser().resolve()


def private_folder(path: Path) -> Path:
    """Make a folder that its owner alone may enter; its content is private.

    Raises:
        OSError: the folder cannot be made, or belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:  # made by an earlier version, or by a caller's mkdir(parents)
        path.chmod(0o700)
    return path


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace a file in a single step: its readers see all of it, or the previous content.

    There must not be two writers at a time.

    Args:
        path: a file in an existing folder.
        content: text is written as UTF-8.
        private: whether the owner alone may read it, because it holds a token or a job.

    Raises:
        OSError: it cannot be written; the previous content stays.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a writer that was killed, perhaps readable by all
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # half of a file takes room that others need
            temporary.unlink()
        # The error of a write names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def why_unwritable(folder: Path) -> str:
    """Return why nothing can be written in a folder, reason and path; empty where it can."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return f"{error.strerror}: {folder}"
    finally:
        with suppress(OSError):
            probe.unlink()
    return ""


def write_refusal(error: Exception | None, folders: Sequence[Path]) -> str:
    """Return why nothing could be written, reason and path; empty where that is not why.

    Args:
        error: ended a start; None: there was none.
        folders: take the files of this machine. Elsewhere, a missing file or right is no refusal.
    """
    if isinstance(error, OSError) and error.filename:
        path = Path(os.fsdecode(error.filename))
        is_inside = any(path.is_relative_to(folder) for folder in folders)
        if is_inside or error.errno in REFUSALS:
            return f"{error.strerror}: {path}"
    probed = next(filter(None, map(why_unwritable, folders)), "")
    is_refusal = isinstance(error, OSError) and error.errno in REFUSALS
    return probed or (str(error) if is_refusal else "")


def last_line(path: Path) -> str:
    """Return the last line of a log, or the reason why there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    return lines[-1] if lines else "its log is empty"
