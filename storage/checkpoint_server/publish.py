"""Publishing of shares: to the node's disk and the object store, then the manifest.

The checkpoint server of the first rank commits once every rank's record lies in the store, so
checkpoint servers need no connection to each other. Killed anywhere, it leaves a committed
checkpoint or an unfinished one that is never offered. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt, NotFound, PreconditionFailed, StaleAttempt, StorageError
from perdure.storage.share import (
    SaveId,
    Share,
    WrittenShare,
    delete_records,
    merge,
    parse_record,
    put_attachments,
    put_record,
    put_share,
    read_record,
    recorded_ranks,
)

_log = logging.getLogger("perdure.storage")

RECORD_THREADS = 16
POLL_FIRST_S = 0.05
POLL_LONGEST_S = 1.0
# After the commit of a later save: a share that a slow store delays is sent again by then.
OVERTAKEN_S = 180.0
CHECK_S = 5.0  # between two checks of who owns the run, while records are awaited
DISK_KEEPS_SAVES = 2
_SHARE = re.compile(r"/step-(\d+)/p(\d+)-a(\d+)-rank\d+\.")


@dataclass(frozen=True, slots=True)
class Committing:
    """A checkpoint that is to be committed.

    Attributes:
        save: save that the manifest is of.
        owner: (placement, attempt) that publishes.
        announce: log of the attempt, which records the commit afterwards.
    """

    save: SaveId
    owner: tuple[int, int]
    announce: Path | None = None


class Publisher:
    """Writes the shares of one node, and commits when it is the first rank's.

    Args:
        store: checkpoints of the run in the object store.
        disk: checkpoints on the node's disk; None without that tier.
        retain: called after a commit with the step; deletes what is no longer wanted.
        announce: called after a commit with `Committing.announce` and the step; an OSError of it
            is only logged.
        wait_s: time that a commit waits for the records of other ranks.
        clock: monotonic seconds.
        reached: called with the name of each point of a save, for fault injection.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        disk: CheckpointStore | None,
        retain: Callable[[int], None],
        announce: Callable[[Path, int], None] = lambda _log, _step: None,
        wait_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
        reached: Callable[[str], None] = lambda _point: None,
    ) -> None:
        self._store = store
        self._disk = disk
        self._retain = retain
        self._announce = announce
        self._wait_s = wait_s
        self._clock = clock
        self._reached = reached
        self._newest: tuple[tuple[int, int], int] | None = None
        self._committed: tuple[tuple[int, int], int, float] | None = None  # the newest, and when
        self._ending = threading.Event()
        self._disk_lock = threading.Lock()
        self._onto_disk: list[tuple[int, int, int]] = []

    def end(self) -> None:
        """Have commits that wait for other ranks give up."""
        self._ending.set()

    def write_to_disk(self, written: WrittenShare, data: memoryview) -> None:
        """Put a share onto the node's disk, if there is such a tier; a full one is only logged."""
        self._reached("before_shard")
        if self._disk is not None:
            self._write_to_disk(self._disk, written, data)
        self._reached("shard_on_disk")

    def upload(self, written: WrittenShare, data: memoryview) -> None:
        """Put a share into the store; its record comes last.

        Raises:
            StorageError: the store refused or failed.
        """
        put_share(self._store, written, data)
        self._reached("shard_in_store")
        put_record(self._store, written)
        self._reached("record_in_store")

    def may_commit(self, step: int, owner: tuple[int, int]) -> bool:
        """Whether a step is still to be committed.

        Raises:
            StaleAttempt: a newer attempt than `owner` owns the run.
        """
        try:
            self._store.check_may_commit(step, *owner)
        except PreconditionFailed:
            return False
        return True

    def attach(self, share: Share) -> None:
        """Put what goes with a share into the store."""
        put_attachments(self._store, share)

    def commit(self, task: Committing) -> bool:
        """Publish a save once all its shares are in the store.

        Returns:
            False when that step was committed before, or will never be whole.

        Raises:
            StaleAttempt: a newer attempt owns the run.
            StorageError: the store failed, or the other ranks' records never came.
        """
        self._newest = max(self._newest or ((0, 0), 0), (task.owner, task.save.step))
        if not self.may_commit(task.save.step, task.owner) or not self._await_records(task):
            return False
        ranks = range(task.save.world_size)
        with ThreadPoolExecutor(RECORD_THREADS) as pool:
            shares = list(pool.map(lambda r: read_record(self._store, task.save, r), ranks))
        manifest = merge(shares, owner=task.owner, written_at_s=self._store.clock())
        self._reached("before_manifest")
        try:
            self._store.commit(manifest)
        except PreconditionFailed:
            return False
        self._reached("committed")
        self._committed = (task.owner, task.save.step, self._clock())
        self._after_commit(task)
        return True

    def _after_commit(self, task: Committing) -> None:
        # The checkpoint is committed, whatever fails from here on.
        step = task.save.step
        if task.announce is not None:
            try:
                self._announce(task.announce, step)
            except OSError as exc:
                _log.error(f"the commit of step {step} is not in the attempt's log: {exc}")
        try:
            delete_records(self._store, task.save, range(task.save.world_size))
            self._reached("records_deleted")
            self._retain(step)
        except StorageError as exc:
            # The next retention, or gc, does what was left.
            _log.error(f"step {step}: not tidied up: {exc}")

    def _await_records(self, task: Committing) -> bool:
        """Wait for the record of every rank; False when the step need not be committed any more."""
        began_s = checked_s = self._clock()
        pause_s = POLL_FIRST_S
        while len(recorded_ranks(self._store, task.save)) < task.save.world_size:
            step = task.save.step
            if self._newest is not None and self._newest[0] > task.owner:
                raise StaleAttempt(f"step {step}: a newer attempt saves meanwhile")
            if self._ending.is_set() or self._clock() > began_s + self._wait_s:
                recorded = recorded_ranks(self._store, task.save)
                missing = sorted(set(range(task.save.world_size)) - recorded)
                raise StorageError(f"step {step}: the shares of ranks {missing} did not come")
            if self._is_overtaken(task):
                recorded = recorded_ranks(self._store, task.save)
                missing = sorted(set(range(task.save.world_size)) - recorded)
                _log.warning(
                    f"step {step}: the shares of ranks {missing} did not come, and a later step "
                    "is committed: this one is not waited for"
                )
                return False
            if self._clock() - checked_s >= CHECK_S:
                # By another node's checkpoint server too, or, by this one, for the attempt before.
                if not self.may_commit(step, task.owner):
                    return False
                checked_s = self._clock()
            self._ending.wait(pause_s)
            pause_s = min(2 * pause_s, POLL_LONGEST_S)
        return True

    def _is_overtaken(self, task: Committing) -> bool:
        """Whether a later save of the same attempt is committed, and not just so.

        The node of a rank may be lost and replaced within an attempt: what it had not yet put
        into the store never comes. A share that is merely late would be followed by the later one.
        """
        if self._committed is None:
            return False
        owner, step, at_s = self._committed
        is_later = owner == task.owner and step > task.save.step
        return is_later and self._clock() - at_s > OVERTAKEN_S

    def _write_to_disk(
        self, disk: CheckpointStore, written: WrittenShare, data: memoryview
    ) -> None:
        share = written.share
        try:
            with self._spared((*share.save_id.owner, share.step)):
                disk.store.put(disk.key(share.step, share.shard), data)
                put_record(disk, written)
            self._prune(disk, keep_saves=DISK_KEEPS_SAVES)
        except StorageError as exc:
            # The store has it all the same; a worse restart is no reason to end a good run.
            _log.error(f"step {share.step} is not on the node's disk: {exc}")
            with suppress(StorageError):
                self._prune(disk, keep_saves=1)  # a full disk would refuse every save from now on

    @contextmanager
    def _spared(self, save: tuple[int, int, int]) -> Iterator[None]:
        """Keeps a save that is being written from being pruned."""
        with self._disk_lock:
            self._onto_disk.append(save)
        try:
            yield
        finally:
            with self._disk_lock:
                self._onto_disk.remove(save)

    def _prune(self, disk: CheckpointStore, *, keep_saves: int) -> None:
        # A save that begins meanwhile waits: its files are not in the listing.
        with self._disk_lock:
            prune_disk(disk, keep_saves=keep_saves, writing=self._onto_disk)


def prune_disk(
    disk: CheckpointStore, *, keep_saves: int, writing: Collection[tuple[int, int, int]] = ()
) -> None:
    """Delete all but the newest saves of a node's disk, and older shards without a record.

    Args:
        disk: checkpoints on the node's disk.
        keep_saves: number of whole saves that stay.
        writing: placement, attempt and step of saves that are on their way; they stay, too.
    """
    saves: defaultdict[tuple[int, int, int], list[str]] = defaultdict(list)
    for info in disk.store.list(f"runs/{disk.run_id}/checkpoints/"):
        if match := _SHARE.search(info.key):
            step, placement, attempt = map(int, match.groups())
            # Not by step alone: after going back, an attempt saves lower steps.
            saves[placement, attempt, step].append(info.key)
    # A shard without its record, of a checkpoint server that was killed, is no save; the newest may
    # be being written.
    whole = {save for save, keys in saves.items() if any(key.endswith(".json") for key in keys)}
    protected = {*sorted(whole)[-keep_saves:], *sorted(saves)[-1:], *writing}
    for save in saves.keys() - protected:
        for key in saves[save]:  # records come before their shards
            disk.store.delete(key)


def shares_on_disk(disk: CheckpointStore) -> list[WrittenShare]:
    """The whole shares that a node's disk holds, by their records; not hashed."""
    shares: list[WrittenShare] = []
    for info in list(disk.store.list(f"runs/{disk.run_id}/checkpoints/")):
        if not info.key.endswith(".json"):
            continue
        with suppress(StorageError):
            written = parse_record(disk.store.get(info.key), url=info.key)
            share = written.share
            stat = disk.store.stat(disk.key(share.step, share.shard))
            if stat.size_bytes == written.record.size_bytes:
                shares.append(written)
    return shares


def is_recorded(checkpoints: CheckpointStore, save: SaveId, rank: int) -> bool:
    """Whether the store has a share."""
    try:
        read_record(checkpoints, save, rank)
    except (NotFound, Corrupt):
        return False
    return True
