"""What the processes of a session have done, by the kernel."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from perdure.training.agent.worker_process import SessionActivity, read_session_activity

# A session that has computed, with a child that has written.
PROGRAM = """
import subprocess, sys, time
while time.process_time() < 0.3:
    pass
child = [sys.executable, "-c", "import sys; sys.stdout.write('x' * 200_000)"]
subprocess.run(child, stdout=subprocess.PIPE, check=True)
print("done", flush=True)
sys.stdin.read()
"""


def test_a_session_is_known_by_all_that_its_processes_did():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"done\n"
        first = read_session_activity([process.pid, 2**22 + 1])
        second = read_session_activity([process.pid])
        process.stdin.close()
    assert first[process.pid].cpu_s >= 0.3
    assert first[process.pid].io_bytes > 200_000
    waited = first[process.pid].waited_s  # a busy machine lets it wait for a processor once more
    assert replace(second[process.pid], waited_s=waited) == first[process.pid], "it waits"
    assert first[2**22 + 1] == SessionActivity(), "there is no such process"
