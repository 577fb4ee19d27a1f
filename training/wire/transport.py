"""JSON lines over TCP between the processes of a run: framing, tokens, deadlines.

One message per line, of a bounded size. The first line of a connection carries a token; what a
peer may send before it, and for how long, is in `perdure.storage.unauthenticated`. There are two
kinds of connections: for a request with its reply (supervisor to agent, `call` and
`RequestServer`), and for a whole attempt, with both sides sending (workers and agents to the
coordinator, `Connection`). The coordinator accepts thousands of the second, so its server is
asyncio's and uses the framing alone. Times are seconds.

Calls to thousands of agents at once, from one thread of its own.

A thread for each call would do for hundreds of nodes; a look every 0.2 s at thousands of them
would be spent on starting threads. Times are seconds.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import resource
import socket
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase

from pydantic import BaseModel, SecretStr

from perdure.storage import unauthenticated
from perdure.storage.cut_off import end_when_cut_off
from perdure.storage.unauthenticated import (
    LIMIT_BYTES,
    FirstBytes,
    TooLongError,
    UnauthenticatedConnections,
)

_log = logging.getLogger("perdure.wire")

MAX_LINE_BYTES = 16 << 20
SILENT_S = 30.0  # between two pieces of an authentic request, or of what answers it
CONNECT_TIMEOUT_S = 5.0
# Twice what a supervisor waits for a silent agent: it has moved the member by then. Nothing else
# shows a process on a node that is cut off that the others go on without it.
CUT_OFF_S = 30


# Of a line by `dump_line`: the rest of one that is authentic may be long.
_TOKEN_FIRST = re.compile(rb'\{"token": ?"([^"\\]*)"')

# Context in which messages give away their secrets: into a connection, and nowhere else.
INTO_A_CONNECTION = {"connection": True}


def dump_line(message: BaseModel) -> bytes:
    """Encode a message as a line; its token is in clear text, for this connection alone."""
    document = message.model_dump(mode="json", context=INTO_A_CONNECTION)
    # pydantic writes a SecretStr as asterisks.
    token = getattr(message, "token", None)
    if isinstance(token, SecretStr):
        document.pop("token")
        document = {"token": token.get_secret_value(), **document}  # first: see `begins_with`
    return json.dumps(document).encode() + b"\n"


def read_line(stream: BufferedIOBase) -> bytes:
    """Read the next line, empty at the end of the connection.

    Raises:
        OSError: the connection broke, or nothing came in time.
        ValueError: the line is too long.
    """
    line = stream.readline(MAX_LINE_BYTES)
    if len(line) == MAX_LINE_BYTES:
        raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
    return line


async def next_line(reader: asyncio.StreamReader) -> bytes:
    """Read the next line of an asyncio connection, empty at its end.

    Raises:
        ValueError: the line is longer than the reader's limit.
    """
    try:
        return await reader.readline()
    except ConnectionError:
        return b""


def is_authentic(received: SecretStr | None, token: str) -> bool:
    """Whether a message's token is right; compared in constant time."""
    # As bytes: of text, compare_digest takes ASCII alone.
    secret = received.get_secret_value() if received is not None else ""
    return hmac.compare_digest(secret.encode(), token.encode())


def begins_with(token: str, data: bytes | bytearray) -> bool:
    """Whether a line that may not be whole yet has the token in its first field."""
    match = _TOKEN_FIRST.match(data)
    return match is not None and hmac.compare_digest(match[1], token.encode())


async def first_line(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive the first line of a connection, and what has come after it; empty at its end.

    Args:
        connection: a socket that does not block.

    Raises:
        OSError: the connection broke, or nothing came in time.
    """
    data = bytearray()
    async with asyncio.timeout(unauthenticated.LIMIT_S):
        while b"\n" not in data:
            if len(data) >= LIMIT_BYTES:
                raise TooLongError
            loop = asyncio.get_running_loop()
            piece = await loop.sock_recv(connection, LIMIT_BYTES - len(data))
            if not piece:
                return b"", b""
            data += piece
    line, _, following = bytes(data).partition(b"\n")
    return line, following


def call(host: str, port: int, request: BaseModel, *, timeout_s: float) -> bytes:
    """Send a request on a connection of its own, return the line that answers it.

    Raises:
        OSError: nothing listens there, or no reply came in time.
        ValueError: the reply is too long.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(dump_line(request))
        with connection.makefile("rb") as lines:
            return read_line(lines)


async def call_among_others(host: str, port: int, request: BaseModel, *, timeout_s: float) -> bytes:
    """`call` without a thread of its own, for a caller with thousands of peers.

    Raises:
        OSError: nothing listens there, or no reply came in time.
        ValueError: the reply is too long.
    """
    async with asyncio.timeout(timeout_s):
        # The kernel answers for a peer that is busy: only one that is gone takes longer.
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
        try:
            writer.write(dump_line(request))
            await writer.drain()
            return await next_line(reader)
        finally:
            writer.transport.abort()  # the peer closes its own side


class RequestServer(socketserver.ThreadingTCPServer):
    """Answers requests, each in a thread of its own, until closed.

    Args:
        host: address to bind.
        port: port to listen on; 0: a free port.
        answer: the reply to a line; what it raises ends that connection alone.
        token: secret in the first field of a request that is longer than a stranger's may be.
    """

    daemon_threads = True  # or close() would wait for a check of minutes
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, host: str, answer: Callable[[bytes], BaseModel], *, token: str, port: int = 0
    ) -> None:
        super().__init__((host, port), _Request)
        self.answer = answer
        self.token = token
        self.unauthenticated = UnauthenticatedConnections()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self.shutdown()
        self.server_close()


class _Request(socketserver.BaseRequestHandler):
    server: RequestServer
    request: socket.socket

    def handle(self) -> None:
        try:
            line = self._line()
        except (OSError, ValueError) as exc:
            _log.info(f"a request was not read: {exc}")
            return
        reply = dump_line(self.server.answer(line))
        try:
            self.request.sendall(reply)
        except OSError as exc:
            _log.info(f"a reply was not taken: {exc}")

    def _line(self) -> bytes:
        """Read a line, of which a stranger's is short and comes soon.

        Raises:
            OSError: the connection broke, or nothing came in time.
            ValueError: the line is too long.
        """
        head, token = bytearray(), self.server.token
        with self.server.unauthenticated.holding(self.request):
            first_bytes = FirstBytes(self.request)
            while b"\n" not in head and not begins_with(token, head):
                piece = first_bytes.read(LIMIT_BYTES)
                if not piece:
                    break
                head += piece
        self.request.settimeout(SILENT_S)
        if b"\n" in head or not begins_with(token, head):
            return bytes(head).partition(b"\n")[0]
        with self.request.makefile("rb") as lines:
            return bytes(head) + read_line(lines)


class Connection(ABC):
    """A client's lasting connection: any thread sends, one thread receives.

    Args:
        host: the server's address.
        port: the server's port.
        joined: first message, with the token.
        timeout_s: limit for connecting.

    Raises:
        OSError: nothing listens there.
    """

    def __init__(self, host: str, port: int, joined: BaseModel, *, timeout_s: float) -> None:
        self._sending = threading.Lock()  # each line is to be whole
        self._is_open = self._is_closed = False
        self._socket = socket.socket()  # of no connection yet
        self.connect(host, port, joined, timeout_s=timeout_s)

    def connect(self, host: str, port: int, joined: BaseModel, *, timeout_s: float) -> None:
        """Connect, or leave the previous server for another, of which nothing is `lost`.

        Raises:
            OSError: nothing listens there; what was there before stays.
        """
        connected = socket.create_connection((host, port), timeout=timeout_s)
        connected.settimeout(None)  # create_connection leaves its own, and peers may be silent
        # Without it a second small line waits until the first is acknowledged.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_cut_off(connected, silent_s=CUT_OFF_S)
        try:
            connected.sendall(dump_line(joined))  # before anything else: it has the token
        except OSError:
            connected.close()
            raise
        with self._sending:
            previous, self._socket, self._is_open = self._socket, connected, True
        _shut_down(previous)
        threading.Thread(
            target=self._listen, args=(connected,), daemon=True, name="connection"
        ).start()

    @abstractmethod
    def receive(self, line: bytes) -> None:
        """Handle a line of the server; what this raises ends the connection."""

    @abstractmethod
    def lost(self, why: str) -> None:
        """Handle an end without `close`; the listening thread calls this once."""

    @property
    def is_open(self) -> bool:
        """Whether it has neither been closed nor lost."""
        return self._is_open

    def send(self, message: BaseModel) -> bool:
        """Send a message. Whether the connection took it."""
        if not self._is_open:
            return False
        with self._sending:
            used = self._socket
            try:
                used.sendall(dump_line(message))
            except OSError:
                _shut_down(used)  # the listening thread reports it
                return False
        return True

    @property
    def is_closed(self) -> bool:
        """Whether this side has ended it."""
        return self._is_closed

    def close(self) -> None:
        """End the connection from this side."""
        self._is_closed, self._is_open = True, False
        _shut_down(self._socket)

    def _listen(self, connected: socket.socket) -> None:
        why = "it closed the connection"
        try:
            with connected, connected.makefile("rb") as lines:
                while line := read_line(lines):
                    self.receive(line)
        except Exception as exc:  # noqa: BLE001 a member that receives no more must not go on
            why = f"{type(exc).__name__}: {exc}"
        with self._sending:
            is_lost = self._is_open and self._socket is connected
            self._is_open = self._is_open and not is_lost
        if is_lost:
            self.lost(why)


def _shut_down(connected: socket.socket) -> None:
    # Closing alone does not wake a thread that waits in recv (Linux).
    with suppress(OSError):  # the other side was faster, or it was never connected
        connected.shutdown(socket.SHUT_RDWR)


# Connections: a look and an order for each of the most nodes that a job may have. Fewer would let
# a check of minutes, or as many dead nodes, keep the look at all others waiting.
MAX_OPEN = 2048
OTHER_FILES = 512  # that this process may open beside them


@dataclass(frozen=True, slots=True)
class TimedLine:
    """A line that answers a request, with the times of request and answer (epoch)."""

    line: bytes
    sent_s: float
    answered_s: float


class FanOut:
    """Carries calls out; the thread begins with the first call and ends with the process.

    Args:
        max_open: connections at a time; a call beyond it waits, and its time begins after that.
    """

    def __init__(self, *, max_open: int = MAX_OPEN) -> None:
        self._max_open = room_for(max_open)
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: asyncio.Semaphore | None = None

    def call(
        self, host: str, port: int, request: BaseModel, *, timeout_s: float
    ) -> Future[TimedLine]:
        """Send a request. Its future has what answers it.

        The future raises OSError (nothing listens there, or no reply came in time) or ValueError
        (the reply is too long).
        """
        calling = self._call(host, port, request, timeout_s)
        return asyncio.run_coroutine_threadsafe(calling, self._started())

    async def _call(self, host: str, port: int, request: BaseModel, timeout_s: float) -> TimedLine:
        assert self._open is not None  # noqa: S101 made with the loop
        async with self._open:
            sent_s = time.time()
            line = await call_among_others(host, port, request, timeout_s=timeout_s)
            return TimedLine(line, sent_s, time.time())

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._open = asyncio.Semaphore(self._max_open)
                thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="calls")
                thread.start()
            return self._loop


def room_for(connections: int) -> int:
    """Count the connections within the limit of open files, which is raised if necessary."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, max(allowed, soft) - OTHER_FILES)
