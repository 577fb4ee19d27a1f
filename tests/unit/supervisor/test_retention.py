"""What a run's checkpoints may lose, by its job, its ledger and its records of loss."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace

import pytest

from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.collect import InUse, RemovalKind, take_listing
from perdure.storage.local import LocalStore
from perdure.storage.manifest import Chunk, Manifest, TensorRecord
from perdure.training.journal.events import StepRecord
from perdure.training.journal.history import RunHistory, replay
from perdure.training.journal.ledger import Identity, Ledger
from perdure.training.journal.records import (
    AnyRecord,
    AttemptEnded,
    AttemptStarted,
    FirstStep,
    PlacementCreated,
)
from perdure.training.journal.steps import metrics_prefix
from perdure.training.supervisor.checkpoints import in_use_by, losses_of, removals
from tests.jobs import small_job
from tests.unit.journal.histories import over, placed, started, stepped

HOUR_S = 3600.0
STEPS = (10, 20, 30, 40, 50)


class SkewedStore(LocalStore):
    """A folder whose clock is ahead of this machine's."""

    ahead_s = 0.0

    def now_s(self):
        return super().now_s() + self.ahead_s

    def list(self, prefix):
        for info in super().list(prefix):
            yield replace(info, modified_s=info.modified_s + self.ahead_s)


@pytest.fixture
def checkpoints(tmp_path):
    """Five committed steps, and a save of step 35 that broke."""
    checkpoints = CheckpointStore(SkewedStore(tmp_path / "store"), "run")
    for step in STEPS:
        commit(checkpoints, step)
    checkpoints.put_shard(35, shard_name(1, 1, 0), b"half")
    return checkpoints


def commit(checkpoints, step, extra=None):
    name = shard_name(1, 1, 0)
    shard = checkpoints.put_shard(step, name, bytes([step]))
    chunk = Chunk(offsets=(0,), lengths=(1,), shard=name, key="w")
    manifest = Manifest(
        run_id="run", placement=1, attempt=1, step=step, world_size=1, written_at_s=0.0,
        tensors={"w": TensorRecord(dtype="U8", shape=(1,), chunks=(chunk,))},
        shards={name: shard}, extra=extra or {},
    )  # fmt: skip
    checkpoints.commit(manifest)


def record_losses(checkpoints, losses):
    """What a worker's log of metrics puts into the store."""
    lines = [
        json.dumps(asdict(StepRecord(step, loss, 1.0, 1e-3, 1.0, None, 0.0, 1.0, 0, 0, 1, 1)))
        for step, loss in losses.items()
    ]
    key = f"{metrics_prefix('run', 1, 1)}00000001-00000099.jsonl"
    checkpoints.store.put(key, "\n".join(lines).encode())


def job(**checkpoint):
    return small_job(checkpoint=checkpoint)


def gone(checkpoints, spec, *, with_retention=True):
    removed = removals(spec, checkpoints, garbage_after_s=0, with_retention=with_retention)
    return [(removal.kind.value, removal.step) for removal in removed]


def history(*records: AnyRecord) -> RunHistory:
    return replay([placed(num_nodes=1), *records])


STARTED, STEPPED, ENDED = started(2, 20), stepped(2, 21), over(2, "stopped")


def test_an_attempt_that_has_started_may_be_reading_any_step():
    in_use = in_use_by(history(STARTED), (1, 1))
    assert in_use == InUse(is_living=True, reading=frozenset({20}), is_restoring=True)


def test_an_attempt_that_has_stepped_has_read_what_it_needs():
    in_use = in_use_by(history(STARTED, STEPPED), (1, 2))
    assert in_use == InUse(is_living=True, reading=frozenset({20}), is_restoring=False)


@pytest.mark.parametrize("fence", [None, (1, 1), (1, 2)])
def test_after_the_end_of_the_last_attempt_no_owner_lives(fence):
    assert in_use_by(history(STARTED, STEPPED, ENDED), fence) == InUse(is_living=False)


@pytest.mark.parametrize("fence", [(1, 3), (2, 1)])
def test_an_owner_of_the_run_that_the_ledger_does_not_know_may_live(fence):
    assert in_use_by(history(STARTED, STEPPED, ENDED), fence) == InUse(is_living=True)


@pytest.mark.parametrize("fence", [None, (1, 1)])
def test_without_a_ledger_an_owner_may_live(fence):
    assert in_use_by(RunHistory(), fence) == InUse(is_living=True)


def test_the_jobs_policy_decides_beside_the_newest_two(checkpoints):
    assert gone(checkpoints, job(keep_last=1)) == [
        ("retention", 10), ("retention", 20), ("retention", 30), ("broken_save", 35),
    ]  # fmt: skip
    assert gone(checkpoints, job(keep_last=2, keep_every_steps=10)) == [("broken_save", 35)]


def test_without_retention_only_garbage_goes(checkpoints):
    result = gone(checkpoints, job(keep_last=1), with_retention=False)
    assert result == [(RemovalKind.BROKEN_SAVE, 35)]


def begin(checkpoints) -> Ledger:
    """The ledger of a run whose attempt started from step 20."""
    ledger = Ledger(checkpoints.store, "run")
    ledger.take(Identity.of_this_process())
    ledger.append(PlacementCreated, placement=1, members=placed(num_nodes=1).members, avoid=())
    ledger.append(AttemptStarted, placement=1, attempt=2, from_step=20)
    return ledger


@pytest.mark.parametrize("ahead_s", [-7 * HOUR_S, 0.0, 7 * HOUR_S])
def test_what_is_young_by_the_stores_clock_stays_whatever_this_machines_says(
    checkpoints, monkeypatch, ahead_s
):
    # No attempt lives, so that age alone keeps what broken saves left.
    begin(checkpoints).append(
        AttemptEnded, placement=1, attempt=2, outcome="stopped", to_step=None, proc_start_cnt={},
        duration_s=1,
    )  # fmt: skip
    checkpoints.store.ahead_s = ahead_s
    monkeypatch.setattr(time, "time", lambda: 9e9)  # it does not count
    checkpoints.put_shard(45, shard_name(1, 1, 0), b"old")
    old = checkpoints.store.local_path(checkpoints.key(45, shard_name(1, 1, 0)))
    old_s = old.stat().st_mtime - 2 * HOUR_S
    os.utime(old, (old_s, old_s))
    result = removals(job(), checkpoints, garbage_after_s=HOUR_S, with_retention=False)
    assert [removal.step for removal in result] == [45], "and not 35, which was just written"


def test_the_best_are_those_of_the_recorded_loss(checkpoints):
    record_losses(checkpoints, {10: 1.0, 20: 0.1, 30: 2.0, 40: 3.0, 50: 4.0, 51: 0.0})
    result = gone(checkpoints, job(keep_last=1, keep_best=1))
    assert result == [("retention", 10), ("retention", 30), ("broken_save", 35)]


def test_a_step_without_a_recorded_loss_stays_when_the_best_are_kept(checkpoints):
    record_losses(checkpoints, {10: 1.0, 20: 0.1})
    result = gone(checkpoints, job(keep_last=1, keep_best=1))
    assert result == [("retention", 10), ("broken_save", 35)]


def test_a_manifest_may_hold_the_loss_itself(checkpoints):
    commit(checkpoints, 60, {"loss": 0.5})
    commit(checkpoints, 70, {"loss": None})
    record_losses(checkpoints, {10: 1.0})
    assert losses_of(checkpoints, take_listing(checkpoints)) == {10: 1.0, 60: 0.5}


def test_what_an_attempt_of_the_ledger_uses_stays(checkpoints):
    ledger = begin(checkpoints)
    assert gone(checkpoints, job(keep_last=1)) == [("broken_save", 35)]
    ledger.append(FirstStep, placement=1, attempt=2, step=21, stepped_s=0.0)
    assert gone(checkpoints, job(keep_last=1)) == [
        ("retention", 10), ("retention", 30), ("broken_save", 35),
    ]  # fmt: skip
