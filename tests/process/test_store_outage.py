"""The folder of a store that vanishes under a run, as an unmounted network file system does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.training.recovery.faults import STORE_FULL, FaultClass, RecoverableBy
from perdure.training.supervisor.store_outage import read_outage
from tests.process.small_disk import NOT_HERE, fill, make_room, small_disk
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
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with a few megabytes."""
    with small_disk(tmp_path / "disk", size="24m") as is_mounted:
        if not is_mounted:
            pytest.skip(NOT_HERE)
        yield tmp_path / "disk"


@pytest.mark.long
def test_a_full_store_ends_the_run_at_once_and_says_so(bench, disk):
    job = bench.pair("full", storage={"address": f"file://{disk}/store"})
    running = bench.start(job)
    running.reach(12)
    fill(disk)
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

    make_room(disk)  # the ledger takes what has happened
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
