"""The agent's control socket: JSON lines over TCP, bound to loopback unless told otherwise.

The server side hands each request to one function; the client side is a connection per call,
so that a supervisor that dies leaves nothing behind. Times are seconds.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
from pydantic import ValidationError

from training.errors import AgentUnreachable, EngineError
from training.files import write_whole
from training.wire.agent import REQUEST, AgentAddress, Order, Reply, Request

ADDRESS_FILE = "address.json"
MAX_LINE_BYTES = 16 << 20

Handler = Callable[[Request], Reply]


class ControlServer:
    """Serves requests in threads of its own until closed."""

    def __init__(self, host: str, token: str, handler: Handler) -> None:
        self._server = _Server((host, 0), _Connection)
        self._server.token = token
        self._server.handler = handler
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    token: str
    handler: Handler


class _Connection(socketserver.StreamRequestHandler):
    timeout = 30.0
    server: _Server

    def handle(self) -> None:
        line = self.rfile.readline(MAX_LINE_BYTES)
        self.wfile.write(self._answer(line).model_dump_json().encode() + b"\n")

    def _answer(self, line: bytes) -> Reply:
        try:
            request = REQUEST.validate_json(line)
        except ValidationError as error:
            return Reply(error=f"not a request: {error.error_count()} problems")
        given = request.token.get_secret_value()
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            return Reply(error="wrong token")
        return self.server.handler(request)


def publish_address(folder: Path, host: str, port: int) -> None:
    """Write where this process listens into its container's folder, for whoever looks for it."""
    address = AgentAddress(
        pid=os.getpid(),
        process_started_s=psutil.Process().create_time(),
        host=host,
        port=port,
    )
    write_whole(folder / ADDRESS_FILE, address.model_dump_json())


class AgentClient:
    """Speaks to one agent.

    Raises (every call):
        AgentUnreachable: nobody answers at the address.
        EngineError: the agent refused the request.
    """

    def __init__(
        self, address: AgentAddress, *, token: str, epoch: int, timeout_s: float = 10.0
    ) -> None:
        self.address = address
        self._token = token
        self._epoch = epoch
        self._timeout_s = timeout_s

    def call(self, order: Order) -> Reply:
        """Send an order, return the reply."""
        request = {"token": self._token, "epoch": self._epoch, "order": order.model_dump()}
        where = (self.address.host, self.address.port)
        try:
            with socket.create_connection(where, timeout=self._timeout_s) as connection:
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as lines:
                    line = lines.readline(MAX_LINE_BYTES)
            reply = Reply.model_validate_json(line)
        except (OSError, ValidationError) as error:
            raise AgentUnreachable(f"agent at {where[0]}:{where[1]}: {error}") from error
        if reply.error is not None:
            raise EngineError(f"agent at {where[0]}:{where[1]} refused {order.op}: {reply.error}")
        return reply
