"""The file in which a coordinator writes down what its attempt handles."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from perdure.training.coordinator import history_writer
from perdure.training.coordinator.history_writer import (
    HISTORY_FILE,
    OLDER_HISTORY_FILE,
    HistoryWriter,
)
from perdure.training.recovery.invariants import InvariantBroken
from perdure.training.recovery.protocol import LastSaved
from perdure.training.recovery.replay import main
from perdure.training.recovery.stimuli import (
    AgentConnected,
    LastSaveReported,
    PauseWanted,
    StepCommitted,
    StepRecorded,
)
from tests.unit.recovery.attempts import AttemptHarness


@pytest.fixture
def attempt():
    return AttemptHarness.of().attempt


@pytest.fixture
def writer(attempt, tmp_path) -> HistoryWriter:
    return HistoryWriter(tmp_path, attempt)


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def kinds(file: Path) -> list[str]:
    return [document["stimulus"]["kind"] for document in written(file)[1:]]


def test_each_stimulus_is_on_disk_with_its_actions_once_it_is_handled(writer, tmp_path):
    actions = writer.handle(PauseWanted(is_wanted=True), now_s=7.5)
    assert len(actions) == 4
    snapshot, handled = written(tmp_path / HISTORY_FILE)
    assert (snapshot["kind"], snapshot["number"]) == ("snapshot", 1)
    assert (handled["number"], handled["at_s"]) == (1, 7.5)
    message = {"op": "pause", "wanted": True}
    assert handled["actions"] == [{"to": "ranks", "content": message, "ranks": "0-3"}]


def test_the_file_is_for_its_owner_alone(writer, tmp_path):
    writer.handle(StepCommitted(1), now_s=1.0)
    assert stat.S_IMODE((tmp_path / HISTORY_FILE).stat().st_mode) == 0o600


def test_of_steps_in_a_row_only_the_newest_is_written_and_before_what_comes_next(writer, tmp_path):
    for step in range(11, 20):
        writer.handle(StepRecorded(step), now_s=float(step))
    assert kinds(tmp_path / HISTORY_FILE) == []
    writer.handle(StepCommitted(19), now_s=20.0)
    assert kinds(tmp_path / HISTORY_FILE) == ["step_recorded", "step_committed"]
    assert [document["number"] for document in written(tmp_path / HISTORY_FILE)] == [1, 9, 10]
    assert main([str(tmp_path / HISTORY_FILE)]) == 0


def test_a_long_history_goes_on_in_another_file_and_both_can_be_replayed(
    attempt, tmp_path, monkeypatch
):
    monkeypatch.setattr(history_writer, "MIN_STIMULI", 10)
    monkeypatch.setattr(history_writer, "STIMULI_PER_RANK", 1)
    writer = HistoryWriter(tmp_path, attempt)
    for number in range(1, 36):
        writer.handle(PauseWanted(is_wanted=number % 2 == 1), now_s=float(number))
    older, newer = written(tmp_path / OLDER_HISTORY_FILE), written(tmp_path / HISTORY_FILE)
    assert (older[0]["number"], len(older)) == (21, 11)
    assert (newer[0]["number"], len(newer)) == (31, 6)
    assert newer[0]["memory"]["pauses"]["is_requested"] is False
    for name in (OLDER_HISTORY_FILE, HISTORY_FILE):
        assert main([str(tmp_path / name)]) == 0


def test_known_secrets_are_masked_wherever_they_are(attempt, tmp_path):
    writer = HistoryWriter(tmp_path, attempt, {"node-of-secret-name"})
    writer.handle(AgentConnected("node-of-secret-name", (0, 1)), now_s=1.0)
    assert "secret-name" not in (tmp_path / HISTORY_FILE).read_text()
    assert main([str(tmp_path / HISTORY_FILE)]) == 0


def test_a_stimulus_that_raises_is_on_record_with_its_error(writer, tmp_path, capsys):
    with pytest.raises(InvariantBroken):
        writer.handle(LastSaveReported(0, LastSaved(step=1)), now_s=1.0)
    (handled,) = written(tmp_path / HISTORY_FILE)[1:]
    assert "last_save_reported is impossible while training" in handled["error"]
    assert main([str(tmp_path / HISTORY_FILE)]) == 1
    assert "stimulus 1 at 1.000: InvariantBroken" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_warning_and_the_attempt_goes_on(
    attempt, tmp_path, caplog
):
    writer = HistoryWriter(tmp_path / "missing", attempt)
    for step in (11, 12):
        writer.handle(StepRecorded(step), now_s=1.0)
        writer.handle(StepCommitted(step), now_s=1.0)
    assert attempt.step == 12
    assert caplog.text.count("is written no further") == 1


def test_an_error_of_the_history_costs_no_action_of_the_attempt(writer, monkeypatch, caplog):
    def fail(*_arguments: Any, **_options: Any) -> str:
        raise ValueError("no JSON")

    monkeypatch.setattr(history_writer, "handled_line", fail)
    assert len(writer.handle(PauseWanted(is_wanted=True), now_s=1.0)) == 4
    assert "is written no further: no JSON" in caplog.text
    assert len(writer.handle(PauseWanted(is_wanted=False), now_s=2.0)) == 4
