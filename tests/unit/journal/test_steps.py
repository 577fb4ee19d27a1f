"""Step records in the store: found again whatever happened to their attempt."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from perdure.storage.local import LocalStore
from perdure.training.journal.attempt_log import AttemptLog, Follower
from perdure.training.journal.events import CheckpointCommitted
from perdure.training.journal.steps import StepReader, UnsavedSteps, metrics_prefix, read_kept_steps
from tests.unit.journal.records import RECORD, record
from tests.values import not_none

PREFIX = metrics_prefix("run", 1, 1)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def put(store: LocalStore, steps: UnsavedSteps) -> None:
    """Bring what was recorded since the last time into the store, as a save does."""
    for key, text in steps.take().items():
        store.put(key, text.encode())


@pytest.fixture
def write(store):
    """Writes the records of an attempt; those not taken are lost with it."""

    def write(
        attempt: tuple[int, int],
        done: range,
        *,
        loss: float,
        num_taken: int = 10**9,
        run: str = "run",
    ) -> None:
        steps = UnsavedSteps(metrics_prefix(run, *attempt))
        for step in done:
            steps.add(record(step, attempt=attempt, loss=loss))
            if step == num_taken:
                put(store, steps)
        if done[-1] < num_taken:
            put(store, steps)

    return write


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def resume(file) -> UnsavedSteps:
    steps = UnsavedSteps(PREFIX)
    steps.catch_up(Follower.of_file(file))
    return steps


def taken(steps: UnsavedSteps) -> list[int]:
    """Steps of the records that the next save brings into the store."""
    lines = [line for text in steps.take().values() for line in text.splitlines()]
    return [json.loads(line)["step"] for line in lines]


def losses(store: LocalStore) -> dict[int, float]:
    return {step: not_none(records.loss) for step, records in read_kept_steps(store, "run").items()}


def test_the_newest_attempts_record_of_a_step_done_twice_is_kept(store, write):
    write((1, 1), range(1, 7), loss=1.0)
    write((1, 2), range(4, 9), loss=2.0)
    write((2, 1), range(8, 10), loss=3.0)
    assert losses(store) == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2, 8: 3, 9: 3}


def test_a_higher_placement_is_newer_whatever_the_attempts_number(store, write):
    write((10, 1), range(1, 3), loss=10.0)
    write((9, 12), range(1, 3), loss=9.0)
    write((2, 3), range(1, 3), loss=2.0)
    assert list(losses(store).values()) == [10.0, 10.0]


def test_kept_steps_are_in_order_and_hold_every_digit(store, write):
    write((1, 2), range(9, 13), loss=0.1 + 0.2)
    write((1, 1), range(1, 11), loss=1 / 3)
    records = read_kept_steps(store, "run")
    assert list(records) == list(range(1, 13))
    assert (records[8].loss, records[9].loss) == (1 / 3, 0.1 + 0.2)
    assert records[9] == record(9, attempt=(1, 2), loss=0.1 + 0.2)


def test_a_diverged_step_can_be_written_and_read(store, write):
    write((1, 1), range(1, 2), loss=float("inf"))
    assert losses(store) == {1: float("inf")}


def test_steps_since_the_last_save_are_lost_with_the_attempt(store, write):
    write((1, 1), range(1, 8), loss=1.0, num_taken=5)
    assert list(losses(store)) == [1, 2, 3, 4, 5]


def test_a_record_is_taken_once_and_has_no_more_than_the_fields_of_a_step():
    steps = UnsavedSteps(PREFIX)
    assert steps.take() == {}
    steps.add(record(1))
    steps.add(record(2))
    ((key, text),) = steps.take().items()
    assert key == "runs/run/metrics/p0001-a0001/00000001-00000002.jsonl"
    assert text.endswith("\n")
    documents = [json.loads(line) for line in text.splitlines()]
    assert [document["step"] for document in documents] == [1, 2]
    assert list(documents[0]) == [
        "step", "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "at_s", "step_s", "position",
        "epoch", "placement", "attempt",
    ]  # fmt: skip
    assert steps.take() == {}


def test_other_runs_are_not_mixed_in(store, write):
    write((1, 1), range(1, 3), loss=1.0)
    write((1, 1), range(5, 6), loss=1.0, run="run-2")
    assert list(read_kept_steps(store, "run")) == [1, 2]
    assert list(read_kept_steps(store, "run-2")) == [5]
    assert read_kept_steps(store, "run-3") == {}


@pytest.mark.parametrize(("committed", "left"), [(3, [4, 5, 6]), (5, [6]), (None, [*range(1, 7)])])
def test_a_replaced_first_rank_attaches_what_was_not_committed(file, committed, left):
    with AttemptLog(file) as first:
        for step in range(1, 6):
            first.append(record(step))
        if committed is not None:
            first.append(CheckpointCommitted(step=committed))  # its upload took some steps
    steps = resume(file)
    assert steps.last_step == 5
    steps.add(record(6))
    assert taken(steps) == left


def test_a_first_rank_that_died_before_its_first_record_leaves_nothing_to_go_on_with(tmp_path):
    steps = resume(tmp_path / "folder" / "m.jsonl")
    assert steps.last_step == 0
    steps.add(record(1))
    assert taken(steps) == [1]


def test_steps_that_are_done_again_replace_the_records_of_the_first_time(store):
    steps = UnsavedSteps(PREFIX)
    for step in (1, 2, 3, 4):
        steps.add(record(step, loss=1.0))
    steps.add(replace(record(2, loss=2.0), at_s=RECORD.at_s + 1))
    assert steps.last_step == 2
    put(store, steps)
    assert losses(store) == {1: 1.0, 2: 2.0}


def test_of_a_step_that_one_attempt_brought_in_twice_the_later_record_is_kept(store):
    steps = UnsavedSteps(PREFIX)
    for step in range(1, 9):
        steps.add(record(step, loss=1.0))
        if step in (4, 8):
            put(store, steps)
    # Gone back by a recovery; their object is listed before that of 5 to 8.
    for step in range(3, 7):
        steps.add(replace(record(step, loss=2.0), at_s=RECORD.at_s + step))
    put(store, steps)
    assert losses(store) == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2, 7: 1, 8: 1}


def test_a_reader_reads_lost_steps_too_and_only_what_is_new(store, write, monkeypatch):
    write((1, 1), range(1, 5), loss=1.0)
    reader = StepReader(store, "run")
    assert [record.step for record in reader.read()] == [1, 2, 3, 4]
    write((1, 2), range(3, 6), loss=2.0)
    got: list[str] = []
    get = store.get

    def remember(_self, key: str) -> bytes:
        got.append(key)
        return get(key)

    monkeypatch.setattr(type(store), "get", remember)
    completions = sorted((record.step, record.attempt) for record in reader.read())
    assert completions == [(1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (5, 2)]
    assert got == ["runs/run/metrics/p0001-a0002/00000003-00000005.jsonl"]


def test_steps_that_a_later_attempt_has_not_come_to_again_are_not_kept(store, write):
    write((1, 1), range(1, 30), loss=1.0)
    write((1, 2), range(11, 14), loss=2.0)
    assert list(losses(store)) == list(range(1, 14))
