"""Checkpoints of a command in the run's store, for nodes whose disks are their own.

    runs/<run_id>/program/step-00000040/p0001-a0002/member-0/...
    runs/<run_id>/program/last.json    the last attempt of which member 0 stores no more

Each node puts there what it has saved itself, the newest first and whole, and a node that lacks
the checkpoint from which its command goes on gets its own member's. Where all nodes save the
same, that of another member will do; where each has a part, parts of one attempt belong together.
Steps are completed optimizer steps.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.storage.errors import NotFound
from perdure.storage.file_sets import (
    MANIFEST,
    ChangedMeanwhileError,
    FileSet,
    delete_set,
    get_set,
    get_sets,
    put_nothing,
    put_set,
    read_set,
)
from perdure.storage.objects import ObjectStore
from perdure.training.commands.checkpoint_layouts import (
    ProgramCheckpoint,
    find_checkpoints,
    is_distributed,
    is_self_contained,
    is_unchanged,
    mark_newest,
    rank_folders,
)
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec

LAST = "last.json"
NUM_STORED = 2  # of each member
# Of parts, while other members have not stored theirs of the same saves yet.
NUM_AHEAD = 4
_KEY = re.compile(rf".*/step-(\d{{8,}})/p(\d{{4,}})-a(\d{{4,}})/member-(\d+)/{re.escape(MANIFEST)}")
_log = logging.getLogger("perdure.agent")


@dataclass(frozen=True, slots=True, order=True)
class Save:
    """A step that an attempt has saved; `attempt` is its placement and number."""

    step: int
    attempt: tuple[int, int]


Stored = Mapping[Save, Collection[int]]  # by save the members whose checkpoints are in the store


def save_prefix(run_id: str, save: Save | None = None, member: int = 0) -> str:
    """Where those of a run, or one of them, lie in the store."""
    base = f"runs/{run_id}/program/"
    if save is None:
        return base
    placement, attempt = save.attempt
    return f"{base}step-{save.step:08d}/p{placement:04d}-a{attempt:04d}/member-{member}"


def list_stored_saves(store: ObjectStore, run_id: str) -> dict[Save, list[int]]:
    """By save the members whose checkpoints are in the store.

    Raises:
        StorageError: the store does not answer.
    """
    members_by_save: defaultdict[Save, list[int]] = defaultdict(list)
    for info in store.list(save_prefix(run_id)):
        key = _KEY.fullmatch(info.key)
        if key is not None:
            members_by_save[Save(int(key[1]), (int(key[2]), int(key[3])))].append(int(key[4]))
    return {save: sorted(members) for save, members in sorted(members_by_save.items())}


def note_end(store: ObjectStore, run_id: str, attempt: tuple[int, int]) -> None:
    """Leave for the other members that member 0 has stored all that it will of an attempt.

    Raises:
        StorageError: the store refuses.
    """
    store.put(save_prefix(run_id) + LAST, json.dumps(attempt).encode())


def is_ended(store: ObjectStore, run_id: str, attempt: tuple[int, int]) -> bool:
    """Whether member 0 has stored all that it will of an attempt.

    Raises:
        StorageError: the store does not answer.
    """
    try:
        placement, number = json.loads(store.get(save_prefix(run_id) + LAST))
    except (NotFound, ValueError):
        return False
    return bool((placement, number) >= attempt)


def list_whole_saves(stored: Stored, num_members: int) -> list[Save]:
    """Saves of which every member has stored its part, the oldest first."""
    members = set(range(num_members))
    return sorted(save for save, by in stored.items() if members <= set(by))


def find_surplus(
    stored: Stored, member: int, put: Save, *, keep: int, num_members: int | None
) -> list[Save]:
    """What a member deletes of its own: all but the newest.

    What other attempts have saved is older than that of the current one, also where its steps are
    later: the program did not go on from there.

    Args:
        stored: what there is.
        member: whose.
        put: what it has just stored, which stays.
        keep: how many steps remain, NUM_STORED at least.
        num_members: of checkpoints in parts: the newest one that is whole stays, and of those
            behind it a few more, for one of them becomes whole next; None: each is whole.
    """

    def age(save: Save) -> tuple[bool, Save]:
        return save.attempt == put.attempt, save

    saves = sorted((save for save, by in stored.items() if member in by), key=age)
    remaining = {put, *saves[-max(keep, NUM_STORED) :]}
    if num_members is not None:
        complete = sorted(list_whole_saves(stored, num_members), key=age)[-1:]
        ahead = [save for save in saves if not complete or age(save) > age(complete[0])]
        remaining.update(complete, ahead[-NUM_AHEAD:])
    return [save for save in saves if save not in remaining]


def store_checkpoint(
    store: ObjectStore,
    run_id: str,
    member: int,
    saved: ProgramCheckpoint,
    *,
    attempt: tuple[int, int],
    keep: int,
    num_members: int | None = None,
) -> bool:
    """Put a checkpoint into the store, and delete this member's oldest. Whether it is there.

    Args:
        store: of the run.
        run_id: of the command.
        member: of this node.
        saved: the checkpoint, or this node's part of it; without bytes where it has none.
        attempt: that has saved it, placement and number.
        keep: how many of the run remain.
        num_members: of a checkpoint that is in parts; None: all nodes save the same.

    Raises:
        StorageError: the store refuses.
    """
    save = Save(saved.step, attempt)
    prefix = save_prefix(run_id, save, member)
    try:
        _put(store, prefix, saved)
    except ChangedMeanwhileError as error:
        _log.info(f"step {saved.step} of the command is not put into the store: {error}")
        return False
    except OSError as error:
        _log.warning(f"step {saved.step} of the command cannot be read: {error}")
        return False
    stored = list_stored_saves(store, run_id)
    for old in find_surplus(stored, member, save, keep=keep, num_members=num_members):
        delete_set(store, save_prefix(run_id, old, member))
    return True


def _put(store: ObjectStore, prefix: str, saved: ProgramCheckpoint) -> None:
    if not is_unchanged(saved):
        raise ChangedMeanwhileError(f"{saved.path} is not what it was when it was complete")
    if saved.size_bytes:
        put_set(store, prefix, saved.path, written_s=saved.written_s)
    else:
        put_nothing(store, prefix, saved.path, written_s=saved.written_s)


def fetch_checkpoint(
    store: ObjectStore,
    run_id: str,
    member: int,
    step: int,
    *,
    spec: ProgramCheckpointsSpec,
    root: Path,
) -> bool:
    """Have the checkpoint of a step on this node, of which any node's is whole; whether it came.

    Raises:
        StorageError: the store does not answer, or has it damaged.
        OSError: it cannot be written.
    """
    if any(saved.step == step for saved in find_checkpoints(spec, root, now_s=time.time())):
        return False
    # Of kind glob the last part of the path is the pattern.
    folder = root.parent if spec.kind is CheckpointKind.GLOB else root
    stored = list_stored_saves(store, run_id)
    for save in sorted((save for save in stored if save.step == step), reverse=True):
        members = stored[save]
        for source in sorted(members, key=lambda other: (other != member, other)):
            files: FileSet | None = read_set(store, save_prefix(run_id, save, source))
            if files is None:
                continue
            path = folder / Path(files.path).name
            get_set(store, save_prefix(run_id, save, source), files, path)
            mark_newest(spec, root, step)
            _log.info(
                f"step {step} of the command is brought to {path}, as member {source} saved it"
            )
            return True
    return False


def fetch_part(store: ObjectStore, run_id: str, member: int, save: Save, path: Path) -> None:
    """Have a member's part of a save at a path, and with it what its ranks read of others' parts.

    Raises:
        StorageError: the store does not answer, or lacks it, or has it damaged.
        OSError: it cannot be written.
    """
    prefix, part = _part(store, run_id, save, member)
    sets = [(prefix, part)]
    if needs_other_parts(part):
        donors = sorted(set(list_stored_saves(store, run_id).get(save, [])) - {member})
        parts = (_part(store, run_id, save, donor) for donor in donors)
        sets += [(prefix, _read_by(part, other)) for prefix, other in parts]
    get_sets(store, sets, path)
    origin = f"as member {member} saved it"
    more = ", with files of others" if len(sets) > 1 else ""
    _log.info(f"step {save.step} of the command is brought to {path}, {origin}{more}")


def needs_other_parts(part: FileSet) -> bool:
    """Whether a node with this part reads files of others, too."""
    return not is_self_contained({file.name for file in part.files}, part.folders)


def _read_by(part: FileSet, other: FileSet) -> FileSet:
    """What a node with one part reads of another: by the folders of its ranks, or else all."""
    ranks = rank_folders(part.folders)
    if not ranks or is_distributed(file.name for file in (*part.files, *other.files)):
        return other
    files = tuple(file for file in other.files if Path(file.name).parts[0] in ranks)
    return other.model_copy(update={"files": files})


def _part(store: ObjectStore, run_id: str, save: Save, member: int) -> tuple[str, FileSet]:
    prefix = save_prefix(run_id, save, member)
    part = read_set(store, prefix)
    if part is None:
        raise NotFound(f"{store.url(prefix)}: the part of member {member} is not there")
    return prefix, part
