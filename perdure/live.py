"""What a person sees on the terminal while a run goes on, and the table after it.

On a terminal a live panel, otherwise one line per event. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tasks.observe import Observation
from training.journal.events import StepRecord
from training.journal.history import AttemptView, RunHistory
from training.supervisor.report import NOT_MENDED, AttemptRow, event_text

PLAIN_EVERY_S = 5.0
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 60
_NUM_EVENTS = 8
TABLE_WIDTH = 165


class LiveView:
    """Shows observations of one run; give its `observe` to the run."""

    def __init__(self, console: Console, *, ui_url: str) -> None:
        self._console = console
        self._ui_url = ui_url
        self._lock = threading.Lock()
        self._seen: Observation | None = None
        self._losses: deque[float] = deque(maxlen=4096)
        self._events: deque[str] = deque(maxlen=_NUM_EVENTS)
        self._known_events: set[str] = set()
        self._printed_s = 0.0
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def observe(self, observation: Observation) -> None:
        """Take in what the run says; called from the flow's thread."""
        with self._lock:
            fresh = [e for e in _events(observation.history) if e not in self._known_events]
            self._known_events.update(fresh)
            self._events.extend(fresh)
            changed = self._seen is None or self._seen.activity != observation.activity
            self._seen = observation
            self._losses.extend(record.loss for record in observation.steps)
        if not self._console.is_terminal:
            self._print(observation, fresh, changed=changed)

    def _print(self, seen: Observation, fresh: Sequence[str], *, changed: bool) -> None:
        for event in fresh:
            self._console.print(event, highlight=False, soft_wrap=True, markup=False)
        due = bool(seen.steps) and time.monotonic() - self._printed_s > PLAIN_EVERY_S
        if changed or due:
            self._printed_s = time.monotonic()
            parts = (_attempt_of(seen.history) + ":", _step_line(seen), seen.activity)
            line = " ".join(part for part in parts if part)
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _render(self) -> RenderableType:
        with self._lock:
            seen, losses, events = self._seen, list(self._losses), list(self._events)
        if seen is None:
            return Panel("starting", title="perdure", border_style="blue")
        colour = _colour_of(seen.activity)
        rows: list[RenderableType] = [Text(seen.activity, style=f"bold {colour or 'green'}")]
        done = seen.last.step if seen.last is not None else 0
        if seen.target_step is not None:
            bar = Table.grid()  # a bar alone would not end its line
            bar.add_row(ProgressBar(total=seen.target_step, completed=done, width=_SPARK_WIDTH))
            rows.append(bar)
        rows.append(Text(_step_line(seen)))
        if losses:
            rows.append(Text(f"loss {sparkline(losses, _SPARK_WIDTH)}", style="cyan"))
        rows += [Text(event, style="yellow") for event in events]
        rows.append(Text(f"Prefect UI: {self._ui_url}", style="dim"))
        title = f"perdure: {seen.run_id}, {_attempt_of(seen.history)}"
        return Panel(Group(*rows), title=title, border_style=colour or "blue")


def _colour_of(activity: str) -> str | None:
    """What sets an activity off from training."""
    if "recover" in activity:
        return "yellow"
    return "cyan" if activity.startswith("paused") else None


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
        return attempts_table(rows)
    return Group(*(Text(_attempt_text(row)) for row in rows))


def _attempt_text(row: AttemptRow) -> str:
    if row.generation is not None:
        return f"  {_recovery_text(row)}"
    text = (
        f"attempt {row.placement}.{row.attempt} on {row.nodes} "
        f"(MA_SCHEDULE_CNT {row.schedule_cnt}, MA_PROC_START_CNT {row.proc_start_cnt or '-'}): "
        f"steps {row.from_step} to {_text(row.to_step) or '?'}, {row.fault or row.outcome}"
    )
    if row.rung:
        text += f" -> {row.rung}"
    if row.seconds_to_next_step is not None:
        text += f", {row.seconds_to_next_step} s to the next step"
    return text


def _recovery_text(row: AttemptRow) -> str:
    place = f" on {row.nodes}" if row.nodes else ""
    reached = f" at step {row.to_step}" if row.to_step is not None else ""
    took = f" in {row.seconds_to_next_step} s" if row.seconds_to_next_step is not None else ""
    what = f"generation {row.generation}{place}{reached}, {row.fault}"
    return f"{what} -> {row.rung}: {row.outcome}{took}"


def attempts_table(rows: Sequence[AttemptRow]) -> Table:
    """The table of attempts for a wide terminal."""
    table = Table(title="Attempts", title_justify="left", header_style="bold")
    for name in (
        "placement", "attempt", "nodes", "MA_SCHEDULE_CNT", "MA_PROC_START_CNT", "from step",
        "to step", "outcome", "rung", "s to next step",
    ):  # fmt: skip
        table.add_column(name, overflow="fold")
    for row in rows:
        inside = f", generation {row.generation}" if row.generation is not None else ""
        failed = f" ({row.outcome})" if row.outcome == NOT_MENDED else ""
        table.add_row(
            str(row.placement),
            f"{row.attempt}{inside}",
            row.nodes,
            row.schedule_cnt,
            row.proc_start_cnt,
            str(row.from_step),
            _text(row.to_step),
            row.fault or row.outcome,
            f"{row.rung}{failed}",
            _text(row.seconds_to_next_step),
        )
    return table


def _text(value: float | None) -> str:
    return "" if value is None else str(value)


def _attempt_of(history: RunHistory) -> str:
    return "attempt {}.{}".format(*history.attempts[-1].key) if history.attempts else "start"


def _step_line(seen: Observation) -> str:
    record: StepRecord | None = seen.last
    if record is None:
        return ""
    mfu = f", MFU {record.mfu:.1%}" if record.mfu is not None else ""
    speed = f" {record.tokens_per_s:,.0f} tokens/s" if record.tokens_per_s else ""
    return f"step {record.step}/{seen.target_step or '?'} loss {record.loss:.4f}{speed}{mfu}"


def _events(history: RunHistory) -> list[str]:
    """One line per fault, decision, recovery and pause of the run so far."""
    return [line for view in history.attempts for line in _events_of(view)]


def _events_of(view: AttemptView) -> list[str]:
    placement, attempt = view.key
    lines = [f"attempt {placement}.{attempt}: {event_text(event)}" for event in view.events]
    return [*lines, _event(view)] if view.decision is not None else lines


def _event(view: AttemptView) -> str:
    assert view.decision is not None  # noqa: S101 filtered by the caller
    fault = view.ended.fault if view.ended is not None else None
    what = f"{fault.fault_class}: {fault.evidence}" if fault is not None else "?"
    isolated = f", {view.decision.isolate} isolated" if view.decision.isolate else ""
    placement, attempt = view.key
    return f"fault in attempt {placement}.{attempt}: {what} -> {view.decision.rung}{isolated}"
