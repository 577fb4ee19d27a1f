"""The checkpoints of a command that this node sees, before an attempt and while it runs.

Times are seconds since the epoch.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from storage.address import open_store
from storage.objects import ObjectStore
from training.agent.command_line import fill_in
from training.agent.order_job import job_of
from training.agent.saved_store import bring_back, store_saved
from training.agent.storing import keep_storing
from training.health.program_checkpoints import Saved, find_saved
from training.specs.program_checkpoints import ProgramCheckpointsSpec
from training.wire.agent import AgentReply, SavedCheckpoint, SavedQuery, StartOrder

LOOK_S = 5.0
# A look at many files on a slow file system takes its time, and is taken more rarely.
LOOK_SHARE = 0.02
NUM_TOLD = 5
_log = logging.getLogger("perdure.agent")


@dataclass(slots=True)
class SavedWatch:
    """Looks at what the command of one attempt saves.

    Attributes:
        spec: where.
        root: its path, filled in.
        since_s: what was written before is none of the run.
        newest: the newest that this attempt has saved, oldest first.
        run_id: whose store has them.
        member: of this node.
    """

    spec: ProgramCheckpointsSpec
    root: Path
    since_s: float
    run_id: str
    member: int
    newest: tuple[SavedCheckpoint, ...] = ()
    _before: frozenset[Saved] | None = None
    _known: set[Saved] = field(default_factory=set)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _uploading: threading.Lock = field(default_factory=threading.Lock)
    _uploaded: Saved | None = None

    @classmethod
    def of(cls, order: StartOrder, member: int, variables: Mapping[str, str]) -> Self | None:
        """Of an attempt that is about to start; None where its job names no place.

        Args:
            order: to start it.
            member: of this node.
            variables: of the command.

        Raises:
            ValueError: the path has a name that nothing sets.
        """
        job = job_of(order)
        spec = job.worker.checkpoints
        if spec is None:
            return None
        root = root_of(spec, order.cwd, variables)
        return cls(spec, root, order.created_s, job.run_id, member)

    def start(self, open_store: Callable[[], ObjectStore]) -> None:
        """Look every few seconds from now on, until `finish`."""
        threading.Thread(target=self._follow, daemon=True).start()
        if self.spec.upload:
            keep_storing(
                self.upload, open_store,
                what="a checkpoint is", every_s=LOOK_S, is_over=self._is_over,
            )  # fmt: skip

    def finish(self) -> None:
        """Look once more; nothing saves any more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self.look()

    def look(self) -> None:
        """See what is new; the first look finds what was there before the attempt."""
        with self._looking:
            try:
                found = find_saved(self.spec, self.root, now_s=time.time(), since_s=self.since_s)
            except OSError as error:
                _log.warning(f"worker.checkpoints: {error}")
                return
            if self._before is None:
                self._before = frozenset(found)
            self._known |= {one for one in found if one not in self._before}
            newest = sorted(self._known, key=lambda one: (one.step, one.written_s))[-NUM_TOLD:]
            self.newest = tuple(map(told, newest))
            if self.spec.keep is not None:
                delete_oldest(found, keep=self.spec.keep)

    def upload(self, store: ObjectStore) -> None:
        """Put the newest checkpoint into the store, if that is asked for and it lacks it.

        Raises:
            StorageError: the store refuses.
        """
        with self._uploading:
            with self._looking:  # which adds to them
                newest = max(self._known, key=lambda one: (one.step, one.written_s), default=None)
            if not self.spec.upload or newest is None or newest == self._uploaded:
                return
            keep = self.spec.keep or 0
            if store_saved(store, self.run_id, self.member, newest, keep=keep):
                self._uploaded = newest

    def _follow(self) -> None:
        pause_s = 0.0
        while not self._is_over.wait(pause_s):
            began_s = time.monotonic()
            self.look()
            pause_s = max(LOOK_S, (time.monotonic() - began_s) / LOOK_SHARE)


def have_resumed(order: StartOrder, member: int, variables: Mapping[str, str]) -> None:
    """Have the checkpoint on this node from which its command goes on, where the store keeps them.

    Args:
        order: to start it.
        member: of this node.
        variables: of the command.

    Raises:
        StorageError: the store does not answer, or has it damaged.
        OSError: it cannot be written.
        ValueError: the path has a name that nothing sets.
    """
    job, step = job_of(order), order.resume_step
    spec = job.worker.checkpoints
    if step is None or spec is None or not spec.upload:
        return
    root = root_of(spec, order.cwd, variables)
    store = open_store(job.storage)
    bring_back(store, job.run_id, member, step, spec=spec, root=root)


def delete_oldest(found: Sequence[Saved], *, keep: int) -> None:
    """Delete all but the newest; another node may do the same.

    Args:
        found: the complete ones, oldest first.
        keep: how many remain.
    """
    for one in found[:-keep]:
        try:
            if one.path.is_dir():
                shutil.rmtree(one.path)
            else:
                one.path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning(f"step {one.step} of the command is not deleted: {error}")
            continue
        _log.info(f"step {one.step} of the command is deleted: {keep} newer ones are kept")


def saved_reply(query: SavedQuery, node: str) -> AgentReply:
    """What a supervisor is told that asks this node for them."""
    try:
        root = root_of(query.spec, query.cwd, before_start(node, query.variables))
        found = find_saved(query.spec, root, now_s=query.until_s, since_s=query.since_s)
    except (OSError, ValueError) as error:
        return AgentReply(error=f"worker.checkpoints: {error}")
    return AgentReply(saved=tuple(map(told, found)))


def before_start(node: str, variables: Mapping[str, str]) -> dict[str, str]:
    """What a path may name where no attempt has set the variables of its processes yet."""
    return {**os.environ, "PERDURE_NODE": node, **variables}


def root_of(spec: ProgramCheckpointsSpec, cwd: str, variables: Mapping[str, str]) -> Path:
    """Where a command saves.

    Raises:
        ValueError: the path has a name that nothing sets.
    """
    (path,) = fill_in([spec.path], variables)
    return Path(cwd).absolute() / path


def told(saved: Saved) -> SavedCheckpoint:
    """A checkpoint in the words of the wire."""
    return SavedCheckpoint(
        step=saved.step,
        path=str(saved.path),
        size_bytes=saved.size_bytes,
        written_s=saved.written_s,
    )
