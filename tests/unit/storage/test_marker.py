"""A folder that holds the store of runs, and one that held it before: a mount that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.storage.address import StorageSpec, check_can_make, has_store, make_store, open_store
from perdure.storage.errors import (
    NotFound,
    PreconditionFailed,
    StorageError,
    StorageFull,
    StoreMissing,
)
from perdure.storage.local import MARKER, LocalStore
from perdure.storage.retry import Retry


@pytest.fixture
def spec(tmp_path) -> StorageSpec:
    return StorageSpec(address=f"file://{tmp_path}/mount/store")


@pytest.fixture
def folder(spec):
    assert spec.folder is not None
    return spec.folder


class Waiting:
    """The pauses of a store that waits, and what happens in one of them."""

    def __init__(self, *then) -> None:
        self.then = list(then)
        self.failed: list[StorageError] = []
        self.over = 0
        self.retry = Retry(
            max_tries=100,
            clock=lambda: 0.0,
            sleep=self.sleep,
            on_failure=lambda error, _lasted_s: self.failed.append(error),
            on_success=self.passed,
        )

    def sleep(self, _seconds: float) -> None:
        if self.then:
            self.then.pop(0)()

    def passed(self) -> None:
        self.over += 1


def test_a_store_is_made_once_and_holds_nothing_then(spec, folder):
    assert not has_store(spec)
    make_store(spec)
    make_store(spec)
    assert has_store(spec)
    store = open_store(spec)
    assert list(store.list("")) == []
    store.put("a", b"1")
    make_store(spec)
    assert [info.key for info in store.list("")] == ["a"]
    assert "Perdure keeps runs" in (folder / MARKER).read_text()
    with pytest.raises(ValueError, match="store's own"):
        store.get(MARKER)


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.put("a", b"1"),
        lambda store: store.put("a", b"1", if_absent=True),
        lambda store: store.get("a"),
        lambda store: store.get_into("a", memoryview(bytearray(1))),
        lambda store: store.stat("a"),
        lambda store: store.list(""),
        lambda store: store.delete("a"),
    ],
)
@pytest.mark.parametrize("is_empty_folder", [True, False])
def test_without_its_marker_nothing_is_read_written_or_made(spec, folder, act, is_empty_folder):
    if is_empty_folder:
        folder.mkdir(parents=True)
    with pytest.raises(StoreMissing, match="it is not mounted, or no run has made it yet"):
        act(open_store(spec))
    assert folder.exists() is is_empty_folder
    assert not is_empty_folder or list(folder.iterdir()) == []


def test_a_bucket_is_always_taken_to_be_there():
    assert has_store(StorageSpec(address="s3://bucket/team"))


def test_what_is_not_in_a_store_that_is_there_is_not_found(spec):
    make_store(spec)
    with pytest.raises(NotFound):
        open_store(spec).get("a")


def test_a_store_that_comes_back_is_waited_for_and_gets_what_was_to_be_written(spec, folder):
    make_store(spec)
    away = folder.with_name("away")
    waiting = Waiting(lambda: None, lambda: away.rename(folder))
    store = open_store(spec, retry=waiting.retry)
    store.put("a", b"1")
    folder.rename(away)
    store.put("b", b"2")
    assert (away.exists(), waiting.over) == (False, 1)
    assert len(waiting.failed) == 2
    assert all(isinstance(one, StoreMissing) for one in waiting.failed)
    assert "it is not mounted, or was moved away" in str(waiting.failed[0])
    assert (store.get("a"), store.get("b")) == (b"1", b"2")


def test_what_is_read_while_the_store_is_away_is_read_from_it_later(spec, folder):
    make_store(spec)
    away = folder.with_name("away")
    store = open_store(spec, retry=Waiting(lambda: away.rename(folder)).retry)
    store.put("a", b"1")
    folder.rename(away)
    assert [info.key for info in store.list("")] == ["a"]


def test_a_store_that_vanishes_while_an_object_is_written_is_written_again(
    spec, folder, monkeypatch
):
    """Below the mount lies an empty folder: what was written there is not in the store."""
    make_store(spec)
    away = folder.with_name("away")
    write = LocalStore._write_temporary
    seen: list[Path] = []

    def back() -> None:
        folder.rename(folder.with_name("below"))
        away.rename(folder)

    def vanishing(self, data, **options):
        path = write(self, data, **options)
        if not seen:
            seen.append(path)
            folder.rename(away)
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
        return path

    monkeypatch.setattr(LocalStore, "_write_temporary", vanishing)
    store = open_store(spec, retry=Waiting(back).retry)
    store.put("a", b"1", if_absent=True)
    assert seen
    assert store.get("a") == b"1"
    with pytest.raises(PreconditionFailed):
        store.put("a", b"2", if_absent=True)


def test_an_object_that_was_published_before_the_store_vanished_is_ours(spec, folder, monkeypatch):
    make_store(spec)
    away = folder.with_name("away")
    put = LocalStore._put

    def vanishing(self, *arguments, **options):
        put(self, *arguments, **options)
        folder.rename(away)

    def back() -> None:
        away.rename(folder)
        monkeypatch.setattr(LocalStore, "_put", put)

    monkeypatch.setattr(LocalStore, "_put", vanishing)
    store = open_store(spec, retry=Waiting(back).retry)
    store.put("a", b"1", if_absent=True)
    assert store.get("a") == b"1"


def test_a_full_disk_is_an_error_of_its_own(spec, monkeypatch):
    make_store(spec)

    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "_write_temporary", full)
    with pytest.raises(StorageFull, match="the disk is full"):
        open_store(spec).put("a", b"1")


def test_where_a_store_may_be_made_is_tried_and_left_as_it_was(spec, tmp_path):
    check_can_make(spec)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays_with_what_is_in_it(spec, folder):
    folder.mkdir(parents=True)
    (folder / "mine").write_text("kept")
    check_can_make(spec)
    assert [path.name for path in folder.iterdir()] == ["mine"]
