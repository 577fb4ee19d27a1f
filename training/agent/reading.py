"""What the workers of an attempt have written, read for a supervisor. Sizes are bytes."""

from __future__ import annotations

from training.agent.evidence import tail
from training.agent.workers import WorkerGroup
from training.health.monitor.masking import masked_text
from training.wire.agent import Reply, WorkerLog

STREAMS = ("stderr", "stdout")
METRICS_FILE = "metrics.jsonl"
MAX_METRICS_BYTES = 1 << 20


def read_metrics(group: WorkerGroup | None, offset: int) -> Reply:
    """Whole lines of the step records after `offset`."""
    path = group.folder / METRICS_FILE if group is not None else None
    if path is None or not path.exists():
        return Reply(text="", offset=offset)
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(MAX_METRICS_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    return Reply(text=whole.decode(errors="replace"), offset=offset + len(whole))


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
