"""The checkpoints of a command on this node, before an attempt and while it runs.

Times are seconds since the epoch, except for limits.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from perdure.storage.address import open_store
from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.commands.arguments import fill_in
from perdure.training.commands.checkpoint_layouts import (
    ProgramCheckpoint,
    Tracker,
    find_checkpoints,
    find_parts,
    find_torn,
    part_path,
    set_aside,
)
from perdure.training.commands.checkpoint_store import (
    MemberCheckpoints,
    list_stored_saves,
)
from perdure.training.commands.megatron import (
    can_be_read_alone,
    parts_of,
    prepare_parts,
    read_record,
)
from perdure.training.commands.mindspore_layouts import name_in_metas
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
from perdure.training.wire.agent import AgentReply, SavedQuery, StartOrder
from perdure.training.wire.agent_status import SavedCheckpoint

POLL_S = 5.0
# Listing many files on a slow file system takes time, and is done more rarely.
POLL_SHARE = 0.02
NUM_REPORTED = 5
EMPTY_ASK_S = 60.0  # how often a node without files asks whether other nodes have saved
_WITH_TRACKER = (CheckpointKind.MEGATRON, CheckpointKind.MINDFORMERS)
SIGN_WAIT_S = 20.0  # at the end of an attempt, for member 0 to have stored its part
_log = logging.getLogger("perdure.agent")


@dataclass(slots=True)
class CommandCheckpointWatcher:
    """Watcher of the checkpoints that the command of one attempt saves.

    Attributes:
        root: the path of the spec, with variables filled in.
        since_s: start of the run; older files are ignored.
        attempt: placement and number.
        num_parts: members that each save a part of every checkpoint; None: all save the same.
        newest: the newest checkpoints of this attempt, oldest first.
    """

    spec: ProgramCheckpointsSpec
    root: Path
    since_s: float
    run_id: str
    member: int
    attempt: tuple[int, int]
    num_parts: int | None
    newest: tuple[SavedCheckpoint, ...] = ()
    _earlier: frozenset[ProgramCheckpoint] | None = None
    _torn: frozenset[ProgramCheckpoint] = frozenset()
    _saves: set[ProgramCheckpoint] = field(default_factory=set)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _upload_lock: threading.Lock = field(default_factory=threading.Lock)
    _uploaded: ProgramCheckpoint | None = None
    _signed_step: int = 0
    _asked_s: float = -math.inf

    @classmethod
    def of(cls, order: StartOrder, member: int, variables: Mapping[str, str]) -> Self | None:
        """Watch an attempt that is about to start; None where its job names no path.

        The first poll belongs before its start: a short life may save at once.

        Args:
            order: order to start the attempt.
            member: member of this node.
            variables: variables of the command.

        Raises:
            ValueError: the path names a variable that is not set.
        """
        job = order.job
        spec = job.program_checkpoints
        if spec is None:
            return None
        root = _checkpoint_root(spec, order.cwd, variables)
        attempt = (order.placement, order.attempt)
        num_parts = order.num_nodes if job.saves_in_parts else None
        return cls(spec, root, order.created_s, job.run_id, member, attempt, num_parts)

    def start(self, open_store: Callable[[], ObjectStore]) -> None:
        """Poll every few seconds until `finish`."""
        threading.Thread(target=self._follow, daemon=True).start()
        if self.spec.upload:
            upload_periodically(
                self.upload, open_store,
                subject="a checkpoint is", every_s=POLL_S, is_over=self._is_over,
            )  # fmt: skip

    def finish(self) -> None:
        """Poll once more: the command saves nothing any more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self.poll()

    def poll(self) -> None:
        """Record new checkpoints; the first poll finds those of earlier attempts."""
        with self._lock:
            try:
                checkpoints = self._list_checkpoints()
                if self._earlier is None:
                    # A later sign does not make the remains of an earlier attempt complete.
                    self._torn = frozenset(self._list_torn())
                    self._earlier = frozenset(checkpoints) | self._torn
            except OSError as error:
                _log.warning(f"worker.checkpoints: {error}")
                return
            checkpoints = [saved for saved in checkpoints if saved not in self._torn]
            self._saves |= {saved for saved in checkpoints if saved not in self._earlier}
            if self._waits_for_sign:
                checkpoints = [saved for saved in checkpoints if saved.step <= self._signed_step]
            else:
                newest = sorted(self._saves, key=_age)[-NUM_REPORTED:]
                self.newest = tuple(map(_to_message, newest))
            if self.spec.keep is not None:
                _delete_oldest(checkpoints, keep=self.spec.keep)

    def upload(self, store: ObjectStore) -> None:
        """Put the newest checkpoint into the store, if the job wants that and the store lacks it.

        Raises:
            StorageError: the store refuses.
            OSError: the record of the parts cannot be read.
        """
        with self._upload_lock:
            newest = self._newest_to_upload(store) if self.spec.upload else None
            if newest is None or newest == self._uploaded:
                return
            checkpoints = MemberCheckpoints(store, self.run_id, self.member)
            keep = self.spec.keep or 0
            if checkpoints.put(newest, attempt=self.attempt, keep=keep, num_members=self.num_parts):
                self._uploaded = newest

    def upload_last(self, store: ObjectStore) -> None:
        """Put the last checkpoint into the store: the command saves nothing any more.

        Other members wait until member 0 has done so, if they may have a part of it.

        Raises:
            StorageError: the store refuses.
            OSError: the record of the parts cannot be read.
        """
        until_s = time.monotonic() + SIGN_WAIT_S
        checkpoints = MemberCheckpoints(store, self.run_id, self.member)
        self.upload(store)
        if self.num_parts is not None and self.member == 0:
            checkpoints.record_end(self.attempt)
        while self._is_unsigned:
            # Asked first: the upload finds all that member 0 stored before.
            is_last = checkpoints.is_ended(self.attempt) or time.monotonic() >= until_s
            self.upload(store)
            if is_last:
                return
            time.sleep(1.0)

    @property
    def _waits_for_sign(self) -> bool:
        """Whether another node has the sign that a part is complete."""
        return self.num_parts is not None and self.member != 0

    @property
    def _is_unsigned(self) -> bool:
        """Whether member 0 may still store a save of which this member has a part, or none."""
        if not self._waits_for_sign or not self.spec.upload:
            return False
        with self._lock:
            # A node whose ranks save nothing cannot see that other nodes have saved.
            return not self._saves or any(saved.step > self._signed_step for saved in self._saves)

    def _list_checkpoints(self) -> list[ProgramCheckpoint]:
        if self._waits_for_sign:
            parts = (part for part in find_parts(self.root) if part.written_s >= self.since_s)
            return sorted(parts, key=lambda part: part.step)
        # Before the start nothing is being written, and after the end nothing is any more.
        is_over = self._earlier is None or self._is_over.is_set()
        return find_checkpoints(
            self.spec, self.root, now_s=time.time(), since_s=self.since_s, is_over=is_over
        )

    def _list_torn(self) -> list[ProgramCheckpoint]:
        if self._waits_for_sign:
            return []
        return find_torn(self.spec, self.root, now_s=time.time(), since_s=self.since_s)

    def _newest_to_upload(self, store: ObjectStore) -> ProgramCheckpoint | None:
        if self._waits_for_sign:
            return self._signed_part(store)
        with self._lock:
            return max(self._saves, key=_age, default=None)

    def _signed_part(self, store: ObjectStore) -> ProgramCheckpoint | None:
        """This node's part of the newest save that member 0 has stored.

        Megatron's sign is written when all ranks are done, and member 0 stores nothing before it.
        A node that never had a file of the attempt has no part of it.
        """
        if not self._may_be_signed():
            return None
        saves = [
            save.step
            for save, members in list_stored_saves(store, self.run_id).items()
            if save.attempt == self.attempt and 0 in members
        ]
        step = max(saves, default=0)
        if step <= self._uploaded_step:
            return None
        if not self._is_over.is_set():
            self.poll()  # the last poll may have seen half of it
        with self._lock:
            self._signed_step = step
            is_empty = not self._saves
            parts = [saved for saved in self._saves if saved.step == step]
        if not is_empty:
            return max(parts, key=_age, default=None)
        if read_record(self.root) is None:
            return None  # its disk is lost, and with it the record of its parts
        return ProgramCheckpoint(step, part_path(self.root, step), 0, time.time())

    def _may_be_signed(self) -> bool:
        """Whether to ask the store, which lists the checkpoints of all members."""
        with self._lock:
            newest = max((saved.step for saved in self._saves), default=None)
        if newest is not None:
            return newest > self._uploaded_step
        # A node whose ranks save nothing cannot see when other nodes do.
        now_s = time.monotonic()
        if now_s - self._asked_s < EMPTY_ASK_S and not self._is_over.is_set():
            return False
        self._asked_s = now_s
        return True

    @property
    def _uploaded_step(self) -> int:
        return self._uploaded.step if self._uploaded is not None else 0

    def _follow(self) -> None:
        pause_s = 0.0
        while not self._is_over.wait(pause_s):
            began_s = time.monotonic()
            self.poll()
            pause_s = max(POLL_S, (time.monotonic() - began_s) / POLL_SHARE)


def watch_checkpoints(order: StartOrder, node: str, member: int) -> CommandCheckpointWatcher | None:
    """Begin to watch an attempt before it starts; None where no path is known before that."""
    try:
        variables = _path_variables(node, order.variables, order.job.run_id)
        watcher = CommandCheckpointWatcher.of(order, member, variables)
    except ValueError:
        return None  # the path names a variable that only the processes have
    if watcher is not None:
        watcher.poll()
    return watcher


def fetch_resume_checkpoint(order: StartOrder, node: str, member: int) -> None:
    """Fetch the checkpoint from which the command resumes, where the store has them.

    Args:
        order: order to start the command.
        node: name of this node.
        member: member of this node.

    Raises:
        StorageError: the store does not answer, or has it damaged.
        OSError: it cannot be written.
        ValueError: the path names a variable that is not set.
    """
    job, step = order.job, order.resume_step
    spec = job.worker.checkpoints
    if spec is None or not spec.upload:
        return
    variables = _path_variables(node, order.variables, job.run_id)
    root = _checkpoint_root(spec, order.cwd, variables)
    store = open_store(job.storage)
    if job.saves_in_parts:
        prepare_parts(store, order, job.run_id, member, root)
    elif step is not None:
        MemberCheckpoints(store, job.run_id, member).fetch(step, spec=spec, root=root)


def _delete_oldest(checkpoints: Sequence[ProgramCheckpoint], *, keep: int) -> None:
    """Delete all but the newest complete checkpoints; another node may do the same."""
    for saved in checkpoints[:-keep]:
        try:
            for path in (*saved.more_files, saved.path):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning(f"step {saved.step} of the command is not deleted: {error}")
            continue
        _log.info(f"step {saved.step} of the command is deleted: {keep} newer ones are kept")


def answer_saved_query(query: SavedQuery, node: str, member: int) -> AgentReply:
    """List the checkpoints of a command for the supervisor that asks this node.

    Saves that were cut short are among them, and so marked, once the command has ended.
    """
    try:
        variables = _path_variables(node, query.variables, query.run_id)
        root = _checkpoint_root(query.spec, query.cwd, variables)
        if query.is_in_parts:
            return AgentReply(saved=tuple(_part_messages(root, query.run_id, member)))
        now_s, since_s, is_over = query.until_s, query.since_s, query.is_over
        whole = find_checkpoints(query.spec, root, now_s=now_s, since_s=since_s, is_over=is_over)
        torn = find_torn(query.spec, root, now_s=now_s, since_s=since_s) if is_over else []
        renamed = [saved for saved in torn if str(saved.path) in query.torn]
        renamed += [saved for saved in (*whole, *torn) if str(saved.path) in query.unreadable]
        _set_aside(renamed, query.spec, root)
    except (OSError, ValueError) as error:
        return AgentReply(error=f"worker.checkpoints: {error}")
    remains = (_to_message(saved).model_copy(update={"is_whole": False}) for saved in torn)
    return AgentReply(saved=(*map(_to_message, whole), *remains))


def _set_aside(
    renamed: Sequence[ProgramCheckpoint],
    spec: ProgramCheckpointsSpec,
    root: Path,
) -> None:
    """Rename checkpoints, and take the program's sign off them."""
    for saved in renamed:
        for path in (*saved.more_files, saved.path):
            new_path = set_aside(path)
            if new_path is not None:
                _log.warning(f"step {saved.step} of the command is set aside: it is {new_path} now")
    if spec.kind.is_of_mindspore and renamed:
        whole = find_checkpoints(spec, root, now_s=time.time(), is_over=True)
        for saved in whole[-1:]:
            name_in_metas((saved.path, *saved.more_files))
    tracker = Tracker(root)
    is_signed = any(saved.step == tracker.step for saved in renamed)
    if spec.kind in _WITH_TRACKER and is_signed:
        # Those of an earlier run, too: without a sign the program would begin anew.
        whole = find_checkpoints(spec, root, now_s=time.time(), is_over=True)
        remaining = [saved.step for saved in whole]
        tracker.write(str(max(remaining)) if remaining else None)


def _part_messages(root: Path, run_id: str, member: int) -> Iterator[SavedCheckpoint]:
    for part in parts_of(read_record(root), root, run_id, member).values():
        path = part_path(root, part.step)
        # A node also needs the other parts of a distributed checkpoint, which are in the store.
        if part.saved_in is not None and can_be_read_alone(path):
            yield SavedCheckpoint(
                step=part.step, path=str(path), size_bytes=part.size_bytes,
                written_s=part.written_s, saved_in=part.saved_in, member=member,
            )  # fmt: skip


def _path_variables(node: str, variables: Mapping[str, str], run_id: str) -> dict[str, str]:
    """Return the variables for a path before an attempt has set those of its processes."""
    return {**os.environ, "PERDURE_NODE": node, "PERDURE_RUN_ID": run_id, **variables}


def _checkpoint_root(spec: ProgramCheckpointsSpec, cwd: str, variables: Mapping[str, str]) -> Path:
    """Return the path where a command saves.

    Raises:
        ValueError: the path names a variable that is not set.
    """
    (path,) = fill_in([spec.path], variables)
    return Path(cwd).absolute() / path


def _age(saved: ProgramCheckpoint) -> tuple[int, float, int]:
    # Also by size: files of one step may have the same time, and are found one by one.
    return saved.step, saved.written_s, saved.size_bytes


def _to_message(saved: ProgramCheckpoint) -> SavedCheckpoint:
    return SavedCheckpoint(
        step=saved.step,
        path=str(saved.path),
        size_bytes=saved.size_bytes,
        written_s=saved.written_s,
    )


def upload_periodically(
    put: Callable[[ObjectStore], None],
    open_store: Callable[[], ObjectStore],
    *,
    subject: str,
    every_s: float,
    is_over: threading.Event,
) -> None:
    """Upload in a thread of its own: an outage of the store delays nothing else.

    Args:
        put: uploads what the store lacks; after a failure it is called again.
        open_store: opens the run's store.
        subject: subject and verb of a warning.
        every_s: time from one call to the next.
        is_over: ends the thread.
    """

    def run() -> None:
        while not is_over.wait(every_s):
            try:
                put(open_store())
            except (StorageError, OSError) as error:  # the node's own disk may fail as well
                _log.warning(f"{subject} put into the store later: {error}")

    threading.Thread(target=run, daemon=True).start()
