"""Whole runs, without Prefect: what faults leave is restored from the nearest tier."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.checkpoint import CheckpointStore, StepState
from perdure.training.config.drill import Kill, Victim
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import Curve, RunDriver, kill_hook
from perdure.training.drill.job import drill_job
from perdure.training.injection.outside import KillInjector
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_handle import RunHandle

pytestmark = pytest.mark.process

STEPS = 24
EVERY = 6


@dataclass
class Driven:
    """One run that was driven to its end."""

    home: Path
    job: Job
    history: RunHistory
    curve: Curve

    @property
    def checkpoints(self) -> CheckpointStore:
        return RunHandle(self.job, home=self.home).checkpoints

    @property
    def rungs(self) -> list[str]:
        return [
            one.decision.rung.value for one in self.history.attempts if one.decision is not None
        ]

    def logs(self) -> list[tuple[str, str]]:
        """What each rank printed, by its attempt and its rank."""
        paths = self._nodes().glob("*/*/attempts/*/rank-*.stdout.log")
        return sorted((f"{path.parent.name}/{path.name}", path.read_text()) for path in paths)

    def restored(self) -> list[str]:
        """Where each attempt restored from, as its first rank printed it."""
        return [
            line.partition("perdure: ")[2]
            for name, text in self.logs()
            if "rank-00000" in name
            for line in text.splitlines()
            if "restored from" in line
        ]

    def _nodes(self) -> Path:
        return self.home / "runs" / self.job.run_id / "nodes"


@pytest.fixture(scope="module")
def drive(home) -> Callable[..., Driven]:
    def drive(
        run_id: str,
        *kills: Kill,
        pace_s: float = 0.1,
        restart: Mapping[str, Any] | None = None,
        **checkpoint: Any,
    ) -> Driven:
        changes = {
            "engine": {"slots_per_node": 1, "spares": 1},
            "checkpoint": {"every_steps": EVERY, "keep_last": 2, **checkpoint},
            "restart": restart or {},
            "drill": {"kills": True},
        }
        job = drill_job(
            home, run_id, kind=ParallelKind.DDP, steps=STEPS, pace_s=pace_s, changes=changes
        )
        injector = KillInjector(kills)
        played = RunDriver(home).run(job, hook=kill_hook(injector))
        assert played.ended == "completed"
        assert played.leftovers == ()
        assert len(injector.fired_s) == len(kills), "every fault really fired"
        return Driven(home, job, played.history, played.curve)

    return drive


@pytest.fixture(scope="module")
def undisturbed(drive) -> Driven:
    driven: Driven = drive("undisturbed-tiers", pace_s=0)
    return driven


def test_a_run_saves_through_its_checkpoint_servers_and_leaves_only_what_it_keeps(undisturbed):
    assert list(undisturbed.curve) == list(range(1, STEPS + 1))
    checkpoints = undisturbed.checkpoints
    assert checkpoints.states() == dict.fromkeys((STEPS - EVERY, STEPS), StepState.COMMITTED)
    assert checkpoints.verify(STEPS) == []


@pytest.mark.long
def test_workers_checkpoint_servers_and_nodes_may_die_and_the_loss_curve_stays(drive, undisturbed):
    # With either of the two on, nothing would be left to restore from the tiers.
    off = ("process_replace", "node_replace", "end_of_life_checkpoint")
    restart = dict.fromkeys(off, False)
    kills = (
        Kill(victim=Victim.RANK, index=1, step=8),
        Kill(victim=Victim.CHECKPOINT_SERVER, index=1, step=14),
        Kill(victim=Victim.NODE, index=1, step=20),
    )
    driven = drive("faulty-tiers", *kills, node_disk=True, restart=restart)
    assert driven.curve == undisturbed.curve
    assert driven.rungs == ["in_place_restart", "in_place_restart", "pod_reschedule"]
    assert driven.restored()[:3] == [
        "step 6 restored from the nodes' memory or disks",
        "step 12 restored from the nodes' memory or disks",
        "step 18 restored from the store",
    ]
    assert driven.checkpoints.steps() == [STEPS - EVERY, STEPS]
    assert driven.checkpoints.verify(STEPS) == []


@pytest.mark.long
def test_a_checkpoint_server_that_died_is_there_again_for_those_who_ask_after_a_recovery(
    drive, undisturbed
):
    kills = (
        Kill(victim=Victim.CHECKPOINT_SERVER, index=1, step=7),
        Kill(victim=Victim.RANK, index=1, step=9),
    )
    driven = drive("checkpoint-server-again", *kills, pace_s=0.5)
    assert driven.curve == undisturbed.curve
    assert driven.rungs == []
    (first, *_) = driven.history.attempts
    assert [one.began.decision.rung for one in first.recoveries] == [Rung.PROCESS_REPLACE]
    assert len(driven.logs()) == 2
    assert not any(
        "saves go to the store while training waits" in text for _, text in driven.logs()
    )


@pytest.mark.long
def test_what_survivors_save_at_the_end_of_their_life_is_what_the_next_attempt_begins_with(
    drive, undisturbed
):
    kill = Kill(victim=Victim.RANK, index=1, step=8)
    driven = drive("end-of-life-tiers", kill, node_disk=True, restart={"process_replace": False})
    assert driven.curve == undisturbed.curve
    assert driven.rungs == ["in_place_restart"]
    saved = driven.history.attempts[0].last_save
    assert saved.step is not None
    assert saved.step >= 8, "later than any save that was due"
    assert driven.restored() == [f"step {saved.step} restored from the nodes' memory or disks"]


def test_announcements_of_commits_are_lines_of_the_first_ranks_records(undisturbed):
    (path,) = undisturbed._nodes().glob("node-0/*/attempts/*/metrics.jsonl")
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    announced = [one["step"] for one in documents if one["kind"] == "checkpoint"]
    assert sorted(announced) == list(range(EVERY, STEPS + 1, EVERY))
