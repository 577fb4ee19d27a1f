"""The logs of an attempt: read while it runs, and put into the store when it has ended.

    runs/<run_id>/logs/p0001-a0002/<node>/rank-00003.stderr.log.gz
    runs/<run_id>/logs/p0001-a0002/<node>/collected.json              written last

Secrets are masked before anything leaves the node, and only whole lines do. The store takes a
limited amount per node and attempt: the most useful logs come first, and a log that is cut keeps
its newest end. Threads collect while the next attempt starts: only the end of the run waits for
them. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from perdure.storage.address import open_store
from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.agent.driver_reports import MSNPUREPORT, write_driver_reports
from perdure.training.agent.log_room import first_kept_byte
from perdure.training.agent.worker_output import STREAMS
from perdure.training.agent.workers import WorkerGroup
from perdure.training.commands.msrun import MsrunProcess
from perdure.training.config.job import Job
from perdure.training.masking import mask_stream, secret_values
from perdure.training.wire.agent import AgentConfig, StartOrder
from perdure.training.wire.logs import (
    Collected,
    CollectedFile,
    CollectOrder,
    LogPiece,
    ReadLogsQuery,
    logs_prefix,
)

MAX_REPLY_BYTES = 2 << 20
COLLECTED_FILE = "collected.json"
PIECE_BYTES = 256 << 10
# Logs compress about tenfold: trying more than this of a log is futile.
RAW_PER_BYTE = 8
MIN_KEPT_BYTES = 4 << 10
CLOSE_TIMEOUT_S = 5.0
_GZIP = 31  # zlib's wbits for a gzip header
OF_CONTAINER = ("agent.log", "checkpoint-server.log", "fork-server.log")

Key = tuple[int, int]  # placement and attempt


@dataclass(frozen=True, slots=True)
class Log:
    """A log of an attempt, as it stood at its end.

    Attributes:
        name: name in the store, without the ending of its compression.
        start: offset where the attempt's part of it begins.
        end: offset where that part ends.
    """

    path: Path
    name: str
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Size of the attempt's part."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Packed:
    """The newest end of a log, masked and compressed; `cut_bytes` before it are left out."""

    data: bytes
    cut_bytes: int


@dataclass(frozen=True, slots=True)
class _Work:
    """An attempt to collect.

    Attributes:
        logs: the most useful first.
        failed_folder: of the processes of a failed attempt; None: none has failed.
    """

    key: Key
    logs: Sequence[Log]
    secrets: frozenset[str]
    job: Job
    failed_folder: Path | None


def read_logs(
    query: ReadLogsQuery,
    *,
    config: AgentConfig,
    folder: Path,
    started: StartOrder,
    group: WorkerGroup,
    is_over: bool,
) -> tuple[LogPiece, ...]:
    """Read the logs from the offsets of a query, as far as a reply has room.

    Args:
        query: logs and offsets.
        config: the agent's configuration.
        folder: the container's folder.
        started: order that started the newest attempt.
        group: processes of that attempt.
        is_over: whether they have ended, so that a line without an end is complete.
    """
    group.output.flush()
    secrets = secrets_of(config, started, group)
    is_same = (query.placement, query.attempt) == (started.placement, started.attempt)
    room, pieces = MAX_REPLY_BYTES, []
    for log, rank in _matching_logs(query, folder, group):
        offset = query.offsets.get(f"{config.node}/{log.name}") if is_same else None
        raw, end = _read(log, offset, query.tail_bytes, min(room, PIECE_BYTES), is_over=is_over)
        room -= len(raw)
        text = b"".join(mask_stream([raw], secrets)).decode(errors="replace")
        pieces.append(
            LogPiece(
                placement=started.placement,
                attempt=started.attempt,
                name=log.name,
                rank=rank,
                text=text,
                offset=end,
                is_last=end >= log.end or not raw,
            )
        )
    return tuple(pieces)


def _matching_logs(
    query: ReadLogsQuery, folder: Path, group: WorkerGroup
) -> Iterator[tuple[Log, int | None]]:
    for log, rank in _all_logs(folder, group):
        if query.file is not None:
            is_wanted = log.name == query.file
        elif query.rank is not None:
            is_wanted = rank == query.rank
        else:
            is_ours = log.path.parent == group.output.log_folder
            is_wanted = query.every_log or is_ours or log.name.startswith("msrun-")
        if is_wanted:
            yield log, rank


def _all_logs(folder: Path, group: WorkerGroup) -> Iterator[tuple[Log, int | None]]:
    for rank in group.ranks:
        of = None if group.order.is_launcher else rank
        for stream in STREAMS:
            yield from ((log, of) for log in logs_at(group.output.path(rank, stream)))
    for process in group.output.msrun:
        yield from ((log, process.rank) for log in _msrun_logs([process]))
    names = (group.folder / "coordinator.log", *(folder / name for name in OF_CONTAINER))
    for path in names:
        yield from ((log, None) for log in logs_at(path))


def _read(
    log: Log, offset: int | None, tail_bytes: int | None, limit_bytes: int, *, is_over: bool
) -> tuple[bytes, int]:
    """Read whole lines from an offset on. Returns also where they end."""
    is_cut = offset is None and tail_bytes is not None and log.size_bytes > tail_bytes
    start = offset if offset is not None else log.end - (tail_bytes or 0) if is_cut else 0
    start = max(start, log.start)
    with log.path.open("rb") as file:
        file.seek(start)
        raw = file.read(limit_bytes)
    end = max(raw.rfind(b"\n"), raw.rfind(b"\r")) + 1
    if not end and (is_over or len(raw) == limit_bytes):
        end = len(raw)  # a line that does not end
    elif is_over and start + len(raw) >= log.end:
        end = len(raw)
    raw = raw[:end]
    if is_cut:
        # The first line lacks its beginning, and with it that of a secret maybe.
        raw = raw.partition(b"\n")[2]
    return raw, start + end


class Collector:
    """Collector of logs for the store, one attempt after the other.

    Args:
        config: the agent's configuration.
        folder: the container's folder.
    """

    def __init__(self, config: AgentConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._states: dict[Key, Collected] = {}
        self._collected_ends: dict[Path, int] = {}  # of logs that outlive attempts
        self._began_s = time.time()
        self._turn = threading.Lock()
        self._threads: list[threading.Thread] = []

    def collect(
        self, order: CollectOrder, started: StartOrder | None, group: WorkerGroup | None
    ) -> Collected:
        """Begin to collect an attempt, once. Returns how far it is.

        Args:
            order: names the attempt.
            started: order that started the newest attempt of this agent.
            group: processes of that attempt, None when there were none.
        """
        key = (order.placement, order.attempt)
        if key in self._states:
            return self._states[key]
        if started is None or (started.placement, started.attempt) != key:
            problem = f"{self._config.node} has nothing of attempt {key[0]}.{key[1]}"
            return _state(key, is_done=True, problems=(problem,))
        self._states[key] = _state(key)
        thread = threading.Thread(target=self._carry_out, args=(started, group), daemon=True)
        self._threads.append(thread)
        thread.start()
        return self._states[key]

    def close(self, started: StartOrder | None, group: WorkerGroup | None) -> None:
        """Collect the newest attempt unless it was, and wait a little: the container goes away."""
        if started is not None:
            order = CollectOrder(placement=started.placement, attempt=started.attempt)
            self.collect(order, started, group)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self, started: StartOrder, group: WorkerGroup | None) -> _Work:
        job = started.job
        key = (started.placement, started.attempt)
        logs = () if job.watch.log_limit_bytes == 0 else tuple(self._list_logs(job, group))
        has_failed = group is not None and bool(_failed_ranks(group))
        folder = group.folder if group is not None and has_failed else None
        return _Work(key, logs, secrets_of(self._config, started, group), job, folder)

    def _list_logs(self, job: Job, group: WorkerGroup | None) -> Iterator[Log]:
        """List the logs, the most useful first."""
        failed: Sequence[int] = ()
        if group is not None:
            failed = _failed_ranks(group)
            yield from _rank_logs(group, failed)
            yield from logs_at(group.folder / "coordinator.log")
        for name in OF_CONTAINER:
            path = self._folder / name
            yield from map(self._unseen, logs_at(path))
        if group is not None:
            healthy = [rank for rank in group.planned_ranks if rank not in failed]
            yield from _device_logs(group, failed)
            yield from _rank_logs(group, healthy)
            yield from _device_logs(group, healthy)
        for log in _newest_first(map(Path, job.watch.system_logs), since_s=self._began_s):
            if (unseen := self._unseen(log)).size_bytes:
                yield unseen

    def _unseen(self, log: Log) -> Log:
        start = self._collected_ends.get(log.path, 0)
        self._collected_ends[log.path] = log.end
        # A log that has become shorter was rotated, and all of it is new.
        return replace(log, start=max(start, log.start) if start <= log.end else log.start)

    def _carry_out(self, started: StartOrder, group: WorkerGroup | None) -> None:
        key = (started.placement, started.attempt)
        with self._turn:
            try:
                work = self._work(started, group)
                store = open_store(work.job.storage)
                if group is not None and group.step_follower is not None:
                    group.step_follower.upload(store)  # the report of the run's end reads it
                # Before the logs, which wait for the driver's tools: the container may go soon.
                if group is not None and group.checkpoint_watcher is not None:
                    group.checkpoint_watcher.upload_last(store)
                self._put_all_logs(work, store)
            except Exception as error:  # noqa: BLE001 the supervisor that waits gets it
                self._add(key, problem=f"{type(error).__name__}: {error}")
            finally:
                done = self._states[key].model_copy(update={"is_done": True})
                self._states[key] = done

    def _put_all_logs(self, work: _Work, store: ObjectStore) -> None:
        if not work.logs:
            return
        prefix = f"{logs_prefix(work.job.run_id, *work.key)}{self._config.node}/"
        room = work.job.watch.log_limit_bytes
        # The tools take their time, and answer only once all logs are stored.
        reports = _driver_reports(work.failed_folder) if work.failed_folder is not None else ()
        for log in chain(work.logs, reports):
            try:
                # Half of the remaining room: a talkative log leaves some for the others.
                packed = pack(log, work.secrets, limit_bytes=room // 2)
                if packed is None:
                    self._add(work.key, problem=f"{log.name}: no room for it within the limit")
                    continue
                store.put(f"{prefix}{log.name}.gz", packed.data)
            except (OSError, ValueError, StorageError) as error:
                self._add(work.key, problem=f"{log.name}: {error}")
                if isinstance(error, StorageError):
                    return  # the store had its tries; the next log would wait as long
                continue
            room -= len(packed.data)
            self._add(work.key, file=_file(f"{prefix}{log.name}.gz", log, packed))
        done = self._states[work.key].model_copy(update={"is_done": True})
        store.put(f"{prefix}{COLLECTED_FILE}", done.model_dump_json(indent=1).encode())

    def _add(
        self, key: Key, *, file: CollectedFile | None = None, problem: str | None = None
    ) -> None:
        state = self._states[key]
        self._states[key] = state.model_copy(
            update={
                "files": (*state.files, file) if file else state.files,
                "problems": (*state.problems, problem) if problem else state.problems,
            }
        )


def secrets_of(
    config: AgentConfig, started: StartOrder, group: WorkerGroup | None
) -> frozenset[str]:
    """List the values that must not leave the node with the logs of an attempt."""
    tokens = {config.token}
    if started.coordinator is not None:
        tokens.add(started.coordinator.token)
    variables: Sequence[Mapping[str, str]] = (os.environ, started.variables, started.job.env)
    secrets = frozenset(tokens).union(*map(secret_values, variables))
    return secrets | group.output.secrets if group is not None else secrets


def pack(log: Log, secrets: frozenset[str], *, limit_bytes: int) -> Packed | None:
    """Compress as much of the end of a log as fits; None when next to nothing does.

    Raises:
        OSError: it cannot be read.
    """
    keep = min(log.size_bytes, RAW_PER_BYTE * limit_bytes)
    while True:
        cut = log.size_bytes - keep
        pieces = _pieces(log, log.start + cut)
        data, read = compress(
            mask_stream(_whole_lines(pieces) if cut else pieces, secrets), limit_bytes=limit_bytes
        )
        if data is not None:
            return Packed(data, cut)
        keep = min(keep * 3 // 4, read)
        if keep < MIN_KEPT_BYTES:
            return None


def compress(pieces: Iterator[bytes], *, limit_bytes: int) -> tuple[bytes | None, int]:
    """Compress pieces; None as soon as they pass the limit. Returns also how much was read."""
    compressor = zlib.compressobj(wbits=_GZIP)
    packed: list[bytes] = []
    size = read = 0
    for piece in pieces:
        read += len(piece)
        packed.append(compressor.compress(piece))
        size += len(packed[-1])
        if size > limit_bytes:
            return None, read
    packed.append(compressor.flush())
    data = b"".join(packed)
    return (data if len(data) <= limit_bytes else None), read


def _pieces(log: Log, start: int) -> Iterator[bytes]:
    with log.path.open("rb") as file:
        file.seek(start)
        left = log.end - start
        while left > 0 and (piece := file.read(min(PIECE_BYTES, left))):
            left -= len(piece)
            yield piece


def _whole_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Drop the first line: its beginning is missing, and with it that of a secret maybe."""
    for piece in pieces:
        _, newline, remainder = piece.partition(b"\n")
        if newline:
            yield remainder
            yield from pieces
            return


def logs_at(path: Path, name: str | None = None) -> Iterator[Log]:
    """Yield the log unless it is missing or empty; links are not followed."""
    if path.is_file() and not path.is_symlink() and (size := path.stat().st_size):
        yield Log(path, name or path.name, first_kept_byte(path), size)


def _failed_ranks(group: WorkerGroup) -> list[int]:
    return [w.rank for w in group.statuses() if w.exit_code and not w.stopped_by_agent]


def _rank_logs(group: WorkerGroup, ranks: Sequence[int]) -> Iterator[Log]:
    for rank in ranks:
        for stream in STREAMS:
            yield from logs_at(group.output.path(rank, stream))
    yield from _msrun_logs(group.output.msrun)


def _msrun_logs(processes: Iterable[MsrunProcess]) -> Iterator[Log]:
    """List the logs that MindSpore's launcher keeps of its workers and its scheduler."""
    for process in processes:
        if process.log is not None:
            name = f"msrun-{process.rank:05d}" if process.rank is not None else "msrun-scheduler"
            yield from logs_at(process.log, f"{name}.log")


def _device_logs(group: WorkerGroup, ranks: Sequence[int]) -> Iterator[Log]:
    """List the logs of CANN, the newest first."""
    for rank in ranks:
        name = f"{group.output.name(rank)}.ascend"
        yield from _newest_first([group.output.device_folder(rank)], name)


def _newest_first(
    folders: Iterable[Path], name: str | None = None, *, since_s: float = 0.0
) -> Iterator[Log]:
    """List logs below folders that were written since then, under `name` or the folder's."""
    dated: list[tuple[float, Log]] = []
    for folder in folders:
        # A log that is rotated away or belongs to another user must not cost the others.
        with suppress(OSError):
            for path in folder.rglob("*.log"):
                with suppress(OSError):
                    logs = logs_at(path, f"{name or folder.name}/{path.relative_to(folder)}")
                    dated += [(path.stat().st_mtime, log) for log in logs]
    for written_s, log in sorted(dated, key=lambda pair: pair[0], reverse=True):
        if written_s >= since_s:
            yield log


def _driver_reports(folder: Path) -> Iterator[Log]:
    """List what the driver's tools report after a failure, if they are installed."""
    with suppress(OSError):  # of a full disk; what the store has so far is still listed
        for report in write_driver_reports(folder):
            yield from logs_at(report)
    yield from _newest_first([folder / MSNPUREPORT])


def _file(key: str, log: Log, packed: Packed) -> CollectedFile:
    return CollectedFile(
        key=key,
        size_bytes=len(packed.data),
        log_bytes=log.size_bytes - packed.cut_bytes,
        cut_bytes=packed.cut_bytes,
    )


def _state(key: Key, *, is_done: bool = False, problems: tuple[str, ...] = ()) -> Collected:
    return Collected(placement=key[0], attempt=key[1], is_done=is_done, problems=problems)


def await_collected(
    query: Callable[[], Sequence[tuple[str, Collected]]],
    *,
    timeout_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[tuple[str, Collected]]:
    """Query until every node has done its part, or for `timeout_s`. Returns the last answer."""
    deadline_s = time.monotonic() + timeout_s
    states = query()
    while not all(state.is_done for _, state in states) and time.monotonic() < deadline_s:
        sleep(0.1)
        states = query()
    return states
