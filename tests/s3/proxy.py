"""An HTTP proxy in front of a server that breaks requests on demand.

Faults strike in the order they were injected, each at the requests it names; everything else
passes unchanged. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import http.client
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

from tests.s3.programs import HOST

PIECE_BYTES = 64 * 1024
UPSTREAM_S = 240.0
TRICKLE_S = 0.02
DROPPED = ("connection", "transfer-encoding", "content-length", "expect")


@dataclass(frozen=True)
class Answer:
    """The request is answered here and never reaches the server."""

    status: int
    code: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        """As S3 words it."""
        return f"<Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()


@dataclass(frozen=True)
class Page(Answer):
    """What a gateway shows when it is ill: a page for people, with a status of success."""

    status: int = 200
    code: str = ""

    @property
    def body(self) -> bytes:
        return b"<html><p>We are back soon<br></html>"


@dataclass(frozen=True)
class LostAnswer:
    """The server does what is requested; the connection is reset before it can answer."""


@dataclass(frozen=True)
class Reset:
    """The connection is reset when so much of the answer's body has passed."""

    after_bytes: int = 0


@dataclass(frozen=True)
class Stall:
    """Nothing more comes when so much of the answer's body has passed."""

    after_bytes: int = 0


@dataclass(frozen=True)
class Trickle:
    """A few bytes at a time come when so much of the answer's body has passed."""

    after_bytes: int = 0


@dataclass(frozen=True)
class InUpload:
    """Something is done when so much of the request's body has passed."""

    then: Callable[[], object]
    after_bytes: int = 0


@dataclass(frozen=True)
class LostRequest:
    """The request is dropped here: it never reaches the server, and nothing is answered."""


Fault = Answer | LostAnswer | Reset | Stall | Trickle | InUpload | LostRequest


@dataclass
class _Injected:
    fault: Fault
    method: str
    path: str
    times: int
    each: bool = False
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def strikes(self, method: str, path: str) -> bool:
        """Whether this request is one of those to strike; counts it."""
        if self.method not in ("", method) or self.path not in path:
            return False
        counted = (method, path) if self.each else ("", "")
        self.seen[counted] += 1
        return self.seen[counted] <= self.times


class FaultProxy(ThreadingHTTPServer):
    """Runs in threads while it is entered."""

    request_queue_size = 128
    daemon_threads = True
    block_on_close = False  # a stalled connection must not stop the tests

    def __init__(self, upstream_port: int) -> None:
        super().__init__((HOST, 0), _Handler)
        self.upstream_port = upstream_port
        self._lock = Lock()
        self._forget()
        self._thread = Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reset()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def reset(self) -> None:
        """Let go of what stalls, and forget all faults and what they did."""
        self.released.set()
        self._forget()

    def _forget(self) -> None:
        self.requests: list[tuple[str, str]] = []  # (method, path with query)
        self.hosts: list[str] = []  # that they are addressed to
        self.struck: list[Fault] = []
        self.released = Event()  # ends what stalls
        self._injected: list[_Injected] = []

    def inject(self, fault: Fault, *, method: str, path: str = "", times: int = 1) -> None:
        """Let `fault` strike the next `times` requests of `method` whose path holds `path`."""
        with self._lock:
            self._injected.append(_Injected(fault, method, path, times))

    def inject_each(self, fault: Fault, *, times: int = 1) -> None:
        """Let `fault` strike every request, the first `times` times that it is sent."""
        with self._lock:
            self._injected.append(_Injected(fault, "", "", times, each=True))

    def next_fault(self, method: str, path: str, host: str) -> Fault | None:
        """What to do to this request."""
        with self._lock:
            self.requests.append((method, path))
            self.hosts.append(host)
            for injected in self._injected:
                if injected.strikes(method, path):
                    self.struck.append(injected.fault)
                    return injected.fault
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        """Broken connections are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultProxy

    def relay(self) -> None:
        fault = self.server.next_fault(self.command, self.path, self.headers["Host"])
        if isinstance(fault, Answer):
            self._answer_here(fault)
            return
        if isinstance(fault, LostRequest):
            self.server.released.wait(UPSTREAM_S)
            self._reset()
            return
        upstream = http.client.HTTPConnection(HOST, self.server.upstream_port, timeout=UPSTREAM_S)
        try:
            self._send_on(upstream, fault)
            answer = upstream.getresponse()
            if isinstance(fault, LostAnswer):
                self._reset()
            else:
                self._send_back(answer, fault)
        except (OSError, http.client.HTTPException):  # the server is gone, and so are we
            self._reset()
        finally:
            upstream.close()

    do_GET = relay  # noqa: N815 the names are http.server's
    do_HEAD = relay  # noqa: N815
    do_PUT = relay  # noqa: N815
    do_POST = relay  # noqa: N815
    do_DELETE = relay  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass

    def _send_on(self, upstream: http.client.HTTPConnection, fault: Fault | None) -> None:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                upstream.putheader(name, value)
        upstream.endheaders()
        left, passed = int(self.headers.get("Content-Length", 0)), 0
        waiting = fault if isinstance(fault, InUpload) else None
        while left:
            # Not a byte more: a server that has the whole body may answer before it is killed.
            most = max(1, waiting.after_bytes - passed) if waiting is not None else left
            piece = self.rfile.read(min(PIECE_BYTES, left, most))
            if not piece:
                raise ConnectionError("the client is gone")
            upstream.send(piece)
            left, passed = left - len(piece), passed + len(piece)
            if waiting is not None and passed >= waiting.after_bytes:
                waiting.then()
                waiting = None

    def _send_back(self, answer: http.client.HTTPResponse, fault: Fault | None) -> None:
        released = self.server.released  # of this test
        # An answer in chunks is short here; one of known length may be long and is passed on.
        body = answer.read() if answer.length is None else None
        size = len(body) if body is not None else int(answer.headers.get("Content-Length", 0))
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.headers.items():
            if name.lower() not in DROPPED:
                self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        stop = fault.after_bytes if isinstance(fault, (Reset, Stall, Trickle)) else None
        passed = 0
        while stop is None or passed < stop:
            want = PIECE_BYTES if stop is None else min(PIECE_BYTES, stop - passed)
            piece = body[passed : passed + want] if body is not None else answer.read(want)
            if not piece:
                break
            self.wfile.write(piece)
            passed += len(piece)
        if isinstance(fault, Stall):
            released.wait(UPSTREAM_S)
        if isinstance(fault, Trickle):
            rest = body[passed:] if body is not None else answer.read()
            for byte in rest:
                if released.wait(TRICKLE_S):
                    break
                self.wfile.write(bytes([byte]))
        if stop is not None:
            self._reset()

    def _answer_here(self, fault: Answer) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response_only(fault.status)
        if "Date" not in fault.headers:
            self.send_header("Date", self.date_time_string())
        for name, value in fault.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(fault.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(fault.body)

    def _reset(self) -> None:
        """Close so that the client sees RST, not the end of the answer."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
