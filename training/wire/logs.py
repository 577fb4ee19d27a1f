"""The messages about the logs of a node: their ends, what is new in them, their way to the store.

Times are seconds since the epoch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel


class LogsQuery(FrozenModel):
    """Ask for the end of each local worker's output."""

    op: Literal["logs"] = "logs"
    tail_bytes: int = Field(ge=1, le=1 << 20)


class ReadLogsQuery(FrozenModel):
    """Ask for what the logs of the newest attempt hold after these places.

    Attributes:
        offsets: by node/name of the log, bytes; of the attempt that `placement` and `attempt` name.
        tail_bytes: of a log that has none, from so far before its end; None: from its beginning.
        rank: global rank whose output to read; None: all ranks.
        file: name of the log that is wanted instead.
        every_log: what the container itself writes is wanted, too.
    """

    op: Literal["read_logs"] = "read_logs"
    placement: int = 0
    attempt: int = 0
    offsets: dict[str, int] = Field(default={})
    tail_bytes: int | None = None
    rank: int | None = None
    file: str | None = None
    every_log: bool = False


class CollectOrder(FrozenModel):
    """Put the logs of an ended attempt into the store, in the background; repeated: how far."""

    op: Literal["collect"] = "collect"
    placement: int
    attempt: int


class WorkerLog(FrozenModel):
    """The end of one worker's output.

    Attributes:
        written_s: time of the last write.
    """

    rank: int
    path: str
    text: str
    written_s: float | None = None


class LogPiece(FrozenModel):
    """Piece of an attempt's log between two places, in whole lines, without secrets.

    Attributes:
        name: name of the log in the store.
        rank: global rank that writes it, None when no rank does.
        offset: end of the piece, in bytes.
        is_last: whether that is the end of the log, for now.
    """

    placement: int
    attempt: int
    name: str
    rank: int | None = None
    text: str
    offset: int
    is_last: bool


class CollectedFile(FrozenModel):
    """One log in the store.

    Attributes:
        key: key of the object in the store.
        size_bytes: compressed.
        log_bytes: bytes of the log in the object.
        cut_bytes: earlier bytes of the log that the object leaves out.
    """

    key: str
    size_bytes: int
    log_bytes: int
    cut_bytes: int = 0


class Collected(FrozenModel):
    """Logs of an attempt that a node has put into the store.

    Attributes:
        is_done: whether nothing more comes.
        problems: logs that are missing, and why.
    """

    placement: int
    attempt: int
    is_done: bool
    files: tuple[CollectedFile, ...] = ()
    problems: tuple[str, ...] = ()


def logs_prefix(run_id: str, placement: int = 0, attempt: int = 0) -> str:
    """Return the key prefix of the logs of a run, or of an attempt, in the store."""
    base = f"runs/{run_id}/logs/"
    return f"{base}p{placement:04d}-a{attempt:04d}/" if placement else base
