"""Garbage collection of a run's checkpoints: the decision, and the deletion.

`decide` is pure: a listing, rules and the time go in, removals with their reasons come out.
`carry_out` checks every object again before it removes it. Never removed are:

- the newest two committed steps, and the steps that may be being read;
- a step set aside, which is kept for inspection;
- an uncommitted step that was touched within the age, or that a living attempt may be writing:
  no later step is committed. Whose name its objects bear does not matter: an attempt also publishes
  what the one before it could not.

Times are seconds since the epoch by the store's clock, sizes bytes, steps completed optimizer
steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from perdure.storage.checkpoint import (
    MANIFEST_NAME,
    CheckpointStore,
    StepObjects,
    StepState,
    group_steps,
    read_manifest,
)
from perdure.storage.errors import NotFound
from perdure.storage.objects import ObjectInfo
from perdure.storage.retention import Retention, is_read

MIN_KEPT_STEPS = 2  # the newest, and the one that is taken when it turns out to be damaged
GARBAGE_AFTER_S = 24 * 3600.0  # longer than any save takes
SHARD_SUFFIX = ".safetensors"

_OF_A_RANK = re.compile(r"^p\d{4,}-a\d{4,}-rank\d{5,}\.")
_PROBE = re.compile(r"/probe-[0-9a-f]{32}$")


class RemovalKind(StrEnum):
    """Why something is deleted."""

    RETENTION = "retention"  # a whole checkpoint that the rules give up
    BROKEN_SAVE = "broken_save"  # a step that was never committed
    STRAY_SHARD = "stray_shard"  # in a committed step whose manifest does not name it
    PROBE = "probe"  # left by a storage check that was killed


@dataclass(frozen=True, slots=True)
class Removal:
    """Objects that are deleted together."""

    kind: RemovalKind
    step: int | None
    objects: tuple[ObjectInfo, ...]
    reason: str

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of all objects."""
        return sum(info.size_bytes for info in self.objects)


@dataclass(frozen=True, slots=True)
class Listing:
    """A run's objects, as one listing shows them.

    Attributes:
        steps: all steps that have an object, ascending.
        named: shards that the manifest of a committed step names; a step whose manifest cannot
            be read is missing.
        probes: objects that storage checks left behind.
    """

    steps: tuple[StepObjects, ...]
    named: dict[int, frozenset[str]]
    probes: tuple[ObjectInfo, ...] = ()

    @property
    def committed(self) -> list[int]:
        """Steps that may be restored, ascending."""
        return [s.step for s in self.steps if s.state is StepState.COMMITTED]


@dataclass(frozen=True, slots=True)
class InUse:
    """Checkpoints that other processes may be reading or writing.

    Attributes:
        is_living: an attempt lives, or may live, and saves steps above the newest committed.
        reading: steps that are needed.
        is_restoring: an attempt has started and may be reading any committed step: it walks
            back past damaged ones.
    """

    is_living: bool = True
    reading: frozenset[int] = frozenset()
    is_restoring: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of the deletion.

    Attributes:
        garbage_after_s: age from which what a broken save left is garbage.
        retention: chooses the committed steps to keep; None: all.
    """

    garbage_after_s: float = GARBAGE_AFTER_S
    retention: Retention | None = None

    def __post_init__(self) -> None:
        if not self.garbage_after_s >= 0:
            raise ValueError(f"garbage_after_s={self.garbage_after_s} must not be negative")


def take_listing(checkpoints: CheckpointStore) -> Listing:
    """List a run and read the manifests of its committed steps.

    Raises:
        StorageError: the store does not answer.
    """
    infos = list(checkpoints.store.list(f"runs/{checkpoints.run_id}/"))
    steps = group_steps(infos)
    named: dict[int, frozenset[str]] = {}
    for step in steps:
        if step.state is StepState.COMMITTED and len(step.objects) > 1:
            manifest = read_manifest(checkpoints, step)
            if manifest is not None:
                named[step.step] = frozenset(manifest.shards)
    probes = tuple(info for info in infos if _PROBE.search(info.key))
    return Listing(tuple(steps), named, probes)


def decide(listing: Listing, *, rules: Rules, in_use: InUse, now_s: float) -> list[Removal]:
    """Decide on deletions: retention first, then garbage, each from the oldest step on."""
    before_s = now_s - rules.garbage_after_s
    leased = frozenset(s.step for s in listing.steps if is_read(s, now_s=now_s))
    in_use = replace(in_use, reading=in_use.reading | leased)
    given_up = _given_up(listing.committed, rules.retention, in_use)
    removals: list[Removal] = []
    for step in listing.steps:
        if step.step in given_up:
            objects = tuple(step.objects.values())
            reason = "retention gives it up"
            removals.append(Removal(RemovalKind.RETENTION, step.step, objects, reason))
    newest = max(listing.committed, default=-1)
    for step in listing.steps:
        if step.step not in given_up:
            named = listing.named.get(step.step)
            removals += _garbage_of(step, named, newest, in_use, before_s)
    probes = tuple(info for info in listing.probes if info.modified_s <= before_s)
    if probes:
        removals.append(Removal(RemovalKind.PROBE, None, probes, "left by a storage check"))
    return removals


def carry_out(checkpoints: CheckpointStore, removals: Iterable[Removal]) -> list[Removal]:
    """Delete what was decided on, as far as it is still as it was listed.

    Returns:
        What has been deleted. As often as one likes: what is gone is no error.

    Raises:
        StorageError: the store refuses or does not answer; what came before is deleted.
    """
    done: list[Removal] = []
    for removal in removals:
        if removal.kind is RemovalKind.RETENTION:
            assert removal.step is not None  # noqa: S101 of a whole checkpoint
            checkpoints.delete(removal.step)
            done.append(removal)
            continue
        if removal.kind is RemovalKind.BROKEN_SAVE and _is_committed(checkpoints, removal.step):
            continue
        deleted = tuple(info for info in removal.objects if _delete_unchanged(checkpoints, info))
        if deleted:
            done.append(Removal(removal.kind, removal.step, deleted, removal.reason))
    return done


def abort_uploads(checkpoints: CheckpointStore, older_than_s: float) -> int:
    """Abort the unfinished uploads below a run's folder. Returns their number."""
    return checkpoints.store.abort_uploads(f"runs/{checkpoints.run_id}/", older_than_s)


def totals(removals: Iterable[Removal]) -> str:
    """Number and size of all removed objects, as text."""
    every = list(removals)
    objects = sum(len(removal.objects) for removal in every)
    size_bytes = sum(removal.size_bytes for removal in every)
    return f"{objects} object{'' if objects == 1 else 's'}, {size_bytes} bytes"


def _given_up(
    committed: Sequence[int], retention: Retention | None, in_use: InUse
) -> frozenset[int]:
    if retention is None or in_use.is_restoring:
        return frozenset()
    protected = retention.keep(committed) | in_use.reading | set(committed[-MIN_KEPT_STEPS:])
    return frozenset(committed) - protected


def _garbage_of(
    step: StepObjects,
    named: frozenset[str] | None,
    newest: int,
    in_use: InUse,
    before_s: float,
) -> list[Removal]:
    match step.state:
        case StepState.UNCOMMITTED:
            is_behind = step.step < newest
            if step.modified_s > before_s or (in_use.is_living and not is_behind):
                return []
            why = f"step {newest} is committed" if is_behind else "no attempt lives"
            # Shards last: a record without its shard would name what is gone.
            objects = sorted(
                step.objects.values(), key=lambda info: info.key.endswith(SHARD_SUFFIX)
            )
            reason = f"never committed, and {why}"
            return [Removal(RemovalKind.BROKEN_SAVE, step.step, tuple(objects), reason)]
        case StepState.COMMITTED if named is not None:
            strays = tuple(
                info
                for name, info in step.objects.items()
                if _OF_A_RANK.match(name) and name not in named and info.modified_s <= before_s
            )
            reason = "the manifest does not name it"
            return [Removal(RemovalKind.STRAY_SHARD, step.step, strays, reason)] if strays else []
        case _:
            return []


def _is_committed(checkpoints: CheckpointStore, step: int | None) -> bool:
    assert step is not None  # noqa: S101 of a save
    try:
        checkpoints.store.stat(checkpoints.key(step, MANIFEST_NAME))
    except NotFound:
        return False
    return True


def _delete_unchanged(checkpoints: CheckpointStore, listed: ObjectInfo) -> bool:
    """Delete an object unless it was written again since it was listed."""
    try:
        if checkpoints.store.stat(listed.key).etag != listed.etag:
            return False
    except NotFound:
        return False
    checkpoints.store.delete(listed.key)
    return True
