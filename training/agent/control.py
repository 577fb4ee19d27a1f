"""The control of an agent: its server, its supervisors' client, and the wakeup of its main thread.

Each request and its reply have a connection of their own, so that a supervisor that dies leaves
nothing behind. Times are seconds.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

import psutil
from pydantic import SecretStr, ValidationError

from perdure.training.errors import AgentUnreachable, EngineError, OtherRelease
from perdure.training.files import write_whole
from perdure.training.wire.agent import (
    REQUEST,
    AgentAddress,
    AgentConfig,
    AgentReply,
    Order,
    Request,
)
from perdure.training.wire.transport import RequestServer, call, is_authentic
from perdure.training.wire.version import PERDURE_VERSION, is_of_this_release

ADDRESS_FILE = "address.json"
TERMINATED_FILE = "terminated"  # an agent that SIGTERM ended leaves it in its container's folder
CALL_TIMEOUT_S = 10.0
LOOPBACK = "127.0.0.1"
NOT_A_REQUEST = "not a request of this version"  # an answer
WRONG_TOKEN = "wrong token"  # noqa: S105 an answer


class WakeupSignal:
    """Wakeup of the main thread, which catches SIGCHLD while it is entered.

    The kernel signals every end, adopted processes included: polling fifty times a second would
    cost more of a core and still notice it later.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous_fd = -1

    def __enter__(self) -> Self:
        signal.signal(signal.SIGCHLD, _ignore_signal)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()

    def wake(self) -> None:
        """Wake the sleeper from any thread, or keep it from falling asleep the next time."""
        try:
            self._writer.send(b"\0")
        except OSError:  # its buffer is full, or it sleeps no more
            return

    def sleep(self, timeout_s: float) -> None:
        """Sleep until a signal came, `wake` was called, or the time is over."""
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        if ready:
            self._reader.recv(4096)


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Python writes to the wakeup descriptor only for signals that have a handler."""


@dataclass(frozen=True, slots=True)
class ControlServer:
    """Server for supervisors, at one address or at several with the same port."""

    listeners: tuple[RequestServer, ...]

    @classmethod
    def of(cls, config: AgentConfig, handler: Callable[[Request], AgentReply]) -> Self:
        """Open the server of an agent, where its engine wants it."""
        return cls.open(
            config.host, config.token, handler, port=config.port, on_loopback=config.on_loopback
        )

    @classmethod
    def open(
        cls,
        host: str,
        token: str,
        handler: Callable[[Request], AgentReply],
        *,
        port: int = 0,
        on_loopback: bool = False,
    ) -> Self:
        """Open a server that hands every request with the token to one function.

        Args:
            host: address to bind.
            token: secret that requests must have.
            handler: answers authentic requests.
            port: port to bind; 0: any that is free.
            on_loopback: whether it also listens there: a port-forward comes from there.
        """

        def answer(line: bytes) -> AgentReply:
            try:
                request = REQUEST.validate_json(line)
            except ValidationError as error:
                return AgentReply(error=f"{NOT_A_REQUEST}: {_first_problem(error)}")
            if not is_authentic(request.token, token):
                return AgentReply(error=WRONG_TOKEN)
            return handler(request)

        first = RequestServer(host, answer, token=token, port=port)
        if not on_loopback:
            return cls((first,))
        loopback = RequestServer(LOOPBACK, answer, token=token, port=first.port)
        return cls((first, loopback))

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.listeners[0].port

    def start(self) -> None:
        """Begin to answer."""
        for listener in self.listeners:
            listener.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        for listener in self.listeners:
            listener.close()

    def publish_address(self, folder: Path, host: str) -> None:
        """Write into a container's folder where this process listens."""
        address = AgentAddress(
            pid=os.getpid(),
            process_started_s=psutil.Process().create_time(),
            host=host,
            port=self.port,
        )
        write_whole(folder / ADDRESS_FILE, address.model_dump_json(), private=True)


def _first_problem(error: ValidationError) -> str:
    """Name the field at fault on one line; a supervisor of another version may have sent it."""
    first = error.errors(include_url=False, include_input=False)[0]
    return " ".join(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".split())


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Client of an agent.

    Attributes:
        token: secret of the agent.
        epoch: epoch of the calling supervisor.
    """

    host: str
    port: int
    token: str = field(repr=False)
    epoch: int

    def request(self, order: Order) -> Request:
        """Wrap an order as it is sent."""
        return Request(token=SecretStr(self.token), epoch=self.epoch, order=order)

    def call(self, order: Order, *, timeout_s: float = CALL_TIMEOUT_S) -> AgentReply:
        """Send an order and return the reply.

        Raises:
            AgentUnreachable: no agent answers at the address.
            EngineError: the agent refused the request.
        """
        try:
            line = call(self.host, self.port, self.request(order), timeout_s=timeout_s)
        except (OSError, ValueError) as error:
            raise self.unreachable(error) from error
        return self.reply(order, line)

    def reply(self, order: Order, line: bytes) -> AgentReply:
        """Parse the line that answers an order.

        Raises:
            AgentUnreachable: it is no reply, or empty: the connection ended. Or the token is that
                of no agent there: nobody can speak to the one that was meant.
            EngineError: the agent refused the request.
            OtherRelease: it is of another release.
        """
        try:
            reply = AgentReply.model_validate_json(line)
        except ValidationError as error:
            if not any(problem["loc"][:1] == ("status",) for problem in error.errors()):
                raise self.unreachable(error) from error  # cut short, or not of an agent
            raise self._other_version(f"of another version ({_first_problem(error)})") from error
        if reply.error == WRONG_TOKEN:
            raise self.unreachable(EngineError(WRONG_TOKEN))
        if reply.status is not None and not is_of_this_release(reply.status.version):
            raise self._other_version(reply.status.version or "of a release that names no version")
        if reply.error is not None:
            at = f"agent at {self.host}:{self.port}"
            error_class = OtherRelease if reply.error.startswith(NOT_A_REQUEST) else EngineError
            raise error_class(f"{at} refused {order.op}: {reply.error}")
        return reply

    def _other_version(self, version: str) -> OtherRelease:
        return OtherRelease(
            f"agent at {self.host}:{self.port} is {version}, and this supervisor "
            f"{PERDURE_VERSION}: supervise the run with the image that it began with"
        )

    def unreachable(self, error: Exception) -> AgentUnreachable:
        """Return the error of a call that did not get through."""
        return AgentUnreachable(f"agent at {self.host}:{self.port}: {error}")
