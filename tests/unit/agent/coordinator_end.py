"""The coordinator's end of a connection: real sockets, and one message at a time."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

from perdure.training.recovery.protocol import CoordinatorMessage
from perdure.training.wire.coordinator import FROM_MEMBER, CoordinatorAddress, FromMember
from perdure.training.wire.transport import dump_line

HOST = "127.0.0.1"
TOKEN = "a-token"
TIMEOUT_S = 240.0


@dataclass
class CoordinatorEnd:
    """Listens for one member."""

    server: socket.socket = field(default_factory=lambda: socket.create_server((HOST, 0)))
    connection: socket.socket | None = None
    _lines: Any = None

    @property
    def address(self) -> CoordinatorAddress:
        port = self.server.getsockname()[1]
        return CoordinatorAddress(host=HOST, port=port, store_port=1, token=TOKEN)

    def receive(self) -> FromMember:
        """The next message of the member."""
        if self.connection is None:
            self.server.settimeout(TIMEOUT_S)
            self.connection, _ = self.server.accept()
            self.connection.settimeout(TIMEOUT_S)
            self._lines = self.connection.makefile("rb")
        return FROM_MEMBER.validate_json(self._lines.readline())

    def is_closed_by_peer(self) -> bool:
        """Whether the member has closed the connection."""
        return bool(self._lines.readline() == b"")

    def send(self, *messages: CoordinatorMessage) -> None:
        """Send messages, once the member has connected."""
        assert self.connection is not None
        self.connection.sendall(b"".join(dump_line(message) for message in messages))

    def disconnect(self) -> None:
        """Close the connection."""
        if self.connection is not None:
            self._lines.close()
            self.connection.close()

    def close(self) -> None:
        """End everything."""
        self.disconnect()
        self.server.close()
