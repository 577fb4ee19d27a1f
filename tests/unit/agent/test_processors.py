"""The processors that a program may use, and the time that it waits for one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from perdure.training.agent.processors import available_cores, waited_for_processor_s

AFFINITY = float(len(os.sched_getaffinity(0)))


def tree(root: Path, cgroup: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {}, AFFINITY),
        ("0::/pod/app\n", {"pod/app/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/pod/app\n", {"pod/app/cpu.max": "max 100000\n", "pod/cpu.max": "25000 100000"}, 0.25),
        ("0::/elsewhere\n", {"cpu.max": "30000 100000\n"}, 0.3),
        (
            "3:cpu,cpuacct:/app\n2:memory:/other\n0::/\n",
            {"cpu/app/cpu.cfs_quota_us": "40000\n", "cpu/app/cpu.cfs_period_us": "100000\n"},
            0.4,
        ),
        (
            "3:cpu:/app\n",
            {"cpu/app/cpu.cfs_quota_us": "-1\n", "cpu/app/cpu.cfs_period_us": "100000\n"},
            AFFINITY,
        ),
        ("garbage\n", {}, AFFINITY),
    ],
    ids=["no quota", "version 2", "of the group above", "a container sees its own as the root",
         "version 1", "version 1 without a quota", "unreadable"],
)  # fmt: skip
def test_the_processors_of_a_program_are_those_of_its_affinity_and_its_quotas(
    tmp_path, cgroup, files, cores
):
    assert available_cores(tree(tmp_path, cgroup, **files)) == pytest.approx(cores)


def test_threads_that_share_a_processor_wait_for_it():
    before_s, allowed = waited_for_processor_s(os.getpid()), os.sched_getaffinity(0)
    is_over = threading.Event()

    def burn() -> None:
        os.sched_setaffinity(0, {min(allowed)})  # of this thread alone
        while not is_over.is_set():
            sum(range(100))

    threads = [threading.Thread(target=burn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while waited_for_processor_s(os.getpid()) <= before_s:
            pass
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_a_process_that_has_ended_waits_for_nothing():
    assert waited_for_processor_s(2**22 + 1) == 0.0
