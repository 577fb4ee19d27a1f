"""The trials of devices, on processes that compute on the CPU: what is provoked really happens."""

from __future__ import annotations

import json

import pytest

from perdure.training.drill.device_report import DeviceReport, try_devices
from perdure.training.wire.node import CheckOutcome

pytestmark = [pytest.mark.process, pytest.mark.long]

SIZE = 3


@pytest.fixture(scope="module")
def report():
    return try_devices(SIZE, burn_in_s=0.0)


def test_every_rank_sums_in_every_generation_and_leaves_a_collective_that_one_never_enters(report):
    assert report.unanswered == ()
    assert [trial.rank for trial in report.trials] == list(range(SIZE))
    found = {check.name: check for trial in report.trials for check in trial.checks}
    assert found["generations"].outcome is CheckOutcome.OK, found["generations"].seen
    assert found["generations"].seen.startswith("3 generations, up after ")
    assert found["burn_in"].outcome is CheckOutcome.OK


def test_the_exception_of_who_waited_is_kept_word_for_word_and_counts_as_a_result(report):
    for trial in report.trials[:-1]:
        provoked = [one.provoked_by for one in trial.exceptions]
        assert provoked == ["a collective that its last rank never enters"] * 2
        assert all("gloo" in one.text for one in trial.exceptions)
        assert all(one.is_fault and one.kind is None for one in trial.exceptions)
    assert report.trials[-1].exceptions == (), "the last rank waits for nobody"


def test_the_report_is_a_file_that_reads_back(report, tmp_path):
    assert report.is_fine
    report.write(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text()
    assert DeviceReport.model_validate_json(text) == report
    assert {"perdure", "machine", "versions", "trials", "drills"} <= json.loads(text).keys()
