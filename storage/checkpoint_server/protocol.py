"""The messages between a worker and its node's checkpoint server.

Messages are JSON behind an 8-byte length, over a Unix socket in the abstract namespace; a reply
may carry one file descriptor of memory. Both ends check that the other is of the same user.
Sizes are bytes, times seconds.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from storage.checkpoint import Tier
from storage.manifest import ManifestPart
from storage.share import SaveId, Share, WrittenShare

_LENGTH = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = 1 << 30


class Message(ManifestPart):
    """One message of either side."""


class Prepare(Message):
    """Have memory of this size ready for a rank; answered when it is."""

    op: Literal["prepare"] = "prepare"
    rank: int
    size_bytes: int


class Reserve(Message):
    """Request a slot to copy into; the reply carries its memory.

    The slot is the connection's until `Ready`; what a broken connection leaves is discarded.

    Attributes:
        owner: (placement, attempt) whose failures the reply may carry; None: of any.
    """

    op: Literal["reserve"] = "reserve"
    rank: int
    size_bytes: int
    timeout_s: float
    owner: tuple[int, int] | None = None


class Ready(Message):
    """The slot holds a whole share: keep it, and publish it.

    Attributes:
        announce: file to append a line to once the checkpoint is committed.
    """

    op: Literal["ready"] = "ready"
    slot: int
    share: Share
    announce: str | None = None


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
    """

    op: Literal["republish"] = "republish"
    save: SaveId
    owner: tuple[int, int]
    commit: bool
    announce: str | None = None


class Settle(Message):
    """Wait until everything that was handed over is in the store, or has failed.

    Attributes:
        owner: (placement, attempt) whose failures the reply may carry; None: of any.
    """

    op: Literal["settle"] = "settle"
    timeout_s: float
    owner: tuple[int, int] | None = None


Request = Annotated[
    Prepare | Reserve | Ready | ListShares | Open | Republish | Settle, Field(discriminator="op")
]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)


class HeldShare(Message):
    """A share that a checkpoint server holds."""

    written: WrittenShare
    tier: Tier


class Failure(Message):
    """What went wrong with a save that was handed over; see `storage.errors.describe`."""

    kind: str
    text: str


class Reply(Message):
    """The answer to any request.

    Attributes:
        refused: why not; everything else is then empty.
        slot: number of the slot whose memory is attached.
        memory_id: changes when the slot has other memory than before.
        size_bytes: of that memory.
        busy: no slot became free, or not everything has settled, within the time.
        failure: of a save that was handed over before; reported once.
    """

    refused: str | None = None
    slot: int | None = None
    memory_id: int | None = None
    size_bytes: int = 0
    busy: bool = False
    shares: tuple[HeldShare, ...] = ()
    failure: Failure | None = None


def send(connection: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """Send one message, with a file descriptor or without."""
    data = message.model_dump_json().encode()
    head = _LENGTH.pack(len(data))
    if descriptor is None:
        connection.sendall(head)
    else:
        socket.send_fds(connection, [head], [descriptor])
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """The JSON of one message and the descriptor it carries; b"" when the other end closed."""
    head, descriptors, _flags, _address = socket.recv_fds(connection, _LENGTH.size, 1)
    if not head:
        return b"", None
    try:
        data = _after(connection, head)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return data, descriptors[0] if descriptors else None


def _after(connection: socket.socket, head: bytes) -> bytes:
    """The message whose length begins with `head`."""
    head += _exactly(connection, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"message of {length} bytes")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        piece = connection.recv(min(size_bytes - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the other end closed within a message")
        data += piece
    return bytes(data)


def check_peer(connection: socket.socket) -> None:
    """Refuse an end that belongs to another user.

    Raises:
        ConnectionError: it does.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise ConnectionError(f"the other end belongs to user {uid}")
