"""The table of the checkpoints that exist: what was deleted has left it. Sizes are bytes."""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal

from perdure.storage.checkpoint import (
    MANIFEST_NAME,
    CheckpointStore,
    StepObjects,
    StepState,
    read_manifest,
)
from perdure.storage.verification import VERIFIED_NAME, last_outcome
from perdure.training.journal.history import RunHistory
from perdure.training.reporting.markdown import clock_text
from perdure.training.supervisor.checkpoints import node_tiers, program_saves


def checkpoint_rows(
    checkpoints: CheckpointStore, home: Path, history: RunHistory
) -> list[dict[str, str]]:
    """The checkpoints that exist, newest first, for the UI.

    Args:
        checkpoints: of the run.
        home: Perdure's folder on this machine, whose nodes' tiers can be seen.
        history: of the run.

    Raises:
        StorageError: the store does not answer.
    """
    if history.is_command:
        return [
            {
                "step": str(one.step),
                "saved (UTC)": clock_text(one.written_at_s),
                "size": decimal(one.size_bytes),
                "path": one.path,
                "by attempt": one.attempt,
            }
            for one in reversed(program_saves(history))
            if one.is_kept is not False
        ]
    on_nodes = node_tiers(home, checkpoints.run_id)
    by = {seen.step: f"{seen.placement}.{seen.attempt}" for seen in history.checkpoints}
    return [
        {
            "step": str(one.step),
            "saved (UTC)": clock_text(one.objects[MANIFEST_NAME].modified_s),
            "size": decimal(one.size_bytes),
            "tiers": ", ".join(one.tiers(on_nodes)),
            "verified": _verified_text(checkpoints, one),
            "by attempt": by.get(one.step, ""),
        }
        for one in reversed(checkpoints.list_steps())
        if MANIFEST_NAME in one.objects
    ]


def _verified_text(checkpoints: CheckpointStore, step: StepObjects) -> str:
    if step.state is StepState.SET_ASIDE:
        return "damaged, set aside"
    # Its manifest is read only where it may matter: there may be many, at every look.
    verified = VERIFIED_NAME in step.objects
    manifest = read_manifest(checkpoints, step) if verified else None
    outcome = last_outcome(checkpoints, step, manifest)
    if outcome is None:
        return "when it was written"
    return f"{'intact' if outcome.is_intact else 'damaged'} {clock_text(outcome.verified_at_s)}"
