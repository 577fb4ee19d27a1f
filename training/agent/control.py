"""How supervisors control an agent: a request and its reply on a connection of their own.

So a supervisor that dies leaves nothing behind. Times are seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
from pydantic import SecretStr, ValidationError

from training.errors import AgentUnreachable, EngineError
from training.files import write_whole
from training.wire.agent import REQUEST, AgentAddress, AgentReply, Order, Request
from training.wire.transport import RequestServer, call, is_authentic

ADDRESS_FILE = "address.json"


def control_server(
    host: str, token: str, handler: Callable[[Request], AgentReply]
) -> RequestServer:
    """A server that hands every request with the token to one function."""

    def answer(line: bytes) -> AgentReply:
        try:
            request = REQUEST.validate_json(line)
        except ValidationError as error:
            return AgentReply(error=f"not a request: {error.error_count()} problems")
        if not is_authentic(request.token, token):
            return AgentReply(error="wrong token")
        return handler(request)

    return RequestServer(host, answer)


def publish_address(folder: Path, host: str, port: int) -> None:
    """Write where this process listens into its container's folder."""
    address = AgentAddress(
        pid=os.getpid(),
        process_started_s=psutil.Process().create_time(),
        host=host,
        port=port,
    )
    write_whole(folder / ADDRESS_FILE, address.model_dump_json(), private=True)


class AgentClient:
    """Calls one agent.

    Raises (every call):
        AgentUnreachable: no agent answers at the address.
        EngineError: the agent refused the request.
    """

    def __init__(
        self, address: AgentAddress, *, token: str, epoch: int, timeout_s: float = 10.0
    ) -> None:
        self.address = address
        self._token = token
        self._epoch = epoch
        self._timeout_s = timeout_s

    def call(self, order: Order) -> AgentReply:
        """Send an order, return the reply."""
        request = Request(token=SecretStr(self._token), epoch=self._epoch, order=order)
        host, port = self.address.host, self.address.port
        try:
            reply = AgentReply.model_validate_json(
                call(host, port, request, timeout_s=self._timeout_s)
            )
        except (OSError, ValueError) as error:
            raise AgentUnreachable(f"agent at {host}:{port}: {error}") from error
        if reply.error is not None:
            raise EngineError(f"agent at {host}:{port} refused {order.op}: {reply.error}")
        return reply
