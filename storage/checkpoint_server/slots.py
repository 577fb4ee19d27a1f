"""Host memory for checkpoints: two slots a rank, so that one whole share is always there.

A slot is EMPTY, COPYING while its worker writes, or READY. A READY slot is given away again only
when a newer one of the rank is READY, its share is published (or cannot be), and has no reader.
With copies at partner nodes a rank has three, and who asks for a slot says which saves stay
(storage/partner_copies.py); shares of other nodes' ranks lie in the same table.
The memory is anonymous (memfd): it lives as long as the checkpoint server, whatever happens to
workers, and is reused, because fresh pages cost six times the copy. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from perdure.storage.manifest import ShardRecord
from perdure.storage.share import SaveId, Share, WrittenShare

SLOTS_PER_RANK = 2


class SlotState(StrEnum):
    """What a slot holds."""

    EMPTY = "empty"
    COPYING = "copying"
    READY = "ready"


class NoMemory(Exception):  # noqa: N818 a state of affairs
    """The host has not enough memory for a slot; the text names both sizes."""


@dataclass(slots=True, eq=False)
class Slot:
    """One buffer of a rank.

    Attributes:
        number: names the slot within its checkpoint server.
        writer: connection that copies into it.
        record: size and hash of the share, None until they are wanted.
        settled: whether its share was published, or will never be.
        readers: how many connections read it.
    """

    rank: int
    number: int
    memory: mmap.mmap | None = None
    descriptor: int = -1
    size_bytes: int = 0
    memory_id: int = 0
    state: SlotState = SlotState.EMPTY
    share: Share | None = None
    record: ShardRecord | None = None
    writer: object | None = None
    settled: bool = True
    readers: int = 0

    def written(self) -> WrittenShare:
        """The share with its hash."""
        assert self.share is not None  # noqa: S101 a READY slot has a share
        if self.record is None:
            with self.view() as view:
                self.record = ShardRecord.of(view)
        return WrittenShare(share=self.share, record=self.record)

    def view(self) -> memoryview:
        """The bytes of the share."""
        assert self.memory is not None  # noqa: S101 a READY slot has memory
        assert self.share is not None  # noqa: S101 likewise
        return memoryview(self.memory)[: self.share.size_bytes]


@dataclass(slots=True)
class SlotTable:
    """The slots of all ranks of a node; safe for use from several threads.

    Attributes:
        available_bytes: returns how much memory the host can still give.
    """

    available_bytes: Callable[[], int]
    _slots: dict[int, list[Slot]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _next_number: int = 0
    _next_memory: int = 0

    def prepare(self, rank: int, size_bytes: int, *, num_slots: int = SLOTS_PER_RANK) -> None:
        """Give every slot of a rank its memory, so that the first saves find it warm.

        Raises:
            NoMemory: the host has not enough.
        """
        with self._changed:
            for slot in self._of(rank, num_slots):
                if slot.state is SlotState.EMPTY:
                    self._size(slot, size_bytes)

    def reserve(
        self,
        rank: int,
        size_bytes: int,
        *,
        writer: object,
        timeout_s: float,
        keep: Collection[SaveId] = (),
    ) -> Slot | None:
        """A slot to copy into, or None when none became free in time.

        Args:
            rank: whose share it is for.
            size_bytes: of the share.
            writer: who copies.
            timeout_s: to wait for a slot.
            keep: saves that stay whatever is newer. Where one of them is here, the newest share
                may be given away instead: a whole one is left all the same.

        Raises:
            NoMemory: the host has not enough.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (slot := self._free(rank, keep)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            self._size(slot, size_bytes)
            slot.state, slot.writer = SlotState.COPYING, writer
            slot.share = slot.record = None
            return slot

    def ready(self, number: int, share: Share, *, writer: object) -> Slot | None:
        """Take a copy as whole; None when the slot is not this writer's."""
        with self._changed:
            slot = self._by_number(number)
            if slot is None or slot.state is not SlotState.COPYING or slot.writer is not writer:
                return None
            slot.state, slot.share, slot.writer = SlotState.READY, share, None
            slot.settled = False
            self._changed.notify_all()
            return slot

    def abandon(self, writer: object) -> None:
        """Discard what a connection that is gone was copying."""
        with self._changed:
            for slot in self._all():
                if slot.writer is writer:
                    slot.state, slot.writer = SlotState.EMPTY, None
            self._changed.notify_all()

    def settle(self, slot: Slot) -> None:
        """Note that nothing more will be done for the share of a slot."""
        with self._changed:
            slot.settled = True
            self._changed.notify_all()

    def pin(self, save: SaveId, rank: int) -> Slot | None:
        """The slot that holds a share, kept as it is until `unpin`."""
        with self._changed:
            for slot in self._all():  # a last save is numbered among those that save
                share = slot.share
                if share is not None and (share.save_id, share.rank) == (save, rank):
                    slot.readers += 1
                    return slot
            return None

    def saves(self) -> list[tuple[SaveId, int]]:
        """What the whole shares are: save and rank."""
        with self._changed:
            return [(s.share.save_id, s.share.rank) for s in self._all() if s.share is not None]

    def unpin(self, slot: Slot) -> None:
        """Release a slot."""
        with self._changed:
            slot.readers -= 1
            self._changed.notify_all()

    def pin_all(self) -> list[Slot]:
        """Every slot that holds a whole share, kept as it is until `unpin`."""
        with self._changed:
            whole = [slot for slot in self._all() if slot.share is not None]
            for slot in whole:
                slot.readers += 1
            return whole

    def drop(self, ranks: Collection[int], *, before: SaveId) -> None:
        """Give back the memory of ranks that are not among these, if all they have is older.

        Args:
            ranks: whose shares may come.
            before: a save that is whole elsewhere.
        """
        limit = (*before.owner, before.step)
        with self._changed:
            for rank in self._slots.keys() - set(ranks):
                slots = self._slots[rank]
                if all(_is_done_with(slot, limit) for slot in slots):
                    for slot in slots:
                        _release(slot)
                    del self._slots[rank]

    def _free(self, rank: int, keep: Collection[SaveId]) -> Slot | None:
        slots = self._of(rank)
        empty = next((s for s in slots if s.state is SlotState.EMPTY), None)
        if empty is not None:
            return empty
        ready = [s for s in slots if s.state is SlotState.READY]
        kept = [s for s in ready if s.share is not None and s.share.save_id in keep]
        # Not by step alone: after going back, an attempt saves lower steps than the one before.
        stays = kept or [max(ready, key=_age_key)] if ready else []
        old = (s for s in ready if s not in stays and s.settled and not s.readers)
        return min(old, key=_age_key, default=None)

    def _of(self, rank: int, num_slots: int = SLOTS_PER_RANK) -> list[Slot]:
        slots = self._slots.setdefault(rank, [])
        while len(slots) < num_slots:
            slots.append(Slot(rank, self._next_number))
            self._next_number += 1
        return slots

    def _all(self) -> list[Slot]:
        return [slot for slots in self._slots.values() for slot in slots]

    def _by_number(self, number: int) -> Slot | None:
        return next((slot for slot in self._all() if slot.number == number), None)

    def _size(self, slot: Slot, size_bytes: int) -> None:
        """Give a slot memory of at least this size; what it has is kept when it is enough."""
        if slot.size_bytes >= size_bytes and slot.memory is not None:
            return
        available = self.available_bytes()
        if size_bytes - slot.size_bytes > available:
            raise NoMemory(
                f"rank {slot.rank}: a share of {size_bytes} bytes, {available} bytes are available"
            )
        if slot.memory is not None:
            # Readers and publishers are done with it: the slot was free.
            _release(slot)
        descriptor = os.memfd_create(f"perdure-rank{slot.rank}", os.MFD_CLOEXEC)
        try:
            # Pages now, and not one by one under the worker's copy.
            os.posix_fallocate(descriptor, 0, size_bytes)
            slot.memory = mmap.mmap(descriptor, size_bytes)
        except OSError as exc:
            os.close(descriptor)
            slot.size_bytes = 0
            raise NoMemory(f"rank {slot.rank}: {size_bytes} bytes: {exc.strerror}") from exc
        self._next_memory += 1
        slot.descriptor, slot.size_bytes = descriptor, size_bytes
        slot.memory_id = self._next_memory


def _release(slot: Slot) -> None:
    """Give the memory of a slot back."""
    if slot.memory is not None:
        slot.memory.close()
        os.close(slot.descriptor)
    slot.memory, slot.size_bytes = None, 0
    slot.state, slot.share, slot.record = SlotState.EMPTY, None, None


def _is_done_with(slot: Slot, limit: tuple[int, int, int]) -> bool:
    """Whether nothing is lost or disturbed when a slot of another node's rank goes."""
    if slot.state is SlotState.COPYING or slot.readers or not slot.settled:
        return False
    return slot.share is None or _age_key(slot) < limit


def _age_key(slot: Slot) -> tuple[int, int, int]:
    assert slot.share is not None  # noqa: S101 called for READY slots alone
    return (*slot.share.save_id.owner, slot.share.step)


# Of what is available when a slot is made: the rest is the training's and the page cache's.
MEMORY_SHARE = 0.8
UNLIMITED = 1 << 62
_MOUNTED = Path("sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """What the files of a memory controller are called, and its page cache within `memory.stat`."""

    limit: str
    used: str
    cache: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available_bytes() -> int:
    """What slots may take now."""
    return int(MEMORY_SHARE * min(psutil.virtual_memory().available, cgroup_left_bytes(Path("/"))))


def cgroup_left_bytes(root: Path) -> int:
    """What the tightest limit of this process's control groups leaves.

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return UNLIMITED
    lefts = [
        _left_bytes(group, names) for line in lines for group, names in _memory_groups(root, line)
    ]
    return min(lefts, default=UNLIMITED)


def _memory_groups(root: Path, line: str) -> Iterator[tuple[Path, _Names]]:
    """A group that limits memory, and all above it; of one line in /proc/self/cgroup."""
    _number, controllers, path = line.split(":", maxsplit=2)
    if controllers and "memory" not in controllers.split(","):
        return
    top, names = (root / _MOUNTED / "memory", _V1) if controllers else (root / _MOUNTED, _V2)
    # A container may get its path as the host has it, and have its own group at the top.
    own = Path(path.lstrip("/"))
    for part in (own, *own.parents):
        if ".." not in part.parts:
            yield top / part, names


def _left_bytes(group: Path, names: _Names) -> int:
    """What one group leaves; its page cache can be given up and does not count."""
    try:
        limit = (group / names.limit).read_text(encoding="ascii").strip()
        if limit == "max":
            return UNLIMITED
        used = int((group / names.used).read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").split()
        cache = int(stat[stat.index(names.cache) + 1])
    except (OSError, ValueError):
        return UNLIMITED  # no such limit here
    return max(0, int(limit) - used + cache)
