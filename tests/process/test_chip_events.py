"""A code that a chip reports while its process lives is answered before anything fails over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.drill.evaluation import differences
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.protocol import AttemptGivenUp, RecoveryBegan
from perdure.training.recovery.rungs import Rung
from tests.chip_tool import ill_chip
from tests.process.harness import faulty_job

pytestmark = pytest.mark.process

STEPS = 60
NOTHING_HANGS = "pause:3:20:0"
STALLS = "absent:3:20"


@pytest.fixture
def with_chip(home, tmp_path, monkeypatch):
    """Plays a run in which device 1 of node-1, that of rank 3, reports a code from step 20 on."""
    chip = ill_chip(tmp_path)

    def play(name: str, code: str, *, faults: str = NOTHING_HANGS, **changes: Any) -> RunOutcome:
        watch = {"sample_every_s": 0.5, **changes.pop("watch", {})}
        restart = {"heal": {"wait_s": 0, "reset_s": 1}, **changes.pop("restart", {})}
        job = faulty_job(
            home, name, steps=STEPS, faults=faults, watch=watch, restart=restart, **changes
        )
        for key, value in chip.environment(code, home / f"marks-{name}").items():
            monkeypatch.setenv(key, value)
        played = RunDriver(home).run(job)
        print_times(code, played, home / f"marks-{name}")
        return played

    return play


def print_times(code: str, played: RunOutcome, marks: Path) -> None:
    """Print how long after the chip's first report it is answered, and training goes on."""
    reported_s = min((float(mark.read_text()) for mark in marks.glob("*-*-*")), default=None)
    if reported_s is None or not answers(played):
        return
    first = played.history.attempts[0]
    began = [event for event in first.events if isinstance(event, RecoveryBegan | AttemptGivenUp)]
    rung = answers(played)[0][-1]
    ended = [span.ended.at_s for span in first.recoveries if span.ended is not None]
    later = [view.started.at_s for view in played.history.attempts[1:]]
    answered_s, resumed_s = min(event.at_s for event in began), min([*ended, *later])
    times = f"answered after {answered_s - reported_s:.1f} s, done {resumed_s - reported_s:.1f} s"
    print(f"{code} is answered by {rung}: {times} after the report")


def answers(played: RunOutcome) -> list[tuple[FaultClass, str | None, int | None, Rung]]:
    """Class, code and device of each fault, with the rung that was begun for it."""
    rows = []
    for view in played.history.attempts:
        for span in view.recoveries:
            fault = span.began.fault
            rows.append((fault.fault_class, fault.code, fault.device, span.began.decision.rung))
        if view.fault is not None and view.decision is not None:
            fault = view.fault
            rows.append((fault.fault_class, fault.code, fault.device, view.decision.rung))
    return rows


def test_a_code_that_takes_its_chip_out_costs_the_node_before_anything_fails(with_chip):
    played = with_chip("separated", "80E18402")
    assert played.ended == "completed"
    memory = FaultClass.DEVICE_MEMORY_ERROR
    assert answers(played) == [(memory, "80E18402", 1, Rung.NODE_REPLACE)]
    (view,) = played.history.attempts
    (span,) = view.recoveries
    assert (span.began.fault.node, span.began.fault.rank) == ("node-1", 3)
    assert "npu-smi reports device 1: fault_code: 80E18402" in span.began.fault.evidence
    assert span.succeeded
    assert played.history.isolated == ("node-1",)
    assert list(played.curve) == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def undisturbed(home) -> RunOutcome:
    return RunDriver(home).run(faulty_job(home, "undisturbed", steps=STEPS))


@pytest.mark.long
def test_a_chip_whose_code_asks_for_a_reset_is_reset_before_anything_fails(
    with_chip, undisturbed, tmp_path
):
    played = with_chip("reset", "80E18404")
    assert played.ended == "completed"
    first, second = played.history.attempts
    memory = FaultClass.DEVICE_MEMORY_ERROR
    assert answers(played) == [(memory, "80E18404", 1, Rung.IN_PLACE_RESTART)]
    assert first.healed is not None
    assert [(act.act, act.is_good) for act in first.healed.acts] == [
        ("reset", True),
        ("check", True),
    ]
    assert ill_chip(tmp_path).resets == "set -t reset -i 7 -c 0\n"
    # The ranks on healthy chips have saved what they had.
    assert first.last_save is not None
    assert second.from_step == first.last_save.step >= 20
    assert differences(played.curve, undisturbed.curve) == []


@pytest.mark.long
def test_a_memory_error_that_stalls_is_the_chips_with_hang_restart_off(with_chip, undisturbed):
    played = with_chip("stalls", "80E01801", faults=STALLS, restart={"hang": False})
    assert played.ended == "completed"
    memory = FaultClass.DEVICE_MEMORY_ERROR
    # The chip reports the code still: no process is started on it before it was reset.
    assert answers(played) == [
        (memory, "80E01801", 1, Rung.PROCESS_REPLACE),
        (memory, "80E01801", 1, Rung.IN_PLACE_RESTART),
    ]
    assert differences(played.curve, undisturbed.curve) == []


@pytest.mark.long
def test_a_memory_error_that_stalls_is_the_chips_where_codes_are_only_reported(
    with_chip, undisturbed
):
    played = with_chip(
        "hangs",
        "80E18404",
        faults=STALLS,
        watch={"chip_events": "report"},
        restart={"hang_timeout_s": 8},
    )
    assert played.ended == "completed"
    memory = FaultClass.DEVICE_MEMORY_ERROR
    assert answers(played) == [(memory, "80E18404", 1, Rung.IN_PLACE_RESTART)]
    (view, _) = played.history.attempts
    assert view.ended is not None
    assert FaultClass.HANG in [fault.fault_class for fault in view.ended.runners_up]
    assert differences(played.curve, undisturbed.curve) == []


@pytest.mark.long
def test_a_code_that_asks_for_nothing_or_is_only_reported_ends_nothing(with_chip, undisturbed):
    for name, code, action in (("hint", "80E18401", "act"), ("told", "80E18402", "report")):
        played = with_chip(name, code, watch={"chip_events": action})
        assert (played.ended, answers(played)) == ("completed", [])
        (view,) = played.history.attempts
        assert any(f"codes {code}" in alert.began.text for alert in view.alerts)
        assert differences(played.curve, undisturbed.curve) == []


@pytest.mark.long
def test_a_command_ends_for_the_code_of_its_chip(with_chip, home):
    script = home / "train.sh"
    script.write_text(
        "#!/bin/sh\n[ -e $MARKS/done ] && exit 0\n: >$MARKS/done\nexec sleep 100000\n"
    )
    script.chmod(0o755)
    worker = {"recipe": None, "command": ["sh", str(script)], "cwd": str(home)}
    played = with_chip("command", "80E18404", worker=worker)
    assert played.ended == "completed"
    memory = FaultClass.DEVICE_MEMORY_ERROR
    assert answers(played) == [(memory, "80E18404", 1, Rung.IN_PLACE_RESTART)]
