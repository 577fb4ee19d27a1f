"""The heartbeat file, between a writer and a reader that may each be gone."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time

import pytest

from perdure.training.liveness.heartbeat import (
    ANY_RANK,
    Heartbeat,
    HeartbeatReader,
    HeartbeatWriter,
    Phase,
    rank_of_file,
)
from perdure.training.processes import RANK_VARIABLES
from tests.values import not_none


@pytest.fixture
def path(tmp_path):
    return tmp_path / "attempt" / "heartbeat-0"


@pytest.fixture
def writer(path):
    return HeartbeatWriter(path)


def read(path) -> Heartbeat:
    """What a new reader finds."""
    return not_none(HeartbeatReader(path).read())


def tear(path) -> None:
    """Leave a record whose writer was killed in the middle of it: odd sequence, half new."""
    with path.open("r+b") as file:
        (sequence,) = struct.unpack("<Q", file.read(8))
        file.seek(0)
        file.write(struct.pack("<QI", sequence + 1, 424242))


def test_what_is_written_is_read(path):
    before_ns = time.monotonic_ns()
    writer = HeartbeatWriter(path)
    writer.beat(phase=Phase.DATA, step=40)
    writer.record_data_wait(500)
    writer.beat(phase=Phase.STEP, step=41)
    writer.enter_collective("broadcast in world")
    writer.enter_collective("allreduce in world")
    writer.leave_collective()
    writer.record_vote(9_000)
    writer.enter_collective("barrier in world")
    beat = read(path)
    assert (beat.pid, beat.phase, beat.step) == (os.getpid(), Phase.STEP, 41)
    assert (beat.generation, beat.entered, beat.left) == (0, 3, 2)
    assert (beat.data_ns, beat.latency_ns) == (500, 9_000)
    assert 0 < beat.waited_ns < time.monotonic_ns() - before_ns
    assert beat.operation == "barrier in world"
    assert before_ns < beat.stepped_ns <= beat.beat_ns <= time.monotonic_ns()


def test_collectives_are_counted_from_one_completed_step_to_the_next(path, writer):
    writer.beat(step=6)
    writer.enter_collective("allreduce in world")
    writer.beat(step=7)
    writer.leave_collective()
    beat = read(path)
    assert (beat.entered, beat.left) == (0, 0)


def test_the_end_of_a_collective_is_no_sign_that_the_training_thread_lives(path, writer):
    writer.enter_collective("allreduce in world")
    entered = read(path)
    writer.leave_collective()
    left = read(path)
    assert left.beat_ns == entered.beat_ns
    assert (entered.entered, entered.left) == (1, 0)
    assert (left.entered, left.left) == (1, 1)


def test_collectives_that_overlap_are_waited_for_once(path, writer):
    before_ns = time.monotonic_ns()
    writer.enter_collective("allreduce in world")
    writer.enter_collective("allreduce in world")
    writer.leave_collective()
    open_ = read(path)
    writer.leave_collective()
    ended = read(path)
    assert open_.waited_ns == 0
    assert 0 < ended.waited_ns <= time.monotonic_ns() - before_ns


def test_a_name_that_is_too_long_or_no_ascii_is_cut_and_replaced(path):
    HeartbeatWriter(path).begin_transfer("send in gr\u00fcn" + "x" * 100)
    beat = read(path)
    assert beat.operation.startswith("send in gr?n")
    assert len(beat.operation) == 48


def test_threads_that_write_at_once_leave_whole_records(path, writer):
    reader = HeartbeatReader(path)
    assert reader.read() is not None  # from here on it has a whole record to fall back on
    readings = []

    def end_collectives() -> None:
        for _ in range(3000):
            writer.enter_collective("allreduce in world")
            writer.leave_collective()

    threads = [threading.Thread(target=end_collectives) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        readings.append(reader.read())
    last = not_none(reader.read())
    assert (last.entered, last.left) == (9000, 9000)
    assert all(reading is not None and reading.left <= reading.entered for reading in readings)


def test_a_writer_beats_as_soon_as_it_is_made(path):
    HeartbeatWriter(path)
    beat = read(path)
    assert (beat.phase, beat.step, beat.stepped_ns) == (Phase.START, -1, 0)


def test_restoring_a_step_is_not_completing_one(path, writer):
    writer.beat(phase=Phase.DATA, step=40)
    restored = read(path)
    assert (restored.step, restored.stepped_ns) == (40, 0)


def test_a_beat_without_a_new_step_moves_the_beat_alone(path, writer):
    writer.beat(step=6)
    writer.beat(step=7)
    first = read(path)
    writer.beat(step=7)
    second = read(path)
    assert second.stepped_ns == first.stepped_ns > 0
    assert second.beat_ns > first.beat_ns


def test_a_reader_before_the_writer_sees_nothing_then_the_first_record(path):
    reader = HeartbeatReader.of(path.parent, 0)
    assert reader.read() is None
    path.parent.mkdir()
    path.write_bytes(b"")
    assert reader.read() is None
    path.write_bytes(bytes(4096))
    assert reader.read() is None
    HeartbeatWriter(path)
    assert reader.read() is not None


def test_a_torn_record_keeps_the_last_whole_one(path, writer):
    writer.beat(phase=Phase.STEP, step=9)
    reader = HeartbeatReader(path)
    whole = reader.read()
    tear(path)
    assert reader.read() == whole
    assert HeartbeatReader(path).read() is None
    writer.beat(step=10)
    torn = not_none(reader.read())
    assert (torn.pid, torn.step) == (os.getpid(), 10)


def test_a_vanished_file_keeps_the_last_record(path):
    HeartbeatWriter(path).beat(step=3)
    reader = HeartbeatReader(path)
    whole = reader.read()
    path.unlink()
    assert reader.read() == whole


def test_the_record_of_a_killed_writer_stays_readable(path):
    code = (
        "import os, sys, pathlib\n"
        "from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase\n"
        "HeartbeatWriter(pathlib.Path(sys.argv[1])).beat(phase=Phase.SAVE, step=12)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(path)])
    assert killed.wait() == -9
    beat = read(path)
    assert (beat.pid, beat.phase, beat.step) == (killed.pid, Phase.SAVE, 12)


def test_the_record_is_readable_by_its_owner_alone(path):
    HeartbeatWriter(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_cost_of_a_beat_is_printed(path):
    writer, count = HeartbeatWriter(path), 2000
    before_s = time.perf_counter()
    for step in range(count):
        writer.beat(step=step)
    print(f"one beat: {(time.perf_counter() - before_s) / count * 1e6:.2f} us")
    beat = read(path)
    assert beat.step == count - 1


@pytest.mark.parametrize(
    ("launched", "name"),
    [
        ({"RANK": "3"}, "heartbeat-3"),
        ({"RANK_ID": "5"}, "heartbeat-5"),
        ({}, f"heartbeat-pid{os.getpid()}"),
    ],
    ids=["torchrun", "msrun", "a plain script"],
)
def test_ranks_that_inherit_one_name_write_to_a_file_each(tmp_path, monkeypatch, launched, name):
    for variable in RANK_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in launched.items():
        monkeypatch.setenv(variable, value)
    HeartbeatWriter(tmp_path / f"heartbeat-{ANY_RANK}").beat(step=7)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    beat = not_none(HeartbeatReader(tmp_path / name).read())
    assert (beat.step, beat.pid) == (7, os.getpid())
    assert rank_of_file(tmp_path / name) == (int(name[-1]) if launched else None)


FULL_DISK = """
import logging, pathlib, sys
from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase
logging.basicConfig(level="INFO")
writer = HeartbeatWriter(pathlib.Path(sys.argv[1], "heartbeat-0"))
writer.beat(phase=Phase.STEP, step=1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("filler_bytes", [0, 61440, 65536])
def test_a_full_disk_costs_the_heartbeat_and_not_the_process(tmp_path, filler_bytes):
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {tmp_path}; "
        f"head -c {filler_bytes} /dev/zero >{tmp_path}/filler; "
        f"exec {sys.executable} -c '{FULL_DISK}' {tmp_path}"
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no heartbeat") == (filler_bytes == 65536), done.stderr
