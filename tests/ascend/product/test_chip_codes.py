"""A chip's code and a stream that never ends are one fault, answered before any limit of a hang."""

from __future__ import annotations

import pytest

from perdure.training.drill.evaluation import differences, list_recoveries
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from tests.ascend.product import runs
from tests.chip_tool import RANK, ill_chip


@pytest.mark.long
def test_a_stream_that_never_ends_on_a_chip_with_a_code_is_the_chips_with_hang_restart_off(
    home, undisturbed, tmp_path, monkeypatch
):
    chip = ill_chip(tmp_path)
    marks = home / "marks-stalled"
    marks.mkdir()
    for key, value in chip.environment("80E18404", marks).items():
        monkeypatch.setenv(key, value)
    changes = {
        "watch": {"sample_every_s": 0.5},
        "restart": {"hang": False, "heal": {"wait_s": 0, "reset_s": 1}},
    }
    fault = runs.DeviceFault("hang", rank=RANK)
    job = runs.job_of(home, "stalled", fault=fault, changes=changes)
    mark = {"DEVICE_FAULT_MARK": str(marks / "fired")}
    job = job.model_copy(update={"env": {**job.env, **mark}})
    outcome = runs.drive(home, job)
    summary = runs.summary(outcome)
    assert outcome.ended == "completed", summary
    rungs = [recovery.rung for recovery in list_recoveries(outcome.history)]
    assert rungs == [Rung.IN_PLACE_RESTART], summary
    assert f"{FaultClass.DEVICE_MEMORY_ERROR} code=80E18404 rank={RANK}" in summary
    assert chip.resets == "set -t reset -i 7 -c 0\n"
    assert differences(outcome.curve, undisturbed.curve) == [], summary
