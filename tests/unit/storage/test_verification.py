"""Reading a checkpoint from end to end, and remembering what came of it."""

from __future__ import annotations

import pytest

from perdure.storage.checkpoint import (
    MANIFEST_NAME,
    CheckpointStore,
    DamageKind,
    StepObjects,
    read_manifest,
)
from perdure.storage.errors import NotFound
from perdure.storage.verification import VERIFIED_NAME, Verified, last_outcome
from perdure.storage.verification import record as keep
from perdure.storage.verification import verify as read_all

SHARD = "p0000-a0000-rank00001.safetensors"


def objects_of(checkpoints: CheckpointStore, step: int) -> StepObjects:
    return next(s for s in checkpoints.list_steps() if s.step == step)


def verify(checkpoints: CheckpointStore, step: int) -> Verified:
    manifest = read_manifest(checkpoints, objects_of(checkpoints, step))
    return read_all(checkpoints, step, manifest)


def remembered(checkpoints: CheckpointStore, step: int) -> Verified | None:
    listed = objects_of(checkpoints, step)
    return last_outcome(checkpoints, listed, read_manifest(checkpoints, listed))


def test_a_whole_checkpoint_is_intact_and_every_byte_of_it_was_read(checkpoints, commit):
    manifest = commit(checkpoints, 5)
    counts: list[int] = []
    outcome = read_all(checkpoints, 5, manifest, on_bytes=counts.append)
    assert outcome.is_intact
    assert sum(counts) == outcome.size_bytes == manifest.size_bytes == 2000
    assert outcome.verified_at_s == 1000.0


def test_what_was_found_is_kept_with_the_step(checkpoints, commit):
    commit(checkpoints, 5)
    assert remembered(checkpoints, 5) is None
    checkpoints.store.put(checkpoints.key(5, SHARD), b"other")
    outcome = verify(checkpoints, 5)
    assert [(d.file, d.kind) for d in outcome.damages] == [(SHARD, DamageKind.TRUNCATED)]
    keep(checkpoints, outcome)
    assert remembered(checkpoints, 5) == outcome
    assert checkpoints.steps() == [5], "the record changes nothing of what is offered"


def test_an_unreadable_manifest_is_a_damage_that_is_remembered(checkpoints, commit):
    commit(checkpoints, 5)
    checkpoints.store.put(checkpoints.key(5, MANIFEST_NAME), b"{")
    outcome = verify(checkpoints, 5)
    assert [d.kind for d in outcome.damages] == [DamageKind.UNREADABLE]
    keep(checkpoints, outcome)
    assert remembered(checkpoints, 5) == outcome


def test_a_step_that_is_saved_anew_does_not_inherit_the_outcome(checkpoints, commit):
    commit(checkpoints, 5)
    keep(checkpoints, verify(checkpoints, 5))
    checkpoints.set_aside(5, "test")
    checkpoints.clock = lambda: 2000.0
    commit(checkpoints, 5, attempt=1)
    assert VERIFIED_NAME in objects_of(checkpoints, 5).objects
    assert remembered(checkpoints, 5) is None


def test_a_record_that_cannot_be_read_is_none(checkpoints, commit):
    commit(checkpoints, 5)
    checkpoints.store.put(checkpoints.key(5, VERIFIED_NAME), b"{}")
    assert remembered(checkpoints, 5) is None


def test_a_step_that_is_removed_while_it_is_read_is_gone_and_not_damaged(checkpoints, commit):
    manifest = commit(checkpoints, 5)
    with pytest.raises(NotFound, match="was removed while it was read"):
        read_all(checkpoints, 5, manifest, on_bytes=lambda _count: checkpoints.delete(5))
