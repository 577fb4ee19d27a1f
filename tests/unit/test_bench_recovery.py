"""What the comparison of recoveries makes of programs that did not run."""

from __future__ import annotations

import pytest

from benchmarks.recovery import __main__ as bench
from benchmarks.recovery.contenders import HCCE, OURS, TORCHRUN, WARM, targets
from benchmarks.recovery.measuring import Recovery
from benchmarks.recovery.running import NotRunError

RAN = Recovery(step_s=0.1, resume_s=0.2, full_s=0.2, steps_lost=0, difference=0.0)
LOSES_NONE = "perdure loses no steps"


def is_met(found: dict[str, list[Recovery]], text: str) -> bool:
    (one,) = [target for target in targets(found) if target.text.startswith(text)]
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
