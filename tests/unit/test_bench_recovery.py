"""What the comparison of recoveries makes of programs that did not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.recovery import __main__ as bench
from benchmarks.recovery.contenders import (
    HCCE,
    NODE_LOST,
    OURS,
    RANK_KILLED,
    TORCHRUN,
    WARM,
    beside_equal,
    targets,
)
from benchmarks.recovery.measuring import Logs, Recovery
from benchmarks.recovery.running import NotRunError
from benchmarks.recovery.tables import recovery_table
from benchmarks.recovery.workload import FAULT_FILE, Workload

RAN = Recovery(step_s=0.1, resume_s=0.2, full_s=0.2, steps_lost=0, difference=0.0)
LOSES_NONE = "perdure loses no steps"


def is_met(found: dict[str, list[Recovery]], text: str) -> bool:
    (one,) = [target for target in targets(RANK_KILLED, found) if target.text.startswith(text)]
    return one.is_met


@pytest.mark.parametrize("text", [LOSES_NONE, "perdure's loss is the undisturbed one"])
def test_what_ours_never_ran_for_is_not_met(text):
    assert is_met({name: [RAN] for name in OURS}, text)
    assert not is_met({TORCHRUN: [RAN]}, text)
    assert not is_met({HCCE: [RAN], WARM: []}, text)


def test_a_contender_that_did_not_run_fails_the_program_in_one_line(monkeypatch, capsys):
    def not_installed(kind: str, name: str, **given: object) -> None:
        raise NotRunError("torchft is not installed")

    monkeypatch.setattr(bench, "run", not_installed)
    monkeypatch.setattr("sys.argv", ["bench", "--only", "recovery", "--contender", "torchft"])
    assert bench.main() == 1
    reported = capsys.readouterr().err.splitlines()
    assert reported == ["bench-recovery: not all contenders ran: torchft: torchft is not installed"]


def test_an_unknown_contender_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "--contender", "nobody"])
    assert bench.main() == 2
    assert "'nobody'" in capsys.readouterr().err


def test_what_was_noticed_before_the_fault_is_no_notice_of_it(tmp_path):
    workload = Workload(folder=tmp_path, steps=3, kill_step=1)
    (tmp_path / FAULT_FILE).write_text('{"at_s": 100.0}')
    for at_s in (99.0, 100.5, 100.25):
        workload.noticed(at_s)
    assert Logs.of(tmp_path).noticed_at_s == 100.25


@pytest.mark.parametrize(
    ("loses_node", "is_armed", "due"),
    [(False, False, [5]), (True, False, []), (True, True, [5, 6, 7])],
)
def test_a_node_is_lost_from_its_step_on_once_the_spare_waits(tmp_path, loses_node, is_armed, due):
    workload = Workload(folder=tmp_path, steps=7, kill_step=5, loses_node=loses_node)
    if is_armed:
        workload.arm()
    assert [step for step in range(1, 8) if workload.is_due(step)] == due


def test_rows_are_compared_with_the_median_of_the_reference():
    slow = replace(RAN, resume_s=1.0, noticed_s=0.125)
    table = recovery_table("title", {WARM: [RAN], TORCHRUN: [slow]}, {}, reference=WARM)
    row = next(line for line in table.splitlines() if line.startswith(TORCHRUN))
    columns = row.removeprefix(TORCHRUN).split()
    assert columns[1:4] == ["0.12", "1.00/1.00/1.00", "5.00"]


def test_the_peers_of_a_lost_node_are_compared_with_ours_of_the_same_section():
    ours, peer = next(iter(NODE_LOST.ours)), next(iter(NODE_LOST.peers))
    found = {ours: [RAN], peer: [replace(RAN, resume_s=1.0)], TORCHRUN: [RAN]}
    assert beside_equal(NODE_LOST, found).endswith(f"{peer}: {ours} 5.00 x as fast")
