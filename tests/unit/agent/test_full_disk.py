"""An agent whose scratch disk takes no files: what it reports, and which logs it gives up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from perdure.training.agent.log_collection import compress, logs_at
from perdure.training.agent.log_room import first_kept_byte, give_up_logs, logs_of
from perdure.training.errors import EngineError
from perdure.training.files import why_unwritable, write_refusal, write_whole
from perdure.training.wire.agent import MetricsQuery, RendezvousOrder
from perdure.training.wire.logs import ReadLogsQuery
from tests.unit.agent.conftest import Container, end_container, start_container
from tests.waiting import wait_for

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=200", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("file systems cannot be mounted here: not root, or without the right")
    yield folder
    while os.path.ismount(folder):  # a test may have put another in its place
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def container(disk) -> Iterator[Container]:
    """An agent on that file system."""
    running = start_container(disk / "container", {})
    running.status()  # it listens: its own start needs room, too
    yield running
    end_container(running)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def use_up_inodes(folder: Path) -> None:
    with suppress(OSError):
        for number in range(1000):
            (folder / f"filler-{number}").touch()


def remount_read_only(folder: Path) -> None:
    # Open logs keep the file system itself writable; a second mount in its place is not.
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (fill, "No space left on device"),
        (use_up_inodes, "No space left on device"),
        (remount_read_only, "Read-only file system"),
    ],
)
def test_a_refused_start_is_told_with_its_reason_and_its_path(container, disk, spoil, reason):
    first = container.start("sh", "-c", "echo step 5; exit 3")
    assert container.until("ended").workers[0].exit_code == 3
    assert container.status().unwritable == ""
    spoil(disk)
    second = container.start("true")
    status = wait_for(lambda: (s := container.status()).attempt == second.attempt and s)
    status = container.until("ended")
    assert status.unwritable.startswith(f"{reason}: {disk}")
    assert status.staging_error is not None
    assert reason in status.staging_error
    assert (status.workers, status.steps, status.saved) == ((), (), ())
    assert first.attempt != second.attempt


def test_a_node_that_takes_files_again_starts_the_next_attempt(container, disk):
    fill(disk)
    container.finish("true")
    assert container.status().unwritable
    (disk / "filler").unlink()
    status = container.finish("true")
    assert (status.unwritable, status.staging_error) == ("", None)


def test_a_start_that_fails_for_the_jobs_own_mistake_blames_no_disk(container):
    assert container.finish("sh", "-c", "exit 3").unwritable == ""
    assert container.finish("/no/such/program").unwritable == ""


def test_a_refused_rendezvous_leaves_the_attempt_before_without_a_word_about_the_next(
    container, disk
):
    first = container.start("sh", "-c", "exit 3")
    container.until("ended")
    fill(disk)
    order = container.order("true", is_command=False)
    with pytest.raises(EngineError, match=f"No space left on device: {disk}"):
        container.call(RendezvousOrder(port=0, start=order, supported=()))
    status = container.status().of_attempt(order.placement, order.attempt)
    assert (status.state, status.workers, status.attempt) == ("idle", (), 0)
    assert "No space left" in status.unwritable
    key = (order.placement, order.attempt)
    assert container.call(MetricsQuery(offset=0, of_attempt=key)).text == ""
    assert container.status().of_attempt(first.placement, first.attempt).workers


def test_a_flood_costs_logs_and_not_the_run(container, disk):
    # It pauses before the disk is full: the agent looks once a second, whatever the machine does.
    program = (
        "import os, sys, time\n"
        "for number in range(60):\n"
        "    sys.stdout.write('a line of the flood\\n' * 50_000)\n"
        "    sys.stdout.flush()\n"
        f"    while os.statvfs({str(disk)!r}).f_bavail * 4096 < 1 << 20:\n"
        "        time.sleep(0.05)\n"
        "print('the last line')\n"
    )
    container.start(sys.executable, "-c", program)
    status = container.until("ended")
    assert status.workers[0].exit_code == 0, status
    (log,) = disk.glob("container/attempts/*/command-*.stdout.log")
    assert log.stat().st_size > 50 * MIB, "more than the disk holds"
    pieces = container.call(ReadLogsQuery(tail_bytes=200)).pieces
    assert any(piece.text.endswith("the last line\n") for piece in pieces)


@pytest.mark.parametrize("line", [b"a line\n", b"x" * 99 + b"\n", b"no end of a line "])
def test_the_newest_end_of_a_log_stays_and_sizes_and_offsets_remain(tmp_path, line):
    path = tmp_path / "rank.log"
    path.write_bytes(line * (4 * MIB // len(line)))
    size = path.stat().st_size
    freed = give_up_logs([path], low_bytes=2 * 256 * 1024)
    if not freed:
        pytest.skip("the file system of the tests has no holes")
    assert freed > 3 * MIB
    assert path.stat().st_size == size
    start = first_kept_byte(path)
    data = path.read_bytes()
    assert 128 * 1024 <= size - start <= 512 * 1024
    assert data[start:].strip(b"\0") == data[start:]
    if line.endswith(b"\n"):
        assert data[start:].startswith(line), "no line without its beginning"
    (log,) = logs_at(path)
    assert (log.start, log.end) == (start, size)
    with path.open("ab") as file:
        file.write(b"more\n")
    assert path.read_bytes().endswith(b"more\n")
    assert compress(iter([data[start:]]), limit_bytes=MIB)[0] is not None


def test_small_logs_stay_whole(tmp_path):
    path = tmp_path / "rank.log"
    path.write_bytes(b"a line\n" * 1000)
    assert give_up_logs([path], low_bytes=0) == 0
    assert first_kept_byte(path) == 0


def test_only_logs_of_the_run_are_given_up(tmp_path):
    node = tmp_path / "node-0"
    attempt = node / "p0001-m0-s1" / "attempts" / "p0001-a0001"
    earlier = node / "p0002-m0-s2" / "attempts" / "p0002-a0001"
    for folder in (attempt, earlier, node / "checkpoints"):
        folder.mkdir(parents=True)
        (folder / "rank-00000.stdout.log").touch()
    (tmp_path / "strangers.log").touch()
    container = node / "p0002-m0-s2"
    (container / "agent.log").touch()
    (earlier / "metrics.jsonl").touch()
    assert {path.relative_to(node).as_posix() for path in logs_of(container, earlier)} == {
        "p0001-m0-s1/attempts/p0001-a0001/rank-00000.stdout.log",
        "p0002-m0-s2/attempts/p0002-a0001/rank-00000.stdout.log",
        "p0002-m0-s2/agent.log",
    }


def test_a_file_that_cannot_be_written_is_named_and_leaves_no_half(disk):
    path = disk / "job.json"
    write_whole(path, "before")
    fill(disk)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_whole(path, "after" * 4096)
    assert path.read_text() == "before"
    assert not path.with_name("job.json.tmp").exists()


def test_a_folder_that_vanished_or_is_none_takes_no_files(tmp_path):
    gone, file = tmp_path / "gone", tmp_path / "file"
    file.touch()
    assert why_unwritable(gone) == f"No such file or directory: {gone}"
    assert why_unwritable(file) == f"Not a directory: {file}"
    assert why_unwritable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == [file], "the probe is gone"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOENT, errno.ENOTDIR])
def test_a_file_of_the_node_that_is_refused_is_the_nodes_whatever_the_reason(tmp_path, number):
    path = tmp_path / "attempts" / "p0001-a0002"
    error = OSError(number, os.strerror(number), str(path))
    assert write_refusal(error, [tmp_path]) == f"{os.strerror(number)}: {path}"


def test_attempts_that_are_no_folder_any_more_refuse_the_start(new_container):
    running = new_container()
    running.finish("true")
    attempts = running.folder / "attempts"
    attempts.rename(attempts.with_name("moved"))
    attempts.touch()
    refused = running.finish("true")
    assert refused.unwritable.endswith(f": {attempts / f'p0003-a{refused.attempt:04d}'}")
    assert refused.staging_error is not None
    attempts.unlink()
    assert running.finish("true").unwritable == ""


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (OSError(28, "No space left on device", "/elsewhere/x"), "No space left on device: /elsew"),
        (OSError(30, "Read-only file system", "/elsewhere/x"), "Read-only file system: /elsewhere"),
        (OSError(122, "Disk quota exceeded"), "[Errno 122] Disk quota exceeded"),
        (FileNotFoundError(2, "No such file or directory", "/secrets/token"), ""),
        (PermissionError(13, "Permission denied", "/secrets/token"), ""),
        (ValueError("a secret is missing"), ""),
        (None, ""),
    ],
)
def test_only_a_file_system_that_takes_no_files_is_a_refusal(tmp_path, error, refusal):
    answer = write_refusal(error, [tmp_path])
    assert answer.startswith(refusal) if refusal else answer == ""
    assert list(tmp_path.iterdir()) == []
