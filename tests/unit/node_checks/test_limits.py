"""Limits of a machine that end processes without a word."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys

import pytest

from perdure.training.node_checks.limits import (
    check_address,
    explain_few_files,
    explain_small_memory,
    files_needed,
)
from perdure.training.processes import await_address
from perdure.training.wire.node import CheckOutcome
from tests.jobs import small_job
from tests.values import not_none

MIB = 1 << 20


@pytest.mark.parametrize("hard_limit", [20, 64, 71])
def test_a_low_hard_limit_is_named_with_the_number_that_the_job_needs(hard_limit):
    job = small_job(engine={"kind": "local", "nodes": 1, "slots_per_node": 2})
    line = not_none(explain_few_files(job, hard_limit=hard_limit))
    assert f"is {hard_limit}, and this job needs {files_needed(job)}" in line


@pytest.mark.parametrize("hard_limit", [1024, 20_000, resource.RLIM_INFINITY])
def test_an_ordinary_hard_limit_is_enough(hard_limit):
    assert explain_few_files(small_job(), hard_limit=hard_limit) is None


def test_more_ranks_need_more_files():
    engine = {"kind": "local", "nodes": 1, "slots_per_node": 1}
    larger = small_job(engine={**engine, "slots_per_node": 4})
    assert files_needed(larger) > files_needed(small_job(engine=engine))


@pytest.mark.parametrize("soft", [64, 256, 1024])
def test_the_soft_limit_is_raised_to_the_hard_one(soft):
    program = (
        "import resource; from perdure.training.processes import raise_open_files;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, 4096)); raise_open_files();"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["4096", "4096"], done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize(
    ("size", "filler_bytes", "line"),
    [
        ("1m", 0, "has 1 of 1 MiB free"),
        ("32m", 0, "has 32 of 32 MiB free"),
        ("64m", 16 * MIB, "has 48 of 64 MiB free"),
        ("64m", 64 * MIB, "has 0 of 64 MiB free"),
        ("64m", 0, "None"),
        ("256m", 100 * MIB, "None"),
    ],
)
def test_little_shared_memory_is_named_with_what_is_there(tmp_path, size, filler_bytes, line):
    program = (
        "import pathlib; from perdure.training.node_checks.limits import explain_small_memory;"
        f'print(explain_small_memory(pathlib.Path("{tmp_path}")))'
    )
    script = (
        f"mount -t tmpfs -o size={size} tmpfs {tmp_path}; "
        f"head -c {filler_bytes} /dev/zero >{tmp_path}/filler; exec {sys.executable} -c '{program}'"
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script], capture_output=True, text=True, check=False
    )
    assert line in done.stdout, done.stderr


def test_a_machine_without_shared_memory_is_not_judged(tmp_path):
    assert explain_small_memory(tmp_path / "none") is None


class Lookup:
    """A name that has an address from a certain time on, and the clock."""

    def __init__(self, known_at_s: float) -> None:
        self.known_at_s, self.now_s = known_at_s, 0.0

    def resolve(self, _name: str) -> None:
        if self.now_s < self.known_at_s:
            raise socket.gaierror(-2, "Name or service not known")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, timeout_s: float) -> str | None:
        return await_address(
            "worker-7", timeout_s=timeout_s, resolve=self.resolve,
            clock=lambda: self.now_s, sleep=self.sleep,
        )  # fmt: skip


@pytest.mark.parametrize("known_at_s", [0, 1, 20, 30, 59])
def test_a_name_that_is_known_later_is_waited_for(known_at_s):
    assert Lookup(known_at_s).wait(60) is None


@pytest.mark.parametrize("timeout_s", [0, 10, 60])
def test_a_name_that_is_never_known_is_named(timeout_s):
    line = not_none(Lookup(1e9).wait(timeout_s))
    assert "'worker-7' has no address" in line


def test_a_first_node_without_an_address_fails_the_check_by_its_name():
    check = check_address("worker-7f9c.train.invalid", on_this_machine=False, timeout_s=0)
    assert check.outcome is CheckOutcome.FAILED
    assert "worker-7f9c.train.invalid" in check.seen


@pytest.mark.parametrize(
    ("on_this_machine", "outcome"), [(True, CheckOutcome.OK), (False, CheckOutcome.WARNING)]
)
def test_a_machine_whose_name_has_no_address_is_named(monkeypatch, on_this_machine, outcome):
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-7f9c.train.invalid")
    check = check_address("127.0.0.1", on_this_machine=on_this_machine, timeout_s=0)
    assert (check.outcome, "worker-7f9c.train.invalid" in check.seen) == (outcome, True)
