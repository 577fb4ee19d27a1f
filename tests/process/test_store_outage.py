"""The folder of a store that vanishes under a run, as an unmounted network file system does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import wait_for
from training.supervisor.store_outage import read_outage

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


@pytest.mark.long
def test_a_run_waits_for_its_store_to_come_back_and_makes_no_other(bench, undisturbed_pair):
    share = Share(bench.home / "share")
    running = bench.start(bench.pair("vanishes", storage={"address": share.address}))
    running.reach(15)
    share.vanish()
    noted = wait_for(
        lambda: read_outage(bench.home, "vanishes"), timeout_s=60, what="the supervisor to notice"
    )
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
