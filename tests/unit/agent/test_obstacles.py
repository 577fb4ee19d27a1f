"""Who holds what is in the way, and what of it an agent removes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.training.agent.obstacles import (
    SharedMemoryNames,
    describe_obstacles,
    remove_leftovers,
)
from perdure.training.diagnosis.obstacles import SHARED_MEMORY


def test_a_file_that_the_run_left_is_removed(tmp_path):
    lock = tmp_path / "train.lock"
    lock.write_text("4711")
    (described,) = describe_obstacles([f"File exists: '{lock}'"], cwd=tmp_path, since_s=0.0)
    assert described.is_of_run
    assert "removed before the next start" in described.text
    remove_leftovers([str(lock)], since_s=0.0)
    assert not lock.exists()


def test_a_file_that_was_there_before_the_run_stays_and_is_named(tmp_path):
    lock = tmp_path / "train.lock"
    lock.write_text("4711")
    after_s = time.time() + 100
    (described,) = describe_obstacles([f"File exists: '{lock}'"], cwd=tmp_path, since_s=after_s)
    assert not described.is_of_run
    assert "before the run" in described.text
    remove_leftovers([str(lock)], since_s=after_s)
    assert lock.exists()


def test_a_file_that_a_living_process_holds_stays_and_its_holder_is_named(tmp_path):
    lock = tmp_path / "train.lock"
    with lock.open("w"):
        (described,) = describe_obstacles([f"File exists: '{lock}'"], cwd=tmp_path, since_s=0.0)
        assert not described.is_of_run
        assert f"(pid {os.getpid()}, user " in described.text
        remove_leftovers([str(lock)], since_s=0.0)
    assert lock.exists()


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_folders_and_links_are_never_removed(tmp_path, make):
    path = tmp_path / "train.lock"
    make(path)
    remove_leftovers([str(path)], since_s=0.0)
    assert os.path.lexists(path)


def test_a_socket_without_its_server_is_removed_and_one_with_it_stays(tmp_path):
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        remove_leftovers([str(path)], since_s=0.0)
        assert path.exists()
    remove_leftovers([str(path)], since_s=0.0)
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("train.lock", "FileExistsError: [Errno 17] File exists: 'train.lock'"),
        ("train.pid", "train.pid exists: another instance is already running (pid 4711)"),
        ("out/run.lock", "the run out/run.lock is locked"),
    ],
)
def test_a_file_that_is_named_from_the_folder_of_the_program_is_found(tmp_path, name, line):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("4711000")
    (described,) = describe_obstacles([line], cwd=tmp_path, since_s=0.0)
    assert (described.name, described.is_of_run) == (str(path), True)


@pytest.mark.parametrize("call", ["server.bind('loader.sock')", "server.bind(path)"])
def test_a_socket_of_a_killed_process_is_found_though_its_error_names_no_path(tmp_path, call):
    text = f"    {call}\nOSError: [Errno 98] Address already in use\n"
    path = tmp_path / "loader.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        described = describe_obstacles([text], cwd=tmp_path, since_s=0.0)
        assert not any(obstacle.is_of_run for obstacle in described), "its server lives"
    (described_later,) = describe_obstacles([text], cwd=tmp_path, since_s=0.0)
    assert (described_later.name, described_later.is_of_run) == (str(path), True)


def test_the_holder_of_a_port_is_named(tmp_path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        line = f"failed to bind to 127.0.0.1:{port}: Address already in use"
        (described,) = describe_obstacles([line], cwd=tmp_path, since_s=0.0)
        assert f"port {port} is held by" in described.text
        assert f"(pid {os.getpid()}, user " in described.text
    (described,) = describe_obstacles([line], cwd=tmp_path, since_s=0.0)
    assert described.text == f"no process that can be seen holds port {port} now"


def test_names_of_a_killed_process_are_removed_and_data_for_later_lives_stays(tmp_path):
    (tmp_path / "psm_0a1b2c3d").write_text("of another program")
    names = SharedMemoryNames(tmp_path)
    left = ("psm_1a2b3c4d", "sem.mp-x_y", "torch_4711_7_0", "index-4711", "ring-4711-0")
    data = ("corpus.bin", "shard-0", "shard-1", "shard-4711", "cache-3f9a2b7c")
    for name in (*left, *data):
        (tmp_path / name).write_text("x")
    names.remove_new({4711, 4712})
    assert {path.name for path in tmp_path.iterdir()} == {"psm_0a1b2c3d", *data}


def test_fifty_lives_leave_no_name_with_a_pid(tmp_path):
    for pid in range(2_000, 2_050):
        names = SharedMemoryNames(tmp_path)
        (tmp_path / f"ring-{pid}").write_text("x")
        names.remove_new({pid})
    assert list(tmp_path.iterdir()) == []


def test_what_another_run_of_this_user_has_in_shared_memory_stays(tmp_path):
    names = SharedMemoryNames(tmp_path)
    others = ("torch_99_7_0", "loky-99-x", "__KMP_REGISTERED_LIB_99")
    for name in others:
        (tmp_path / name).write_text("x")
    names.remove_new({4711})
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_a_semaphore_of_a_living_process_stays():
    before = SharedMemoryNames()
    semaphore: Any = multiprocessing.get_context("spawn").Semaphore()
    name = Path(SHARED_MEMORY) / f"sem.{semaphore._semlock.name.removeprefix('/')}"
    assert name.exists()
    before.remove_new(pids=())
    assert name.exists(), "other processes open it by this name"


def test_a_pid_file_of_a_living_process_stays_though_nobody_has_it_open(tmp_path):
    pid_file = tmp_path / "daemon.pid"
    pid_file.write_text(f"{os.getpid()}\n")
    remove_leftovers([str(pid_file)], since_s=0.0)
    assert pid_file.exists()
    pid_file.write_text(f"{2**22 + 1}\n")
    remove_leftovers([str(pid_file)], since_s=0.0)
    assert not pid_file.exists()
