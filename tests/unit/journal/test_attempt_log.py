"""The log of an attempt: whatever its writers die of, whole events are read, each once."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import get_args

import pytest

from perdure.training.agent.checkpoint_server import log_commit
from perdure.training.journal.attempt_log import AttemptLog, Follower, parse_lines, read_lines
from perdure.training.journal.events import CheckpointCommitted, Event, LedgerEvent
from perdure.training.recovery.protocol import AttemptEvent, LastSave, PauseBegan
from tests.unit.journal.records import RECORD, record
from tests.waiting import wait_for

PAUSED = PauseBegan(at_s=5.0, number=1, step=4)
SAVED = LastSave(at_s=6.0, number=2, step=4, ranks=(0, 1))
HALF = '{"kind":"step","step":2,"lo'


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


def append(file: Path, *events: Event) -> None:
    with AttemptLog(file) as log:
        for event in events:
            log.append(event)


def read(file: Path) -> list[Event]:
    return Follower.of_file(file).read() or []


def test_events_are_read_in_the_order_in_which_their_writers_appended_them(file):
    with AttemptLog(file) as first_rank, AttemptLog(file) as coordinator:
        first_rank.append(RECORD)
        coordinator.append(SAVED)
        first_rank.append(CheckpointCommitted(step=1))
        coordinator.append(PAUSED)
    assert read(file) == [RECORD, SAVED, CheckpointCommitted(step=1), PAUSED]


def test_a_line_is_plain_json(file):
    append(file, RECORD, CheckpointCommitted(step=4), PAUSED)
    step, checkpoint, pause = map(json.loads, file.read_text().splitlines())
    assert (step["kind"], step["loss"], step["mfu"]) == ("step", 0.1 + 0.2, None)
    assert checkpoint == {"kind": "checkpoint", "step": 4}
    assert pause == {"kind": "pause_began", "at_s": 5.0, "number": 1, "step": 4}


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan, 1 / 3, 5e-324, 2.0])
def test_a_loss_is_read_as_it_was_to_its_last_digit(file, loss):
    append(file, replace(RECORD, loss=loss))
    (event,) = read(file)
    assert repr(event) == repr(replace(RECORD, loss=loss))


@pytest.mark.parametrize("left", [HALF, HALF[:1], '{"kind":"last_save","why":"\u00e4'])
def test_an_event_after_a_writer_was_killed_in_mid_line_is_whole(file, left):
    append(file, RECORD)
    with file.open("a") as killed:
        killed.write(left)
    append(file, SAVED, PAUSED)
    assert read(file) == [RECORD, SAVED, PAUSED]


def test_an_event_is_whole_although_the_other_writer_is_killed_while_it_is_written(file):
    with AttemptLog(file) as log, file.open("a") as other:
        write = log._write

        def cut_in(line: bytes) -> bytes:
            if not other.closed:
                other.write(HALF)
                other.close()
            return write(line)

        log._write = cut_in  # type: ignore[method-assign]
        log.append(SAVED)
        log.append(PAUSED)
    assert read(file) == [SAVED, PAUSED]


def test_a_file_that_ends_with_a_whole_line_is_gone_on_with_as_it_is(file):
    append(file, RECORD)
    text = file.read_text()
    append(file, PAUSED)
    assert file.read_text() == f"{text}{PAUSED.model_dump_json()}\n"


def test_a_disk_that_takes_only_a_part_of_a_line_is_full(file, monkeypatch):
    write = os.write
    with AttemptLog(file) as log:
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda fd, line: write(fd, line[:20]))
            with pytest.raises(OSError, match="No space left") as caught:
                log.append(RECORD)
        assert caught.value.errno == errno.ENOSPC
        log.append(PAUSED)
    assert read(file) == [PAUSED]


def _append_until_killed(path: str, attempt: int) -> None:
    with AttemptLog(Path(path)) as log:
        for step in range(1, 1_000_000):
            # Longer than a page: a kill may cut it.
            log.append(SAVED.model_copy(update={"number": step, "why": f"{attempt}" * 9_000}))
            time.sleep(0.0005)  # or the file grows by 100 MB while it is watched


def _have_written(file: Path, lives: int) -> bool:
    """Whether so many lives of both writers have written their first event."""
    data = file.read_bytes() if file.exists() else b""
    first = re.findall(rb'"number":1,[^\n]*?"why":"(.)', data)
    return all(first.count(writer) >= lives for writer in (b"1", b"2"))


def test_of_two_writers_that_are_killed_every_whole_event_is_read_in_its_order(file):
    spawn = multiprocessing.get_context("fork")
    for round_ in range(3):
        writers = [spawn.Process(target=_append_until_killed, args=(str(file), n)) for n in (1, 2)]
        for writer in writers:
            writer.start()
        wait_for(partial(_have_written, file, round_ + 1))
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join(240)
        append(file, record(round_ + 1))
    follower = Follower.of_file(file)
    events = [event for events in iter(follower.read, None) for event in events]
    assert [event.step for event in events if event.kind == "step"] == [1, 2, 3]
    numbers: dict[str, list[int]] = {"1": [], "2": []}
    for event in events:
        if isinstance(event, LastSave):
            assert len(set(event.why)) == 1, "no line gets into another"
            numbers[event.why[0]].append(event.number)
    for of_writer in numbers.values():
        assert of_writer.count(1) == 3
        assert all(b in (a + 1, 1) for a, b in pairwise(of_writer))


def test_every_event_is_in_the_union_that_the_log_and_the_ledger_read():
    events = set(_leaves(AttemptEvent))
    kinds = set(get_args(get_args(LedgerEvent)[0]))
    assert events == kinds, "training/journal/events.py: _Recorded needs every event"
    assert events < set(get_args(get_args(Event)[0]))


def _leaves(kind: type) -> Iterator[type]:
    """The classes below a class that have none below them."""
    below: list[type] = type.__subclasses__(kind)
    yield from chain.from_iterable(map(_leaves, below)) if below else [kind]


def test_a_follower_that_meets_half_a_line_waits_for_the_rest_of_it(file):
    follower = Follower.of_file(file)
    assert follower.read() is None, "there is no file yet"
    text = f"{PAUSED.model_dump_json()}\n"
    with file.open("a", buffering=1) as slow:
        slow.write(text)
        slow.write(text[:9])
        slow.flush()
        assert follower.read() == [PAUSED]
        assert follower.read() is None
        slow.write(text[9:])
        assert follower.read() == [PAUSED]
    assert follower.read() is None


def test_a_long_log_is_read_in_parts_of_whole_lines(file):
    steps = [record(step) for step in range(1, 12_001)]
    append(file, *steps)
    follower = Follower.of_file(file)
    parts = list(iter(follower.read, None))
    assert len(parts) > 1
    assert [event for part in parts for event in part] == steps


def test_a_follower_reads_lines_from_wherever_they_come(file):
    append(file, RECORD, SAVED)
    offsets: list[int] = []

    def over_the_wire(offset: int) -> tuple[str, int]:
        offsets.append(offset)
        return read_lines(file, offset)

    follower = Follower(over_the_wire)
    assert follower.read() == [RECORD, SAVED]
    assert follower.read() is None
    assert offsets == [0, file.stat().st_size]


def test_a_line_break_inside_an_event_is_not_the_end_of_its_line():
    event = SAVED.model_copy(update={"why": "disk\u2028full\x85\n"})
    assert list(parse_lines(event.model_dump_json() + "\n")) == [event]


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
    assert list(parse_lines(text)) == [SAVED, PAUSED]


def test_the_checkpoint_server_logs_a_commit(file):
    append(file, RECORD)
    log_commit(file, 10)
    assert read(file) == [RECORD, CheckpointCommitted(step=10)]
