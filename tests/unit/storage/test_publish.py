"""Publishing: shares of a node onto its disk and into the store, and then the manifest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perdure.storage.checkpoint import CheckpointStore, StepState
from perdure.storage.checkpoint_server import publish
from perdure.storage.checkpoint_server.publish import Committing, Publisher, shares_on_disk
from perdure.storage.errors import Corrupt, StaleAttempt, StorageError
from perdure.storage.local import LocalStore
from perdure.storage.share import Share, WrittenShare, put_record, recorded_ranks
from perdure.training.agent.checkpoint_server import log_commit
from tests.unit.storage.nodes import RUN_ID, bytes_of, flip_bit, share_of, written
from tests.unit.storage.stores import FullStore, RecordingStore

MANIFEST = "manifest.json"


@pytest.fixture
def store(tmp_path) -> RecordingStore:
    return RecordingStore(tmp_path / "store")


@pytest.fixture
def checkpoints(store) -> CheckpointStore:
    return CheckpointStore(store, RUN_ID)


@pytest.fixture
def disk(tmp_path) -> CheckpointStore:
    return CheckpointStore(LocalStore(tmp_path / "disk"), RUN_ID)


def publisher(
    checkpoints: CheckpointStore, disk: CheckpointStore | None = None, **changes: Any
) -> Publisher:
    """One that does not wait for other ranks, unless `wait_s` is among the changes."""
    fields = {"retain": lambda _step: None, "announce": lambda _log, _step: None, "wait_s": 0.0}
    return Publisher(checkpoints, disk=disk, **{**fields, **changes})


def put(to: Publisher, share: Share) -> None:
    """As the checkpoint server does: onto the disk, then into the store."""
    to.write_to_disk(written(share), memoryview(bytes_of(share)))
    to.upload(written(share), memoryview(bytes_of(share)))


def write(to: Publisher, step: int, **fields: Any) -> Committing:
    share = share_of(step, **fields)
    put(to, share)
    return Committing(share.save_id, share.save_id.owner)


def names(keys: list[str]) -> list[str]:
    return [key.rpartition("/")[2] for key in keys]


def test_the_record_follows_its_shard_and_the_manifest_comes_last(checkpoints, store):
    points: list[str] = []
    publishing = publisher(checkpoints, reached=points.append)
    assert publishing.commit(write(publishing, 10)) is True
    record, shard = "p0001-a0001-rank00000.json", "p0001-a0001-rank00000.safetensors"
    assert names(store.writes) == [shard, record, MANIFEST, record]
    assert store.writes[-1].startswith("-"), "the manifest has what the record held"
    assert points == [
        "before_shard",
        "shard_on_disk",
        "shard_in_store",
        "record_in_store",
        "before_manifest",
        "committed",
        "records_deleted",
    ]
    assert checkpoints.steps() == [10]
    assert checkpoints.verify(10) == []


def test_attachments_are_in_the_store_before_the_checkpoint_is(checkpoints, store):
    publishing = publisher(checkpoints)
    publishing.commit(write(publishing, 10, attachments={"runs/run/metrics/a": "text"}))
    assert names(store.writes).index("a") < names(store.writes).index(MANIFEST)
    assert store.get("runs/run/metrics/a") == b"text"


def test_a_checkpoint_is_committed_once_the_last_ranks_record_is_there(checkpoints):
    publishing = publisher(checkpoints, wait_s=20)
    task = write(publishing, 10, world_size=3)
    write(publishing, 10, rank=2, world_size=3)
    committing = Thread(target=publishing.commit, args=(task,))
    committing.start()
    assert checkpoints.steps() == []
    write(publishing, 10, rank=1, world_size=3)
    committing.join()
    assert checkpoints.steps() == [10]
    assert checkpoints.verify(10) == []


def test_a_rank_whose_share_never_comes_is_named(checkpoints):
    publishing = publisher(checkpoints)
    task = write(publishing, 10, world_size=4)
    write(publishing, 10, rank=2, world_size=4)
    with pytest.raises(StorageError, match=r"step 10: the shares of ranks \[1, 3\] did not come"):
        publishing.commit(task)
    assert checkpoints.states() == {10: StepState.UNCOMMITTED}


def test_a_commit_that_waits_gives_up_at_the_end(checkpoints):
    publishing = publisher(checkpoints, wait_s=1000)
    task = write(publishing, 10, world_size=2)
    publishing.end()
    with pytest.raises(StorageError, match="did not come"):
        publishing.commit(task)


def test_shares_of_which_one_is_damaged_in_its_record_are_not_committed(checkpoints, store):
    publishing = publisher(checkpoints)
    task = write(publishing, 10)
    store.put(checkpoints.key(10, "p0001-a0001-rank00000.json"), b"{}")
    with pytest.raises(Corrupt):
        publishing.commit(task)
    assert checkpoints.steps() == []


def test_a_step_that_is_committed_stays_as_it_is(checkpoints):
    retained: list[int] = []
    publishing = publisher(checkpoints, retain=retained.append)
    task = write(publishing, 10)
    assert publishing.commit(task)
    before = checkpoints.manifest(10)
    again = write(publishing, 10, owner=(1, 2))
    assert publishing.commit(again) is False
    assert checkpoints.manifest(10) == before
    assert checkpoints.verify(10) == []
    assert retained == [10]


def test_an_attempt_that_was_fenced_off_cannot_publish(checkpoints):
    publishing = publisher(checkpoints)
    stale, new = write(publishing, 10), write(publishing, 10, owner=(1, 2))
    checkpoints.fence(1, 2)
    with pytest.raises(StaleAttempt, match="placement 1 attempt 1 is older"):
        publishing.commit(stale)
    assert publishing.commit(new)
    assert (checkpoints.manifest(10).placement, checkpoints.manifest(10).attempt) == (1, 2)
    assert checkpoints.verify(10) == []


def test_an_attempt_that_waits_for_its_ranks_gives_way_to_a_newer_one(checkpoints):
    publishing = publisher(checkpoints, wait_s=1000)
    waiting = write(publishing, 20, world_size=2)
    newer = write(publishing, 10, owner=(1, 2))
    assert publishing.commit(newer)
    with pytest.raises(StaleAttempt, match="step 20: a newer attempt saves meanwhile"):
        publishing.commit(waiting)


def interrupted(checkpoints: CheckpointStore, meanwhile: Callable[[], object]) -> Publisher:
    """A publisher that sees time fly while it waits, and something happen once."""
    times = itertools.count(step=3)

    def clock() -> float:
        now_s = next(times)
        if now_s == 6:
            meanwhile()
        return float(now_s)

    return publisher(checkpoints, wait_s=1000, clock=clock)


def test_a_commit_that_waits_gives_way_to_an_attempt_of_other_nodes(checkpoints):
    waiting = interrupted(checkpoints, lambda: checkpoints.fence(1, 2))
    task = write(waiting, 10, world_size=2)
    with pytest.raises(StaleAttempt, match="placement 1 attempt 1 is older"):
        waiting.commit(task)


def test_a_commit_that_waits_ends_when_the_step_was_committed_by_another(checkpoints):
    other = publisher(checkpoints)
    theirs = write(other, 10, owner=(1, 2))
    waiting = interrupted(checkpoints, lambda: other.commit(theirs))
    task = write(waiting, 10, world_size=2)
    assert waiting.commit(task) is False
    assert checkpoints.manifest(10).attempt == 2


def test_a_save_that_lost_a_share_with_its_node_ends_once_a_later_one_is_committed(
    checkpoints, caplog
):
    waiting = interrupted(checkpoints, lambda: waiting.commit(later))
    lost, later = write(waiting, 10, world_size=2), write(waiting, 20)
    assert waiting.commit(lost) is False
    assert checkpoints.steps() == [20]
    assert "step 10: the shares of ranks [1] did not come, and a later step" in caplog.text


def test_the_announcement_follows_the_commit(checkpoints, tmp_path):
    announced: list[tuple[Path, int, list[int]]] = []
    publishing = publisher(
        checkpoints, announce=lambda log, step: announced.append((log, step, checkpoints.steps()))
    )
    task = write(publishing, 10)
    log = tmp_path / "metrics.jsonl"
    publishing.commit(Committing(task.save, task.owner, announce=log))
    assert announced == [(log, 10, [10])]


@pytest.mark.parametrize("nowhere", ["gone/metrics.jsonl", "."])
def test_a_checkpoint_that_cannot_be_announced_is_committed_and_retained_all_the_same(
    checkpoints, store, tmp_path, caplog, nowhere
):
    retained: list[int] = []
    publishing = publisher(checkpoints, retain=retained.append, announce=log_commit)
    task = write(publishing, 10)
    assert publishing.commit(Committing(task.save, task.owner, announce=tmp_path / nowhere))
    assert checkpoints.steps() == retained == [10]
    assert recorded_ranks(checkpoints, task.save) == set(), "tidied up, too"
    assert "the commit of step 10 is not in the attempt's log" in caplog.text


def test_records_of_a_commit_that_was_cut_short_do_no_harm(checkpoints, store):
    publishing = publisher(checkpoints)
    task = write(publishing, 10)
    record = store.get(checkpoints.key(10, "p0001-a0001-rank00000.json"))
    assert publishing.commit(task)
    store.put(checkpoints.key(10, "p0001-a0001-rank00000.json"), record)
    assert checkpoints.steps() == [10]
    assert checkpoints.verify(10) == []
    checkpoints.delete(10)
    assert checkpoints.states() == {}


def test_the_disk_keeps_the_two_newest_saves(checkpoints, disk):
    publishing = publisher(checkpoints, disk)
    for step in (10, 20, 30):
        write(publishing, step)
    assert [one.share.step for one in shares_on_disk(disk)] == [20, 30]
    assert recorded_ranks(checkpoints, share_of(10).save_id) == {0}, "the store keeps its own"


def test_a_save_that_overtakes_another_on_the_disk_leaves_it_alone(checkpoints, disk, monkeypatch):
    one = publisher(checkpoints, disk)

    def overtaken(to: CheckpointStore, record: WrittenShare) -> None:
        monkeypatch.undo()
        put(one, share_of(20))
        put_record(to, record)

    monkeypatch.setattr(publish, "put_record", overtaken)
    put(one, share_of(10))
    assert sorted(held.share.step for held in shares_on_disk(disk)) == [10, 20]
    put(one, share_of(30))
    assert sorted(held.share.step for held in shares_on_disk(disk)) == [20, 30]


@pytest.mark.parametrize(
    ("before", "after", "kept"), [((100, 110), (60, 70, 80), [70, 80]), ((60,), (60, 70), [60, 70])]
)
def test_after_going_back_the_disk_keeps_what_the_new_attempt_saves(
    checkpoints, disk, before, after, kept
):
    publishing = publisher(checkpoints, disk)
    for step in before:
        write(publishing, step)
    for step in after:
        write(publishing, step, owner=(1, 2))
    found = [(one.share.step, one.share.save_id.owner) for one in shares_on_disk(disk)]
    assert found == [(step, (1, 2)) for step in kept]


def test_a_full_disk_is_logged_and_the_store_gets_the_share(checkpoints, tmp_path, caplog):
    full = CheckpointStore(FullStore(tmp_path / "full", room_bytes=10), RUN_ID)
    publishing = publisher(checkpoints, full)
    assert publishing.commit(write(publishing, 10))
    assert "step 10 is not on the node's disk" in caplog.text
    assert shares_on_disk(full) == []
    assert checkpoints.verify(10) == []


def test_shares_on_disk_are_those_that_are_whole(checkpoints, disk):
    publishing = publisher(checkpoints, disk)
    for rank in range(4):
        write(publishing, 10, rank=rank, world_size=4)
    store = disk.store
    key = share_of(10, rank=1, world_size=4).shard
    store.put(disk.key(10, key), bytes(10))
    store.delete(disk.key(10, share_of(10, rank=2, world_size=4).shard))
    store.put(disk.key(10, "p0001-a0001-rank00003.json"), b"{")
    assert [one.share.rank for one in shares_on_disk(disk)] == [0]


def test_a_disk_that_was_never_written_holds_nothing(tmp_path):
    assert shares_on_disk(CheckpointStore(LocalStore(tmp_path / "none"), RUN_ID)) == []


def test_one_flipped_bit_of_a_published_shard_is_found(checkpoints, tmp_path):
    publishing = publisher(checkpoints)
    publishing.commit(write(publishing, 10))
    flip_bit(LocalStore(tmp_path / "store"), checkpoints.key(10, share_of(10).shard), 100)
    assert [damage.file for damage in checkpoints.verify(10)] == [share_of(10).shard]
