"""Clients without a token, as any server of a run may meet them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

from tests.waiting import wait_for

Address = tuple[str, int]
TIMEOUT_S = 240


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended a connection, whatever it had to say before."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True  # what was not read is answered so
    return True


def flood(address: Address, piece: bytes) -> int:
    """Send a line that never ends; return how much was taken until the server closed it."""
    sent = 0
    with socket.create_connection(address) as connection:
        connection.settimeout(TIMEOUT_S)
        with suppress(ConnectionError):
            while sent < 64 << 20:
                sent += connection.send(piece)
    return sent


def trickle(address: Address) -> None:
    """Send a byte now and then, until the server closes the connection."""
    with socket.create_connection(address) as connection:

        def is_over() -> bool:
            with suppress(OSError):
                connection.send(b"x")
            return is_closed(connection)

        wait_for(is_over)


def crowd(address: Address, ask: Callable[[], object], count: int) -> None:
    """Have silent clients, more than the server keeps, and one that is served among them."""
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(address, timeout=TIMEOUT_S))
            for _ in range(count)
        ]
        assert ask()
        wait_for(lambda: is_closed(silent[0]))
        assert not is_closed(silent[-1]), "its time is not over"
