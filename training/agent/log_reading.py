"""The logs of an attempt while it lives, for those who read along.

Whole lines leave the node, with secrets masked as in the store. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perdure.training.agent.log_collection import (
    OF_CONTAINER,
    PIECE_BYTES,
    Log,
    logs_at,
    secrets_of,
)
from perdure.training.agent.workers import STREAMS, WorkerGroup
from perdure.training.masking import masked
from perdure.training.wire.agent import AgentConfig, StartOrder
from perdure.training.wire.logs import LogPiece, ReadLogsQuery

MAX_REPLY_BYTES = 2 << 20


def read_logs(
    query: ReadLogsQuery,
    *,
    config: AgentConfig,
    folder: Path,
    started: StartOrder,
    group: WorkerGroup,
    is_over: bool,
) -> tuple[LogPiece, ...]:
    """What the logs hold after the places of a query, as far as it fits into a reply.

    Args:
        query: what is wanted.
        config: of the agent.
        folder: the container's.
        started: the newest attempt.
        group: its processes.
        is_over: whether they have ended, so that a line without an end is all there will be.
    """
    group.flush_output()
    secrets = secrets_of(config, started, group)
    is_same = (query.placement, query.attempt) == (started.placement, started.attempt)
    left, pieces = MAX_REPLY_BYTES, []
    for log, rank in _wanted(query, folder, group):
        offset = query.offsets.get(f"{config.node}/{log.name}") if is_same else None
        raw, end = _read(log, offset, query.tail_bytes, min(left, PIECE_BYTES), is_over=is_over)
        left -= len(raw)
        text = b"".join(masked([raw], secrets)).decode(errors="replace")
        pieces.append(
            LogPiece(
                placement=started.placement,
                attempt=started.attempt,
                name=log.name,
                rank=rank,
                text=text,
                offset=end,
                is_last=end >= log.end or not raw,
            )
        )
    return tuple(pieces)


def _wanted(
    query: ReadLogsQuery, folder: Path, group: WorkerGroup
) -> Iterator[tuple[Log, int | None]]:
    for log, rank in _all(folder, group):
        if query.file is not None:
            is_wanted = log.name == query.file
        elif query.rank is not None:
            is_wanted = rank == query.rank
        else:
            is_wanted = query.every_log or log.path.parent == group.log_folder
        if is_wanted:
            yield log, rank


def _all(folder: Path, group: WorkerGroup) -> Iterator[tuple[Log, int | None]]:
    for rank in group.ranks:
        of = None if group.order.is_launcher else rank
        for stream in STREAMS:
            yield from ((one, of) for one in logs_at(group.log_path(rank, stream)))
    names = (group.folder / "coordinator.log", *(folder / name for name in OF_CONTAINER))
    for path in names:
        yield from ((one, None) for one in logs_at(path))


def _read(
    log: Log, offset: int | None, tail_bytes: int | None, limit_bytes: int, *, is_over: bool
) -> tuple[bytes, int]:
    """Whole lines from a place on, and where they end."""
    is_cut = offset is None and tail_bytes is not None and log.end > tail_bytes
    start = offset if offset is not None else log.end - (tail_bytes or 0) if is_cut else 0
    with log.path.open("rb") as file:
        file.seek(start)
        raw = file.read(limit_bytes)
    end = max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1
    if not end and (is_over or len(raw) == limit_bytes):
        end = len(raw)  # a line that does not end
    elif is_over and start + len(raw) >= log.end:
        end = len(raw)
    raw = raw[:end]
    if is_cut:
        # Without the first line: its begin is missing, and with it the begin of a secret maybe.
        raw = raw.partition(b"\n")[2]
    return raw, start + end
