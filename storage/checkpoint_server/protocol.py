"""The messages between a worker and its node's checkpoint server.

Messages are JSON behind an 8-byte length, over a Unix socket in the abstract namespace; a reply
may carry one file descriptor of memory. Both ends check that the other is of the same user.
Checkpoint servers frame what they say to each other in the same way (peers.py). Sizes are bytes,
times seconds.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from perdure.storage.checkpoint import Tier
from perdure.storage.manifest import ManifestPart
from perdure.storage.partner_copies import CopyState
from perdure.storage.share import SaveId, Share, WrittenShare

_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = 1 << 30


class Message(ManifestPart):
    """Base of the messages of either side."""


class PeerAddress(Message):
    """Address at which a node's checkpoint server takes copies from other nodes, and returns them.

    Attributes:
        host: name or IP address that other nodes connect to.
        port: TCP port of the listener.
        token: first bytes of every connection; made by the checkpoint server when it starts.
    """

    host: str
    port: int
    token: str = Field(repr=False)


class Prepare(Message):
    """Have memory of this size ready for a rank; answered when it is."""

    op: Literal["prepare"] = "prepare"
    rank: int
    size_bytes: int
    num_slots: int = 2


class Reserve(Message):
    """Request a slot to copy into; the reply carries its memory.

    The slot is the connection's until `Ready`; what a broken connection leaves is discarded.

    Attributes:
        owner: (placement, attempt) whose failures the reply may carry; None: of any.
        keep: saves whose memory is not for this one.
        copied: save whose copies are whole on all partners.
    """

    op: Literal["reserve"] = "reserve"
    rank: int
    size_bytes: int
    timeout_s: float
    owner: tuple[int, int] | None = None
    keep: tuple[SaveId, ...] = ()
    copied: SaveId | None = None


class Ready(Message):
    """The slot holds a whole share: keep it, and publish it.

    Attributes:
        announce: file to append a line to once the checkpoint is committed.
        keep: saves that partners keep beside a copy of this one; None: it is not copied.
    """

    op: Literal["ready"] = "ready"
    slot: int
    share: Share
    announce: str | None = None
    keep: tuple[SaveId, ...] | None = None


class ListShares(Message):
    """Request the list of shares that are held."""

    op: Literal["list"] = "list"


class Open(Message):
    """Request the memory of a share; it stays as it is until the connection is closed."""

    op: Literal["open"] = "open"
    save: SaveId
    rank: int


class Republish(Message):
    """Have every share of a save that is held put into the store.

    Attributes:
        owner: (placement, attempt) that publishes.
        commit: whether this checkpoint server writes the manifest.
        ranks: ranks of the shares; None: all held shares. Where nodes hold copies of each other's,
            one node publishes each.
    """

    op: Literal["republish"] = "republish"
    save: SaveId
    owner: tuple[int, int]
    commit: bool
    announce: str | None = None
    ranks: tuple[int, ...] | None = None


class Settle(Message):
    """Wait until everything that was handed over is in the store, or has failed.

    Attributes:
        owner: (placement, attempt) whose failures the reply may carry; None: of any.
    """

    op: Literal["settle"] = "settle"
    timeout_s: float
    owner: tuple[int, int] | None = None


class Greet(Message):
    """Request the address for other nodes' checkpoint servers."""

    op: Literal["greet"] = "greet"


class SetPartners(Message):
    """Copy this node's shares there from now on.

    Attributes:
        partners: checkpoint servers that take copies of this node's shares.
        ranks: ranks of the shares that this node holds, its own and those of other nodes.
    """

    op: Literal["set_partners"] = "set_partners"
    partners: tuple[PeerAddress, ...]
    ranks: tuple[int, ...]


class CopyAgain(Message):
    """Copy a share that is held to the partners that lack it: they are others than before."""

    op: Literal["copy_again"] = "copy_again"
    save: SaveId
    rank: int


class CopyStateQuery(Message):
    """Request how far the copies of a share are."""

    op: Literal["copy_state"] = "copy_state"
    save: SaveId
    rank: int


class Bring(Message):
    """Have a share in this node's memory that another node's checkpoint server holds."""

    op: Literal["bring"] = "bring"
    save: SaveId
    rank: int
    source: PeerAddress


Request = Annotated[
    Prepare
    | Reserve
    | Ready
    | ListShares
    | Open
    | Republish
    | Settle
    | Greet
    | SetPartners
    | CopyAgain
    | CopyStateQuery
    | Bring,
    Field(discriminator="op"),
]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)


class HeldShare(Message):
    """A share that a checkpoint server holds."""

    written: WrittenShare
    tier: Tier


class Failure(Message):
    """Failure of a save that was handed over; see `perdure.storage.errors.describe`."""

    kind: str
    text: str


class Reply(Message):
    """The answer to any request.

    Attributes:
        refused: why not; everything else is then empty.
        slot: number of the slot whose memory is attached.
        memory_id: changes when the slot has other memory than before.
        size_bytes: size of that memory.
        busy: no slot became free, or not everything has settled, within the time.
        failure: failure of an earlier save; reported once.
        address: address for other checkpoint servers; None when this one takes no copies.
        copies: progress of the copies.
    """

    refused: str | None = None
    slot: int | None = None
    memory_id: int | None = None
    size_bytes: int = 0
    busy: bool = False
    shares: tuple[HeldShare, ...] = ()
    failure: Failure | None = None
    address: PeerAddress | None = None
    copies: CopyState | None = None


def send(connection: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """Send one message, with a file descriptor or without."""
    data = message.model_dump_json().encode()
    head = _LENGTH.pack(len(data))
    if descriptor is None:
        connection.sendall(head)
    else:
        socket.send_fds(connection, [head], [descriptor])
    connection.sendall(data)


def receive(
    connection: socket.socket,
    *,
    limit_bytes: int = MAX_MESSAGE_BYTES,
    timeout_s: float | None = None,
) -> tuple[bytes, int | None]:
    """The JSON of one message and the descriptor it carries; b"" when the other end closed.

    Args:
        connection: socket of the other end.
        limit_bytes: longest message that is accepted.
        timeout_s: limit for the whole message, also set on the socket; None: the socket's own,
            for each piece that comes.

    Raises:
        ConnectionError: the message is longer than the limit, or was cut short.
        TimeoutError: it did not come in time.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    _leave_time(connection, deadline_s)
    head, descriptors, _flags, _address = socket.recv_fds(connection, _LENGTH.size, 1)
    if not head:
        return b"", None
    try:
        data = _receive_message(connection, head, limit_bytes, deadline_s)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return data, descriptors[0] if descriptors else None


def _receive_message(
    connection: socket.socket, head: bytes, limit_bytes: int, deadline_s: float | None
) -> bytes:
    """The message whose length begins with `head`."""
    head += _exactly(connection, _LENGTH.size - len(head), deadline_s)
    (length,) = _LENGTH.unpack(head)
    if length > limit_bytes:
        raise ConnectionError(f"message of {length} bytes")
    return _exactly(connection, length, deadline_s)


def _exactly(connection: socket.socket, size_bytes: int, deadline_s: float | None) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        _leave_time(connection, deadline_s)
        piece = connection.recv(min(size_bytes - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other end closed within a message")
        data += piece
    return bytes(data)


def _leave_time(connection: socket.socket, deadline_s: float | None) -> None:
    """Have the next call of a socket end at the deadline."""
    if deadline_s is None:
        return
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the message took too long")
    connection.settimeout(left_s)


def check_peer(connection: socket.socket) -> None:
    """Refuse an end that belongs to another user.

    Raises:
        ConnectionError: another user owns the process.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise ConnectionError(f"the other end belongs to user {uid}")
