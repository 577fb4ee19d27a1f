"""Disk, memory, ports and store of a node."""

from __future__ import annotations

import socket
from collections import namedtuple

import psutil
import pytest

from perdure.storage.address import StorageSpec, make_store, open_store
from perdure.storage.errors import PermanentError
from perdure.training.node_checks import host as host_checks
from perdure.training.node_checks.host import (
    Room,
    check_disk,
    check_disks,
    check_memory,
    check_ports,
    check_store,
)
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job

STATE_BYTES = 1_000_000
Disk = namedtuple("Disk", "total free")  # noqa: PYI024 as psutil has it
Memory = namedtuple("Memory", "available")  # noqa: PYI024 likewise


@pytest.fixture
def job(tmp_path):
    def build(**sections):
        return small_job(tmp_path, **sections)

    return build


@pytest.fixture
def disk(monkeypatch):
    def have(total, free):
        monkeypatch.setattr(psutil, "disk_usage", lambda _path: Disk(total, free))

    return have


@pytest.mark.parametrize(
    ("free", "outcome"),
    [
        (50, CheckOutcome.OK),
        (9, CheckOutcome.FAILED),
        (11, CheckOutcome.WARNING),  # of its size
        (29, CheckOutcome.WARNING),  # of what a run may write
    ],
)
def test_a_disk_needs_room_for_the_checkpoints(tmp_path, disk, free, outcome):
    disk(1000, free * 10)
    check = check_disk("disk", tmp_path, Room(100, low_bytes=300, low_percent=20, why="2 saves"))
    assert check.outcome is outcome
    assert "100 B free: 2 saves" in check.allowed


def test_next_to_no_space_is_never_enough_however_much_of_the_disk_it_is(job, tmp_path, disk):
    """A file system of 5 MB that is empty is 100 % free."""
    disk(total=5_000_000, free=5_000_000)
    for sections in ({}, {"worker": {"command": ["true"]}}, {"worker": {"recipe": "mine:main"}}):
        for state in (None, STATE_BYTES):
            checks = list(check_disks(job(**sections), tmp_path, state))
            assert [check.outcome for check in checks] == [CheckOutcome.FAILED] * 2, checks
    disk(total=500_000_000, free=500_000_000)
    checks = list(check_disks(job(worker={"command": ["true"]}), tmp_path, None))
    assert [check.outcome for check in checks] == [CheckOutcome.WARNING] * 2
    assert "the size of its saves is not known" in checks[1].allowed


def test_a_disk_that_takes_no_file_has_failed_whatever_its_numbers(tmp_path, monkeypatch):
    def refuse(_folder):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(host_checks, "_try_to_write", refuse)
    check = check_disk("disk", tmp_path, Room(0))
    assert check.outcome is CheckOutcome.FAILED
    assert "Read-only" in check.seen


def test_nothing_is_left_on_the_disk(tmp_path):
    check_disk("disk", tmp_path, Room(0))
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_a_folder_needs_room_for_all_that_is_kept(job, tmp_path, disk):
    steps = job(checkpoint={"keep_last": 3})
    state, logs = 1 << 30, host_checks.RECORDS_BYTES
    disk(total=40 * state, free=4 * state + logs - 1)
    node, store = check_disks(steps, tmp_path, state)
    assert (node.name, node.outcome) == ("disk", CheckOutcome.OK)
    assert (store.name, store.outcome) == ("store_disk", CheckOutcome.FAILED)
    assert "4 saves of 1.07 GB, logs and records" in store.allowed
    disk(total=40 * state, free=5 * state)
    assert [check.outcome for check in check_disks(steps, tmp_path, state)] == [CheckOutcome.OK] * 2


def test_what_a_run_that_goes_on_has_saved_already_needs_no_room_again(job, tmp_path, disk):
    steps = job(checkpoint={"keep_last": 3})
    saved = tmp_path / "store" / "runs" / steps.run_id / "checkpoints" / "step-00000010"
    saved.mkdir(parents=True)
    (saved / "shard").write_bytes(bytes(3 * STATE_BYTES))
    disk(total=40 << 30, free=host_checks.RECORDS_BYTES + STATE_BYTES)
    _, store = check_disks(steps, tmp_path, STATE_BYTES)
    assert "1 saves of 1 MB" in store.allowed
    assert store.outcome is CheckOutcome.WARNING


def test_host_memory_has_to_take_two_saves(job, monkeypatch):
    needed = 2 * STATE_BYTES // 2  # two nodes
    for available, outcome in ((needed, CheckOutcome.OK), (needed - 1, CheckOutcome.FAILED)):
        memory = Memory(available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert check_memory(job(), 2, STATE_BYTES).outcome is outcome
    without = job(checkpoint={"host_memory": False})
    assert check_memory(without, 2, STATE_BYTES).outcome is CheckOutcome.OK


def test_copies_of_other_nodes_need_their_room_too(job, monkeypatch):
    copying = {"checkpoint": {"partner_copies": 1}, "restart": {"pod_retries": 1}}
    needed = 5 * STATE_BYTES // 2  # three saves of its own, and two of its partner's
    for available, outcome in ((needed, CheckOutcome.OK), (needed - 1, CheckOutcome.FAILED)):
        memory = Memory(available)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        assert check_memory(job(**copying), 2, STATE_BYTES).outcome is outcome


def test_ports_of_hccl_and_of_the_rendezvous_have_to_be_free(job):
    fixed = job(comm={"master_port": 29_400, "if_base_port": 61_000})
    free = check_ports(fixed, is_first=True, has_npus=True, used=lambda: {80})
    assert (free.outcome, free.seen) == (CheckOutcome.OK, "33 ports are free")
    num_taken = check_ports(
        fixed, is_first=True, has_npus=True, used=lambda: {61_031, 29_400, 61_032}
    )
    assert (num_taken.outcome, num_taken.seen) == (CheckOutcome.FAILED, "in use: 29400, 61031")
    other = check_ports(fixed, is_first=False, has_npus=False, used=lambda: {29_400})
    assert other.outcome is CheckOutcome.SKIPPED


def test_a_store_without_keys_has_failed_and_the_other_checks_go_on(job, monkeypatch):
    def refuse(_spec):
        raise ValueError("no keys")

    monkeypatch.setattr(host_checks, "open_store", refuse)
    check = host_checks.check_job_store(job())
    assert (check.outcome, check.seen) == (CheckOutcome.FAILED, "cannot open: no keys")


def test_a_port_in_use_is_found():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert listener.getsockname()[1] in host_checks.listening_ports()


def test_a_store_is_written_read_and_left_as_it_was(tmp_path):
    spec = StorageSpec(address=f"file://{tmp_path}")
    make_store(spec)
    store = open_store(spec)
    check = check_store(store, "runs/r/", size_bytes=1000)
    assert check.outcome is CheckOutcome.OK
    assert check.figures["write_mb_s"] > 0
    assert list(store.list("")) == []


def test_a_store_that_refuses_has_failed(tmp_path, monkeypatch):
    store = open_store(StorageSpec(address=f"file://{tmp_path}"))

    def refuse(*_arguments, **_options):
        raise PermanentError("access denied")

    monkeypatch.setattr(type(store), "put", refuse)
    check = check_store(store, "runs/r/", size_bytes=10)
    assert (check.outcome, check.seen) == (CheckOutcome.FAILED, "cannot write: access denied")
