"""The host of a node, read with psutil: processors, memory, and the disk of a folder.

In a container these are the machine's numbers, not the container's share.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from perdure.training.wire.node import HostSample


class HostSource:
    """Reads the host again and again.

    Args:
        folder: the file system that it lies on is looked at.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        psutil.cpu_percent()  # the use of processors is measured since the call before

    def read(self) -> HostSample:
        """The host as it is; processors since the last time."""
        disk = psutil.disk_usage(str(self._folder))
        return HostSample(
            cpu_percent=psutil.cpu_percent(),
            memory_percent=psutil.virtual_memory().percent,
            disk_free_percent=100.0 * disk.free / disk.total if disk.total else None,
            disk_free_bytes=disk.free,
        )
