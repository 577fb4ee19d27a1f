"""Processes of a container: found, ordered, ended."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from training.processes import oldest_first


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
