"""What several commands show: the attempts of a run, its loss as a line, where its time went."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perdure.console import make_table
from perdure.training.journal.time_account import Account
from perdure.training.reporting.ettr import COLOURS, coarse, share_rows
from perdure.training.reporting.rows import NOT_RECOVERED, AttemptRow

WIDTH = 60  # of bars and lines
TABLE_WIDTH = 165  # a narrower terminal would fold the table of attempts letter by letter
_SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a line of block characters, averaged down to `width` of them."""
    size = max(1, -(-len(values) // width))
    means = [
        sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)
    ]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_SPARKS[round((mean - low) / span * (len(_SPARKS) - 1))] for mean in means)


def attempts_view(rows: Sequence[AttemptRow], width: int) -> RenderableType:
    """The attempts as a table, or line by line where a table would be folded letter by letter."""
    if width >= TABLE_WIDTH:
        return _attempts_table(rows)
    return Group(*(Text(_attempt_text(row)) for row in rows))


def _attempt_text(row: AttemptRow) -> str:
    if row.generation is not None:
        return f"  {_recovery_text(row)}"
    text = (
        f"attempt {row.placement}.{row.attempt} on {row.nodes} "
        f"(MA_SCHEDULE_CNT {row.schedule_cnt}, MA_PROC_START_CNT {row.proc_start_cnt or '-'}): "
        f"{_steps_text(row)}{row.fault or row.outcome}"
    )
    if row.rung:
        text += f" -> {row.rung}"
    if row.seconds_to_next_step is not None:
        text += f", {row.seconds_to_next_step} s to the next step"
    return text


def _steps_text(row: AttemptRow) -> str:
    if row.from_step is None and row.to_step is None:
        return ""
    return f"steps {_text(row.from_step) or '?'} to {_text(row.to_step) or '?'}, "


def _recovery_text(row: AttemptRow) -> str:
    place = f" on {row.nodes}" if row.nodes else ""
    reached = f" at step {row.to_step}" if row.to_step is not None else ""
    took = f" in {row.seconds_to_next_step} s" if row.seconds_to_next_step is not None else ""
    what = f"generation {row.generation}{place}{reached}, {row.fault}"
    return f"{what} -> {row.rung}: {row.outcome}{took}"


def _attempts_table(rows: Sequence[AttemptRow]) -> Table:
    """The table of attempts for a wide terminal."""
    table = make_table(
        "placement", "attempt", "nodes", "MA_SCHEDULE_CNT", "MA_PROC_START_CNT", "from step",
        "to step", "outcome", "rung", "s to next step",
    )  # fmt: skip
    table.title, table.title_justify = "Attempts", "left"
    for row in rows:
        inside = f", generation {row.generation}" if row.generation is not None else ""
        failed = f" ({row.outcome})" if row.outcome == NOT_RECOVERED else ""
        table.add_row(
            str(row.placement),
            f"{row.attempt}{inside}",
            row.nodes,
            row.schedule_cnt,
            row.proc_start_cnt,
            _text(row.from_step),
            _text(row.to_step),
            row.fault or row.outcome,
            f"{row.rung}{failed}",
            _text(row.seconds_to_next_step),
        )
    return table


def _text(value: float | None) -> str:
    return "" if value is None else str(value)


def account_bar(account: Account) -> Text:
    """The wall time from left to right, in the colours of its owners."""
    bar = Text("  ")
    for interval in coarse(account.intervals, WIDTH):
        cells = round(interval.seconds / account.wall_s * WIDTH)
        bar.append("\u2588" * max(1, cells), style=COLOURS[interval.owner])
    return bar


def account_table(account: Account) -> Table:
    """The share of every owner in the wall time."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("owner", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("what")
    for row in share_rows(account):
        colour = COLOURS.get(row["owner"])
        mark = Text("\u2588 ", style=colour) if colour is not None else Text("  ")
        table.add_row(mark + Text(row["owner"]), row["time"], row["share"], row["what"])
    return table
