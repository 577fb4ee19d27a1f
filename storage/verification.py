"""Reading a checkpoint from end to end, and the recorded outcome of the last time.

`verified.json` in the step's folder holds the outcome of the newest verification. It names the
save that was read, so that a step which was set aside and saved again does not inherit it. Times
are seconds since the epoch, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError

from perdure.storage.checkpoint import CheckpointStore, Damage, StepObjects
from perdure.storage.errors import NotFound
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.manifest import Manifest

VERIFIED_NAME = "verified.json"


class Verified(FrozenModel):
    """The outcome of one verification.

    Attributes:
        written_at_s: time in the manifest; None when it could not be read.
        size_bytes: sum of the shards that the manifest names.
    """

    step: int
    verified_at_s: float
    written_at_s: float | None
    size_bytes: int
    damages: tuple[Damage, ...]

    @property
    def is_intact(self) -> bool:
        """Whether everything was as published."""
        return not self.damages


def verify(
    checkpoints: CheckpointStore,
    step: int,
    manifest: Manifest | None,
    *,
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> Verified:
    """Read and hash every shard of a committed step. Nothing is written.

    Args:
        checkpoints: checkpoints of the run, in the store.
        step: a committed step.
        manifest: manifest of the step; None when it cannot be read, which is a damage.
        on_bytes: called with the size of every piece that was read.

    Raises:
        NotFound: the step was removed meanwhile.
        StorageError: the store does not answer; the checkpoint may be whole.
    """
    damages = checkpoints.verify(step, on_bytes=on_bytes)
    if damages and step not in checkpoints.states():
        raise NotFound(f"{checkpoints.url(step)}: was removed while it was read")
    return Verified(
        step=step,
        verified_at_s=checkpoints.clock(),
        written_at_s=manifest.written_at_s if manifest is not None else None,
        size_bytes=manifest.size_bytes if manifest is not None else 0,
        damages=tuple(damages),
    )


def record(checkpoints: CheckpointStore, outcome: Verified) -> None:
    """Keep an outcome with the step."""
    key = checkpoints.key(outcome.step, VERIFIED_NAME)
    checkpoints.store.put(key, outcome.model_dump_json().encode())


def last_outcome(
    checkpoints: CheckpointStore, step: StepObjects, manifest: Manifest | None
) -> Verified | None:
    """Outcome of the newest verification of this very save; None when it was never verified."""
    if VERIFIED_NAME not in step.objects:
        return None
    try:
        data = checkpoints.store.get(checkpoints.key(step.step, VERIFIED_NAME))
        outcome = Verified.model_validate_json(data)
    except (NotFound, ValidationError):
        return None  # deleted since it was listed, or of another version
    written_at_s = manifest.written_at_s if manifest is not None else None
    return outcome if outcome.written_at_s == written_at_s else None
