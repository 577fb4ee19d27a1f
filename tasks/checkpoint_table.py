"""Table of the checkpoints that exist; deleted checkpoints leave it. Sizes are bytes."""

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
        checkpoints: checkpoints of the run, in the store.
        home: Perdure's folder on this machine, whose nodes' tiers can be seen.
        history: ledger of the run, as read.

    Raises:
        StorageError: the store does not answer.
    """
    if history.is_command:
        return [
            {
                "step": str(save.step),
                "saved (UTC)": clock_text(save.written_at_s),
                "size": decimal(save.size_bytes),
                "path": save.path,
                "by attempt": save.attempt,
            }
            for save in reversed(program_saves(history))
            if save.is_kept is not False
        ]
    on_nodes = node_tiers(home, checkpoints.run_id)
    by = {record.step: f"{record.placement}.{record.attempt}" for record in history.checkpoints}
    return [
        {
            "step": str(step.step),
            "saved (UTC)": clock_text(step.objects[MANIFEST_NAME].modified_s),
            "size": decimal(step.size_bytes),
            "tiers": ", ".join(step.tiers(on_nodes)),
            "verified": _verified_text(checkpoints, step),
            "by attempt": by.get(step.step, ""),
        }
        for step in reversed(checkpoints.list_steps())
        if MANIFEST_NAME in step.objects
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
