"""What lies in a run's folders, as people and the collection of garbage are told."""

from __future__ import annotations

import pytest

from storage.checkpoint import (
    MANIFEST_NAME,
    CheckpointStore,
    StepState,
    Tier,
    read_manifest,
    set_aside_reason,
)
from tests.unit.storage.conftest import Committer


@pytest.fixture
def mixed(checkpoints: CheckpointStore, commit: Committer) -> CheckpointStore:
    """Steps 5 and 10 are committed, 15 was set aside, 20 was never committed."""
    for step in (5, 10, 15):
        commit(checkpoints, step)
    checkpoints.set_aside(15, "shard lost")
    checkpoints.put_shard(20, "p0001-a0001-rank00000.safetensors", b"123")
    return checkpoints


def test_the_states_are_those_of_the_checkpoint_store(mixed: CheckpointStore) -> None:
    assert {s.step: s.state for s in mixed.list_steps()} == mixed.states()
    assert [s.state for s in mixed.list_steps()][2:] == [StepState.SET_ASIDE, StepState.UNCOMMITTED]


def test_size_and_age_are_those_of_all_objects_of_a_step(mixed: CheckpointStore) -> None:
    step = mixed.list_steps()[0]
    infos = [mixed.store.stat(mixed.key(5, name)) for name in step.objects]
    assert len(infos) == 3
    assert step.size_bytes == sum(info.size_bytes for info in infos)
    assert step.modified_s == max(info.modified_s for info in infos)


def test_a_manifest_is_read_also_when_its_step_was_set_aside(mixed: CheckpointStore) -> None:
    manifests = [read_manifest(mixed, step) for step in mixed.list_steps()]
    assert [m and m.step for m in manifests] == [5, 10, 15, None]


def test_an_unreadable_manifest_is_none_at_all(mixed: CheckpointStore) -> None:
    mixed.store.put(mixed.key(10, MANIFEST_NAME), b"{")
    assert read_manifest(mixed, mixed.list_steps()[1]) is None


def test_a_manifest_that_was_deleted_since_the_listing_is_none(mixed: CheckpointStore) -> None:
    step = mixed.list_steps()[1]
    mixed.delete(10)
    assert read_manifest(mixed, step) is None


def test_a_step_set_aside_says_why(mixed: CheckpointStore) -> None:
    reasons = [set_aside_reason(mixed, step) for step in mixed.list_steps()]
    assert reasons == [None, None, "shard lost", None]
    mixed.store.put(mixed.key(15, "set-aside.json"), b"[]")
    assert set_aside_reason(mixed, mixed.list_steps()[2]) == "its record cannot be read"


def test_objects_beside_the_step_folders_are_no_steps(mixed: CheckpointStore) -> None:
    for key in ("x", "checkpoints/step-00000001", "checkpoints/step-x/y", "checkpoints/other/y"):
        mixed.store.put(f"runs/run-1/{key}", b"")
    assert [s.step for s in mixed.list_steps()] == [5, 10, 15, 20]


def test_the_tiers_of_a_step_come_nearest_first_and_the_store_counts_once_committed(
    mixed: CheckpointStore,
) -> None:
    nodes = {20: [Tier.MEMORY, Tier.DISK], 15: [Tier.MEMORY]}
    found = {step.step: step.tiers(nodes) for step in mixed.list_steps()}
    for step in mixed.list_steps():
        assert ("store" in found[step.step]) == (step.state is StepState.COMMITTED)
    assert found[20][:2] == ("memory", "disk")
    assert found[15][0] == "memory"
