"""Processors that a node gives its programs, and the time that threads wait for one.

The time in use alone does not show whether a program computes: a node with a quota of half a
processor, or with other work, gives it less than it could use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def waited_for_processor_s(pid: int) -> float:
    """Read how long the threads of a process were ready to run and waited for a processor."""
    waited_ns = 0
    with suppress(OSError, IndexError, ValueError):  # it has ended, or the kernel counts nothing
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 the names alone, and fast
            with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:  # noqa: PTH123 procfs
                waited_ns += int(file.read().split()[1])
    return waited_ns / 1e9


def available_cores(root: Path = Path("/")) -> float:
    """Return how many processors this process may use, by its affinity and its cgroups.

    Args:
        root: of the file system, for tests.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            tree = root / "sys/fs/cgroup"
            if controllers:  # version 1 has a tree for each controller
                tree /= "cpu"
            if not controllers or "cpu" in controllers.split(","):
                limits += _quotas(tree, path)
    return min(limits)


def _quotas(tree: Path, path: str) -> Iterator[float]:
    """Read the quotas of a cgroup and of all above it; a container may see its own as the root."""
    folder = tree / path.lstrip("/")
    while True:
        with suppress(OSError, ValueError):
            quota, period = _read_quota(folder)
            if quota != "max" and float(quota) > 0:
                yield float(quota) / float(period)
        if folder == tree:
            return
        folder = folder.parent


def _read_quota(folder: Path) -> list[str]:
    limit = folder / "cpu.max"
    if limit.exists():
        return limit.read_text(encoding="ascii").split()
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return [(folder / name).read_text(encoding="ascii").strip() for name in names]
