"""The folder of a store that vanishes under a run, as an unmounted network file system does."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.training.recovery.faults import STORE_FULL, FaultClass, RecoverableBy
from perdure.training.supervisor.store_outage import read_outage
from tests.values import not_none
from tests.waiting import wait_for

pytestmark = pytest.mark.process


@dataclass
class Share:
    """A folder below which lies an empty one, as below a mount."""

    folder: Path

    @property
    def address(self) -> str:
        return f"file://{self.folder}"

    def vanish(self) -> None:
        self.folder.rename(self.folder.with_name(f"{self.folder.name}-away"))
        self.folder.mkdir()

    def come_back(self) -> None:
        self.folder.rmdir()  # fails where anything was written meanwhile
        self.folder.with_name(f"{self.folder.name}-away").rename(self.folder)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, with a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip(
            "file systems cannot be mounted here: not root, or a container without the right"
        )
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room on the folder's file system."""
    path = folder / "somebody-elses"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free < 4096
    return path


@pytest.mark.long
def test_a_full_store_ends_the_run_at_once_and_says_so(bench, small_disk):
    job = bench.pair("full", storage={"address": f"file://{small_disk}/store"})
    running = bench.start(job)
    running.reach(12)
    others = fill(small_disk)
    noted = wait_for(lambda: read_outage(bench.home, "full"), what="the supervisor to notice")
    assert noted.why.endswith("the disk is full")
    said = bench.perdure("status", "full")
    assert "state: running, but its ledger cannot be written" in said
    assert f"its ledger cannot be written since {noted.since}: file://" in said
    assert running.status()["ledger_unwritable"]["why"].endswith("the disk is full")
    running.pace(0)
    wait_for(
        lambda: not running.local.rank(0) and not running.local.rank(1),
        what="the ranks to end, as no save is possible",
    )

    others.unlink()  # the ledger takes what has happened
    assert running.finish() == 1, running.out
    history = running.history
    (attempt,) = history.attempts
    fault = not_none(not_none(attempt.ended).fault)
    assert (fault.fault_class, fault.code) == (FaultClass.STORAGE_ERROR, STORE_FULL)
    assert fault.recoverable_by is RecoverableBy.USER_FIX
    assert running.rungs() == ["stop"]
    assert "the run's store is full; make room, then start the run again" in running.out
    assert "cannot be written" not in bench.perdure("status", "full")
    running.leave_nothing()


@pytest.mark.long
def test_a_run_waits_for_its_store_to_come_back_and_makes_no_other(bench, undisturbed_pair):
    share = Share(bench.home / "share")
    running = bench.start(bench.pair("vanishes", storage={"address": share.address}))
    running.reach(15)
    share.vanish()
    noted = wait_for(lambda: read_outage(bench.home, "vanishes"), what="the supervisor to notice")
    running.reach(25)  # training goes on meanwhile

    asked = bench.python("-m", "perdure", "status", "vanishes")
    assert asked.returncode == 1
    said = " ".join(asked.stderr.split())
    assert f"vanishes: its ledger cannot be written since {noted.since}" in said
    assert "no store is in this folder" in said

    job_file = str(bench.home / "vanishes.yaml")
    again = bench.python("-m", "perdure", "run", job_file)
    assert again.returncode == 2, again.stdout + again.stderr
    assert "no store is in this folder, where this machine keeps" in again.stderr

    share.come_back()
    running.complete(undisturbed_pair)
    assert running.rungs() == []
    assert len(running.history.attempts) == 1
    assert read_outage(bench.home, "vanishes") is None
