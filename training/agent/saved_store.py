"""Checkpoints of a command in the run's store, for nodes whose disks are their own.

    runs/<run_id>/program/step-00000040/member-0/...

Each node puts there what it has saved itself, the newest first and whole, and a node that lacks
the checkpoint from which its command goes on gets its own member's, or that of another member.
Steps are completed optimizer steps.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from pathlib import Path

from storage.file_sets import (
    MANIFEST,
    ChangedMeanwhileError,
    FileSet,
    delete_set,
    get_set,
    put_set,
    read_set,
)
from storage.objects import ObjectStore
from training.health.program_checkpoints import Saved, find_saved, mark_newest
from training.specs.program_checkpoints import ProgramCheckpointsSpec

NUM_STORED = 2  # of each member
_KEY = re.compile(rf".*/step-(\d{{8,}})/member-(\d+)/{re.escape(MANIFEST)}")
_log = logging.getLogger("perdure.agent")


def prefix_of(run_id: str, step: int | None = None, member: int = 0) -> str:
    """Where those of a run, or one of them, lie in the store."""
    base = f"runs/{run_id}/program/"
    return f"{base}step-{step:08d}/member-{member}" if step is not None else base


def stored_steps(store: ObjectStore, run_id: str) -> dict[int, list[int]]:
    """By step the members whose checkpoints are in the store.

    Raises:
        StorageError: the store does not answer.
    """
    found: defaultdict[int, list[int]] = defaultdict(list)
    for info in store.list(prefix_of(run_id)):
        key = _KEY.fullmatch(info.key)
        if key is not None:
            found[int(key[1])].append(int(key[2]))
    return {step: sorted(members) for step, members in found.items()}


def store_saved(store: ObjectStore, run_id: str, member: int, saved: Saved, *, keep: int) -> bool:
    """Put a checkpoint into the store, and delete this member's oldest. Whether it is there.

    Raises:
        StorageError: the store refuses.
    """
    try:
        put_set(store, prefix_of(run_id, saved.step, member), saved.path, written_s=saved.written_s)
    except ChangedMeanwhileError as error:
        _log.info(f"step {saved.step} of the command is not put into the store: {error}")
        return False
    own = sorted(step for step, by in stored_steps(store, run_id).items() if member in by)
    for step in own[: -max(keep, NUM_STORED)]:
        delete_set(store, prefix_of(run_id, step, member))
    return True


def bring_back(
    store: ObjectStore,
    run_id: str,
    member: int,
    step: int,
    *,
    spec: ProgramCheckpointsSpec,
    root: Path,
) -> bool:
    """Have the checkpoint of a step on this node; whether it had to be brought.

    Raises:
        StorageError: the store does not answer, or has it damaged.
        OSError: it cannot be written.
    """
    if any(one.step == step for one in find_saved(spec, root, now_s=time.time())):
        return False
    members = stored_steps(store, run_id).get(step, [])
    for one in [member] * (member in members) + [other for other in members if other != member]:
        made: FileSet | None = read_set(store, prefix_of(run_id, step, one))
        if made is None:
            continue
        path = root / Path(made.path).name
        get_set(store, prefix_of(run_id, step, one), made, path)
        mark_newest(spec, root, step)
        _log.info(f"step {step} of the command is brought to {path}, as member {one} saved it")
        return True
    return False
