"""Which logs of a run there are: in its store, and on the nodes of the attempt that lives.

Sizes are bytes.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from perdure.storage.objects import ObjectStore
from perdure.training.agent.log_collection import COLLECTED_FILE
from perdure.training.errors import InputError
from perdure.training.reporting.fault_report import HANG_REPORT
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.wire.logs import Collected, ReadLogsQuery, logs_prefix

_KEY = re.compile(r"p(\d+)-a(\d+)/(?:([^/]+)/)?([^/].*)")
_RANK = re.compile(r"rank-(\d+)\.")
_OUTPUT = re.compile(r"(?:rank|command)-\d+\.std(?:out|err)\.log")
_PACKED = ".gz"
_PLAIN = (HANG_REPORT,)

Key = tuple[int, int]  # placement and attempt


@dataclass(frozen=True, slots=True)
class LogRow:
    """One log in the store.

    Attributes:
        node: that wrote it, None for what is about all of them.
        file: its name on the node.
        rank: global rank that wrote it, None when no rank did.
        size_bytes: compressed; of a living attempt as it is.
        cut_bytes: left out at its beginning; None while that is not known.
        key: of the object; None of a living attempt.
        is_living: whether its attempt goes on, so that its node has it.
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
        rows: by attempt, node and file.
        collected: what each node wrote when it had put all its logs there.
    """

    rows: Sequence[LogRow]
    collected: dict[tuple[Key, str], Collected]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logs are to be printed; None: whatever it is."""

    rank: int | None = None
    node: str | None = None
    file: str | None = None

    def takes(self, row: LogRow) -> bool:
        """Whether a log is one of them; of a node, without a name, what its ranks wrote."""
        if self.rank is None and self.file is None and not _OUTPUT.match(row.file):
            return False
        return (
            self.rank in (None, row.rank)
            and self.node in (None, row.node)
            and self.file in (None, row.file)
        )


def read_index(store: ObjectStore, run_id: str) -> LogIndex:
    """What the store has.

    Raises:
        InputError: the list of a node is damaged.
    """
    found: list[tuple[Key, str, str, str, int]] = []
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
            found.append((key, node, name.removesuffix(_PACKED), info.key, info.size_bytes))
    cuts = {file.key: file.cut_bytes for one in collected.values() for file in one.files}
    rows = [
        LogRow(*key, node or None, name, _rank_of(name), size, cuts.get(object_key), object_key)
        for key, node, name, object_key, size in sorted(found)
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


def chosen(rows: Sequence[LogRow], wanted: Wanted) -> list[LogRow]:
    """The rows that are wanted, of the newest attempt that has any."""
    fit = [row for row in rows if wanted.takes(row)]
    newest = max(((row.placement, row.attempt) for row in fit), default=None)
    return [row for row in fit if (row.placement, row.attempt) == newest]


def content_of(store: ObjectStore, row: LogRow) -> bytes:
    """A log that is in the store, unpacked."""
    assert row.key is not None  # noqa: S101 it is in the store
    content = store.get(row.key)
    return gzip.decompress(content) if row.key.endswith(_PACKED) else content


def living_rows(run: RunHandle) -> list[LogRow]:
    """The logs that nodes on this machine have of the attempt that lives; their sizes as they are.

    The history is as it was last read.
    """
    view, observer = run.history.open_attempt, run.newest_observer()
    if view is None or observer is None:
        return []
    pieces = observer.read_logs(ReadLogsQuery(tail_bytes=0, every_log=True)) or ()
    return [
        LogRow(*view.key, node, one.name, one.rank, one.offset, None, None, is_living=True)
        for node, one in pieces
        if (one.placement, one.attempt) == view.key
    ]


def living_text(run: RunHandle, row: LogRow) -> Iterator[str]:
    """A log of the attempt that lives, piece by piece, as far as it goes now."""
    observer = run.newest_observer()
    offset, is_last = 0, observer is None
    while not is_last and observer is not None:
        query = ReadLogsQuery(
            placement=row.placement,
            attempt=row.attempt,
            offsets={f"{row.node}/{row.file}": offset},
            file=row.file,
        )
        mine = [one for node, one in observer.read_logs(query) or () if node == row.node]
        is_last = not mine or mine[0].is_last
        for one in mine:
            offset = one.offset
            yield one.text
