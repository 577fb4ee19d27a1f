"""Where a session's process prints its own stacks, for the agent that asks for them."""

from __future__ import annotations

from pathlib import Path


def stacks_file(folder: Path, local_rank: int) -> Path:
    """Where a process prints them on SIGUSR2.

    Args:
        folder: of the attempt on its node.
        local_rank: of the process.
    """
    return folder / f"stacks-{local_rank}.txt"
