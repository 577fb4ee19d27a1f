"""A fork server for data loaders that is forked from this process.

The one that multiprocessing starts by itself is a new interpreter, which imports torch for
seconds: longer than everything else that a process needs to take another's place. At its very
beginning a worker has all imports, and neither threads nor a device: it can be forked then.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import threading
from contextlib import suppress
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

NAME = "data-loaders"


def serve_forks() -> None:
    """Fork multiprocessing's fork server now; does nothing where that is not possible.

    Written against the private parts of Python 3.11 to 3.13; 3.14 authenticates clients.
    """
    server: Any = forkserver._forkserver  # noqa: SLF001 there is no public way
    is_known = hasattr(server, "_forkserver_pid") and not hasattr(server, "_forkserver_authkey")
    if not is_known or server._forkserver_pid is not None or threading.active_count() > 1:  # noqa: SLF001
        return
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        # Every client holds the writing end; when the last is gone, so is the server.
        alive, held = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(held)
            _serve(listener.detach(), alive, Path(address).parent)
        os.close(alive)
    server._forkserver_address = address  # noqa: SLF001
    server._forkserver_alive_fd = held  # noqa: SLF001
    server._forkserver_pid = pid  # noqa: SLF001


def _serve(listener: int, alive: int, folder: Path) -> None:
    """Be the fork server; never returns."""
    with suppress(BaseException):  # its end is a SystemExit
        gc.freeze()  # or the first collection in a loader would copy every page
        Path("/proc/self/comm").write_text(NAME, encoding="utf-8")
        forkserver.main(listener, alive, [])
    # The worker may have been killed: nothing else removes it.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)
