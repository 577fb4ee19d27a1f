"""Step records: written once, found again whatever happened to the attempt."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from storage.local import LocalStore
from training.runtime.metrics import (
    MetricsLog,
    StepRecord,
    kept_steps,
    metrics_prefix,
    parse_live,
)

RECORD = StepRecord(
    step=1,
    loss=0.1 + 0.2,
    grad_norm=1.5,
    lr=1e-3,
    tokens_per_s=1e5,
    mfu=None,
    at_s=1_700_000_000.25,
    step_s=0.5,
    position=8,
    epoch=0,
    placement=1,
    attempt=1,
)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def record(step: int, *, attempt: tuple[int, int] = (1, 1), loss: float = 2.0) -> StepRecord:
    placement, number = attempt
    return replace(RECORD, step=step, loss=loss, placement=placement, attempt=number)


@pytest.fixture
def write(tmp_path, store):
    """Writes the records of an attempt; those not flushed are lost with it."""

    def write(attempt: tuple[int, int], steps: range, *, loss: float, flushed: int = 10**9) -> None:
        path = tmp_path / f"{attempt}.jsonl"
        log = MetricsLog(path, store, metrics_prefix("run", *attempt))
        for step in steps:
            log.step(record(step, attempt=attempt, loss=loss))
            if step == flushed:
                log.flush()
        if steps[-1] < flushed:
            log.flush()
        log.close()

    return write


def test_the_newest_attempts_record_of_a_step_done_twice_is_kept(store, write):
    write((1, 1), range(1, 7), loss=1.0)
    write((1, 2), range(4, 9), loss=2.0)
    write((2, 1), range(8, 10), loss=3.0)
    losses = {step: kept.loss for step, kept in kept_steps(store, "run").items()}
    assert losses == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2, 8: 3, 9: 3}


def test_a_higher_placement_is_newer_whatever_the_attempts_number(store, write):
    write((10, 1), range(1, 3), loss=10.0)
    write((9, 12), range(1, 3), loss=9.0)
    write((2, 3), range(1, 3), loss=2.0)
    assert [kept.loss for kept in kept_steps(store, "run").values()] == [10.0, 10.0]


def test_kept_steps_are_in_order_and_hold_every_digit(store, write):
    write((1, 2), range(9, 13), loss=0.1 + 0.2)
    write((1, 1), range(1, 11), loss=1 / 3)
    kept = kept_steps(store, "run")
    assert list(kept) == list(range(1, 13))
    assert (kept[8].loss, kept[9].loss) == (1 / 3, 0.1 + 0.2)
    assert kept[9] == record(9, attempt=(1, 2), loss=0.1 + 0.2)


def test_steps_since_the_last_flush_are_lost_with_the_attempt(store, write):
    write((1, 1), range(1, 8), loss=1.0, flushed=5)
    assert list(kept_steps(store, "run")) == [1, 2, 3, 4, 5]


def test_a_flush_without_new_records_writes_nothing(tmp_path, store):
    log = MetricsLog(tmp_path / "m.jsonl", store, metrics_prefix("run", 1, 1))
    log.flush()
    log.step(record(1))
    log.flush()
    log.flush()
    assert len(list(store.list(metrics_prefix("run")))) == 1


def test_other_runs_are_not_mixed_in(tmp_path, store, write):
    write((1, 1), range(1, 3), loss=1.0)
    other = MetricsLog(tmp_path / "o.jsonl", store, metrics_prefix("run-2", 1, 1))
    other.step(record(5))
    other.flush()
    assert list(kept_steps(store, "run")) == [1, 2]
    assert list(kept_steps(store, "run-2")) == [5]
    assert kept_steps(store, "run-3") == {}


def test_the_local_file_tells_steps_and_checkpoints_at_once(tmp_path, store):
    path = tmp_path / "folder" / "m.jsonl"
    log = MetricsLog(path, store, metrics_prefix("run", 1, 1))
    log.step(RECORD)
    log.step(record(2))
    log.checkpoint(2)
    steps, checkpoints = parse_live(path.read_text())
    assert steps == [RECORD, record(2)]
    assert checkpoints == [2]
    log.close()


def test_an_empty_text_holds_nothing():
    assert parse_live("") == ([], [])


def test_a_diverged_step_can_be_written_and_read(store, write):
    write((1, 1), range(1, 2), loss=float("inf"))
    assert kept_steps(store, "run")[1].loss == float("inf")


def test_a_line_is_plain_json(tmp_path, store):
    path = tmp_path / "m.jsonl"
    MetricsLog(path, store, "x/").step(RECORD)
    document = json.loads(path.read_text())
    assert (document["kind"], document["loss"], document["mfu"]) == ("step", 0.1 + 0.2, None)
