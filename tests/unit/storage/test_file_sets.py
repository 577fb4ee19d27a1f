"""Files of a program in the store: whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.storage.errors import Corrupt
from perdure.storage.file_sets import (
    ChangedMeanwhileError,
    delete_set,
    get_set,
    get_sets,
    put_nothing,
    put_set,
    read_set,
)
from perdure.storage.local import LocalStore
from tests.values import not_none

PREFIX = "runs/run/program/step-00000010/member-0"


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def folder(path: Path) -> Path:
    """A checkpoint of several files, one of them empty."""
    (path / "rank-0").mkdir(parents=True)
    (path / "rank-0" / "weights.pt").write_bytes(b"weights" * 1000)
    (path / "config.json").write_text("{}")
    (path / "done").write_bytes(b"")
    return path


def content(path: Path) -> dict[str, bytes]:
    files = (one for one in path.rglob("*") if one.is_file())
    return {str(one.relative_to(path)): one.read_bytes() for one in files}


def test_a_folder_comes_back_as_it_was(store, tmp_path):
    path = folder(tmp_path / "iter_10")
    before = content(path)
    made = put_set(store, PREFIX, path, written_s=5.0)
    assert read_set(store, PREFIX) == made
    assert (made.path, made.size_bytes) == (str(path), 7002)
    elsewhere = tmp_path / "new" / "node" / "iter_10"
    get_set(store, PREFIX, made, elsewhere)
    assert content(elsewhere) == before


def test_a_file_comes_back_in_place_of_another(store, tmp_path):
    path = tmp_path / "ckpt.pt"
    path.write_bytes(b"first")
    made = put_set(store, PREFIX, path, written_s=5.0)
    path.write_bytes(b"second, longer")
    get_set(store, PREFIX, made, path)
    assert path.read_bytes() == b"first"
    assert [one.name for one in tmp_path.iterdir() if one.name != "store"] == ["ckpt.pt"]


def test_what_is_half_put_is_not_there(store, tmp_path, monkeypatch):
    path = folder(tmp_path / "iter_10")
    put = store.put

    def fail_late(key: str, data: bytes) -> None:
        if key.endswith("weights.pt"):
            raise OSError("killed")
        put(key, data)

    monkeypatch.setattr(store, "put", fail_late)
    with pytest.raises(OSError, match="killed"):
        put_set(store, PREFIX, path, written_s=5.0)
    assert read_set(store, PREFIX) is None


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_the_program_writes_or_deletes_meanwhile_is_not_published(
    store, tmp_path, monkeypatch, is_gone
):
    path = tmp_path / "ckpt.pt"
    path.write_bytes(b"first")
    put = store.put

    def write_meanwhile(key: str, data: bytes) -> None:
        put(key, data)
        path.unlink()
        if not is_gone:
            path.write_bytes(b"second")

    monkeypatch.setattr(store, "put", write_meanwhile)
    with pytest.raises(ChangedMeanwhileError):
        put_set(store, PREFIX, path, written_s=5.0)
    assert read_set(store, PREFIX) is None


def test_a_folder_that_is_saved_anew_meanwhile_is_not_published(store, tmp_path, monkeypatch):
    path = folder(tmp_path / "iter_10")
    put = store.put

    def write_the_next(key: str, data: bytes) -> None:
        put(key, data)
        if key.endswith("config.json"):  # behind it, before the others are read
            (path / "done").write_bytes(b"of the next save")
            (path / "config.json").write_text("{ }")

    monkeypatch.setattr(store, "put", write_the_next)
    with pytest.raises(ChangedMeanwhileError):
        put_set(store, PREFIX, path, written_s=5.0)
    assert read_set(store, PREFIX) is None


def test_files_come_back_with_the_time_of_their_save(store, tmp_path):
    made = put_set(store, PREFIX, folder(tmp_path / "iter_10"), written_s=5.0)
    get_set(store, PREFIX, made, tmp_path / "new" / "iter_10")
    assert (tmp_path / "new" / "iter_10" / "done").stat().st_mtime == 5.0


def test_of_several_sets_the_first_ones_file_counts(store, tmp_path):
    other = "runs/run/program/step-00000010/member-1"
    made = put_set(store, PREFIX, folder(tmp_path / "a"), written_s=5.0)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("another")
    (tmp_path / "b" / "rank-1.pt").write_text("more")
    further = put_set(store, other, tmp_path / "b", written_s=6.0)
    get_sets(store, [(PREFIX, made), (other, further)], tmp_path / "new")
    assert content(tmp_path / "new") == content(tmp_path / "a") | {"rank-1.pt": b"more"}


def test_that_there_are_no_files_is_a_set_too(store, tmp_path):
    (tmp_path / "iter_10" / "mp_rank_00").mkdir(parents=True)
    made = put_nothing(store, PREFIX, tmp_path / "iter_10", written_s=5.0)
    assert read_set(store, PREFIX) == made
    assert (made.files, made.folders) == ((), ("mp_rank_00",))
    assert put_nothing(store, PREFIX, tmp_path / "nowhere", written_s=5.0).folders == ()


def test_damage_is_found_before_anything_is_replaced(store, tmp_path):
    path = folder(tmp_path / "iter_10")
    made = put_set(store, PREFIX, path, written_s=5.0)
    store.put(f"{PREFIX}/files/rank-0/weights.pt", b"x" * 7000)
    before = content(path)
    with pytest.raises(Corrupt, match="are not those that were put"):
        get_set(store, PREFIX, made, path)
    assert content(path) == before


def test_a_manifest_cannot_name_a_file_outside_its_folder(store, tmp_path):
    made = put_set(store, PREFIX, folder(tmp_path / "iter_10"), written_s=5.0)
    text = made.model_dump_json().replace("config.json", "../outside")
    store.put(f"{PREFIX}/manifest.json", text.encode())
    with pytest.raises(Corrupt):
        read_set(store, PREFIX)
    store.put(f"{PREFIX}/manifest.json", b"{}")
    with pytest.raises(Corrupt):
        read_set(store, PREFIX)


def test_a_deleted_set_leaves_nothing(store, tmp_path):
    put_set(store, PREFIX, folder(tmp_path / "iter_10"), written_s=5.0)
    not_none(read_set(store, PREFIX))
    delete_set(store, PREFIX)
    assert list(store.list("")) == []
