"""What the workers of an attempt have written, read for a supervisor. Sizes are bytes."""

from __future__ import annotations

from training.agent.evidence import tail
from training.agent.workers import WorkerGroup
from training.journal.attempt_log import FILE_NAME, read_lines
from training.masking import masked_text
from training.wire.agent import Reply, WorkerLog

STREAMS = ("stderr", "stdout")


def read_metrics(group: WorkerGroup | None, offset: int) -> Reply:
    """Whole lines of the attempt log after `offset`."""
    text, offset = read_lines(group.folder / FILE_NAME, offset) if group else ("", offset)
    return Reply(text=text, offset=offset)


def read_logs(group: WorkerGroup | None, tail_bytes: int) -> tuple[WorkerLog, ...]:
    """The end of each worker's output."""
    if group is None:
        return ()
    paths = [(rank, group.log_path(rank, stream)) for rank in group.ranks for stream in STREAMS]
    return tuple(
        WorkerLog(
            rank=rank, path=str(path), text=masked_text(tail(path, tail_bytes), group.secrets)
        )
        for rank, path in paths
        if path.exists()
    )
