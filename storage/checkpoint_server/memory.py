"""How much memory the host, and the container's limits, can still give. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# Of what is available when a slot is made: the rest is the training's and the page cache's.
MEMORY_SHARE = 0.8
UNLIMITED = 1 << 62
_MOUNTED = Path("sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """What the files of a memory controller are called, and its page cache within `memory.stat`."""

    limit: str
    used: str
    cache: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available_bytes() -> int:
    """What slots may take now."""
    return int(MEMORY_SHARE * min(psutil.virtual_memory().available, cgroup_left_bytes(Path("/"))))


def cgroup_left_bytes(root: Path) -> int:
    """What the tightest limit of this process's control groups leaves.

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return UNLIMITED
    lefts = [
        _left_bytes(group, names) for line in lines for group, names in _memory_groups(root, line)
    ]
    return min(lefts, default=UNLIMITED)


def _memory_groups(root: Path, line: str) -> Iterator[tuple[Path, _Names]]:
    """A group that limits memory, and all above it; of one line in /proc/self/cgroup."""
    _number, controllers, path = line.split(":", maxsplit=2)
    if controllers and "memory" not in controllers.split(","):
        return
    top, names = (root / _MOUNTED / "memory", _V1) if controllers else (root / _MOUNTED, _V2)
    # A container may be told its path as the host sees it, and see its own group at the top.
    own = Path(path.lstrip("/"))
    for part in (own, *own.parents):
        if ".." not in part.parts:
            yield top / part, names


def _left_bytes(group: Path, names: _Names) -> int:
    """What one group leaves; its page cache can be given up and does not count."""
    try:
        limit = (group / names.limit).read_text(encoding="ascii").strip()
        if limit == "max":
            return UNLIMITED
        used = int((group / names.used).read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").split()
        cache = int(stat[stat.index(names.cache) + 1])
    except (OSError, ValueError):
        return UNLIMITED  # no such limit here
    return max(0, int(limit) - used + cache)
