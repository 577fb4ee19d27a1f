"""The logs of an attempt while it lives, for those who read along.

Whole lines leave the node, with secrets masked as in the store. Sizes are bytes.

What a node knows beside what its workers print: device logs, driver tools, stacks.

The logs of an ended attempt, from a node into the store.

    runs/<run_id>/logs/p0001-a0002/<node>/rank-00003.stderr.log.gz
    runs/<run_id>/logs/p0001-a0002/<node>/collected.json              written last

Secrets are masked before anything leaves the node. What a node and attempt may put there is
limited; the most useful logs come first, and of a log that is cut the newest end is kept. It
happens in threads of its own while the next attempt starts: nothing waits for it but the end of
the run. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.storage.address import open_store
from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.agent.evidence import (
    read_device_health,
    read_device_logs,
    read_stacks,
    without_secrets,
)
from perdure.training.agent.workers import STREAMS, WorkerGroup
from perdure.training.config.job import Job
from perdure.training.masking import mask_stream, secret_values
from perdure.training.wire.agent import AgentConfig, NodeLog, StartOrder
from perdure.training.wire.logs import (
    Collected,
    CollectedFile,
    CollectOrder,
    LogPiece,
    ReadLogsQuery,
    logs_prefix,
)

MAX_REPLY_BYTES = 2 << 20


def read_logs(
    query: ReadLogsQuery,
    *,
    config: AgentConfig,
    folder: Path,
    started: StartOrder,
    group: WorkerGroup,
    is_over: bool,
) -> tuple[LogPiece, ...]:
    """What the logs hold after the places of a query, as far as it fits into a reply.

    Args:
        query: what is wanted.
        config: of the agent.
        folder: the container's.
        started: the newest attempt.
        group: its processes.
        is_over: whether they have ended, so that a line without an end is all there will be.
    """
    group.flush_output()
    secrets = secrets_of(config, started, group)
    is_same = (query.placement, query.attempt) == (started.placement, started.attempt)
    left, pieces = MAX_REPLY_BYTES, []
    for log, rank in _wanted(query, folder, group):
        offset = query.offsets.get(f"{config.node}/{log.name}") if is_same else None
        raw, end = _read(log, offset, query.tail_bytes, min(left, PIECE_BYTES), is_over=is_over)
        left -= len(raw)
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


def _wanted(
    query: ReadLogsQuery, folder: Path, group: WorkerGroup
) -> Iterator[tuple[Log, int | None]]:
    for log, rank in _all(folder, group):
        if query.file is not None:
            is_wanted = log.name == query.file
        elif query.rank is not None:
            is_wanted = rank == query.rank
        else:
            is_wanted = query.every_log or log.path.parent == group.log_folder
        if is_wanted:
            yield log, rank


def _all(folder: Path, group: WorkerGroup) -> Iterator[tuple[Log, int | None]]:
    for rank in group.ranks:
        of = None if group.order.is_launcher else rank
        for stream in STREAMS:
            yield from ((log, of) for log in logs_at(group.log_path(rank, stream)))
    names = (group.folder / "coordinator.log", *(folder / name for name in OF_CONTAINER))
    for path in names:
        yield from ((log, None) for log in logs_at(path))


def _read(
    log: Log, offset: int | None, tail_bytes: int | None, limit_bytes: int, *, is_over: bool
) -> tuple[bytes, int]:
    """Whole lines from a place on, and where they end."""
    is_cut = offset is None and tail_bytes is not None and log.end > tail_bytes
    start = offset if offset is not None else log.end - (tail_bytes or 0) if is_cut else 0
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
        # Without the first line: its begin is missing, and with it the begin of a secret maybe.
        raw = raw.partition(b"\n")[2]
    return raw, start + end


def read_evidence(group: WorkerGroup, tail_bytes: int) -> tuple[NodeLog, ...]:
    """Device logs, and the output of the driver's tools; asks these one by one.

    Args:
        group: processes of the newest attempt.
        tail_bytes: of each log.
    """
    # One folder of a launcher has the logs of all its ranks.
    is_known = not group.order.is_launcher
    folders = {group.device_folder(r): r if is_known else None for r in group.ranks}
    devices = range(group.order.slots_per_node)
    texts = (*read_device_logs(folders, tail_bytes), *read_device_health(devices))
    return without_secrets(texts, group.secrets)


def read_worker_stacks(group: WorkerGroup) -> tuple[NodeLog, ...]:
    """The stack of every thread of the workers; runs other programs."""
    # The command lines of the processes are among them.
    return without_secrets(read_stacks(group.stacks_targets()), group.secrets)


COLLECTED_FILE = "collected.json"
PIECE_BYTES = 256 << 10
# Logs compress about tenfold; more than this of one is not even tried.
RAW_PER_BYTE = 8
MIN_KEPT_BYTES = 4 << 10
CLOSE_TIMEOUT_S = 5.0
_GZIP = 31  # zlib's wbits for a gzip header
OF_CONTAINER = ("agent.log", "checkpoint-server.log", "fork-server.log")
_STREAMS = ("stderr", "stdout")

Key = tuple[int, int]  # placement and attempt


@dataclass(frozen=True, slots=True)
class Log:
    """A log of an attempt, as it stood at its end.

    Attributes:
        name: in the store, without the ending of its compression.
        start: where the attempt's part of it begins.
        end: where it ends.
    """

    path: Path
    name: str
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Of the attempt's part."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Packed:
    """The newest end of a log, masked and compressed; `cut_bytes` are left out before it."""

    data: bytes
    cut_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be collected: `logs`, the most useful first."""

    key: Key
    logs: Sequence[Log]
    secrets: frozenset[str]
    job: Job


class Collector:
    """Puts logs into the store, one attempt after the other.

    Args:
        config: of the agent.
        folder: the container's.
    """

    def __init__(self, config: AgentConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._states: dict[Key, Collected] = {}
        self._collected_ends: dict[Path, int] = {}  # of logs that go on: what attempts before had
        self._began_s = time.time()
        self._one_by_one = threading.Lock()
        self._threads: list[threading.Thread] = []

    def collect(
        self, order: CollectOrder, started: StartOrder | None, group: WorkerGroup | None
    ) -> Collected:
        """Begin to collect an attempt, once. How far it is.

        Args:
            order: which attempt.
            started: the newest attempt of this agent.
            group: its processes, None when there were none.
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
        """Collect what was not requested yet, and wait for it a little: the container goes away."""
        if started is not None:
            order = CollectOrder(placement=started.placement, attempt=started.attempt)
            self.collect(order, started, group)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _work(self, started: StartOrder, group: WorkerGroup | None) -> Work:
        job = started.job
        key = (started.placement, started.attempt)
        logs = () if job.watch.log_limit_bytes == 0 else tuple(self._logs(job, group))
        return Work(key, logs, secrets_of(self._config, started, group), job)

    def _logs(self, job: Job, group: WorkerGroup | None) -> Iterator[Log]:
        """What there is, the most useful first."""
        failed: Sequence[int] = ()
        if group is not None:
            failed = [w.rank for w in group.statuses() if w.exit_code and not w.stopped_by_agent]
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
        # One that is shorter than it was has been rotated, and all of it is new.
        return replace(log, start=start if start <= log.end else 0)

    def _carry_out(self, started: StartOrder, group: WorkerGroup | None) -> None:
        key = (started.placement, started.attempt)
        with self._one_by_one:
            try:
                work = self._work(started, group)
                store = open_store(work.job.storage)
                if group is not None and group.shown is not None:
                    group.shown.keep(store)  # the report of the run's end reads it
                self._put_all(work, store)
                if group is not None and group.saved is not None:
                    group.saved.upload_last(store)
            except Exception as error:  # noqa: BLE001 the supervisor that waits gets it
                self._add(key, problem=f"{type(error).__name__}: {error}")
            finally:
                done = self._states[key].model_copy(update={"is_done": True})
                self._states[key] = done

    def _put_all(self, work: Work, store: ObjectStore) -> None:
        if not work.logs:
            return
        prefix = f"{logs_prefix(work.job.run_id, *work.key)}{self._config.node}/"
        left = work.job.watch.log_limit_bytes
        for log in work.logs:
            try:
                # Half of what is left: one that talks much leaves room for the others.
                packed = pack(log, work.secrets, limit_bytes=left // 2)
                if packed is None:
                    self._add(work.key, problem=f"{log.name}: no room for it within the limit")
                    continue
                store.put(f"{prefix}{log.name}.gz", packed.data)
            except (OSError, ValueError, StorageError) as error:
                self._add(work.key, problem=f"{log.name}: {error}")
                if isinstance(error, StorageError):
                    return  # the store had its tries; the next log would wait as long
                continue
            left -= len(packed.data)
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
    """What must not leave the node with the logs of an attempt."""
    tokens = {config.token}
    if started.coordinator is not None:
        tokens.add(started.coordinator.token)
    variables: Sequence[Mapping[str, str]] = (os.environ, started.variables, started.job.env)
    secrets = frozenset(tokens).union(*map(secret_values, variables))
    return secrets | group.secrets if group is not None else secrets


def pack(log: Log, secrets: frozenset[str], *, limit_bytes: int) -> Packed | None:
    """As much of the end of a log as fits, None when next to nothing does.

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
    """The pieces as gzip, None as soon as it is over the limit; and how much went in."""
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
    """Without the first line: its begin is missing, and with it the begin of a secret maybe."""
    for piece in pieces:
        _, newline, remainder = piece.partition(b"\n")
        if newline:
            yield remainder
            yield from pieces
            return


def logs_at(path: Path, name: str | None = None) -> Iterator[Log]:
    """The log, where there is one with anything in it; links are not followed."""
    if path.is_file() and not path.is_symlink() and (size := path.stat().st_size):
        yield Log(path, name or path.name, 0, size)


def _rank_logs(group: WorkerGroup, ranks: Sequence[int]) -> Iterator[Log]:
    for rank in ranks:
        for stream in _STREAMS:
            yield from logs_at(group.log_path(rank, stream))


def _device_logs(group: WorkerGroup, ranks: Sequence[int]) -> Iterator[Log]:
    """What CANN wrote, the newest first."""
    for rank in ranks:
        name = f"{group.log_name(rank)}.ascend"
        yield from _newest_first([group.device_folder(rank)], name)


def _newest_first(
    folders: Iterable[Path], name: str | None = None, *, since_s: float = 0.0
) -> Iterator[Log]:
    """The logs below folders, under `name` or the folder's own, if written since then."""
    dated: list[tuple[float, Log]] = []
    for folder in folders:
        # What is rotated away meanwhile, or is another user's, must not cost the other logs.
        with suppress(OSError):
            for path in folder.rglob("*.log"):
                with suppress(OSError):
                    logs = logs_at(path, f"{name or folder.name}/{path.relative_to(folder)}")
                    dated += [(path.stat().st_mtime, log) for log in logs]
    for written_s, log in sorted(dated, key=lambda pair: pair[0], reverse=True):
        if written_s >= since_s:
            yield log


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
    """Query until every node has done its part, or for `timeout_s`. The last answer."""
    deadline_s = time.monotonic() + timeout_s
    states = query()
    while not all(state.is_done for _, state in states) and time.monotonic() < deadline_s:
        sleep(0.1)
        states = query()
    return states
