"""CheckpointStore: what is offered, who may publish, and what damage does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from perdure.storage.checkpoint import (
    MANIFEST_NAME,
    CheckpointStore,
    DamageKind,
    SetAside,
    StepState,
    Tier,
    read_manifest,
    set_aside_reason,
)
from perdure.storage.errors import (
    AccessDenied,
    Corrupt,
    NotFound,
    PreconditionFailed,
    StaleAttempt,
    Throttled,
)
from perdure.storage.manifest import Manifest, checksummed, digest, parse_manifest
from tests.unit.storage.conftest import Committer

Commit = Callable[..., Manifest]
ROOT = Path(__file__).parents[3]
SHARD = "p0000-a0000-rank00001.safetensors"

WRITER = """
    import os, sys
    from pathlib import Path
    from perdure.storage.checkpoint import CheckpointStore, shard_name
    from perdure.storage.local import LocalStore

    checkpoints = CheckpointStore(LocalStore(Path(sys.argv[1])), "run-1")
    checkpoints.check_may_commit(20, 0, 0)
    for rank in range(2):
        checkpoints.put_shard(20, shard_name(0, 0, rank), bytes(1000))
    os._exit(9)
"""


def damage(checkpoints: CheckpointStore, step: int, data: bytes | None) -> None:
    """Replace a shard behind the store's back; None deletes it."""
    path = checkpoints.store.local_path(checkpoints.key(step, SHARD))
    assert path is not None
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


def flipped(data: bytes) -> bytes:
    return data[:700] + bytes([data[700] ^ 1]) + data[701:]


def test_a_committed_step_is_offered_with_what_was_published(checkpoints, commit):
    published = commit(checkpoints, 10)
    assert checkpoints.steps() == [10]
    assert checkpoints.latest() == 10
    assert checkpoints.manifest(10) == published
    assert checkpoints.verify(10) == []
    assert published.size_bytes == 2000
    assert published.written_at_s == 1000.0


def test_latest_can_be_asked_below_a_step_and_is_none_without_checkpoints(checkpoints, commit):
    assert checkpoints.latest() is None
    assert checkpoints.steps() == []
    with pytest.raises(NotFound):
        checkpoints.manifest(10)
    commit(checkpoints, 5, 10, 123456789)
    assert checkpoints.latest() == 123456789
    assert checkpoints.latest(below_step=10) == 5
    assert checkpoints.latest(below_step=5) is None


def test_a_writer_killed_before_the_manifest_leaves_the_older_step_latest(
    local, checkpoints, commit
):
    commit(checkpoints, 10)
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(local._root)]
    killed = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=False)
    assert killed.returncode == 9
    assert checkpoints.states() == {10: StepState.COMMITTED, 20: StepState.UNCOMMITTED}
    assert checkpoints.latest() == 10
    assert checkpoints.verify(10) == []
    commit(checkpoints, 20, attempt=1)  # the next attempt is not in the dead one's way
    assert checkpoints.latest() == 20
    assert checkpoints.verify(20) == []


def test_committing_a_step_twice_fails(checkpoints, commit):
    published = commit(checkpoints, 10)
    with pytest.raises(PreconditionFailed, match="committed already"):
        checkpoints.commit(published)
    with pytest.raises(PreconditionFailed, match="committed already"):
        checkpoints.check_may_commit(10, 5, 5)
    assert checkpoints.manifest(10) == published


def test_of_two_committers_that_passed_the_check_one_fails(checkpoints, commit, monkeypatch):
    published = commit(checkpoints, 10)
    monkeypatch.setattr(checkpoints, "check_may_commit", lambda *_: None)
    with pytest.raises(PreconditionFailed, match="exists already"):
        checkpoints.commit(published)


@pytest.mark.parametrize("stale", [(1, 1), (0, 9)])
def test_a_stale_attempt_cannot_commit(checkpoints, commit, stale):
    checkpoints.fence(1, 2)
    with pytest.raises(StaleAttempt, match="placement 1 attempt 2, which owns the run"):
        commit(checkpoints, 10, placement=stale[0], attempt=stale[1])
    assert checkpoints.steps() == []
    commit(checkpoints, 10, placement=1, attempt=2)


def test_a_container_that_the_first_member_has_left_cannot_commit_in_the_same_attempt(
    local, checkpoints, commit
):
    checkpoints.fence(1, 1, first_container=1)
    left, new = (CheckpointStore(local, "run-1", first_container=count) for count in (1, 2))
    left.check_may_commit(10, 1, 1)
    checkpoints.fence(1, 1, first_container=2)
    with pytest.raises(StaleAttempt, match="moved to its container 2, and this is container 1"):
        left.check_may_commit(10, 1, 1)
    new.check_may_commit(10, 1, 1)
    checkpoints.check_may_commit(10, 1, 1)  # of another node
    with pytest.raises(StaleAttempt, match="cannot fence"):
        checkpoints.fence(1, 1, first_container=1)
    commit(new, 10, placement=1, attempt=1)


def test_the_fence_only_moves_forward(checkpoints):
    assert checkpoints.read_fence() is None
    checkpoints.fence(1, 2)
    checkpoints.fence(1, 2)
    checkpoints.fence(2, 0)
    with pytest.raises(StaleAttempt, match="cannot fence"):
        checkpoints.fence(1, 9)
    assert checkpoints.read_fence() == (2, 0)


def test_a_damaged_fence_lets_no_attempt_publish(checkpoints, commit):
    checkpoints.store.put("runs/run-1/fence.json", checksummed('{"placement":-1}'))
    with pytest.raises(Corrupt, match="not a fence"):
        commit(checkpoints, 10)


def test_manifests_of_another_run_are_refused(local, checkpoints, commit):
    published = commit(checkpoints, 10)
    other = CheckpointStore(local, "run-2")
    with pytest.raises(ValueError, match=r"'run-1'.*'run-2'"):
        other.commit(published)
    local.put(other.key(10, "manifest.json"), published.to_bytes())
    with pytest.raises(Corrupt, match="is of run 'run-1' step 10"):
        other.manifest(10)


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden", "a b"])
def test_run_ids_cannot_leave_their_folder(local, run_id):
    with pytest.raises(ValueError, match="should match pattern"):
        CheckpointStore(local, run_id)


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (flipped, DamageKind.HASH_DIFFERS),
        (lambda data: data[:-1], DamageKind.TRUNCATED),
        (lambda data: data + b"x", DamageKind.HASH_DIFFERS),
        (lambda _data: b"", DamageKind.TRUNCATED),
        (lambda _data: None, DamageKind.MISSING),
    ],
    ids=["flipped bit", "truncated", "too long", "emptied", "deleted"],
)
def test_a_damaged_shard_is_found_and_a_step_that_was_set_aside_is_not_offered(
    checkpoints, commit, harm, kind
):
    commit(checkpoints, 10, 20)
    damage(checkpoints, 20, harm(checkpoints.store.get(checkpoints.key(20, SHARD))))
    (found,) = checkpoints.verify(20)
    assert (found.file, found.kind) == (SHARD, kind)
    assert checkpoints.latest() == 20, "verify only looks"

    set_aside = SetAside(20, (found,))
    assert f"{SHARD} {kind}: " in set_aside.reason
    checkpoints.set_aside(20, set_aside.reason)
    assert checkpoints.states() == {10: StepState.COMMITTED, 20: StepState.SET_ASIDE}
    assert checkpoints.latest() == 10
    with pytest.raises(NotFound, match="set aside"):
        checkpoints.manifest(20)
    assert checkpoints.verify(10) == []


def test_a_set_aside_step_may_be_saved_anew(checkpoints, commit):
    commit(checkpoints, 10)
    checkpoints.set_aside(10, "test")
    anew = commit(checkpoints, 10, attempt=1)
    assert checkpoints.steps() == [10]
    assert checkpoints.manifest(10) == anew
    assert checkpoints.verify(10) == []
    checkpoints.set_aside(10, "again")
    commit(checkpoints, 10, attempt=2)
    assert checkpoints.steps() == [10]


def test_an_unreadable_manifest_is_damage(checkpoints, commit):
    commit(checkpoints, 10, 20)
    checkpoints.store.put(checkpoints.key(20, "manifest.json"), b'{"half')
    (found,) = checkpoints.verify(20)
    assert found.kind is DamageKind.UNREADABLE
    assert checkpoints.verify(10) == []


def test_a_medium_that_fails_is_damage_and_a_store_that_refuses_to_read_is_none(
    checkpoints, commit, monkeypatch
):
    commit(checkpoints, 10)
    get_into = Mock(side_effect=Corrupt("the medium cannot be read"))
    monkeypatch.setattr(checkpoints.store, "get_into", get_into)
    assert {found.kind for found in checkpoints.verify(10)} == {DamageKind.UNREADABLE}
    for error in (Throttled, AccessDenied):
        get_into.side_effect = error("no")
        with pytest.raises(error):
            checkpoints.verify(10)
    assert checkpoints.steps() == [10]


def test_deleting_a_step_removes_its_manifest_first(checkpoints, commit, monkeypatch):
    commit(checkpoints, 10, 100)
    delete = Mock(wraps=checkpoints.store.delete)
    monkeypatch.setattr(checkpoints.store, "delete", delete)
    checkpoints.delete(10)
    assert delete.call_args_list[0].args[0].endswith("step-00000010/manifest.json")
    assert checkpoints.states() == {100: StepState.COMMITTED}
    assert checkpoints.verify(100) == []


def test_the_protocol_holds_on_s3(s3, commit):
    checkpoints = CheckpointStore(s3, "run-1")
    checkpoints.fence(0, 0)
    commit(checkpoints, 10, 20)
    shard = checkpoints.key(20, SHARD)
    s3.put(shard, flipped(s3.get(shard)))
    (found,) = checkpoints.verify(20)
    assert found.kind is DamageKind.HASH_DIFFERS
    checkpoints.set_aside(20, found.detail)
    assert checkpoints.steps() == [10]
    assert checkpoints.verify(10) == []
    with pytest.raises(PreconditionFailed):
        commit(checkpoints, 10)


def test_manifests_survive_their_bytes(checkpoints, commit):
    published = commit(checkpoints, 10)
    with_extra = published.model_copy(update={"extra": {"loss": 1e-300, "names": ["a", None]}})
    assert parse_manifest(with_extra.to_bytes(), url="u") == with_extra


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format_version": 2}', b"\xff"])
def test_what_is_no_manifest_is_an_error_of_one_line(data):
    with pytest.raises(Corrupt, match=r"^u: not ") as raised:
        parse_manifest(data, url="u")
    assert "\n" not in str(raised.value)


def test_a_manifest_whose_chunks_do_not_cover_is_refused(checkpoints, commit):
    saved = commit(checkpoints, 10).model_dump_json()
    text = checksummed(saved.replace('"shape":[1]', '"shape":[2]'))
    with pytest.raises(Corrupt, match="1 elements of 2"):
        parse_manifest(text, url="u")


def test_the_hash_is_xxh3_128():
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.fixture
def mixed(checkpoints: CheckpointStore, commit: Committer) -> CheckpointStore:
    """Steps 5 and 10 are committed, 15 was set aside, 20 was never committed."""
    commit(checkpoints, 5, 10, 15)
    checkpoints.set_aside(15, "shard lost")
    checkpoints.put_shard(20, "p0001-a0001-rank00000.safetensors", b"123")
    return checkpoints


def test_the_states_are_those_of_the_checkpoint_store(mixed):
    assert {s.step: s.state for s in mixed.list_steps()} == mixed.states()
    assert [s.state for s in mixed.list_steps()][2:] == [StepState.SET_ASIDE, StepState.UNCOMMITTED]


def test_size_and_age_are_those_of_all_objects_of_a_step(mixed):
    step = mixed.list_steps()[0]
    infos = [mixed.store.stat(mixed.key(5, name)) for name in step.objects]
    assert len(infos) == 3
    assert step.size_bytes == sum(info.size_bytes for info in infos)
    assert step.modified_s == max(info.modified_s for info in infos)


def test_a_manifest_is_read_also_when_its_step_was_set_aside(mixed):
    manifests = [read_manifest(mixed, step) for step in mixed.list_steps()]
    assert [m and m.step for m in manifests] == [5, 10, 15, None]


def test_a_manifest_that_cannot_be_read_or_was_deleted_since_the_listing_is_none(mixed):
    step = mixed.list_steps()[1]
    mixed.store.put(mixed.key(10, MANIFEST_NAME), b"{")
    assert read_manifest(mixed, step) is None
    mixed.delete(10)
    assert read_manifest(mixed, step) is None


def test_a_step_set_aside_has_its_reason(mixed):
    reasons = [set_aside_reason(mixed, step) for step in mixed.list_steps()]
    assert reasons == [None, None, "shard lost", None]
    mixed.store.put(mixed.key(15, "set-aside.json"), b"[]")
    assert set_aside_reason(mixed, mixed.list_steps()[2]) == "its record cannot be read"


def test_objects_beside_the_step_folders_are_no_steps(mixed):
    for key in ("x", "checkpoints/step-00000001", "checkpoints/step-x/y", "checkpoints/other/y"):
        mixed.store.put(f"runs/run-1/{key}", b"")
    assert [s.step for s in mixed.list_steps()] == [5, 10, 15, 20]


def test_the_tiers_of_a_step_come_nearest_first_and_the_store_counts_once_committed(mixed):
    nodes = {20: [Tier.MEMORY, Tier.DISK], 15: [Tier.MEMORY]}
    found = {step.step: step.tiers(nodes) for step in mixed.list_steps()}
    for step in mixed.list_steps():
        assert ("store" in found[step.step]) == (step.state is StepState.COMMITTED)
    assert found[20][:2] == ("memory", "disk")
    assert found[15][0] == "memory"
