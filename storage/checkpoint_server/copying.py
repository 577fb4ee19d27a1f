"""Copying a node's shares to its partners, one after the other, in the background.

The limit of the rate is that of the whole node: a single thread sends. Times are seconds, sizes
bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from perdure.storage.checkpoint_server.peers import Pace, give_copy
from perdure.storage.checkpoint_server.protocol import PeerAddress
from perdure.storage.checkpoint_server.slots import Slot, SlotTable
from perdure.storage.errors import NotCopied
from perdure.storage.partner_copies import CopyState
from perdure.storage.share import SaveId

_log = logging.getLogger("perdure.storage")


class Copier:
    """Sends shares to the partners of this node.

    Args:
        slots: memory that holds the shares.
        bytes_per_s: limit of this node; None: none.
    """

    def __init__(self, slots: SlotTable, bytes_per_s: float | None) -> None:
        self._slots = slots
        self._ending = threading.Event()
        self._pace = Pace(bytes_per_s, self._ending)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._lock = threading.Lock()
        # None until the ranks have met, and in a server that has just been started again.
        self._partners: Sequence[PeerAddress] | None = None
        # By rank, the share whose copies were begun last.
        self._newest: dict[int, tuple[SaveId, CopyState]] = {}

    def set_partners(self, partners: Sequence[PeerAddress]) -> None:
        """Send shares to these partners from now on."""
        with self._lock:
            self._partners = tuple(partners)

    def expect(self, save: SaveId, rank: int) -> None:
        """A share is to be copied, and still being hashed."""
        self._note(save, rank, CopyState.COPYING)

    def fail(self, save: SaveId, rank: int) -> None:
        """A share cannot be copied."""
        self._note(save, rank, CopyState.FAILED)

    def begin(self, save: SaveId, rank: int, *, keep: tuple[SaveId, ...]) -> None:
        """Copy a share that a slot holds. Never raises: no save fails for its copy.

        Args:
            save: save that the share belongs to.
            rank: rank that the share belongs to.
            keep: saves that partners keep beside it.
        """
        self.expect(save, rank)
        # Pinned from now on: the slot must be as it is when its turn comes.
        slot = self._slots.pin(save, rank)
        if slot is None:
            self.fail(save, rank)
            return

        def copy() -> None:
            state = CopyState.FAILED
            try:
                self._send(slot, keep)
                state = CopyState.COPIED
            except Exception as exc:  # noqa: BLE001 the next save is copied all the same
                if not self._ending.is_set():
                    _log.error(f"step {save.step} rank {rank} is not copied: {exc}")
            finally:
                self._slots.unpin(slot)
                self._note(save, rank, state)

        try:
            self._sender.submit(copy)
        except RuntimeError as exc:  # closed meanwhile, or no thread can be started
            if not self._ending.is_set():
                _log.error(f"step {save.step} rank {rank} is not copied: {exc}")
            self._slots.unpin(slot)
            self.fail(save, rank)

    def _send(self, slot: Slot, keep: tuple[SaveId, ...]) -> None:
        with self._lock:
            partners = self._partners
        if partners is None:
            raise NotCopied("no partners are known")
        written = slot.written()
        with slot.view() as view:
            for partner in partners:
                give_copy(partner, written, view, keep=keep, pace=self._pace)

    def state(self, save: SaveId, rank: int) -> CopyState:
        """Progress of the copies of a share; only that of the newest share is known."""
        with self._lock:
            newest = self._newest.get(rank)
        return newest[1] if newest is not None and newest[0] == save else CopyState.FAILED

    def close(self) -> None:
        """Send no more; what is on its way is broken off when the process ends."""
        self._ending.set()
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _note(self, save: SaveId, rank: int, state: CopyState) -> None:
        with self._lock:
            newest = self._newest.get(rank)
            if state is CopyState.COPYING or newest is None or newest[0] == save:
                self._newest[rank] = (save, state)
