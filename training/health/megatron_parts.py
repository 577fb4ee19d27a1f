"""Megatron-LM's layout of checkpoints: the folders of its steps, and what one node has of them.

    latest_checkpointed_iteration.txt    the sign, which rank 0 writes last
    iter_0000040/mp_rank_00/model_optim_rng.pt

Steps are completed optimizer steps.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from perdure.training.files import write_whole
from perdure.training.health.saved_files import Saved, measured

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"  # of a rank of tensor and pipeline parallelism
_ITERATION = re.compile(r"iter_(\d{7,})")


def find_parts(root: Path) -> Iterator[Saved]:
    """A node's own folders of steps, whether or not they are complete."""
    for path in root.glob("iter_*"):
        step = _ITERATION.fullmatch(path.name)
        if step is not None:
            yield from measured(int(step[1]), path)


def part_path(root: Path, step: int) -> Path:
    """Where Megatron-LM saves a step."""
    return root / f"iter_{step:07d}"


def is_distributed(names: Iterable[str]) -> bool:
    """Whether files are those of `torch_dist`, of which every rank reads all that others wrote."""
    return any(name.endswith((".distcp", ".metadata")) for name in names)


def rank_folders(names: Iterable[str]) -> list[str]:
    """Those of ranks of tensor and pipeline parallelism."""
    return [one for one in names if one.startswith("mp_rank_")]


def is_enough(names: Collection[str], folders: Iterable[str]) -> bool:
    """Whether a part has all that the ranks of its node read.

    Where a rank is a replica of one on another node, or has a share of the optimizer, there is a
    folder for it, and the file of the model is missing.

    Args:
        names: of its files, relative to the folder of the step.
        folders: those directly in that, also empty ones.
    """
    ranks = rank_folders(folders)
    has_all = all(f"{one}/{RANK_FILE}" in names for one in ranks)
    return bool(ranks) and has_all and not is_distributed(names)


def tracker_text(root: Path) -> str | None:
    """What the program's sign of a complete checkpoint says; None where there is none."""
    try:
        return (root / TRACKER).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def tracked_step(root: Path) -> int | None:
    """The iteration that the program's sign names."""
    text = tracker_text(root)
    return int(text) if text is not None and text.isdecimal() else None


def set_tracker(root: Path, text: str | None) -> None:
    """Have the program's sign say this; None: be gone.

    Raises:
        OSError: it cannot be written.
    """
    if text is None:
        (root / TRACKER).unlink(missing_ok=True)
    else:
        write_whole(root / TRACKER, text)
