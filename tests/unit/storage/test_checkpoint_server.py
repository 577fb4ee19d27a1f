"""The checkpoint server and its clients: what is handed over is published, held, and reported."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import sched_yield
from threading import Event, Lock, Thread
from typing import Any

import pytest

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.checkpoint_server.protocol import (
    ListShares,
    Ready,
    Reserve,
    check_peer,
    receive,
    send,
)
from perdure.storage.checkpoint_server.publish import Publisher, prune_disk, shares_on_disk
from perdure.storage.checkpoint_server.server import UPLOAD_THREADS, CheckpointServer
from perdure.storage.checkpoint_server.slots import SlotState
from perdure.storage.errors import Corrupt, PermanentError, StorageError
from perdure.storage.local import LocalStore
from perdure.storage.share import put_record
from tests.unit.storage.nodes import (
    RUN_ID,
    bytes_of,
    flip_bit,
    save,
    save_steps,
    settle,
    share_of,
    written,
)
from tests.unit.storage.stores import FullStore, UnreadableStore
from tests.waiting import BEYOND_A_TEST_S

NOBODY = 65534


@dataclass
class Bench:
    """A checkpoint server in threads of this process, its store and its disk."""

    checkpoint_server: CheckpointServer
    name: str
    store: FullStore
    disk: CheckpointStore

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.store, RUN_ID)

    @contextmanager
    def full_store(self) -> Iterator[None]:
        """Nothing fits into the store until everything that was handed over has been tried."""
        self.store.room_bytes = 10
        yield
        self.checkpoint_server._tasks.wait(240)
        self.store.room_bytes = 1 << 30


@pytest.fixture
def memory_bytes() -> list[int]:
    """What the host still has."""
    return [1 << 30]


@contextmanager
def serving(
    store: FullStore, disk: CheckpointStore, available_bytes: Callable[[], int] | None = None
) -> Iterator[Bench]:
    checkpoints = CheckpointStore(store, RUN_ID)
    name = f"perdure-test-{uuid.uuid4().hex}"
    checkpoint_server = CheckpointServer(
        name,
        publisher=Publisher(checkpoints, disk=disk, retain=lambda _step: None, wait_s=5),
        store=checkpoints,
        disk=disk,
        available_bytes=available_bytes,
    )
    thread = Thread(target=checkpoint_server.serve, daemon=True)
    thread.start()
    yield Bench(checkpoint_server, name, store, disk)
    checkpoint_server.close(5)
    thread.join()


@pytest.fixture
def bench(tmp_path, memory_bytes) -> Iterator[Bench]:
    store = FullStore(tmp_path / "store", room_bytes=1 << 30)
    disk = CheckpointStore(LocalStore(tmp_path / "disk"), RUN_ID)
    with serving(store, disk, lambda: memory_bytes[0]) as bench:
        yield bench


@pytest.fixture
def client(bench) -> Iterator[CheckpointClient]:
    with CheckpointClient(bench.name) as client:
        yield client


def held(client: CheckpointClient) -> list[tuple[int, int, str]]:
    return [
        (one.written.share.step, one.written.share.rank, one.tier.value) for one in client.shares()
    ]


def test_a_save_is_in_memory_on_disk_and_committed(bench, client):
    save_steps(client, 10)
    assert held(client) == [(10, 0, "memory"), (10, 0, "disk")]
    assert bench.checkpoints.steps() == [10]
    assert bench.checkpoints.verify(10) == []
    assert bytes(client.open(share_of(10).save_id, 0)[:64]) == bytes_of(share_of(10))
    assert client.shares()[0].written == written(share_of(10))


def test_every_ranks_share_belongs_to_the_checkpoint(bench):
    with CheckpointClient(bench.name) as first, CheckpointClient(bench.name) as second:
        save(first, share_of(10, world_size=2))
        save(second, share_of(10, rank=1, world_size=2))
        settle(first)
        settle(second)
    assert len(bench.checkpoints.manifest(10).shards) == 2
    assert bench.checkpoints.verify(10) == []


def release_retired(bench: Bench, client: CheckpointClient) -> None:
    """Close a connection, and wait until the checkpoint server has noticed."""
    client.close()
    while any(slot.state is SlotState.COPYING for slot in bench.checkpoint_server._slots._all()):
        sched_yield()


def test_what_is_mapped_once_is_used_again(bench, client):
    first = client.reserve(0, 5000)
    release_retired(bench, client)
    again = client.reserve(0, 4000)
    assert first is not None
    assert again is not None
    assert again.memory is first.memory
    release_retired(bench, client)
    grown = client.reserve(0, 9000)
    assert grown is not None
    assert (grown.number, len(grown.memory)) == (first.number, 9000)


def test_no_memory_is_refused_with_the_numbers(client, memory_bytes):
    memory_bytes[0] = 1000
    assert client.prepare(2, 5000) == "rank 2: a share of 5000 bytes, 1000 bytes are available"
    with pytest.raises(StorageError, match="a share of 5000 bytes, 1000 bytes are available"):
        client.reserve(2, 5000)
    assert client.prepare(2, 400) is None


def test_a_copy_that_its_writer_left_is_discarded_and_what_was_whole_stays(bench, client):
    save_steps(client, 10)
    leaving = CheckpointClient(bench.name)
    slot = leaving.reserve(0, 64)
    assert slot is not None
    slot.memory[:64] = bytes(64)
    leaving.close()
    save_steps(client, 20)
    assert [one for one in held(client) if one[2] == "memory"] == [
        (10, 0, "memory"),
        (20, 0, "memory"),
    ]


def test_a_slot_of_another_worker_cannot_be_handed_over(bench, client):
    slot = client.reserve(0, 64)
    assert slot is not None
    with (
        CheckpointClient(bench.name) as other,
        pytest.raises(StorageError, match=f"slot {slot.number} is not yours"),
    ):
        other.ready(slot, share_of(10), announce=None)
    client.ready(slot, share_of(10), announce=None)
    settle(client)


def test_what_a_reader_has_open_is_not_given_away(bench, client):
    save_steps(client, 10, 20)
    with CheckpointClient(bench.name) as reader:
        memory = reader.open(share_of(10).save_id, 0)
        assert client.reserve(0, 64) is None
        assert bytes(memory[:64]) == bytes_of(share_of(10))
    save_steps(client, 30)
    with pytest.raises(StorageError, match="step 10 rank 0 is gone"):
        client.open(share_of(10).save_id, 0)


def test_a_store_without_room_is_reported_once_and_the_next_save_works(bench, client):
    with bench.full_store(), pytest.raises(PermanentError, match="the disk is full"):
        save_steps(client, 10)
    settle(client)
    save_steps(client, 20)
    assert bench.checkpoints.steps() == [20]


def test_a_failure_reaches_the_next_save_and_costs_no_slot(bench, client):
    with bench.full_store():
        save(client, share_of(10))
    with pytest.raises(PermanentError, match="the disk is full"):
        save(client, share_of(20))
    save_steps(client, 20, 30, 40)
    assert bench.checkpoints.steps() == [20, 30, 40]


def test_an_unforeseen_error_reaches_the_worker_too(bench, client):
    bench.store.error = ZeroDivisionError("in a library")
    save(client, share_of(10))
    with pytest.raises(StorageError, match="in a library"):
        settle(client)
    bench.store.error = None
    save_steps(client, 20)
    assert bench.checkpoints.steps() == [20]


def test_a_save_that_was_overtaken_by_a_newer_attempt_is_no_failure(bench, client):
    bench.checkpoints.fence(1, 2)
    save_steps(client, 10)
    assert bench.checkpoints.steps() == []
    save_steps(client, 10, owner=(1, 2))
    assert bench.checkpoints.manifest(10).attempt == 2


def test_a_disk_that_cannot_be_read_hides_no_memory(tmp_path, bench, caplog):
    broken = CheckpointStore(UnreadableStore(tmp_path / "broken"), RUN_ID)
    bench.checkpoint_server._disk = broken
    with CheckpointClient(bench.name) as client:
        save_steps(client, 10)
        assert held(client) == [(10, 0, "memory")]
    assert "the medium cannot be read" in caplog.text


def test_a_note_that_cannot_be_written_refuses_no_save(bench, client):
    noted: list[int] = []

    def full(saves) -> None:
        noted.append(len(saves))
        raise OSError(errno.ENOSPC, "No space left on device")

    bench.checkpoint_server._note = full
    save_steps(client, 10, 20)
    assert noted == [1, 2]
    assert bench.checkpoints.steps() == [10, 20]


def test_notes_of_ranks_that_save_at_once_are_written_one_after_the_other(bench):
    writing = Lock()
    together: list[bool] = []
    noted: list[int] = []

    def note(saves) -> None:
        noted.append(len(saves))
        together.append(not writing.acquire(blocking=False))
        for _ in range(1000):
            sched_yield()
        writing.release()

    bench.checkpoint_server._note = note
    clients = [CheckpointClient(bench.name) for _ in range(4)]
    savers = [
        Thread(target=save, args=(client, share_of(10, rank=rank, world_size=4)))
        for rank, client in enumerate(clients)
    ]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    settle(clients[0])
    assert not any(together)
    assert noted == sorted(noted)
    assert noted[-1] == 4


def test_a_share_whose_slot_is_given_away_is_noted_as_gone(bench, client):
    noted: list[list[int]] = []
    bench.checkpoint_server._note = lambda saves: noted.append(
        sorted(save.step for save, _rank in saves)
    )
    save_steps(client, 10, 20)
    client.reserve(0, 64)
    assert noted == [[10], [10, 20], [20]]


def test_a_failure_of_a_dead_attempt_is_not_reported_to_the_next_one(bench, client):
    with bench.full_store():
        save(client, share_of(10))
    with CheckpointClient(bench.name, owner=(1, 2)) as second:
        save_steps(second, 20, owner=(1, 2))
    settle(client)
    assert bench.checkpoints.steps() == [20]


def test_a_failure_of_an_attempt_is_reported_to_its_own_workers(bench):
    with (
        CheckpointClient(bench.name, owner=(1, 2)) as mine,
        CheckpointClient(bench.name, owner=(1, 1)) as before,
    ):
        with bench.full_store():
            save(mine, share_of(10, owner=(1, 2)))
        settle(before)
        with pytest.raises(PermanentError, match="the disk is full"):
            settle(mine)
        settle(mine)


def test_shares_reach_the_disk_while_the_store_hangs(bench, client, monkeypatch):
    goes_on = Event()
    put = bench.store.put

    def hang(key, data, **options) -> None:
        goes_on.wait(240)
        put(key, data, **options)

    monkeypatch.setattr(bench.store, "put", hang)
    ranks = range(UPLOAD_THREADS + 2)
    for rank in ranks:
        save(client, share_of(10, rank=rank, world_size=len(ranks)))
    bench.checkpoint_server._tasks.wait(240, pools=[bench.checkpoint_server._disk_writes])
    assert {one.share.rank for one in shares_on_disk(bench.disk)} == set(ranks)
    assert client.is_busy()
    goes_on.set()
    settle(client)
    assert bench.checkpoints.verify(10) == []


def lost_upload(bench, client, step: int, **fields) -> None:
    """A save that the store refused: memory and disk have it."""
    with bench.full_store(), pytest.raises(PermanentError):
        save_steps(client, step, **fields)


def republish(client: CheckpointClient, step: int, **how: Any) -> None:
    """As a worker of the second attempt requests it."""
    how = {"owner": (1, 2), "commit": True, "announce": None, **how}
    client.republish(share_of(step).save_id, **how)
    settle(client)


def test_what_the_store_refused_before_is_published_by_the_next_attempt(bench, client):
    lost_upload(bench, client, 10)
    bench.checkpoints.fence(1, 2)
    republish(client, 10)
    assert (bench.checkpoints.steps(), bench.checkpoints.manifest(10).attempt) == ([10], 2)
    assert bench.checkpoints.verify(10) == []


@pytest.fixture
def restarted(bench, client) -> Iterator[CheckpointClient]:
    """A second server over the disk of one whose memory is gone; only step 10 is on it."""
    attachments = {"runs/run/metrics/1-10": "ten lines"}
    lost_upload(bench, client, 10, attachments=attachments)
    with serving(bench.store, bench.disk) as second, CheckpointClient(second.name) as theirs:
        yield theirs


def test_what_only_the_disk_has_is_published_with_all_that_goes_with_it(bench, restarted):
    assert held(restarted) == [(10, 0, "disk")]
    republish(restarted, 10)
    assert bench.checkpoints.verify(10) == []
    assert bench.store.get("runs/run/metrics/1-10") == b"ten lines"


def test_steps_of_a_save_that_was_overtaken_are_kept_with_the_one_that_is_restored(
    bench, restarted
):
    later = share_of(20)
    bench.disk.store.put(bench.disk.key(20, later.shard), bytes_of(later))
    put_record(bench.disk, written(later))
    republish(restarted, 20)
    assert bench.checkpoints.steps() == [20]
    assert bench.store.get("runs/run/metrics/1-10") == b"ten lines"


def test_a_share_that_rotted_on_the_disk_is_not_published(bench, restarted):
    flip_bit(bench.disk.store, bench.disk.key(10, share_of(10).shard), 77)
    with pytest.raises(Corrupt, match="is damaged"):
        republish(restarted, 10, commit=False)
    assert bench.checkpoints.steps() == []


def test_a_republished_share_that_the_store_has_is_left_alone(bench, client):
    save(client, share_of(10, world_size=2))
    bench.checkpoint_server._tasks.wait(0.2)
    key = bench.checkpoints.key(10, share_of(10).shard)
    before = bench.store.stat(key).etag
    client.republish(share_of(10, world_size=2).save_id, owner=(1, 2), commit=False, announce=None)
    bench.checkpoint_server._tasks.wait(0.2)
    assert bench.store.stat(key).etag == before
    save_steps(client, 10, rank=1, world_size=2)


def test_a_committed_save_is_not_published_again(bench, client):
    save_steps(client, 10)
    before = bench.store.stat(bench.checkpoints.key(10, share_of(10).shard)).etag
    republish(client, 10)
    assert bench.store.stat(bench.checkpoints.key(10, share_of(10).shard)).etag == before
    assert bench.checkpoints.manifest(10).attempt == 1


def test_a_save_that_every_worker_requests_is_published_once(bench, client, monkeypatch):
    lost_upload(bench, client, 10)
    uploads: list[int] = []
    upload = bench.checkpoint_server._publisher.upload

    def counted(one, data) -> None:
        uploads.append(one.share.rank)
        upload(one, data)

    monkeypatch.setattr(bench.checkpoint_server._publisher, "upload", counted)
    for _worker in range(3):
        client.republish(share_of(10).save_id, owner=(1, 2), commit=False, announce=None)
    bench.checkpoint_server._tasks.wait(240)
    assert uploads == [0]
    republish(client, 10, owner=(1, 3))
    assert bench.checkpoints.manifest(10).attempt == 3


def test_a_share_that_lost_its_slot_meanwhile_is_no_failure_without_a_disk(bench):
    bench.checkpoint_server._disk = None
    bench.checkpoint_server._publish_again(share_of(10).save_id, 0, (1, 2))
    assert bench.checkpoints.states() == {}


def test_a_connection_that_cannot_be_taken_does_not_end_the_checkpoint_server(
    bench, client, caplog, monkeypatch
):
    failures = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def accept_later(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    assert held(client) == []
    with CheckpointClient(bench.name) as second:
        assert held(second) == []
    assert failures == []
    assert caplog.text.count("no connection taken: [Errno 24]") == 1


def test_an_error_while_answering_is_reported_and_the_connection_goes_on(
    bench, client, monkeypatch, caplog
):
    def fail() -> None:
        raise ZeroDivisionError("by nought")

    with monkeypatch.context() as patch:
        patch.setattr(bench.checkpoint_server, "_held", fail)
        with pytest.raises(
            StorageError, match="the checkpoint server: ZeroDivisionError: by nought"
        ):
            client.shares()
    assert "list: ZeroDivisionError: by nought" in caplog.text
    assert held(client) == []


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 names alone


def test_descriptors_that_were_not_requested_are_closed(bench, tmp_path):
    with socket.socket(socket.AF_UNIX) as peer, (tmp_path / "file").open("wb") as file:
        peer.connect(f"\0{bench.name}")
        before = None
        for _ in range(5):
            send(peer, ListShares(), file.fileno())
            assert receive(peer)[0]
            before = before or num_descriptors()
        assert num_descriptors() == before


def test_the_descriptor_of_a_message_that_was_cut_short_is_closed(tmp_path):
    one, other = socket.socketpair()
    with one, other, (tmp_path / "file").open("wb") as file:
        before = num_descriptors()
        socket.send_fds(one, [b"\x05\0\0\0\0\0\0\0xx"], [file.fileno()])
        one.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="closed within a message"):
            receive(other)
        assert num_descriptors() == before


def test_a_peer_that_sends_nonsense_is_dropped_and_others_are_served(bench, client):
    for nonsense in (b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x05\0\0\0\0\0\0\0xx", b"\x01"):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(f"\0{bench.name}")
            peer.sendall(nonsense)
            peer.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert peer.recv(1) == b""
    assert held(client) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_peer_of_another_user_is_refused(bench, client):
    script = (
        "import os, socket, sys\n"
        f"os.setuid({NOBODY})\n"
        "peer = socket.socket(socket.AF_UNIX)\n"
        "peer.connect('\\0' + sys.argv[1])\n"
        "try:\n"
        "    peer.sendall(b'\\x0d' + bytes(7) + b'{\"op\":\"list\"}')\n"
        "    print(len(peer.recv(100)))\n"
        "except OSError:\n"
        "    print(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, bench.name], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"
    assert held(client) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_checkpoint_server_of_another_user_is_refused():
    name = f"perdure-test-{uuid.uuid4().hex}"
    script = (
        "import os, socket, sys\n"
        f"os.setuid({NOBODY})\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind('\\0' + sys.argv[1])\n"
        "listener.listen()\n"
        "print('listening', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        other.stdout.readline()
        with socket.socket(socket.AF_UNIX) as mine:
            mine.connect(f"\0{name}")
            with pytest.raises(ConnectionError, match=f"belongs to user {NOBODY}"):
                check_peer(mine)
    finally:
        other.communicate(b"")


def test_messages_and_descriptors_arrive_as_sent(tmp_path):
    one, other = socket.socketpair()
    with one, other, (tmp_path / "file").open("wb+") as file:
        big = Ready(slot=1, share=share_of(10, size_bytes=64), announce="x" * 300_000)
        sender = Thread(target=send, args=(one, big))
        sender.start()
        data, descriptor = receive(other)
        sender.join()
        assert (Ready.model_validate_json(data), descriptor) == (big, None)
        send(one, ListShares(), file.fileno())
        data, descriptor = receive(other)
        assert descriptor is not None
        file.write(b"seen")
        file.flush()
        assert os.pread(descriptor, 4, 0) == b"seen"
        os.close(descriptor)
        one.close()
        assert receive(other) == (b"", None)


def test_the_end_waits_for_what_was_handed_over(bench, client):
    save(client, share_of(10))
    assert bench.checkpoint_server.close(240) is True
    assert bench.checkpoints.steps() == [10]


def test_the_end_reports_in_time_that_something_was_not_published(bench, client, monkeypatch):
    save(client, share_of(10, world_size=2))
    monkeypatch.setattr(bench.checkpoint_server._publisher, "_wait_s", BEYOND_A_TEST_S)
    assert bench.checkpoint_server.close(0.2) is False


def test_at_the_end_a_commit_that_waits_for_other_ranks_gives_up_in_time(bench, client):
    save(client, share_of(10, world_size=2))
    assert bench.checkpoint_server.close(2) is False
    assert bench.checkpoint_server._tasks.wait(0)
    failure = bench.checkpoint_server._tasks.take_failure((1, 1))
    assert failure is not None
    assert "the shares of ranks [1] did not come" in failure.text


def test_pruning_keeps_whole_saves_of_all_ranks(bench, client):
    for step in (10, 20, 30):
        for rank in (0, 1):
            save(client, share_of(step, rank=rank, world_size=2))
        settle(client)
    kept = [(one.share.step, one.share.rank) for one in shares_on_disk(bench.disk)]
    assert kept == [(20, 0), (20, 1), (30, 0), (30, 1)]
    prune_disk(bench.disk, keep_saves=1)
    assert {one.share.step for one in shares_on_disk(bench.disk)} == {30}


def test_tiers_are_named_nearest_first():
    assert list(Tier) == ["memory", "disk", "store"]
    assert Reserve(rank=0, size_bytes=1, timeout_s=0).op == "reserve"


def test_a_shard_without_its_record_takes_no_saves_place_on_the_disk(bench):
    # The checkpoint server of 30 was killed; the record of 50 comes next.
    for share in map(share_of, (10, 20, 30, 40, 50)):
        bench.disk.store.put(bench.disk.key(share.step, share.shard), bytes_of(share))
        if share.step not in (30, 50):
            put_record(bench.disk, written(share))
    prune_disk(bench.disk, keep_saves=2)
    assert sorted(one.share.step for one in shares_on_disk(bench.disk)) == [20, 40]
    assert sorted(bench.disk.states()) == [20, 40, 50]
