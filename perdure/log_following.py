"""`perdure logs --follow`: what the ranks of a run write, from one attempt to the next.

Nodes on this machine are read while an attempt lives; what they wrote last, and what other nodes
wrote, comes from the store when the attempt has ended. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.console import warn
from perdure.log_index import Key, LogRow, Wanted, content_of, read_index
from perdure.storage.errors import StorageError
from perdure.training.errors import InputError
from perdure.training.supervisor.observing import AttemptObserver
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.wire.logs import LogPiece, ReadLogsQuery

POLL_S = 0.5
LEDGER_PERIOD_S = 2.0
FIRST_BYTES = 4 << 10  # of each log, before what is new
COLLECTED_WAIT_S = 5.0
REMEMBERED_CHARS = 4 << 10  # enough to find the place in the store's copy

Place = tuple[str, str]  # node and log


def follow_logs(run: RunHandle, wanted: Wanted) -> None:
    """Print what is written until the run ends, or until Ctrl-C.

    Raises:
        InputError: the run has not been started.
    """
    if run.refresh().job is None:
        raise InputError("run_id", f"{run.job.run_id} has not been started")
    follower = LogFollower(run, wanted, _print)
    try:
        while follower.look():
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _print(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()


@dataclass(slots=True)
class LogFollower:
    """Reads on in the logs of a run.

    Attributes:
        run: not taken by this process.
        wanted: which of its logs.
        write: gets what is new.
    """

    run: RunHandle
    wanted: Wanted
    write: Callable[[str], None]
    _key: Key | None = None
    _offsets: dict[str, int] = field(default_factory=dict)
    _written: dict[Place, str] = field(default_factory=dict)
    _read_s: float = float("-inf")
    _observer: tuple[int, AttemptObserver] | None = None
    _has_warned: bool = False

    def look(self) -> bool:
        """Write what is new. Whether more may come."""
        self._refresh()
        history = self.run.history
        if history.ended is not None:
            last = history.attempts[-1].key if history.attempts else None
            if last is not None and self._key != last:
                self._begin(last)
            self._finish()
            return False
        while not self._read_on():
            pass
        return True

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if now_s - self._read_s < LEDGER_PERIOD_S:
            return
        self._read_s = now_s
        try:
            self.run.refresh()
        except StorageError as error:
            warn(f"the store does not answer: {error}")

    def _read_on(self) -> bool:
        """Read one piece of each log. Whether they are at their ends for now."""
        observer = self._observed()
        placement, attempt = self._key or (0, 0)
        query = ReadLogsQuery(
            placement=placement,
            attempt=attempt,
            offsets=self._offsets,
            tail_bytes=FIRST_BYTES if self._key is None else None,
            rank=self.wanted.rank,
            file=self.wanted.file,
        )
        pieces = observer.read_logs(query) if observer is not None else None
        if pieces is None:
            if self.run.history.open_attempt is not None and not self._has_warned:
                self._has_warned = True
                warn("no node of the run is in reach: its logs come when an attempt has ended")
            return True
        mine = [(node, one) for node, one in pieces if self.wanted.node in (None, node)]
        newest = max(((one.placement, one.attempt) for _, one in mine), default=None)
        for node, one in mine:
            key = (one.placement, one.attempt)
            if key != self._key and key == newest:
                self._begin(key)
            if key == self._key:
                self._take(node, one)
        return all(one.is_last for _, one in mine)

    def _observed(self) -> AttemptObserver | None:
        placed = self.run.history.placement
        if placed is None:
            return None
        if self._observer is None or self._observer[0] != placed.placement:
            found = self.run.newest_observer()
            self._observer = (placed.placement, found) if found is not None else None
        return self._observer[1] if self._observer is not None else None

    def _begin(self, key: Key) -> None:
        """Go on with another attempt."""
        self._finish()
        self._key, self._offsets, self._written = key, {}, {}
        self.write("==> attempt {}.{} <==\n".format(*key))

    def _take(self, node: str, piece: LogPiece) -> None:
        self._offsets[f"{node}/{piece.name}"] = piece.offset
        self._show(node, piece.name, piece.rank, piece.text)

    def _show(self, node: str, name: str, rank: int | None, text: str) -> None:
        place = (node, name)
        self._written[place] = (self._written.get(place, "") + text)[-REMEMBERED_CHARS:]
        if self.wanted.rank is not None:
            self.write(text)
            return
        who = f"rank {rank}" if rank is not None else node
        self.write("".join(f"{who} | {line}" for line in text.splitlines(keepends=True)))

    def _finish(self) -> None:
        """What the store has of the attempt beyond what was read from its nodes."""
        if self._key is None:
            return
        deadline_s = time.monotonic() + COLLECTED_WAIT_S
        nodes = {node for node, _ in self._written}
        while True:
            index = read_index(self.run.store, self.run.job.run_id)
            collected = {node for key, node in index.collected if key == self._key}
            if nodes <= collected or time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)
        for row in index.rows:
            if (row.placement, row.attempt) == self._key and self.wanted.takes(row):
                self._show_rest(row)

    def _show_rest(self, row: LogRow) -> None:
        node = row.node or ""
        text = content_of(self.run.store, row).decode(errors="replace")
        self._show(node, row.file, row.rank, rest_of(text, self._written.get((node, row.file), "")))


def rest_of(text: str, written: str) -> str:
    """What a text holds after the end that was written already; nothing where that is not in it."""
    at = text.rfind(written) if written else 0
    return text[at + len(written) :] if at >= 0 else ""
