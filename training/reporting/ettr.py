"""The account of a run's time, kept up to date and shown as a table and a picture.

Steps are in the store when a checkpoint covers them; the supervisor that watches the attempt knows
later steps, which are lost when the attempt ends. Times are seconds, moments seconds since the
epoch.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.storage.objects import ObjectStore
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory
from perdure.training.journal.steps import StepReader, drop_lost_steps
from perdure.training.journal.time_account import (
    MEANING,
    RECOVERY,
    Account,
    Interval,
    Key,
    Owner,
    account_time,
)
from perdure.training.recovery.rungs import RUNGS
from perdure.training.reporting.pictures import new_figure, png_of

# For the terminal and the picture: greens train, reds were lost to faults.
COLOURS: Mapping[str, str] = {
    Owner.PRODUCTIVE: "#2e7d32",
    Owner.REDONE: "#c0392b",
    Owner.SAVE: "#7cb342",
    Owner.DETECTION: "#d98e04",
    **{RECOVERY[rung]: row.colour for rung, row in RUNGS.items() if row.colour},
    Owner.START_UP: "#1f5fa8",
    Owner.WAITING: "#8d6e63",
    Owner.PAUSED: "#4dd0e1",
    Owner.ENDING: "#90a4ae",
    Owner.COMMAND: "#26a69a",
    Owner.UNSUPERVISED: "#424242",
    Owner.UNKNOWN: "#cfd8dc",
}
_NUM_ROWS = 30  # the newest attempts in a picture
_RESOLUTION = 1500  # intervals across a picture; a shorter interval is drawn with its neighbours
_UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class Accountant:
    """Knows every step of a run; safe for use from several threads."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._reader = StepReader(store, run_id)
        self._live_records: dict[tuple[int, int, int, float], StepRecord] = {}
        self._attempt: Key | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # its own: a slow store must not hold up add_steps()

    def add_steps(self, steps: Iterable[StepRecord]) -> None:
        """Add steps of a living attempt; returns at once."""
        with self._lock:
            for record in steps:
                key = record.placement, record.attempt
                if key != self._attempt:  # steps that the store lacks are lost with their attempt
                    self._live_records, self._attempt = {}, key
                self._live_records[record.identity] = record

    def records(self, history: RunHistory) -> list[StepRecord]:
        """List every record of a step, also where a later record of the same step counts.

        Raises:
            StorageError: the store does not answer.
        """
        with self._reading:
            stored = {record.identity: record for record in self._reader.read()}
        with self._lock:
            # Records in the store need not be held twice.
            self._live_records = {
                key: r for key, r in self._live_records.items() if key not in stored
            }
            living = history.open_attempt
            lives = living is not None and living.key == self._attempt
            live = list(self._live_records.values()) if lives else []
        return [*stored.values(), *live]

    def account(self, history: RunHistory, *, now_s: float) -> Account:
        """Account for the run's time.

        Raises:
            StorageError: the store does not answer.
        """
        return account_time(history, self.records(history), now_s=now_s)

    def kept_steps(self) -> dict[int, StepRecord]:
        """Return the record that counts of every step in the store.

        Raises:
            StorageError: the store does not answer.
        """
        with self._reading:
            return drop_lost_steps(self._reader.read())


def share_rows(account: Account) -> list[dict[str, str]]:
    """Build a row for every owner that has any time, with the sum as the last row."""
    rows = [
        {
            "owner": owner,
            "time": duration_text(seconds),
            "share": f"{seconds / account.wall_s:.1%}",
            "what": MEANING[owner],
        }
        for owner, seconds in account.seconds.items()
        if seconds > 0
    ]
    wall = duration_text(account.wall_s)
    return [*rows, {"owner": "wall time", "time": wall, "share": "100.0%", "what": ""}]


def ettr_text(account: Account) -> str:
    """Say the ETTR in a sentence."""
    if account.known_ettr is None:
        return "ETTR not known: nothing shows the steps of the command"
    productive = duration_text(account.seconds[Owner.PRODUCTIVE])
    wall = duration_text(account.wall_s)
    return f"ETTR {account.ettr:.1%}: {productive} on steps that were kept, of {wall}"


def duration_text(seconds: float) -> str:
    """Write a duration in its two largest units.

    Ages compare clocks of two machines: less than nothing is nothing.
    """
    seconds = max(0.0, seconds)
    if 0 < seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if not hours:
        return f"{minutes}m {whole % 60}s"
    return f"{hours}h {minutes % 60}m" if not days else f"{days}d {hours % 24}h"


def timeline_picture(account: Account) -> bytes:
    """Draw a bar for the whole run and a bar for each of its newest attempts, as PNG."""
    from matplotlib.patches import Patch  # noqa: PLC0415 slow to import

    rows = _rows(account)
    figure = new_figure(11, 2.3 + 0.32 * len(rows))
    axes = figure.add_subplot()
    unit, unit_s = next(
        (choice for choice in _UNITS if account.wall_s >= 3 * choice[1]), _UNITS[-1]
    )
    from_s = account.intervals[0].from_s if account.intervals else 0.0
    for number, (_, intervals) in enumerate(rows):
        _draw_row(axes, number, intervals, from_s, unit_s)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, max(account.wall_s / unit_s, 1e-9))
    axes.set_xlabel(f"{unit} since the run was created")
    axes.grid(axis="x", alpha=0.25)
    axes.set_title(ettr_text(account))
    handles = [
        Patch(color=COLOURS[owner], label=f"{owner} {seconds / account.wall_s:.1%}")
        for owner, seconds in account.seconds.items()
        if seconds > 0
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return png_of(figure)


def _rows(account: Account) -> list[tuple[str, list[Interval]]]:
    by_attempt: defaultdict[Key, list[Interval]] = defaultdict(list)
    for interval in account.intervals:
        if interval.attempt != (0, 0):
            by_attempt[interval.attempt].append(interval)
    attempts = [("attempt {}.{}".format(*key), by_attempt[key]) for key in by_attempt]
    return [("whole run", list(account.intervals)), *attempts[-_NUM_ROWS:]]


def _draw_row(
    axes: Any, number: int, intervals: Sequence[Interval], from_s: float, unit_s: float
) -> None:
    bars: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for interval in coarse(intervals):
        begin = (interval.from_s - from_s) / unit_s
        bars[interval.owner].append((begin, interval.seconds / unit_s))
    for owner, ranges in bars.items():
        axes.broken_barh(ranges, (number - 0.4, 0.8), color=COLOURS[owner], linewidth=0)


def coarse(intervals: Sequence[Interval], resolution: int = _RESOLUTION) -> Iterator[Interval]:
    """Join short intervals until they are wide enough to be drawn, under their main owner.

    Args:
        intervals: without gaps.
        resolution: how many fit side by side at most.
    """
    if not intervals:
        return
    least_s = (intervals[-1].to_s - intervals[0].from_s) / resolution
    gathered: defaultdict[str, float] = defaultdict(float)
    from_s = intervals[0].from_s
    for interval in intervals:
        if gathered and interval.seconds >= least_s:
            yield Interval(from_s, interval.from_s, _most(gathered), interval.attempt)
            gathered, from_s = defaultdict(float), interval.from_s
        gathered[interval.owner] += interval.seconds
        if interval.to_s - from_s >= least_s:
            yield Interval(from_s, interval.to_s, _most(gathered), interval.attempt)
            gathered, from_s = defaultdict(float), interval.to_s
    if gathered:
        yield Interval(from_s, intervals[-1].to_s, _most(gathered), intervals[-1].attempt)


def _most(gathered: Mapping[str, float]) -> str:
    return max(gathered, key=lambda owner: gathered[owner])


@dataclass(frozen=True, slots=True)
class AccountReport:
    """An account as it is shown: a sentence, a table and a picture."""

    text: str
    rows: list[dict[str, str]]
    png: bytes


def account_report(account: Account) -> AccountReport:
    """Sentence, table and picture of an account."""
    return AccountReport(ettr_text(account), share_rows(account), timeline_picture(account))
