"""The logs of a run: the index of those in its store, reading one, and following new output.

The store holds the logs of attempts that have ended. While an attempt lives, its nodes on this
machine answer; their last lines, and the logs of other nodes, come from the store once it has
ended. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import gzip
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from perdure.console import warn
from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.agent.log_collection import COLLECTED_FILE
from perdure.training.errors import InputError
from perdure.training.reporting.fault_report import HANG_REPORT
from perdure.training.supervisor.observing import AttemptObserver
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.wire.logs import Collected, ReadLogsQuery, logs_prefix

POLL_S = 0.5
LEDGER_PERIOD_S = 2.0
FIRST_BYTES = 4 << 10  # of each log, printed before its new output
COLLECTED_WAIT_S = 5.0
REMEMBERED_CHARS = 4 << 10  # enough to find the place in the store's copy

_KEY = re.compile(r"p(\d+)-a(\d+)/(?:([^/]+)/)?([^/].*)")
_RANK = re.compile(r"rank-(\d+)\.")
_OUTPUT = re.compile(r"(?:rank|command)-\d+\.std(?:out|err)\.log")
_PACKED = ".gz"
_PLAIN = (HANG_REPORT,)

Key = tuple[int, int]  # placement and attempt
Place = tuple[str, str]  # node and log


@dataclass(frozen=True, slots=True)
class LogRow:
    """One log in the store.

    Attributes:
        node: the node that wrote it; None for a report about all nodes.
        file: its name on the node.
        rank: the global rank that wrote it; None when no rank did.
        size_bytes: compressed in the store, uncompressed while its attempt lives.
        cut_bytes: bytes left out at its beginning; None while their number is not known.
        key: object key; None while its attempt lives.
        is_living: whether its attempt still lives, so that the log is on its node.
    """

    placement: int
    attempt: int
    node: str | None
    file: str
    rank: int | None
    size_bytes: int
    cut_bytes: int | None
    key: str | None
    is_living: bool = False


@dataclass(frozen=True, slots=True)
class LogIndex:
    """The logs of a run in its store.

    Attributes:
        rows: sorted by attempt, node and file.
        collected: the list that each node wrote after it had uploaded all its logs.
    """

    rows: Sequence[LogRow]
    collected: dict[tuple[Key, str], Collected]


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The logs that a user asked for; None matches every value."""

    rank: int | None = None
    node: str | None = None
    file: str | None = None

    def matches(self, row: LogRow) -> bool:
        """Whether the user asked for this log; a filter by node alone matches output of ranks."""
        if self.rank is None and self.file is None and not _OUTPUT.match(row.file):
            return False
        return (
            self.rank in (None, row.rank)
            and self.node in (None, row.node)
            and self.file in (None, row.file)
        )


def read_index(store: ObjectStore, run_id: str) -> LogIndex:
    """List the logs in the store.

    Raises:
        InputError: the list of a node is damaged.
    """
    objects: list[tuple[Key, str, str, str, int]] = []
    collected: dict[tuple[Key, str], Collected] = {}
    prefix = logs_prefix(run_id)
    for info in store.list(prefix):
        match = _KEY.fullmatch(info.key.removeprefix(prefix))
        if match is None:
            continue  # not Perdure's
        key, node, name = (int(match[1]), int(match[2])), match[3] or "", match[4]
        if name == COLLECTED_FILE:
            collected[(key, node)] = _collected(store, info.key)
        elif name.endswith(_PACKED) or name in _PLAIN:
            objects.append((key, node, name.removesuffix(_PACKED), info.key, info.size_bytes))
    cuts = {file.key: file.cut_bytes for listing in collected.values() for file in listing.files}
    rows = [
        LogRow(*key, node or None, name, _rank_of(name), size, cuts.get(object_key), object_key)
        for key, node, name, object_key, size in sorted(objects)
    ]
    return LogIndex(rows, collected)


def _collected(store: ObjectStore, key: str) -> Collected:
    try:
        return Collected.model_validate_json(store.get(key))
    except ValidationError as error:
        raise InputError(key, f"is damaged: {error.error_count()} problems") from error


def _rank_of(name: str) -> int | None:
    match = _RANK.match(name)
    return int(match[1]) if match is not None else None


def newest_matches(rows: Sequence[LogRow], log_filter: LogFilter) -> list[LogRow]:
    """The rows that match, of the newest attempt that has any."""
    matches = [row for row in rows if log_filter.matches(row)]
    newest = max(((row.placement, row.attempt) for row in matches), default=None)
    return [row for row in matches if (row.placement, row.attempt) == newest]


def content_of(store: ObjectStore, row: LogRow) -> bytes:
    """The content of a log in the store, decompressed."""
    assert row.key is not None  # noqa: S101 it is in the store
    content = store.get(row.key)
    return gzip.decompress(content) if row.key.endswith(_PACKED) else content


def all_rows(run: RunHandle, index: LogIndex) -> list[LogRow]:
    """The logs in the store, then those that only the nodes of the living attempt have."""
    stored = {(row.placement, row.attempt, row.node, row.file) for row in index.rows}
    living = living_rows(run)
    only = [r for r in living if (r.placement, r.attempt, r.node, r.file) not in stored]
    return [*index.rows, *only]


def living_rows(run: RunHandle) -> list[LogRow]:
    """The logs that nodes on this machine have of the living attempt, with their present sizes.

    Uses the history as it was last read.
    """
    view, observer = run.history.open_attempt, run.newest_observer()
    if view is None or observer is None:
        return []
    pieces = observer.read_logs(ReadLogsQuery(tail_bytes=0, every_log=True)) or ()
    return [
        LogRow(*view.key, node, piece.name, piece.rank, piece.offset, None, None, is_living=True)
        for node, piece in pieces
        if (piece.placement, piece.attempt) == view.key
    ]


def living_text(run: RunHandle, row: LogRow) -> Iterator[str]:
    """A log of the living attempt, piece by piece, up to its present end."""
    observer = run.newest_observer()
    offset, is_last = 0, observer is None
    while not is_last and observer is not None:
        query = ReadLogsQuery(
            placement=row.placement,
            attempt=row.attempt,
            offsets={f"{row.node}/{row.file}": offset},
            file=row.file,
        )
        pieces = [piece for node, piece in observer.read_logs(query) or () if node == row.node]
        is_last = not pieces or pieces[0].is_last
        for piece in pieces:
            offset = piece.offset
            yield piece.text


def follow_logs(run: RunHandle, log_filter: LogFilter) -> None:
    """Print new output until the run ends, or until Ctrl-C.

    Raises:
        InputError: the run has not been started.
    """
    if run.refresh().job is None:
        raise InputError("run_id", f"{run.job.run_id} has not been started")
    follower = _LogFollower(run, log_filter, _print)
    try:
        while follower.poll():
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def _print(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()


@dataclass(slots=True)
class _LogFollower:
    """Reads new output in the logs of a run, from one attempt to the next.

    Attributes:
        run: a run that another process may supervise.
        log_filter: selects the logs.
        write: receives new output.
    """

    run: RunHandle
    log_filter: LogFilter
    write: Callable[[str], None]
    _key: Key | None = None
    _offsets: dict[str, int] = field(default_factory=dict)
    _written: dict[Place, str] = field(default_factory=dict)
    _read_s: float = float("-inf")
    _observer: tuple[int, AttemptObserver] | None = None
    _has_warned: bool = False

    def poll(self) -> bool:
        """Write new output; return whether more may come."""
        self._refresh()
        history = self.run.history
        if history.ended is not None:
            last = history.attempts[-1].key if history.attempts else None
            if last is not None and self._key != last:
                self._begin(last)
            self._finish()
            return False
        while not self._read_pieces():
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

    def _read_pieces(self) -> bool:
        """Read one piece of each log; return whether all are at their ends for now."""
        observer = self._newest_observer()
        placement, attempt = self._key or (0, 0)
        query = ReadLogsQuery(
            placement=placement,
            attempt=attempt,
            offsets=self._offsets,
            tail_bytes=FIRST_BYTES if self._key is None else None,
            rank=self.log_filter.rank,
            file=self.log_filter.file,
        )
        pieces = observer.read_logs(query) if observer is not None else None
        if pieces is None:
            if self.run.history.open_attempt is not None and not self._has_warned:
                self._has_warned = True
                warn(
                    "no node of the run is reachable from this machine; its logs appear when its "
                    "attempt has ended"
                )
            return True
        matches = [(n, piece) for n, piece in pieces if self.log_filter.node in (None, n)]
        newest = max(((piece.placement, piece.attempt) for _, piece in matches), default=None)
        for node, piece in matches:
            key = (piece.placement, piece.attempt)
            if key != self._key and key == newest:
                self._begin(key)
            if key == self._key:
                self._offsets[f"{node}/{piece.name}"] = piece.offset
                self._show(node, piece.name, piece.rank, piece.text)
        return all(piece.is_last for _, piece in matches)

    def _newest_observer(self) -> AttemptObserver | None:
        placed = self.run.history.placement
        if placed is None:
            return None
        if self._observer is None or self._observer[0] != placed.placement:
            observer = self.run.newest_observer()
            self._observer = (placed.placement, observer) if observer is not None else None
        return self._observer[1] if self._observer is not None else None

    def _begin(self, key: Key) -> None:
        """Finish one attempt and begin to read the next."""
        self._finish()
        self._key, self._offsets, self._written = key, {}, {}
        self.write("==> attempt {}.{} <==\n".format(*key))

    def _show(self, node: str, name: str, rank: int | None, text: str) -> None:
        place = (node, name)
        self._written[place] = (self._written.get(place, "") + text)[-REMEMBERED_CHARS:]
        if self.log_filter.rank is not None:
            self.write(text)
            return
        writer = f"rank {rank}" if rank is not None else node
        self.write("".join(f"{writer} | {line}" for line in text.splitlines(keepends=True)))

    def _finish(self) -> None:
        """Write the rest of the attempt's logs from the store."""
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
            if (row.placement, row.attempt) == self._key and self.log_filter.matches(row):
                self._show_rest(row)

    def _show_rest(self, row: LogRow) -> None:
        node = row.node or ""
        text = content_of(self.run.store, row).decode(errors="replace")
        written = self._written.get((node, row.file), "")
        at = text.rfind(written) if written else 0
        # Where the store's copy lacks the lines written before, nothing shows what follows them.
        self._show(node, row.file, row.rank, text[at + len(written) :] if at >= 0 else "")
