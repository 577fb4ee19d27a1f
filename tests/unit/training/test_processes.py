"""Processes of a container: found, ordered, ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import psutil

from training.processes import interface_of, oldest_first


def test_a_process_is_killed_before_those_that_it_started_whatever_their_pids():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = []
    for _ in range(3):
        started.append(subprocess.Popen(command))
        time.sleep(0.02)  # the kernel counts starts in hundredths of a second
    try:
        ages = [psutil.Process(process.pid) for process in started]
        assert oldest_first(reversed(ages)) == ages
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
        for one in addresses:
            if one.family == socket.AF_INET:
                assert interface_of(one.address) == name
    assert interface_of("192.0.2.254") is None, "of documentation, nobody's"
    assert interface_of("no-such-host.invalid") is None
