"""The checkpoints of a command that this node sees, before an attempt and while it runs.

Times are seconds since the epoch.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from training.agent.command_line import fill_in
from training.health.program_checkpoints import Saved, find_saved
from training.job import Job
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
    """

    spec: ProgramCheckpointsSpec
    root: Path
    since_s: float
    newest: tuple[SavedCheckpoint, ...] = ()
    _before: frozenset[Saved] = frozenset()
    _known: set[Saved] = field(default_factory=set)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _looking: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, order: StartOrder, variables: Mapping[str, str]) -> Self | None:
        """Of an attempt that is about to start; None where its job names no place.

        Args:
            order: to start it.
            variables: of the command.

        Raises:
            OSError: what is there cannot be read.
            ValueError: the path has a name that nothing sets.
        """
        spec = Job.model_validate_json(order.job).worker.checkpoints if order.is_command else None
        if spec is None:
            return None
        root = root_of(spec, order.cwd, variables)
        before = find_saved(spec, root, now_s=time.time())
        return cls(spec, root, order.created_s, _before=frozenset(before))

    def start(self) -> None:
        """Look every few seconds from now on, until `finish`."""
        threading.Thread(target=self._follow, daemon=True).start()

    def finish(self) -> None:
        """Look once more; nothing saves any more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self.look()

    def look(self) -> None:
        """See what is new."""
        with self._looking:
            try:
                found = find_saved(self.spec, self.root, now_s=time.time(), since_s=self.since_s)
            except OSError as error:
                _log.warning(f"worker.checkpoints: {error}")
                return
            self._known |= {one for one in found if one not in self._before}
            newest = sorted(self._known, key=lambda one: (one.step, one.written_s))[-NUM_TOLD:]
            self.newest = tuple(map(told, newest))
            if self.spec.keep is not None:
                delete_oldest(found, keep=self.spec.keep)

    def _follow(self) -> None:
        pause_s = LOOK_S
        while not self._is_over.wait(pause_s):
            began_s = time.monotonic()
            self.look()
            pause_s = max(LOOK_S, (time.monotonic() - began_s) / LOOK_SHARE)


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


def saved_reply(query: SavedQuery) -> AgentReply:
    """What a supervisor is told that asks for them."""
    try:
        root = root_of(query.spec, query.cwd, {**os.environ, **query.variables})
        found = find_saved(query.spec, root, now_s=query.until_s, since_s=query.since_s)
    except (OSError, ValueError) as error:
        return AgentReply(error=f"worker.checkpoints: {error}")
    return AgentReply(saved=tuple(map(told, found)))


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
