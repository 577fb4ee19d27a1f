"""A worker's side of the checkpoint server: slots to copy into, shares to read.

One connection per purpose: what a connection was copying is discarded with it, what it reads is
kept for as long as it is open. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Self

from pydantic import ValidationError

from perdure.storage.checkpoint_server.protocol import (
    Bring,
    CopyAgain,
    CopyStateQuery,
    Greet,
    HeldShare,
    ListShares,
    Message,
    Open,
    PeerAddress,
    Prepare,
    Ready,
    Reply,
    Republish,
    Reserve,
    SetPartners,
    Settle,
    check_peer,
    receive,
    send,
)
from perdure.storage.errors import StorageError, TimedOut, error_of
from perdure.storage.partner_copies import CopyState
from perdure.storage.share import SaveId, Share

START_TIMEOUT_S = 30.0
TURN_S = 0.5  # of waiting, after which the caller may show that it is alive
# Pages into the page table at once, not one fault each under the copy; only Linux has it.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)


@dataclass(frozen=True, slots=True)
class ReservedSlot:
    """A slot of the checkpoint server to copy into."""

    number: int
    memory: mmap.mmap


@dataclass(slots=True)
class CheckpointClient:
    """A connection to the checkpoint server of this node.

    Attributes:
        name: name of the checkpoint server's socket.
        owner: (placement, attempt) that saves, and whose failures are raised; None: any.

    Raises (every call):
        TimedOut: the checkpoint server is gone.
        StorageError: the checkpoint server refused.
    """

    name: str
    owner: tuple[int, int] | None = None
    _socket: socket.socket | None = None
    _mapped: dict[int, tuple[int, mmap.mmap]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release everything that was reserved or opened."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def prepare(self, rank: int, size_bytes: int, *, num_slots: int = 2) -> str | None:
        """Have memory ready for the saves of a rank. Returns why there is none, else None."""
        request = Prepare(rank=rank, size_bytes=size_bytes, num_slots=num_slots)
        return self._ask(request)[0].refused

    def reserve(
        self,
        rank: int,
        size_bytes: int,
        *,
        keep: tuple[SaveId, ...] = (),
        copied: SaveId | None = None,
    ) -> ReservedSlot | None:
        """A slot, or None when none became free within a moment.

        Args:
            rank: rank that the share belongs to.
            size_bytes: size of the share's file.
            keep: saves whose memory is not for this one.
            copied: save whose copies are whole on all partners.

        Raises:
            StorageError: an earlier save of this node failed for good; raised once.
        """
        request = Reserve(
            rank=rank,
            size_bytes=size_bytes,
            timeout_s=TURN_S,
            owner=self.owner,
            keep=keep,
            copied=copied,
        )
        reply, descriptor = self._asked(request)
        if reply.busy:
            return None
        assert reply.slot is not None  # noqa: S101 not refused, not busy
        assert descriptor is not None  # noqa: S101 not refused, not busy
        mapped = self._mapped.get(reply.slot)
        if mapped is not None and mapped[0] == reply.memory_id:
            os.close(descriptor)
            return ReservedSlot(reply.slot, mapped[1])
        memory = _map(descriptor, reply.size_bytes, flags=_POPULATE)
        self._mapped[reply.slot] = (reply.memory_id or 0, memory)
        return ReservedSlot(reply.slot, memory)

    def ready(
        self,
        slot: ReservedSlot,
        share: Share,
        *,
        announce: str | None,
        keep: tuple[SaveId, ...] | None = None,
    ) -> None:
        """Hand a copied share over.

        Args:
            slot: slot with the copied bytes.
            share: description of the copied bytes.
            announce: file that gets a line once the checkpoint is committed.
            keep: saves that partners keep beside a copy of this one; None: it is not copied.
        """
        self._asked(Ready(slot=slot.number, share=share, announce=announce, keep=keep))

    def address(self) -> PeerAddress | None:
        """Address for other nodes' checkpoint servers; None when this one takes no copies."""
        return self._asked(Greet())[0].address

    def set_partners(self, partners: tuple[PeerAddress, ...], ranks: tuple[int, ...]) -> None:
        """Have this node's shares copied there from now on; it holds those of `ranks` itself."""
        self._asked(SetPartners(partners=partners, ranks=ranks))

    def copy_again(self, save: SaveId, rank: int) -> None:
        """Have a share that is held copied to the partners that lack it."""
        self._asked(CopyAgain(save=save, rank=rank))

    def copy_state(self, save: SaveId, rank: int) -> CopyState:
        """Progress of the copies of a share."""
        return self._asked(CopyStateQuery(save=save, rank=rank))[0].copies or CopyState.FAILED

    def bring(self, save: SaveId, rank: int, source: PeerAddress) -> None:
        """Have a share that another node's checkpoint server holds in this node's memory, too."""
        self._asked(Bring(save=save, rank=rank, source=source))

    def shares(self) -> tuple[HeldShare, ...]:
        """Every share of this node, from memory and disk."""
        return self._asked(ListShares())[0].shares

    def open(self, save: SaveId, rank: int) -> mmap.mmap:
        """The bytes of a share in memory, until this client is closed."""
        reply, descriptor = self._asked(Open(save=save, rank=rank))
        assert descriptor is not None  # noqa: S101 not refused
        # Page by page as it is read, by several threads.
        return _map(descriptor, reply.size_bytes, flags=0)

    def republish(
        self,
        save: SaveId,
        *,
        owner: tuple[int, int],
        commit: bool,
        announce: str | None,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        """Have a save that was restored from the nodes put into the store.

        Args:
            save: identity of the restored save.
            owner: (placement, attempt) that publishes.
            commit: whether this node's checkpoint server writes the manifest.
            announce: file that gets a line once the checkpoint is committed.
            ranks: ranks that this node publishes the shares of; None: all that it holds.
        """
        self._asked(
            Republish(save=save, owner=owner, commit=commit, announce=announce, ranks=ranks)
        )

    def is_busy(self) -> bool:
        """Whether something handed over is still on its way to the store, after a moment's wait.

        Raises:
            StorageError: some of it failed; raised once.
        """
        return self._asked(Settle(timeout_s=TURN_S, owner=self.owner))[0].busy

    def _asked(self, request: Message) -> tuple[Reply, int | None]:
        """The reply; a refusal, or what failed meanwhile, is raised."""
        reply, descriptor = self._ask(request)
        if reply.failure is not None or reply.refused is not None:
            if descriptor is not None:
                os.close(descriptor)
            if reply.failure is not None:
                raise error_of(reply.failure.kind, reply.failure.text)
            raise StorageError(str(reply.refused))
        return reply, descriptor

    def _ask(self, request: Message) -> tuple[Reply, int | None]:
        descriptor = None
        try:
            if self._socket is None:
                self._socket = self._connected()
            send(self._socket, request)
            data, descriptor = receive(self._socket)
            if not data:
                raise ConnectionError("it ended")
            return Reply.model_validate_json(data), descriptor
        except (OSError, ValidationError) as exc:
            if descriptor is not None:
                os.close(descriptor)
            self.close()
            raise TimedOut(f"the checkpoint server of this node does not answer: {exc}") from exc

    def _connected(self) -> socket.socket:
        """A connection; a checkpoint server that has just been started takes a moment to listen."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(f"\0{self.name}")
                check_peer(connection)
            except OSError:
                connection.close()
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
            else:
                return connection


def _map(descriptor: int, size_bytes: int, *, flags: int) -> mmap.mmap:
    # Readers too: torch wants memory that could be written.
    try:
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | flags)
    finally:
        os.close(descriptor)
