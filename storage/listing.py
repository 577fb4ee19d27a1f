"""What lies in the folders of a run's checkpoints, read with one listing.

For people and for the collection of garbage; a restore asks `CheckpointStore`. Times are seconds
since the epoch, sizes bytes, steps completed optimizer steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.checkpoint import MANIFEST_NAME, SET_ASIDE_NAME, CheckpointStore, StepState
from storage.checkpoint_server.protocol import Tier
from storage.errors import Corrupt, NotFound
from storage.manifest import Manifest, parse_manifest
from storage.objects import ObjectInfo

_STEP_KEY = re.compile(r"^runs/[^/]+/checkpoints/step-(\d{8,})/(.+)$")


@dataclass(frozen=True, slots=True)
class StepObjects:
    """The objects of one step.

    Attributes:
        objects: by name in the step's folder.
    """

    step: int
    objects: Mapping[str, ObjectInfo]

    @property
    def state(self) -> StepState:
        """What the objects amount to."""
        if SET_ASIDE_NAME in self.objects:
            return StepState.SET_ASIDE
        return StepState.COMMITTED if MANIFEST_NAME in self.objects else StepState.UNCOMMITTED

    @property
    def size_bytes(self) -> int:
        """All objects together."""
        return sum(info.size_bytes for info in self.objects.values())

    @property
    def modified_s(self) -> float:
        """When the newest object was written, by the store's clock."""
        return max(info.modified_s for info in self.objects.values())


def list_steps(checkpoints: CheckpointStore) -> list[StepObjects]:
    """Every step that has an object, ascending."""
    return group_steps(checkpoints.store.list(f"runs/{checkpoints.run_id}/checkpoints/"))


def group_steps(infos: Iterable[ObjectInfo]) -> list[StepObjects]:
    """The objects of step folders among `infos`, by step; others are passed over."""
    found: dict[int, dict[str, ObjectInfo]] = {}
    for info in infos:
        match = _STEP_KEY.match(info.key)
        if match:
            found.setdefault(int(match[1]), {})[match[2]] = info
    return [StepObjects(step, found[step]) for step in sorted(found)]


def read_manifest(checkpoints: CheckpointStore, step: StepObjects) -> Manifest | None:
    """The manifest of a step, also of one that was set aside; None when there is no readable one.

    Raises:
        StorageError: the store does not answer; says nothing of the manifest.
    """
    if MANIFEST_NAME not in step.objects:
        return None
    key = checkpoints.key(step.step, MANIFEST_NAME)
    try:
        return parse_manifest(checkpoints.store.get(key), url=checkpoints.store.url(key))
    except (NotFound, Corrupt):
        return None  # deleted since it was listed, or damaged


def set_aside_reason(checkpoints: CheckpointStore, step: StepObjects) -> str | None:
    """Why a step was set aside; None when it was not."""
    if SET_ASIDE_NAME not in step.objects:
        return None
    try:
        record = json.loads(checkpoints.store.get(checkpoints.key(step.step, SET_ASIDE_NAME)))
        return str(record["reason"])
    except (NotFound, ValueError, LookupError, TypeError):
        return "its record cannot be read"


def tiers_of(step: StepObjects, on_nodes: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """Where a step can be restored from, nearest first.

    Args:
        step: its objects in the store.
        on_nodes: tiers of the nodes per step.
    """
    in_store = (Tier.STORE,) if step.state is StepState.COMMITTED else ()
    return (*on_nodes.get(step.step, ()), *in_store)
