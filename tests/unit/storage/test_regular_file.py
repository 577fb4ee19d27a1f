"""Objects of a folder store that are no files, and files of a program's checkpoints that are none.

Each of these tests ends: a reader that opened a FIFO would wait for its writer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.file_sets import put_set
from perdure.storage.local import LocalStore
from perdure.storage.regular_file import NotRegularError, open_regular
from perdure.training.commands.checkpoint_layouts import Tracker, is_whole_file, read_number

KEY = "runs/a/ledger/000001.json"
OUTSIDE = b"a file of somebody else"


def make_socket(path: Path) -> None:
    previous = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(previous)


def link_out(path: Path) -> None:
    outside = path.parents[4] / "outside"
    outside.write_bytes(OUTSIDE)
    path.symlink_to(outside)


STRANGE: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "proc": lambda path: path.symlink_to("/proc/self/environ"),
    "loop": lambda path: path.symlink_to(path.name),
    "out": link_out,
}


@pytest.fixture
def store(tmp_path) -> LocalStore:
    (tmp_path / "store/runs/a/ledger").mkdir(parents=True)
    return LocalStore(tmp_path / "store")


@pytest.mark.parametrize("kind", STRANGE)
def test_an_object_that_is_no_file_of_the_store_is_refused_by_every_reader(store, tmp_path, kind):
    STRANGE[kind](tmp_path / "store" / KEY)
    readers: list[Callable[[], object]] = [
        lambda: store.get(KEY),
        lambda: store.get(KEY, start=1, length=5),
        lambda: store.get_into(KEY, memoryview(bytearray(4))),
        lambda: store.get_scattered(KEY, [memoryview(bytearray(4))]),
        lambda: store.stat(KEY),
    ]
    for read in readers:
        with pytest.raises(Corrupt, match=r"000001\.json: (not a regular file|a symbolic link)"):
            read()


def test_a_link_to_a_file_of_the_same_store_is_followed(store, tmp_path):
    store.put("runs/a/real", b"here")
    (tmp_path / "store" / KEY).symlink_to("../real")
    assert store.get(KEY) == b"here"
    assert store.stat(KEY).size_bytes == 4


def test_a_store_behind_a_link_is_a_store(store, tmp_path):
    store.put(KEY, b"here")
    (tmp_path / "link").symlink_to("store")
    linked = LocalStore(tmp_path / "link")
    assert linked.get(KEY) == b"here"
    linked.put("runs/a/new", b"new")
    linked.delete(KEY)
    assert store.get("runs/a/new") == b"new"
    with pytest.raises(NotFound):
        store.get(KEY)


def test_nothing_is_written_or_deleted_behind_a_link_out_of_the_store(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(OUTSIDE)
    (tmp_path / "store/runs/b").symlink_to(outside)
    with pytest.raises(Corrupt, match="out of the store"):
        store.put("runs/b/new", b"new")
    with pytest.raises(Corrupt, match="out of the store"):
        store.delete("runs/b/file")
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("file", OUTSIDE)]


def test_a_folder_of_temporaries_elsewhere_is_not_swept(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "old").write_bytes(OUTSIDE)
    os.utime(outside / "old", (0, 0))
    (tmp_path / "store/.tmp").symlink_to(outside)
    with pytest.raises(Corrupt, match="out of the store"):
        store.put(KEY, b"new")
    assert (outside / "old").read_bytes() == OUTSIDE


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_what_is_no_file_is_no_sign_and_no_checkpoint_of_a_program(tmp_path, kind):
    for name in ("latest_checkpointed_iteration.txt", "ckpt.pt"):
        STRANGE[kind](tmp_path / name)
    assert Tracker(tmp_path).text is None
    assert not is_whole_file(tmp_path / "ckpt.pt")
    assert read_number(tmp_path / "ckpt.pt", "step") is None
    with pytest.raises(NotRegularError):
        put_set(LocalStore(tmp_path / "store"), "set", tmp_path / "ckpt.pt", written_s=0.0)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
