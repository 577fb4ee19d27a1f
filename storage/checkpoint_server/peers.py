"""The conversation between checkpoint servers of two nodes: a share is copied, or brought back.

One TCP connection for each copy. Its first message has the token of the server that is called, and
is short; then comes one request. `Offer`: the caller's share, which the server takes into its own
memory. `Fetch`: a share that the server holds, which the caller takes. Who takes says when it has
the memory for it; then the bytes follow. A share counts as held only when their hash is that of its
record: what a broken connection leaves is discarded. Nothing is pickled. Sizes are bytes, times
seconds.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from perdure.storage.checkpoint_server.protocol import Message, PeerAddress, receive, send
from perdure.storage.checkpoint_server.slots import NoMemory, Slot, SlotTable
from perdure.storage.cut_off import end_when_cut_off
from perdure.storage.errors import NotCopied
from perdure.storage.manifest import ShardRecord
from perdure.storage.share import SaveId, WrittenShare
from perdure.storage.unauthenticated import UnauthenticatedConnections

_log = logging.getLogger("perdure.storage")

HELLO_BYTES = 4096
MESSAGE_BYTES = 256 << 20  # of a share's record, which names every tensor
CONNECT_TIMEOUT_S = 10.0  # and of the whole first message
# A peer that is there hashes gigabytes before it answers, or waits for its pace.
SILENT_S = 120.0
CUT_OFF_S = 30  # a host that acknowledges nothing for so long is gone
SLOT_WAIT_S = 10.0
PIECE_BYTES = 4 << 20
SMALLEST_PIECE_BYTES = 4096
ACCEPT_PAUSE_S = 1.0


class Hello(Message):
    """First message of a connection: the token of the server that is called."""

    token: str = Field(repr=False)


class Offer(Message):
    """Take a copy of a share; its bytes follow when the reply says so.

    Attributes:
        keep: saves whose copies stay beside this one.
    """

    op: Literal["offer"] = "offer"
    written: WrittenShare
    keep: tuple[SaveId, ...] = ()


class Fetch(Message):
    """Give a share; its bytes follow the reply and the `Go` after it."""

    op: Literal["fetch"] = "fetch"
    save: SaveId
    rank: int


class Go(Message):
    """There is room for the share that was fetched: send its bytes."""

    op: Literal["go"] = "go"


class PeerReply(Message):
    """The answer.

    Attributes:
        refused: why not; everything else is then empty.
        is_held: the share is here as a whole.
        written: share that a `Fetch` asked for.
    """

    refused: str | None = None
    is_held: bool = False
    written: WrittenShare | None = None


PEER_REQUEST: TypeAdapter[Offer | Fetch] = TypeAdapter(
    Annotated[Offer | Fetch, Field(discriminator="op")]
)


class Pace:
    """Spreads bytes over time.

    Args:
        bytes_per_s: limit; None: none.
        ending: set when nothing is waited for any more.
    """

    def __init__(self, bytes_per_s: float | None, ending: threading.Event) -> None:
        self._rate = bytes_per_s
        self._ending = ending
        self._due_s = 0.0

    @property
    def piece_bytes(self) -> int:
        """Bytes sent in a tenth of a second; larger pieces would come in bursts."""
        if self._rate is None:
            return PIECE_BYTES
        return min(PIECE_BYTES, max(SMALLEST_PIECE_BYTES, int(self._rate / 10)))

    def wait(self, size_bytes: int) -> None:
        """Wait for the turn of so many bytes."""
        if self._rate is None:
            return
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s) + size_bytes / self._rate
        self._ending.wait(self._due_s - now_s)


def _keep(connection: socket.socket) -> None:
    """Prepare a connection of a copy: the next copies wait for this one."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end_when_cut_off(connection, silent_s=CUT_OFF_S)


@contextmanager
def _called(address: PeerAddress) -> Iterator[socket.socket]:
    """A connection to another server, with the token sent."""
    called = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
    with called:
        called.settimeout(SILENT_S)
        _keep(called)
        send(called, Hello(token=address.token))
        yield called


def _reply_of(connection: socket.socket) -> PeerReply:
    data, _ = receive(connection, limit_bytes=MESSAGE_BYTES)
    if not data:
        raise ConnectionError("it closed the connection")
    reply = PeerReply.model_validate_json(data)
    if reply.refused is not None:
        raise NotCopied(reply.refused)
    return reply


def give_copy(
    address: PeerAddress,
    written: WrittenShare,
    data: memoryview,
    *,
    keep: tuple[SaveId, ...],
    pace: Pace,
) -> None:
    """Copy a share to another node; it is held there when this returns.

    Raises:
        NotCopied: the partner does not hold the copy.
    """
    try:
        with _called(address) as connection:
            send(connection, Offer(written=written, keep=keep))
            if _reply_of(connection).is_held:
                return
            _send_bytes(connection, data, pace)
            if not _reply_of(connection).is_held:
                raise NotCopied("it is not held there")
    except (OSError, ValueError) as exc:
        raise NotCopied(f"{address.host}:{address.port}: {exc}") from exc


def _send_bytes(connection: socket.socket, data: memoryview, pace: Pace) -> None:
    # In pieces: the socket's timeout is of one `sendall`, however much that sends.
    for start in range(0, len(data), pace.piece_bytes):
        piece = data[start : start + pace.piece_bytes]
        pace.wait(len(piece))
        connection.sendall(piece)


def bring(slots: SlotTable, address: PeerAddress, save: SaveId, rank: int) -> None:
    """Take a share that another node holds into this one's memory.

    Raises:
        NotCopied: the source gave no whole share.
    """
    try:
        with _called(address) as connection:
            send(connection, Fetch(save=save, rank=rank))
            written = _reply_of(connection).written
            if written is None or (written.share.save_id, written.share.rank) != (save, rank):
                raise NotCopied("it answered with another share")
            _take(slots, connection, written, keep=(), go=Go())
    except (OSError, ValueError) as exc:
        raise NotCopied(f"{address.host}:{address.port}: {exc}") from exc


def _take(
    slots: SlotTable,
    connection: socket.socket,
    written: WrittenShare,
    *,
    keep: tuple[SaveId, ...],
    go: Message,
) -> None:
    """Receive the bytes of a share into a slot; `go` has the other end send them.

    Raises:
        NotCopied: there is no room, or they are not those of its record.
        OSError: the connection broke.
    """
    # First: gigabytes of fresh pages take longer than bytes that are sent may wait (`CUT_OFF_S`).
    slot = _slot_for(slots, written, keep, writer=connection)
    try:
        send(connection, go)
        _receive_into(slots, slot, connection, written)
    finally:
        slots.abandon(connection)  # what is READY is nobody's any more


def _slot_for(
    slots: SlotTable, written: WrittenShare, keep: tuple[SaveId, ...], *, writer: object
) -> Slot:
    share = written.share
    if share.size_bytes != written.record.size_bytes:
        raise NotCopied(f"{share.shard}: its record is of another size")
    try:
        slot = slots.reserve(
            share.rank, share.size_bytes, writer=writer, timeout_s=SLOT_WAIT_S, keep=keep
        )
    except NoMemory as exc:
        raise NotCopied(str(exc)) from exc
    if slot is None:
        raise NotCopied(f"no slot for rank {share.rank} within {SLOT_WAIT_S:g} s")
    return slot


def _receive_into(
    slots: SlotTable, slot: Slot, connection: socket.socket, written: WrittenShare
) -> None:
    share = written.share
    assert slot.memory is not None  # noqa: S101 just reserved
    with memoryview(slot.memory)[: share.size_bytes] as memory:
        at = 0
        while at < len(memory):
            received = connection.recv_into(memory[at : at + PIECE_BYTES])
            if not received:
                raise ConnectionError(f"cut short at {at} of {len(memory)} bytes")
            at += received
        record = ShardRecord.of(memory)
    if record != written.record:
        raise NotCopied(f"{share.shard}: damaged on its way")
    if slots.ready(slot.number, share, writer=connection) is None:
        raise NotCopied(f"{share.shard}: its slot was taken away")
    # Publishing it is the business of the node that it is of, as long as that lives.
    slot.record = record
    slots.settle(slot)


class PeerServer:
    """Takes and gives shares of other nodes.

    Args:
        host: name or address to bind; of several addresses of a name the first one.
        slots: memory of this checkpoint server.
        run_id: run of this node; shares of other runs are refused.
        changed: called when a share was taken.
    """

    def __init__(
        self, host: str, slots: SlotTable, *, run_id: str, changed: Callable[[], None]
    ) -> None:
        self._slots = slots
        self._run_id = run_id
        self._changed = changed
        family, *_, bound = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.create_server(bound[:2], family=family, backlog=128)
        self._closing = threading.Event()
        self._unauthenticated = UnauthenticatedConnections()
        self.address = PeerAddress(
            host=host, port=self._listener.getsockname()[1], token=secrets.token_hex(32)
        )
        threading.Thread(target=self._serve, daemon=True, name="peers").start()

    def close(self) -> None:
        """Take no more."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._converse, args=(accepted,), daemon=True).start()
            except (OSError, RuntimeError) as exc:
                if not self._closing.is_set():
                    _log.error(f"no copy taken: {exc}")
                    self._closing.wait(ACCEPT_PAUSE_S)

    def _converse(self, connection: socket.socket) -> None:
        with connection:
            try:
                if not self._is_known(connection):
                    return
                connection.settimeout(SILENT_S)
                data, _ = receive(connection, limit_bytes=MESSAGE_BYTES)
                self._answer(connection, PEER_REQUEST.validate_json(data))
            except NotCopied as exc:
                with suppress(OSError):
                    send(connection, PeerReply(refused=str(exc)))
            except (OSError, ValueError) as exc:
                # The other node is gone, or it is none of the run's.
                _log.info(f"a copy was broken off: {exc}")

    def _is_known(self, connection: socket.socket) -> bool:
        """Whether the first message has this server's token."""
        with self._unauthenticated.holding(connection):
            _keep(connection)
            hello, _ = receive(connection, limit_bytes=HELLO_BYTES, timeout_s=CONNECT_TIMEOUT_S)
        token = Hello.model_validate_json(hello).token
        return hmac.compare_digest(token.encode(), self.address.token.encode())

    def _answer(self, connection: socket.socket, request: Offer | Fetch) -> None:
        if isinstance(request, Fetch):
            self._give(connection, request)
            return
        share = request.written.share
        if share.run_id != self._run_id:
            raise NotCopied(f"{share.run_id} is another run")
        if not self._holds(request.written):
            _take(self._slots, connection, request.written, keep=request.keep, go=PeerReply())
            self._changed()
        send(connection, PeerReply(is_held=True))

    def _holds(self, written: WrittenShare) -> bool:
        slot = self._slots.pin(written.share.save_id, written.share.rank)
        if slot is None:
            return False
        try:
            return slot.written() == written
        finally:
            self._slots.unpin(slot)

    def _give(self, connection: socket.socket, request: Fetch) -> None:
        slot = self._slots.pin(request.save, request.rank)
        if slot is None:
            raise NotCopied(f"step {request.save.step} rank {request.rank} is not here")
        try:
            send(connection, PeerReply(written=slot.written()))
            data, _ = receive(connection, limit_bytes=HELLO_BYTES)
            Go.model_validate_json(data)
            with slot.view() as view:
                _send_bytes(connection, view, Pace(None, self._closing))
        finally:
            self._slots.unpin(slot)
