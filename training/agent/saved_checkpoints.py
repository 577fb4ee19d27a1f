"""The checkpoints of a command that this node sees. Times are seconds since the epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from training.agent.command_line import fill_in
from training.health.program_checkpoints import Saved, find_saved
from training.specs.program_checkpoints import ProgramCheckpointsSpec
from training.wire.agent import AgentReply, SavedCheckpoint, SavedQuery


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
