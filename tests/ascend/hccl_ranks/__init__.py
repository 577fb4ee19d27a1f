"""Programs that the ranks of a test of HCCL run, and how a test starts them.

A program is a module here: `python -m tests.ascend.hccl_ranks.NAME ARGUMENT ...`, one process a
rank with RANK, WORLD_SIZE and STORE, a file by which the ranks find each other. It prints its
result as JSON in its last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a rank ended.

    Attributes:
        status: its exit status.
        result: what it printed; None where it did not come to that.
        output: all of its output.
        counts: of its calls of HCCL, by name.
    """

    status: int
    result: Any
    output: str
    counts: Mapping[str, int]


def run(
    name: str,
    *arguments: str,
    size: int,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    of_rank: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Ended]:
    """Run a program in `size` processes and wait for all of them.

    Args:
        name: of the module.
        arguments: of the program.
        size: number of ranks.
        folder: an empty one.
        variables: to add to the environment.
        of_rank: likewise, of single ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"{__name__}.{name}", *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "STORE": str(folder / "store"),
                "OMP_NUM_THREADS": "1",
                "ASCEND_EMULATOR_COUNTS": str(folder),
                **(variables or {}),
                **(of_rank or {}).get(rank, {}),
            },
            cwd=ROOT,
            stdout=(folder / f"{rank}.out").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.wait(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
    return [_ended(process, folder, rank) for rank, process in enumerate(processes)]


def results(ended: list[Ended]) -> list[Any]:
    """The results of ranks that all ended well."""
    for rank, one in enumerate(ended):
        assert one.status == 0, f"rank {rank}: {one.output}"
    return [one.result for one in ended]


def read_counts(path: Path) -> dict[str, int]:
    """The counts in a file that the emulator writes; hccl_count.hpp has its format."""
    if not path.exists():
        return {}
    records = path.read_bytes()
    found = (records[at : at + 64] for at in range(0, len(records), 64))
    return {
        one[:56].rstrip(b"\0").decode(): int.from_bytes(one[56:], "little")
        for one in found
        if one[0]
    }


def _ended(process: subprocess.Popen[bytes], folder: Path, rank: int) -> Ended:
    output = (folder / f"{rank}.out").read_text(errors="replace")
    lines = output.splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        result = None
    return Ended(
        process.returncode, result, output, read_counts(folder / f"hccl-{process.pid}.counts")
    )
