"""The coordinator's end of a line, held by a test: real sockets, and a word at a time."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

from training.recovery.protocol import CoordinatorMessage
from training.wire.coordinator import FROM_MEMBER, CoordinatorAddress, FromMember
from training.wire.transport import dump_line

HOST = "127.0.0.1"
TOKEN = "a-token"
TIMEOUT_S = 10.0


@dataclass
class FarEnd:
    """Listens for one member."""

    server: socket.socket = field(default_factory=lambda: socket.create_server((HOST, 0)))
    line: socket.socket | None = None
    _lines: Any = None

    @property
    def address(self) -> CoordinatorAddress:
        port = self.server.getsockname()[1]
        return CoordinatorAddress(host=HOST, port=port, store_port=1, token=TOKEN)

    def hear(self) -> FromMember:
        """What the member says next."""
        if self.line is None:
            self.server.settimeout(TIMEOUT_S)
            self.line, _ = self.server.accept()
            self.line.settimeout(TIMEOUT_S)
            self._lines = self.line.makefile("rb")
        return FROM_MEMBER.validate_json(self._lines.readline())

    def is_hung_up_on(self) -> bool:
        """Whether the member has closed the line."""
        return bool(self._lines.readline() == b"")

    def say(self, *messages: CoordinatorMessage) -> None:
        """Say something; the member has spoken first."""
        assert self.line is not None
        self.line.sendall(b"".join(dump_line(message) for message in messages))

    def hang_up(self) -> None:
        """Close the line."""
        if self.line is not None:
            self._lines.close()
            self.line.close()

    def close(self) -> None:
        """End everything."""
        self.hang_up()
        self.server.close()
