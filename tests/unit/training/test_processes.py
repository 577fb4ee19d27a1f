"""Processes of a container: found, ordered, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from perdure.training.processes import (
    MARKER,
    container_processes,
    interface_of,
    kill_container,
    read_world_size,
    sort_by_start,
)
from tests.local_run import LocalRun
from tests.waiting import wait_for


def test_a_process_is_killed_before_those_that_it_started_whatever_their_pids():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = []
    for _ in range(3):
        started.append(subprocess.Popen(command))
        time.sleep(0.02)  # the kernel counts starts in hundredths of a second
    try:
        ages = [psutil.Process(process.pid) for process in started]
        assert sort_by_start(reversed(ages)) == ages
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_interface_of_an_address_is_the_one_that_has_it():
    loopback = interface_of("127.0.0.1")
    assert loopback == interface_of("127.0.0.2") == interface_of("localhost")
    assigned = psutil.net_if_addrs()
    assert loopback in assigned
    for name, addresses in assigned.items():
        for interface in addresses:
            if interface.family == socket.AF_INET:
                assert interface_of(interface.address) == name
    assert interface_of("192.0.2.254") is None, "of documentation, nobody's"
    assert interface_of("no-such-host.invalid") is None


WITH_A_LOADER = """
import multiprocessing, time
context = multiprocessing.get_context("forkserver")
lock = context.Lock()
context.Process(target=time.sleep, args=(600,)).start()
print(lock._semlock.name, flush=True)
time.sleep(600)
"""


def start_loader(marker: str) -> tuple[subprocess.Popen[str], Path]:
    """A process with a loader in a container, and a semaphore that both have."""
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_A_LOADER],
        env={**os.environ, MARKER: marker},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip().removeprefix("/")
    semaphore = Path("/dev/shm", f"sem.{name}")  # noqa: S108 where glibc keeps them
    assert semaphore.exists()
    return process, semaphore


def test_a_node_that_is_killed_on_purpose_leaves_no_semaphore(tmp_path):
    process, semaphore = start_loader(str(tmp_path / "runs/run/nodes/node-0/container"))
    try:
        assert process.pid in LocalRun(tmp_path, "run").kill_node("node-0")
        run = LocalRun(tmp_path, "run")
        wait_for(lambda: not run.processes(), what="the end of its tracker")
        assert not semaphore.exists()
    finally:
        semaphore.unlink(missing_ok=True)
        process.communicate()


@pytest.mark.parametrize("tracker", ["lives", "is frozen"])
def test_a_killed_container_leaves_no_semaphore_and_no_process(tmp_path, tracker):
    marker = str(tmp_path)
    process, semaphore = start_loader(marker)
    (pid,) = [
        interface.pid
        for interface in container_processes(marker)
        if any("resource_tracker" in part for part in interface.cmdline())
    ]
    if tracker == "is frozen":  # what cannot end by itself is killed as the others are
        os.kill(pid, signal.SIGSTOP)
    try:
        assert kill_container(marker)
        assert container_processes(marker) == []
        assert semaphore.exists() == (tracker == "is frozen")
    finally:
        semaphore.unlink(missing_ok=True)
        process.communicate()


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({"RANK": "3", "WORLD_SIZE": "16"}, 16),
        ({"RANK_ID": "1", "RANK_SIZE": "8", "MS_WORKER_NUM": "8"}, 8),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 2),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 1),
        ({"ACCELERATE_MIXED_PRECISION": "no", "RANK": "1", "WORLD_SIZE": "2"}, 2),
        ({"RANK": "0"}, None),
        ({"WORLD_SIZE": "8"}, None),
        ({}, None),
    ],
)
def test_a_launcher_tells_its_ranks_the_size_of_their_gang(environment, size):
    assert read_world_size(environment) == size
