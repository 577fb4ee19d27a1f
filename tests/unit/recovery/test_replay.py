"""What a coordinator wrote down of an attempt plays the same attempt again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from perdure.training.coordinator.history_writer import HISTORY_FILE, HistoryWriter
from perdure.training.recovery.actions import Action
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.event_history import HistoryError, parse_history
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import WorkerFaultKind
from perdure.training.recovery.repair import StepPhase, Vote
from perdure.training.recovery.replay import USAGE, main
from perdure.training.recovery.replicas import ParallelLayout
from perdure.training.recovery.rungs import Policy
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import (
    AgentConnected,
    AgentDisconnected,
    LoopEnded,
    NodeLost,
    PauseWanted,
    RankConnected,
    RankPaused,
    StepCommitted,
    StepRecorded,
    Stimulus,
)
from tests.unit.recovery.attempts import HSDP, STEP, AttemptHarness, is_plan

SECRET = "hf_" + "a" * 30


def write_down(harness: AttemptHarness, folder: Path) -> Path:
    """From here on everything that the attempt handles is in a file."""
    harness.attempt = WritingAttempt(harness.attempt, folder)
    return folder / HISTORY_FILE


class WritingAttempt(Attempt):
    """An attempt whose door is the history writer's."""

    def __init__(self, attempt: Attempt, folder: Path) -> None:
        super().__init__(attempt.memory, attempt.settings, attempt.decider)
        self.writer = HistoryWriter(folder, attempt)

    def handle(self, stimulus: Stimulus, *, now_s: float) -> Sequence[Action]:
        return self.writer.handle(stimulus, now_s=now_s)


def node_replaced(harness: AttemptHarness) -> None:
    """A node is lost, another takes its place, and training goes on."""
    lost = Fault(FaultClass.NODE_LOST, 1000.0, "its agent is silent", node="node-1", step=STEP)
    for rank in (2, 3):
        harness.kill(rank, is_reported=False)
    harness.handle(AgentDisconnected("node-1"))
    harness.handle(NodeLost(lost, (2, 3)))
    harness.answer()
    harness.handle(AgentConnected("node-2", (2, 3)))
    for rank in (2, 3):
        harness.start(rank)
    harness.answer()
    assert harness.stage() is Stage.TRAINING


def rank_replaced_in_a_pause(harness: AttemptHarness) -> None:
    harness.handle(PauseWanted(is_wanted=True))
    for rank in range(4):
        harness.handle(RankPaused(rank, STEP, is_paused=True))
    harness.handle(StepCommitted(STEP))
    harness.kill(1)
    harness.answer()
    harness.handle(StepRecorded(STEP + 1))
    harness.handle(RankConnected(0, ParallelLayout(dp=2, tp=2)))


def abnormal_step_accepted(harness: AttemptHarness) -> None:
    for phase in (StepPhase.RUN, StepPhase.PREPARED):
        harness.progress_to(STEP, phase, vote=Vote(step=STEP, loss=nan, grad_norm=inf))
        harness.worker_fault(0, WorkerFaultKind.NUMERIC, step=STEP, grad_norm=inf)
        harness.answer()
    assert harness.stage() is Stage.TRAINING
    assert harness.plan().applies


def last_save_in_the_middle_of_a_repair(harness: AttemptHarness) -> None:
    harness.worker_fault(2, WorkerFaultKind.CONNECTION, text=f"no route: token={SECRET}")
    harness.advance(1.0)
    harness.answer(until=is_plan)
    harness.kill(3, exit_code=1, error=f"ValueError: password={SECRET}")
    harness.answer()
    harness.handle(LoopEnded(0))
    assert harness.stage() is Stage.GIVEN_UP


COURSES: tuple[Callable[[AttemptHarness], None], ...] = (
    node_replaced,
    rank_replaced_in_a_pause,
    abnormal_step_accepted,
    last_save_in_the_middle_of_a_repair,
)


@pytest.fixture
def hsdp() -> AttemptHarness:
    return AttemptHarness.of(HSDP, policy=Policy(numeric_retry=True))


@pytest.mark.parametrize("course", COURSES)
def test_an_attempt_is_played_again_from_its_file(hsdp, tmp_path, capsys, course):
    file = write_down(hsdp, tmp_path)
    course(hsdp)
    hsdp.handle(LoopEnded(0))  # the last step record is written with what comes after it
    assert main([str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("training before stimulus 1, written by ")
    assert printed[-1] == f"{len(handled(file))} stimuli, everything as on record"
    for event in hsdp.began():
        assert any(f'"number": {event.number}' in line for line in printed)


def test_a_file_that_begins_in_the_middle_of_a_recovery_is_played_from_there(hsdp, tmp_path):
    hsdp.kill(1)
    hsdp.handle(StepRecorded(STEP + 3))
    hsdp.memory_fault(0)
    hsdp.reports(0)
    file = write_down(hsdp, tmp_path)
    hsdp.answer()
    hsdp.kill(2)
    hsdp.answer()
    assert hsdp.stage() is Stage.TRAINING
    assert main([str(file)]) == 0


def handled(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def change(file: Path, number: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """Falsify the stimulus of this number."""
    lines = file.read_text().splitlines()
    document = json.loads(lines[number])
    assert document["number"] == number
    edit(document)
    lines[number] = json.dumps(document)
    file.write_text("\n".join(lines) + "\n")


def forget_actions(document: dict[str, Any]) -> None:
    document["actions"] = []


def end_elsewhere(document: dict[str, Any]) -> None:
    document["state_after"] = "ending"


def begin_elsewhere(document: dict[str, Any]) -> None:
    document["state_before"] = "saving"


def come_from_nowhere(document: dict[str, Any]) -> None:
    document["stimulus"] = {
        "kind": "last_save_reported", "rank": 0, "report": {"op": "last_saved", "step": 1},
    }  # fmt: skip


def have_raised(document: dict[str, Any]) -> None:
    document["error"] = "KeyError: 7"


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (forget_actions, "other actions than on record: none"),
        (end_elsewhere, "gathering after it, not ending"),
        (begin_elsewhere, "training before it, not saving"),
        (come_from_nowhere, "InvariantBroken: after LastSaveReported"),
        (have_raised, "ended in no error, on record is KeyError: 7"),
    ],
)
def test_the_first_stimulus_with_another_outcome_is_named(hsdp, tmp_path, capsys, edit, problem):
    file = write_down(hsdp, tmp_path)
    hsdp.kill(1)
    hsdp.answer()
    death = next(d["number"] for d in handled(file) if d["stimulus"]["kind"] == "process_ended")
    change(file, death, edit)
    assert main([str(file)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"replay: stimulus {death} at 1000.000: ")
    assert problem in errors


def test_a_line_that_the_end_of_the_coordinator_cut_is_left_out(hsdp, tmp_path, capsys):
    file = write_down(hsdp, tmp_path)
    hsdp.kill(1)
    text = file.read_text()
    file.write_text(text[:-10])
    assert main([str(file)]) == 0
    assert capsys.readouterr().out.endswith("1 stimuli, everything as on record\n")


def test_no_secret_is_in_the_file_and_it_can_be_played_all_the_same(hsdp, tmp_path):
    file = write_down(hsdp, tmp_path)
    last_save_in_the_middle_of_a_repair(hsdp)
    assert SECRET not in file.read_text()
    assert "***" in file.read_text()
    assert main([str(file)]) == 0


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "line 1 is missing"),
        (["{}\n"], "line 1: "),
        (["not json\n"], "line 1: "),
    ],
)
def test_a_text_that_is_no_history_is_an_error_with_its_line(
    tmp_path, capsys, lines: Sequence[str], problem
):
    with pytest.raises(HistoryError, match=problem):
        parse_history(lines)
    file = tmp_path / HISTORY_FILE
    file.write_text("".join(lines))
    assert main([str(file)]) == 2
    assert problem in capsys.readouterr().err


def test_without_a_file_the_replay_says_how_it_is_called(tmp_path, capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == f"{USAGE}\n"
    assert main([str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl" in capsys.readouterr().err
