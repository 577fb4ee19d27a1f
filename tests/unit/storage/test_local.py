"""LocalStore: publication, listing, and what the operating system may answer."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from perdure.storage.errors import (
    AccessDenied,
    Corrupt,
    NotFound,
    PermanentError,
    PreconditionFailed,
    TransientError,
)
from perdure.storage.local import ABANDONED_AFTER_S, TEMPORARY_FOLDER, LocalStore

HOUR_S = 3600.0


class Killed(BaseException):
    """The writer ends here."""


def temporaries(local: LocalStore) -> list[Path]:
    return list((local._root / TEMPORARY_FOLDER).iterdir())


def test_a_writer_killed_before_the_rename_leaves_the_old_object(local, monkeypatch):
    local.put("a/b", b"old")
    seen: list[bytes] = []

    def killed(source: Path, _target: Path) -> None:
        seen.append(Path(source).read_bytes())
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            local.put("a/b", b"new")
    assert seen == [b"new"], "everything was written before the rename"
    assert local.get("a/b") == b"old"
    assert [info.key for info in local.list("")] == ["a/b"]


def test_data_is_synced_before_it_gets_its_name_and_the_folder_after(local, monkeypatch):
    local.put("a/warm", b"")  # creates the folders
    events: list[str] = []
    sync, replace = os.fsync, Path.replace

    def watched_sync(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').resolve().parent.name}")
        sync(descriptor)

    def watched_replace(source: Path, target: Path) -> Path:
        events.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    local.put("a/b", b"data")
    assert events == [f"sync {TEMPORARY_FOLDER}", "rename", f"sync {local._root.name}"]


def test_temporary_files_are_never_listed(local):
    local.put("a", b"1")
    (local._root / TEMPORARY_FOLDER / "123-abc").write_bytes(b"half")
    assert [info.key for info in local.list("")] == ["a"]
    assert list(local.list(TEMPORARY_FOLDER)) == []
    assert list(local.list(f"{TEMPORARY_FOLDER}/1")) == []


def test_nothing_temporary_remains_after_any_put(local):
    local.put("a", b"1")
    local.put("a", b"2", if_absent=False)
    local.put("b", b"3", if_absent=True)
    with pytest.raises(PreconditionFailed):
        local.put("b", b"4", if_absent=True)
    assert temporaries(local) == []


def test_the_first_put_of_a_store_removes_abandoned_temporaries_only(tmp_path):
    folder = tmp_path / TEMPORARY_FOLDER
    folder.mkdir()
    (folder / "abandoned").write_bytes(b"x")
    (folder / "live").write_bytes(b"x")
    old_s = (folder / "live").stat().st_mtime - ABANDONED_AFTER_S - 1
    os.utime(folder / "abandoned", (old_s, old_s))
    LocalStore(tmp_path).put("a", b"1")
    assert [path.name for path in folder.iterdir()] == ["live"]


@pytest.mark.parametrize("ahead_s", [-48 * HOUR_S, 48 * HOUR_S])
def test_the_time_is_the_file_systems_whatever_the_machines_clock_says(local, monkeypatch, ahead_s):
    monkeypatch.setattr(time, "time", lambda: ahead_s)
    before_s = local.now_s()
    local.put("a", b"1")
    assert before_s <= local.stat("a").modified_s <= local.now_s()
    assert temporaries(local) == []


def test_asking_the_time_makes_no_store(tmp_path):
    before_s = time.time()
    assert before_s <= LocalStore(tmp_path / "gone" / "store").now_s() <= time.time()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_may_not_be_written_has_this_machines_time(local, monkeypatch):
    local.put("a", b"1")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", read_only)
    monkeypatch.setattr(time, "time", lambda: 7.0)
    assert local.now_s() == 7.0


def test_a_link_that_nfs_made_but_calls_taken_counts_as_made(local, monkeypatch):
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", repeated)
    local.put("a", b"ours", if_absent=True)
    assert local.get("a") == b"ours"


def test_a_folder_pruned_between_making_and_renaming_is_made_again(local, monkeypatch):
    replace = Path.replace
    pruned: list[Path] = []

    def racing(source: Path, target: Path) -> Path:
        if not pruned:
            pruned.append(target)
            target.parent.rmdir()
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", racing)
    local.put("a/b", b"1")
    assert pruned
    assert local.get("a/b") == b"1"


def test_deleting_the_last_object_removes_its_folders(local):
    local.put("a/b/c", b"1")
    local.put("a/d", b"1")
    local.delete("a/b/c")
    assert not (local._root / "a/b").exists()
    assert local.get("a/d") == b"1"


def test_a_folder_is_no_object(local):
    local.put("a/b", b"1")
    with pytest.raises(NotFound):
        local.stat("a")
    with pytest.raises(NotFound):
        local.get("a")
    with pytest.raises(NotFound):
        local.get("a/b/c")
    local.delete("a")
    assert local.get("a/b") == b"1"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EACCES, AccessDenied),
        (errno.ENOSPC, PermanentError),
        (errno.EIO, Corrupt),
        (errno.ESTALE, TransientError),
        (errno.ELOOP, PermanentError),
    ],
)
def test_operating_system_errors_become_ours_and_name_the_object(
    local, monkeypatch, number, expected
):
    local.put("warm", b"")

    def failing(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(expected, match=r"file://.*/a/b: "):
        local.put("a/b", b"1")
    assert temporaries(local) == []


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(local, monkeypatch):
    local.put("runs/a/b", b"1")

    def denied(_folder: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(AccessDenied):
        list(local.list("runs/a/"))


def test_the_root_must_be_absolute():
    with pytest.raises(ValueError, match="not an absolute path"):
        LocalStore(Path("relative"))


def test_the_stores_own_folder_is_no_key(local):
    with pytest.raises(ValueError, match="the store's own"):
        local.put(f"{TEMPORARY_FOLDER}/x", b"")
