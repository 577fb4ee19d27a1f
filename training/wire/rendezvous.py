"""The rendezvous store in which processes find each other.

torch binds a store that it serves to every address of the host, and has no authentication: who
reaches the port reads and writes the keys of all ranks. Here it listens on one address. Times are
seconds.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from perdure.training.processes import await_address

TIMEOUT_S = 300.0  # torch's own default


def serve_store(
    host: str, port: int, world_size: int | None = None, *, timeout_s: float = TIMEOUT_S
) -> TCPStore:
    """Serve a store that listens on this address of this host alone.

    Args:
        host: name or address; of several addresses of a name the first.
        port: port to listen on; 0: any free port.
        world_size: number of clients, None: any number.
        timeout_s: limit of each of a client's calls.

    Raises:
        OSError: the address is none of this machine's, or the port is taken.
        RuntimeError: the store does not start.
    """
    await_address(host)
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    # The store closes the descriptor when it ends, with libuv and without (torch 2.13); one that
    # could not start has not always closed it, and then closing it here might hit another file.
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
