"""The checkpoints of one run: their layout, the commit protocol, and whether they are whole.

    runs/<run_id>/fence.json                                       who may publish
    runs/<run_id>/checkpoints/step-00001200/p0002-a0001-rank00003.safetensors
    runs/<run_id>/checkpoints/step-00001200/manifest.json          the commit marker, written last
    runs/<run_id>/checkpoints/step-00001200/set-aside.json         found damaged: never offered

Invariant: a step is offered if and only if it has a manifest and was not set aside. Sizes are
bytes, times seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import xxhash
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from pydantic_core import from_json

from perdure.storage.errors import Corrupt, NotFound, PreconditionFailed, StaleAttempt
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.manifest import (
    Manifest,
    RunId,
    ShardRecord,
    checksummed,
    digest,
    parse_manifest,
    verified_document,
)
from perdure.storage.objects import ObjectInfo, ObjectStore

MANIFEST_NAME = "manifest.json"
SET_ASIDE_NAME = "set-aside.json"
FENCE_NAME = "fence.json"
VERIFY_BLOCK_BYTES = 16 * 2**20
OnBytes = Callable[[int], None]  # gets the size of every piece that was read
_STEP_KEY = re.compile(r"^runs/[^/]+/checkpoints/step-(\d{8,})/(.+)$")
_RUN_ID: TypeAdapter[str] = TypeAdapter(RunId)


class StepState(StrEnum):
    """State of a step, read from the objects in its folder."""

    COMMITTED = "committed"
    SET_ASIDE = "set_aside"
    UNCOMMITTED = "uncommitted"  # being written, or its writer died


class Tier(StrEnum):
    """Places that hold a checkpoint, nearest first."""

    MEMORY = "memory"
    DISK = "disk"
    STORE = "store"


class DamageKind(StrEnum):
    """Difference between an object and its published bytes."""

    MISSING = "missing"
    TRUNCATED = "truncated"
    HASH_DIFFERS = "hash_differs"
    UNREADABLE = "unreadable"  # no manifest, or the medium fails


@dataclass(frozen=True, slots=True)
class Damage:
    """An object of a checkpoint that differs from the published one."""

    file: str
    kind: DamageKind
    detail: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """A step that was found damaged and taken out of the choice."""

    step: int
    damages: tuple[Damage, ...]

    @property
    def reason(self) -> str:
        """Every damage on one line, for records."""
        return "; ".join(f"{damage.file} {damage.kind}: {damage.detail}" for damage in self.damages)


@dataclass(frozen=True, slots=True)
class StepObjects:
    """The objects of one step.

    Attributes:
        objects: objects by their names in the step's folder.
    """

    step: int
    objects: Mapping[str, ObjectInfo]

    @property
    def state(self) -> StepState:
        """State that follows from the names of the objects."""
        if SET_ASIDE_NAME in self.objects:
            return StepState.SET_ASIDE
        return StepState.COMMITTED if MANIFEST_NAME in self.objects else StepState.UNCOMMITTED

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of all objects."""
        return sum(info.size_bytes for info in self.objects.values())

    @property
    def modified_s(self) -> float:
        """Time of the newest object, by the store's clock."""
        return max(info.modified_s for info in self.objects.values())

    def tiers(self, on_nodes: Mapping[int, Sequence[Tier]]) -> tuple[Tier, ...]:
        """Tiers that can restore the step, nearest first.

        Args:
            on_nodes: tiers of the nodes, by step.
        """
        in_store = (Tier.STORE,) if self.state is StepState.COMMITTED else ()
        return (*on_nodes.get(self.step, ()), *in_store)


class _Fence(FrozenModel):
    placement: NonNegativeInt
    attempt: NonNegativeInt
    first_container: NonNegativeInt = 0

    @property
    def owner(self) -> tuple[int, int]:
        return self.placement, self.attempt

    @property
    def order(self) -> tuple[int, int, int]:
        return self.placement, self.attempt, self.first_container


class CheckpointStore:
    """The checkpoints of `run_id` in `store`.

    Args:
        store: store that holds the run.
        run_id: letters, digits, '.', '_' and '-'.
        clock: wall time in seconds, for records.
        first_container: MA_SCHEDULE_CNT of the first node's container, which commits, in processes
            of that container; None in all others.

    Raises:
        ValueError: `run_id` cannot be part of a key.
    """

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        *,
        clock: Callable[[], float] = time.time,
        first_container: int | None = None,
    ) -> None:
        self.store = store
        self.run_id = _RUN_ID.validate_python(run_id)
        self.clock = clock
        self._first_container = first_container

    def commit(self, manifest: Manifest) -> None:
        """Publish a checkpoint whose shards are all written.

        Raises:
            StaleAttempt: a newer attempt owns the run.
            PreconditionFailed: that step is committed already.
            ValueError: the manifest is of another run.
        """
        if manifest.run_id != self.run_id:
            raise ValueError(f"manifest of run {manifest.run_id!r} in store of {self.run_id!r}")
        self.check_may_commit(manifest.step, manifest.placement, manifest.attempt)
        self._clear_set_aside(manifest.step)
        # The check above guards stores that ignore if_absent, this one against racing writers.
        self.store.put(self.key(manifest.step, MANIFEST_NAME), manifest.to_bytes(), if_absent=True)

    def check_may_commit(self, step: int, placement: int, attempt: int) -> None:
        """Raise what `commit` would raise, before any shard is written.

        A second save of a committed step must not begin: the same attempt uses the same shard
        names, and would overwrite what the manifest lists.
        """
        fence = self._held_fence()
        if fence is not None and (placement, attempt) < fence.owner:
            raise StaleAttempt(
                f"run {self.run_id}: placement {placement} attempt {attempt} is older than "
                f"placement {fence.placement} attempt {fence.attempt}, which owns the run"
            )
        container = self._first_container
        if fence is not None and container is not None and container < fence.first_container:
            raise StaleAttempt(
                f"run {self.run_id}: the first node's member has moved to its container "
                f"{fence.first_container}, and this is container {container}"
            )
        if self._exists(step, MANIFEST_NAME) and not self._exists(step, SET_ASIDE_NAME):
            raise PreconditionFailed(f"{self.url(step)}: committed already")

    def fence(self, placement: int, attempt: int, *, first_container: int = 0) -> None:
        """Let nothing older than (placement, attempt) publish from now on.

        Args:
            placement: placement that owns the run from now on.
            attempt: number of the attempt on it.
            first_container: MA_SCHEDULE_CNT of the first node's container; what is left of one
                before, on a node that was cut off in the same attempt, may not commit either.

        A commit that passed its check a moment before can still land. It is whole and of this
        run, so it does no harm; the new attempt gets PreconditionFailed if it saves that step.

        Raises:
            StaleAttempt: the fence is already beyond (placement, attempt).
        """
        held = self._held_fence()
        wanted = _Fence(placement=placement, attempt=attempt, first_container=first_container)
        if held is not None and held.order > wanted.order:
            raise StaleAttempt(
                f"run {self.run_id}: cannot fence for placement {placement} attempt {attempt}: "
                f"placement {held.placement} attempt {held.attempt} owns the run"
            )
        if held != wanted:
            self.store.put(self._fence_key(), checksummed(wanted.model_dump_json()))

    def read_fence(self) -> tuple[int, int] | None:
        """(placement, attempt) that may publish; None before the first `fence`.

        Raises:
            Corrupt: the object is not what `fence` writes.
        """
        held = self._held_fence()
        return held.owner if held is not None else None

    def _held_fence(self) -> _Fence | None:
        try:
            data = self.store.get(self._fence_key())
        except NotFound:
            return None
        try:
            return _Fence.model_validate_json(
                verified_document(data, url=self.store.url(self._fence_key()))
            )
        except ValidationError as exc:
            raise Corrupt(f"{self.store.url(self._fence_key())}: not a fence") from exc

    def list_steps(self) -> list[StepObjects]:
        """List the steps that have any object, ascending; one listing."""
        return group_steps(self.store.list(f"runs/{self.run_id}/checkpoints/"))

    def states(self) -> dict[int, StepState]:
        """State of each step that has any object, ascending."""
        return {objects.step: objects.state for objects in self.list_steps()}

    def steps(self) -> list[int]:
        """Steps that may be restored, ascending."""
        return [step for step, state in self.states().items() if state is StepState.COMMITTED]

    def latest(self, *, below_step: int | None = None) -> int | None:
        """The newest step that may be restored, below `below_step` if given."""
        return max((s for s in self.steps() if below_step is None or s < below_step), default=None)

    def manifest(self, step: int) -> Manifest:
        """The manifest of a committed step.

        Raises:
            NotFound: not committed, or set aside.
            Corrupt: the object is not a manifest of this run and step.
        """
        if self._exists(step, SET_ASIDE_NAME):
            raise NotFound(f"{self.url(step)}: was set aside")
        key = self.key(step, MANIFEST_NAME)
        manifest = parse_manifest(self.store.get(key), url=self.store.url(key))
        if (manifest.run_id, manifest.step) != (self.run_id, step):
            raise Corrupt(
                f"{self.store.url(key)}: is of run {manifest.run_id!r} step {manifest.step}"
            )
        return manifest

    def verify(self, step: int, *, on_bytes: OnBytes = lambda _count: None) -> list[Damage]:
        """Read every shard of a committed step and compare; empty when it is whole.

        Raises:
            StorageError: the store does not answer or refuses; the checkpoint may be whole.
        """
        try:
            manifest = self.manifest(step)
        except NotFound as exc:
            return [Damage(MANIFEST_NAME, DamageKind.MISSING, str(exc))]
        except Corrupt as exc:
            return [Damage(MANIFEST_NAME, DamageKind.UNREADABLE, str(exc))]
        return self.verify_shards(step, manifest.shards, on_bytes=on_bytes)

    def set_aside(self, step: int, reason: str) -> None:
        """Stop offering a step, but keep its objects for inspection."""
        record = {"step": step, "reason": reason, "set_aside_at_s": self.clock()}
        self.store.put(self.key(step, SET_ASIDE_NAME), json.dumps(record).encode())

    def delete(self, step: int) -> None:
        """Remove a step: its manifest first, so that no half of it is ever offered."""
        self.store.delete(self.key(step, MANIFEST_NAME))
        for info in self._objects(step).values():
            self.store.delete(info.key)

    def put_shard(self, step: int, name: str, data: bytes | memoryview) -> ShardRecord:
        """Write one shard of a step that is not committed yet; returns its size and hash."""
        self.store.put(self.key(step, name), data)
        return ShardRecord.of(data)

    def key(self, step: int, name: str) -> str:
        """Key of an object of `step`."""
        return f"runs/{self.run_id}/checkpoints/{_folder(step)}/{name}"

    def url(self, step: int) -> str:
        """Address of the step's manifest, for records."""
        return self.store.url(self.key(step, MANIFEST_NAME))

    def _fence_key(self) -> str:
        return f"runs/{self.run_id}/{FENCE_NAME}"

    def _objects(self, step: int) -> Mapping[str, ObjectInfo]:
        """The objects of one step, by name."""
        steps = group_steps(self.store.list(self.key(step, "")))
        return steps[0].objects if steps else {}

    def _exists(self, step: int, name: str) -> bool:
        try:
            self.store.stat(self.key(step, name))
        except NotFound:
            return False
        return True

    def _clear_set_aside(self, step: int) -> None:
        """Make room for a step that is saved again; a crash in between offers no checkpoint."""
        try:
            record = self.store.get(self.key(step, SET_ASIDE_NAME))
        except NotFound:
            return
        self.store.delete(self.key(step, MANIFEST_NAME))
        self.store.put(self.key(step, f"set-aside-{digest(record)[:8]}.json"), record)
        self.store.delete(self.key(step, SET_ASIDE_NAME))

    def verify_shards(
        self,
        step: int,
        shards: Mapping[str, ShardRecord],
        *,
        on_bytes: OnBytes = lambda _count: None,
    ) -> list[Damage]:
        """Read these shards of a step and compare; empty when they are whole.

        Args:
            step: step that the shards belong to.
            shards: published sizes and hashes, by name.
            on_bytes: called with the size of every piece that was read.

        Raises:
            StorageError: the store does not answer or refuses; the checkpoint may be whole.
        """
        sizes = {name: info.size_bytes for name, info in self._objects(step).items()}
        results = (
            self._verify_shard(step, name, shards[name], sizes.get(name), on_bytes)
            for name in sorted(shards)
        )
        return [damage for damage in results if damage is not None]

    def _verify_shard(
        self,
        step: int,
        name: str,
        wanted: ShardRecord,
        size_bytes: int | None,
        on_bytes: OnBytes,
    ) -> Damage | None:
        if size_bytes is None:
            return Damage(name, DamageKind.MISSING, "no such object")
        if size_bytes < wanted.size_bytes:
            detail = f"{size_bytes} bytes of {wanted.size_bytes}"
            return Damage(name, DamageKind.TRUNCATED, detail)
        if size_bytes > wanted.size_bytes:
            detail = f"{size_bytes} bytes instead of {wanted.size_bytes}"
            return Damage(name, DamageKind.HASH_DIFFERS, detail)
        try:
            stored_digest = self._digest_object(self.key(step, name), size_bytes, on_bytes)
        except (NotFound, Corrupt) as exc:  # others, as AccessDenied, are no damage
            return Damage(name, DamageKind.UNREADABLE, str(exc))
        if stored_digest != wanted.xxh3_128:
            detail = f"xxh3_128 {stored_digest} instead of {wanted.xxh3_128}"
            return Damage(name, DamageKind.HASH_DIFFERS, detail)
        return None

    def _digest_object(self, key: str, size_bytes: int, on_bytes: OnBytes) -> str:
        hasher = xxhash.xxh3_128()
        block = memoryview(bytearray(min(size_bytes, VERIFY_BLOCK_BYTES)))
        for start in range(0, size_bytes, VERIFY_BLOCK_BYTES):
            part = block[: min(VERIFY_BLOCK_BYTES, size_bytes - start)]
            self.store.get_into(key, part, start=start)
            hasher.update(part)
            on_bytes(part.nbytes)
        return hasher.hexdigest()


def shard_name(placement: int, attempt: int, rank: int) -> str:
    """File name of one rank's shard; names of different attempts never meet."""
    return f"p{placement:04d}-a{attempt:04d}-rank{rank:05d}.safetensors"


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def group_steps(infos: Iterable[ObjectInfo]) -> list[StepObjects]:
    """The objects of step folders among `infos`, by step; others are passed over."""
    by_step: dict[int, dict[str, ObjectInfo]] = {}
    for info in infos:
        match = _STEP_KEY.match(info.key)
        if match:
            by_step.setdefault(int(match[1]), {})[match[2]] = info
    return [StepObjects(step, by_step[step]) for step in sorted(by_step)]


def read_manifest(checkpoints: CheckpointStore, step: StepObjects) -> Manifest | None:
    """The manifest of a step, also of one that was set aside; None when there is no readable one.

    Raises:
        StorageError: the store does not answer; the manifest may be whole.
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
        record = from_json(checkpoints.store.get(checkpoints.key(step.step, SET_ASIDE_NAME)))
        return str(record["reason"])
    except (NotFound, ValueError, LookupError, TypeError):
        return "its record cannot be read"
