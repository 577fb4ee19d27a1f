"""The view of a run while `perdure run` supervises it.

A terminal shows a live panel, a pipe gets one line per event. Times are seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.console import WIDTH, sparkline
from perdure.tasks.observe import Observation
from perdure.training.journal.attempt_view import AttemptView
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.reporting.rows import event_text

PLAIN_EVERY_S = 5.0
_NUM_EVENTS = 8


class LiveView:
    """Shows observations of one run, which its flow passes to `observe`."""

    def __init__(self, console: Console, *, ui_url: str) -> None:
        self._console = console
        self._ui_url = ui_url
        self._lock = threading.Lock()  # the flow's thread observes, rich's thread renders
        self._observation: Observation | None = None
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
        """Show an observation, on the flow's thread."""
        with self._lock:
            fresh = [e for e in _events(observation.history) if e not in self._known_events]
            self._known_events.update(fresh)
            self._events.extend(fresh)
            changed = (
                self._observation is None or self._observation.activity != observation.activity
            )
            self._observation = observation
            losses = (record.loss for record in observation.steps)
            self._losses.extend(loss for loss in losses if loss is not None)
        if not self._console.is_terminal:
            self._print(observation, fresh, changed=changed)

    def _print(self, observation: Observation, fresh: Sequence[str], *, changed: bool) -> None:
        for event in fresh:  # soft_wrap: a log that is searched by line needs them whole
            self._console.print(event, soft_wrap=True)
        due = bool(observation.steps) and time.monotonic() - self._printed_s > PLAIN_EVERY_S
        if changed or due:
            self._printed_s = time.monotonic()
            parts = (
                _attempt_of(observation.history) + ":",
                _step_line(observation),
                observation.activity,
            )
            line = " ".join(part for part in parts if part)
            self._console.print(line, soft_wrap=True)

    def _render(self) -> RenderableType:
        with self._lock:
            observation, losses, events = self._observation, list(self._losses), list(self._events)
        if observation is None:
            return Panel("starting", title="perdure", border_style="blue")
        colour = _colour_of(observation.activity)
        rows: list[RenderableType] = [Text(observation.activity, style=f"bold {colour or 'green'}")]
        done = observation.last.step if observation.last is not None else 0
        if observation.target_step is not None:
            bar = Table.grid()  # a bar alone would not end its line
            bar.add_row(ProgressBar(total=observation.target_step, completed=done, width=WIDTH))
            rows.append(bar)
        rows.append(Text(_step_line(observation)))
        if losses:
            rows.append(Text(f"loss {sparkline(losses, WIDTH)}", style="cyan"))
        rows += [Text(event, style="yellow") for event in events]
        rows.append(Text(f"Prefect UI: {self._ui_url}", style="dim"))
        title = f"perdure: {observation.run_id}, {_attempt_of(observation.history)}"
        return Panel(Group(*rows), title=title, border_style=colour or "blue")


def _colour_of(activity: str) -> str | None:
    """The color of an activity other than training."""
    if "recover" in activity or "waiting" in activity:
        return "yellow"
    return "cyan" if activity.startswith("paused") else None


def _attempt_of(history: RunHistory) -> str:
    return "attempt {}.{}".format(*history.attempts[-1].key) if history.attempts else "start"


def _step_line(observation: Observation) -> str:
    record: StepRecord | None = observation.last
    if record is None:
        return ""
    mfu = f", MFU {record.mfu:.1%}" if record.mfu is not None else ""
    speed = f" {record.tokens_per_s:,.0f} tokens/s" if record.tokens_per_s else ""
    loss = f" {record.loss_text}" if record.loss_text else ""
    return f"step {record.step}/{observation.target_step or '?'}{loss}{speed}{mfu}"


def _events(history: RunHistory) -> list[str]:
    """One line per fault, decision, recovery and pause of the run so far."""
    return [line for view in history.attempts for line in _events_of(view)]


def _events_of(view: AttemptView) -> Iterator[str]:
    name = "attempt {}.{}".format(*view.key)
    yield from (f"{name}: {event_text(event)}" for event in view.events)
    if view.decision is None:
        return
    fault = view.ended.fault if view.ended is not None else None
    cause = f"{fault.fault_class}: {fault.evidence}" if fault is not None else "?"
    isolated = f", {view.decision.isolate} isolated" if view.decision.isolate else ""
    heading = "fault in" if view.ended is None or view.ended.is_fault else "restart of"
    yield f"{heading} {name}: {cause} -> {view.decision.rung}{isolated}"
