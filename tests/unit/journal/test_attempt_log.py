"""Step records: written once, found again whatever happened to the attempt."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from storage.local import LocalStore
from training.journal.attempt_log import (
    Live,
    MetricsLog,
    StepReader,
    StepRecord,
    kept_steps,
    metrics_prefix,
    parse_live,
)
from training.recovery.events import LastSave, PauseBegan

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

PAUSED = PauseBegan(at_s=5.0, number=1, step=4)
SAVED = LastSave(at_s=6.0, number=2, step=4, ranks=(0, 1))


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def record(step: int, *, attempt: tuple[int, int] = (1, 1), loss: float = 2.0) -> StepRecord:
    placement, number = attempt
    return replace(RECORD, step=step, loss=loss, placement=placement, attempt=number)


def put(store: LocalStore, log: MetricsLog) -> None:
    """Bring what was recorded since the last time into the store, as a save does."""
    for key, text in log.take().items():
        store.put(key, text.encode())


@pytest.fixture
def write(tmp_path, store):
    """Writes the records of an attempt; those not taken are lost with it."""

    def write(attempt: tuple[int, int], steps: range, *, loss: float, taken: int = 10**9) -> None:
        path = tmp_path / f"{attempt}.jsonl"
        log = MetricsLog(path, metrics_prefix("run", *attempt))
        for step in steps:
            log.step(record(step, attempt=attempt, loss=loss))
            if step == taken:
                put(store, log)
        if steps[-1] < taken:
            put(store, log)
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


def test_steps_since_the_last_save_are_lost_with_the_attempt(store, write):
    write((1, 1), range(1, 8), loss=1.0, taken=5)
    assert list(kept_steps(store, "run")) == [1, 2, 3, 4, 5]


def test_a_record_is_taken_once(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", metrics_prefix("run", 1, 1))
    assert log.take() == {}
    log.step(record(1))
    log.step(record(2))
    ((key, text),) = log.take().items()
    assert key == "runs/run/metrics/p0001-a0001/00000001-00000002.jsonl"
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2]
    assert log.take() == {}


def test_other_runs_are_not_mixed_in(tmp_path, store, write):
    write((1, 1), range(1, 3), loss=1.0)
    other = MetricsLog(tmp_path / "o.jsonl", metrics_prefix("run-2", 1, 1))
    other.step(record(5))
    put(store, other)
    assert list(kept_steps(store, "run")) == [1, 2]
    assert list(kept_steps(store, "run-2")) == [5]
    assert kept_steps(store, "run-3") == {}


def test_the_local_file_tells_steps_and_checkpoints_at_once(tmp_path):
    path = tmp_path / "folder" / "m.jsonl"
    log = MetricsLog(path, metrics_prefix("run", 1, 1))
    log.step(RECORD)
    log.step(record(2))
    log.checkpoint(2)
    assert parse_live(path.read_text()) == Live(steps=(RECORD, record(2)), checkpoints=(2,))
    log.close()


def test_an_empty_text_holds_nothing():
    assert parse_live("") == Live()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "m.jsonl"


def resume(file) -> MetricsLog:
    return MetricsLog.resumed(file, metrics_prefix("run", 1, 1))


def taken(log: MetricsLog) -> list[int]:
    """Steps of the records that the next save brings into the store."""
    return [json.loads(line)["step"] for text in log.take().values() for line in text.splitlines()]


def test_the_local_file_tells_what_the_coordinator_noted(file):
    log = MetricsLog(file, "x/")
    log.step(RECORD)
    with file.open("a") as coordinator:
        coordinator.write(SAVED.model_dump_json() + "\n" + PAUSED.model_dump_json() + "\n")
    log.checkpoint(1)
    live = parse_live(file.read_text())
    assert live == Live(steps=(RECORD,), checkpoints=(1,), notes=(SAVED, PAUSED))


def test_a_line_break_inside_a_note_is_not_the_end_of_its_line():
    note = SAVED.model_copy(update={"why": "disk\u2028full\x85\n"})
    assert parse_live(note.model_dump_json() + "\n").notes == (note,)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step", "step": 3, "lo',
        '{"kind": "step", "step": 3}',
        '{"kind": "pause_began", "number": 1}',
        '{"kind": "pause_began", "at_s": 1, "number": 1, "step": 4, "added_later": true}',
        '{"kind": "checkpoint", "step": null}',
        '{"kind": "of a later version"}',
        '{"kind": ["step"]}',
        '{"step": 3}',
        "[]",
        "null",
        "\ufffd\x00",
        "",
    ],
)
def test_a_line_that_cannot_be_understood_costs_only_itself(line):
    text = f"{SAVED.model_dump_json()}\n{line}\n{PAUSED.model_dump_json()}\n"
    assert parse_live(text) == Live(notes=(SAVED, PAUSED))


def test_a_replaced_first_rank_attaches_what_was_not_committed(file):
    first = MetricsLog(file, "x/")
    for step in range(1, 6):
        first.step(record(step))
    first.checkpoint(3)
    log = resume(file)
    assert log.last_step == 5
    log.step(record(6))
    assert taken(log) == [4, 5, 6]


def test_a_commit_that_is_told_late_does_not_hide_the_steps_before_its_line(file):
    first = MetricsLog(file, "x/")
    for step in range(1, 10):
        first.step(record(step))
    first.checkpoint(5)  # its upload took four steps
    assert taken(resume(file)) == [6, 7, 8, 9]


def test_a_half_written_line_is_ended_and_the_next_one_is_whole(file):
    first = MetricsLog(file, "x/")
    first.step(record(1))
    first.close()
    with file.open("a") as torn:
        torn.write('{"kind": "step", "step": 2, "lo')
    log = resume(file)
    assert log.last_step == 1
    log.step(record(2))
    assert parse_live(file.read_text()).steps == (record(1), record(2))
    assert taken(log) == [1, 2]


def test_a_whole_file_is_gone_on_with_as_it_is(file):
    first = MetricsLog(file, "x/")
    first.step(record(1))
    first.close()
    before = file.read_text()
    assert resume(file).last_step == 1
    assert file.read_text() == before


def test_a_first_rank_that_died_before_its_first_record_leaves_nothing_to_go_on_with(tmp_path):
    log = resume(tmp_path / "folder" / "m.jsonl")
    assert log.last_step == 0
    log.step(record(1))
    assert taken(log) == [1]


def test_steps_that_are_done_again_replace_the_records_of_the_first_time(file, store):
    log = resume(file)
    for step in (1, 2, 3, 4):
        log.step(record(step, loss=1.0))
    log.step(replace(record(2, loss=2.0), at_s=RECORD.at_s + 1))
    assert log.last_step == 2
    put(store, log)
    assert {s: kept.loss for s, kept in kept_steps(store, "run").items()} == {1: 1.0, 2: 2.0}


def test_of_a_step_that_one_attempt_brought_in_twice_the_later_record_is_kept(file, store):
    log = resume(file)
    for step in range(1, 9):
        log.step(record(step, loss=1.0))
        if step in (4, 8):
            put(store, log)
    for step in range(
        3, 7
    ):  # gone back by a recovery; their object is listed before that of 5 to 8
        log.step(replace(record(step, loss=2.0), at_s=RECORD.at_s + step))
    put(store, log)
    losses = {step: kept.loss for step, kept in kept_steps(store, "run").items()}
    assert losses == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2, 7: 1, 8: 1}


def test_a_reader_tells_lost_steps_too_and_reads_only_what_is_new(store, write, monkeypatch):
    write((1, 1), range(1, 5), loss=1.0)
    reader = StepReader(store, "run")
    assert [one.step for one in reader.read()] == [1, 2, 3, 4]
    write((1, 2), range(3, 6), loss=2.0)
    got: list[str] = []
    get = store.get

    def remember(_self, key: str) -> bytes:
        got.append(key)
        return get(key)

    monkeypatch.setattr(type(store), "get", remember)
    told = sorted((one.step, one.attempt) for one in reader.read())
    assert told == [(1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (5, 2)]
    assert got == ["runs/run/metrics/p0001-a0002/00000003-00000005.jsonl"]


def test_a_diverged_step_can_be_written_and_read(store, write):
    write((1, 1), range(1, 2), loss=float("inf"))
    assert kept_steps(store, "run")[1].loss == float("inf")


def test_a_line_is_plain_json(tmp_path):
    path = tmp_path / "m.jsonl"
    MetricsLog(path, "x/").step(RECORD)
    document = json.loads(path.read_text())
    assert (document["kind"], document["loss"], document["mfu"]) == ("step", 0.1 + 0.2, None)
