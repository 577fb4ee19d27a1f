"""How checkpoints are shown: tables for a person, objects for a script.

Times are seconds since the epoch, ages seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from storage.checkpoint import (
    CheckpointStore,
    StepObjects,
    StepState,
    Tier,
    read_manifest,
    set_aside_reason,
)
from storage.collect import Removal
from storage.verification import Verified, last_outcome

STATE_NAMES = {
    StepState.COMMITTED: "committed",
    StepState.SET_ASIDE: "set_aside",
    StepState.UNCOMMITTED: "incomplete",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint.

    Attributes:
        written_at_s: of the manifest; without one, of the newest object.
        size_bytes: of everything in the step's folder.
        world_size: of the attempt that saved; None without a manifest, as the next two.
        reason: why it was set aside.
        verified: outcome of the last verification.
        tiers: where it can be restored from, nearest first.
    """

    step: int
    written_at_s: float
    age_s: float
    size_bytes: int
    world_size: int | None
    placement: int | None
    attempt: int | None
    state: StepState
    reason: str | None
    verified: Verified | None
    tiers: tuple[str, ...]


def rows_of(checkpoints: CheckpointStore, *, tiers: Mapping[int, Sequence[Tier]]) -> list[Row]:
    """The checkpoints of a run, newest first.

    Args:
        checkpoints: of the run.
        tiers: of the nodes, by step.
    """
    return [_row_of(checkpoints, step, tiers) for step in reversed(checkpoints.list_steps())]


def _row_of(
    checkpoints: CheckpointStore, step: StepObjects, tiers: Mapping[int, Sequence[Tier]]
) -> Row:
    manifest = read_manifest(checkpoints, step)
    written_at_s = manifest.written_at_s if manifest is not None else step.modified_s
    return Row(
        step=step.step,
        written_at_s=written_at_s,
        age_s=max(0.0, checkpoints.clock() - written_at_s),
        size_bytes=step.size_bytes,
        world_size=manifest.world_size if manifest is not None else None,
        placement=manifest.placement if manifest is not None else None,
        attempt=manifest.attempt if manifest is not None else None,
        state=step.state,
        reason=set_aside_reason(checkpoints, step),
        verified=last_outcome(checkpoints, step, manifest),
        tiers=step.tiers(tiers),
    )


def row_object(row: Row) -> dict[str, Any]:
    """A row for a script."""
    verified = None
    if row.verified is not None:
        verified = {
            "verified_at_s": row.verified.verified_at_s,
            "intact": row.verified.is_intact,
            "damages": len(row.verified.damages),
        }
    return {
        "step": row.step,
        "written_at_s": row.written_at_s,
        "age_s": round(row.age_s, 3),
        "size_bytes": row.size_bytes,
        "world_size": row.world_size,
        "placement": row.placement,
        "attempt": row.attempt,
        "state": STATE_NAMES[row.state],
        "reason": row.reason,
        "verified": verified,
        "tiers": list(row.tiers),
    }


def rows_view(rows: Sequence[Row], *, now_s: float) -> Group:
    """Rows for a person; reasons stand below the table, which they would tear apart."""
    reasons = [Text(f"step {row.step} was set aside: {row.reason}") for row in rows if row.reason]
    return Group(_rows_table(rows, now_s), *reasons)


def _rows_table(rows: Sequence[Row], now_s: float) -> Table:
    table = Table(header_style="bold")
    for name in ("step", "age", "size", "ranks", "attempt"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("state", "verified", "tiers"):
        table.add_column(name)
    for row in rows:
        attempt = "" if row.placement is None else f"{row.placement}.{row.attempt}"
        state = STATE_NAMES[row.state].replace("_", " ")
        table.add_row(
            str(row.step),
            age_text(row.age_s),
            decimal(row.size_bytes),
            str(row.world_size or ""),
            attempt,
            Text(state, style="" if row.state is StepState.COMMITTED else "yellow"),
            _verified_text(row.verified, now_s),
            ", ".join(row.tiers),
        )
    return table


def _verified_text(verified: Verified | None, now_s: float) -> Text:
    if verified is None:
        return Text("never", style="dim")
    age = age_text(max(0.0, now_s - verified.verified_at_s))
    if verified.is_intact:
        return Text(f"intact, {age} ago", style="green")
    return Text(f"{_count(len(verified.damages), 'damage')}, {age} ago", style="red")


def removals_table(removals: Sequence[Removal]) -> Table:
    """What is deleted, for a person."""
    table = Table(header_style="bold")
    for name in ("what", "step", "objects", "size", "why"):
        table.add_column(name, justify="right" if name in {"step", "objects", "size"} else "left")
    for removal in removals:
        table.add_row(
            removal.kind.replace("_", " "),
            "" if removal.step is None else str(removal.step),
            str(len(removal.objects)),
            decimal(removal.size_bytes),
            removal.reason,
        )
    return table


def removal_object(removal: Removal) -> dict[str, Any]:
    """What is deleted, for a script."""
    return {
        "kind": removal.kind,
        "step": removal.step,
        "keys": [info.key for info in removal.objects],
        "size_bytes": removal.size_bytes,
        "reason": removal.reason,
    }


def age_text(age_s: float) -> str:
    """An age in its two largest units."""
    minutes, hours, days = int(age_s // 60), int(age_s // 3600), int(age_s // 86_400)
    if not minutes:
        return f"{int(age_s)}s"
    if not hours:
        return f"{minutes}m {int(age_s) % 60}s"
    return f"{hours}h {minutes % 60}m" if not days else f"{days}d {hours % 24}h"


@contextmanager
def reading_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, on stderr so that stdout stays for a script; elsewhere nothing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda count: progress.advance(task, count)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
