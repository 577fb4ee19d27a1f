"""Checkpoints of a command in the run's store, for nodes whose disks are their own.

    runs/<run_id>/program/step-00000040/p0001-a0002/member-0/...
    runs/<run_id>/program/last.json    the last attempt of which member 0 stores no more

Each node stores what it has saved itself, the newest first and whole, and a node that lacks the
checkpoint from which its command resumes fetches its own member's. If all nodes save the same,
another member's will do; if each has a part, parts of one attempt belong together. Steps are
completed optimizer steps.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
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
    Tracker,
    find_checkpoints,
)
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec

LAST = "last.json"
NUM_STORED = 2  # checkpoints of each member that always remain
# Parts that remain while other members have not stored theirs of the same saves yet.
NUM_AHEAD = 4
RANK_FILE = "model_optim_rng.pt"  # of a rank of tensor and pipeline parallelism
_KEY = re.compile(rf".*/step-(\d{{8,}})/p(\d{{4,}})-a(\d{{4,}})/member-(\d+)/{re.escape(MANIFEST)}")
_log = logging.getLogger("perdure.agent")


@dataclass(frozen=True, slots=True, order=True)
class Save:
    """A step that an attempt has saved; `attempt` is its placement and number."""

    step: int
    attempt: tuple[int, int]


Stored = Mapping[Save, Collection[int]]  # members that have stored a save


def save_prefix(run_id: str, save: Save | None = None, member: int = 0) -> str:
    """Return the key prefix of a run's checkpoints, or of a member's part of one of them."""
    base = f"runs/{run_id}/program/"
    if save is None:
        return base
    placement, attempt = save.attempt
    return f"{base}step-{save.step:08d}/p{placement:04d}-a{attempt:04d}/member-{member}"


def list_stored_saves(store: ObjectStore, run_id: str) -> dict[Save, list[int]]:
    """List the saves in the store, each with the members that have stored it.

    Raises:
        StorageError: the store does not answer.
    """
    members_by_save: defaultdict[Save, list[int]] = defaultdict(list)
    for info in store.list(save_prefix(run_id)):
        key = _KEY.fullmatch(info.key)
        if key is not None:
            members_by_save[Save(int(key[1]), (int(key[2]), int(key[3])))].append(int(key[4]))
    return {save: sorted(members) for save, members in sorted(members_by_save.items())}


def list_whole_saves(stored: Stored, num_members: int) -> list[Save]:
    """List saves of which every member has stored its part, the oldest first."""
    members = set(range(num_members))
    return sorted(save for save, by in stored.items() if members <= set(by))


def find_surplus(
    stored: Stored, member: int, put: Save, *, keep: int, num_members: int | None
) -> list[Save]:
    """List the checkpoints that a member deletes: all of its own but the newest.

    Saves of other attempts are older than those of the current one, even if their steps are later:
    the program did not go on from there.

    Args:
        stored: all saves in the store.
        member: member whose checkpoints are deleted.
        put: save that it has just stored, which remains.
        keep: how many steps remain, NUM_STORED at least.
        num_members: number of parts: the newest whole save remains, and a few later ones, for one
            of them becomes whole next; None: each member's checkpoint is whole.
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


@dataclass(frozen=True, slots=True)
class MemberCheckpoints:
    """A member's checkpoints of a command in the run's store."""

    store: ObjectStore
    run_id: str
    member: int

    def record_end(self, attempt: tuple[int, int]) -> None:
        """Record for the other members that member 0 has stored all that it will of an attempt.

        Raises:
            StorageError: the store refuses.
        """
        self.store.put(save_prefix(self.run_id) + LAST, json.dumps(attempt).encode())

    def is_ended(self, attempt: tuple[int, int]) -> bool:
        """Whether member 0 has stored all that it will of an attempt.

        Raises:
            StorageError: the store does not answer.
        """
        try:
            placement, number = json.loads(self.store.get(save_prefix(self.run_id) + LAST))
        except (NotFound, ValueError):
            return False
        return bool((placement, number) >= attempt)

    def put(
        self,
        saved: ProgramCheckpoint,
        *,
        attempt: tuple[int, int],
        keep: int,
        num_members: int | None = None,
    ) -> bool:
        """Put a checkpoint into the store, and delete the oldest. Returns whether it is there.

        Args:
            saved: the checkpoint, or this member's part of it; without bytes if it has none.
            attempt: placement and number of the attempt that saved it.
            keep: how many steps remain.
            num_members: number of parts; None: all nodes save the same.

        Raises:
            StorageError: the store refuses.
        """
        save = Save(saved.step, attempt)
        prefix = save_prefix(self.run_id, save, self.member)
        try:
            _put_unchanged(self.store, prefix, saved)
        except ChangedMeanwhileError as error:
            _log.info(f"step {saved.step} of the command is not put into the store: {error}")
            return False
        except OSError as error:
            _log.warning(f"step {saved.step} of the command cannot be read: {error}")
            return False
        stored = list_stored_saves(self.store, self.run_id)
        for old in find_surplus(stored, self.member, save, keep=keep, num_members=num_members):
            delete_set(self.store, save_prefix(self.run_id, old, self.member))
        return True

    def fetch(self, step: int, *, spec: ProgramCheckpointsSpec, root: Path) -> bool:
        """Fetch the checkpoint of a step, where every node's is whole. Returns whether it came.

        Raises:
            StorageError: the store does not answer, or has it damaged.
            OSError: it cannot be written.
        """
        present = find_checkpoints(spec, root, now_s=time.time(), is_over=True)
        if any(saved.step == step for saved in present):
            return False
        # The last part of a glob's path is the pattern.
        folder = root.parent if spec.kind is CheckpointKind.GLOB else root
        stored = list_stored_saves(self.store, self.run_id)
        for save in sorted((save for save in stored if save.step == step), reverse=True):
            for member in sorted(stored[save], key=lambda number: (number != self.member, number)):
                prefix = save_prefix(self.run_id, save, member)
                files: FileSet | None = read_set(self.store, prefix)
                if files is None:
                    continue
                path = folder / Path(files.path).name
                get_set(self.store, prefix, files, path)
                if spec.kind is CheckpointKind.MEGATRON:
                    Tracker(root).write(str(step))
                _note_fetched(step, path, member)
                return True
        return False

    def fetch_part(self, save: Save, path: Path) -> None:
        """Fetch this member's part of a save, and the files that its ranks read of other parts.

        Raises:
            StorageError: the store does not answer, or lacks it, or has it damaged.
            OSError: it cannot be written.
        """
        prefix, part = self._part(save, self.member)
        sets = [(prefix, part)]
        if needs_other_parts(part):
            stored = list_stored_saves(self.store, self.run_id)
            donors = sorted(set(stored.get(save, [])) - {self.member})
            parts = (self._part(save, donor) for donor in donors)
            sets += [(prefix, _select_files(part, other)) for prefix, other in parts]
        get_sets(self.store, sets, path)
        _note_fetched(
            save.step, path, self.member, ", with files of others" if len(sets) > 1 else ""
        )

    def _part(self, save: Save, member: int) -> tuple[str, FileSet]:
        prefix = save_prefix(self.run_id, save, member)
        part = read_set(self.store, prefix)
        if part is None:
            raise NotFound(f"{self.store.url(prefix)}: the part of member {member} is not there")
        return prefix, part


def _put_unchanged(store: ObjectStore, prefix: str, saved: ProgramCheckpoint) -> None:
    if not saved.is_unchanged():
        raise ChangedMeanwhileError(f"{saved.path} has changed since it was complete")
    put = put_set if saved.size_bytes else put_nothing
    put(store, prefix, saved.path, written_s=saved.written_s)


def _note_fetched(step: int, path: Path, member: int, more: str = "") -> None:
    _log.info(
        f"step {step} of the command was fetched to {path}, as member {member} saved it{more}"
    )


def needs_other_parts(part: FileSet) -> bool:
    """Whether a node with this part also reads files of other parts."""
    return not is_self_contained({file.name for file in part.files}, part.folders)


def _select_files(part: FileSet, other: FileSet) -> FileSet:
    """Select what a node with a part reads of another: the folders of its ranks, or else all."""
    ranks = _rank_folders(part.folders)
    if not ranks or _is_distributed(file.name for file in (*part.files, *other.files)):
        return other
    files = tuple(file for file in other.files if Path(file.name).parts[0] in ranks)
    return other.model_copy(update={"files": files})


def _is_distributed(names: Iterable[str]) -> bool:
    """Whether files are those of `torch_dist`, of which every rank reads all files."""
    return any(name.endswith((".distcp", ".metadata")) for name in names)


def _rank_folders(names: Iterable[str]) -> list[str]:
    """Select the folders of ranks of tensor and pipeline parallelism."""
    return [name for name in names if name.startswith("mp_rank_")]


def is_self_contained(names: Collection[str], folders: Iterable[str]) -> bool:
    """Whether a part has all that the ranks of its node read.

    A rank that is a replica of a rank on another node, or has a share of the optimizer, has a
    folder here, but the file of the model is missing.

    Args:
        names: the part's files, relative to the folder of the step.
        folders: folders directly in that folder, also empty ones.
    """
    ranks = _rank_folders(folders)
    has_all = all(f"{folder}/{RANK_FILE}" in names for folder in ranks)
    return bool(ranks) and has_all and not _is_distributed(names)
