"""Driver, CANN, torch_npu and torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perdure.training.node_checks.versions import (
    Installed,
    cann_versions,
    check_versions,
    driver_fits,
    read_installed,
)
from perdure.training.telemetry.vendor_tools import read_assignments
from perdure.training.wire.node import CheckOutcome
from tests.unit.telemetry.driver_tools import SAMPLES

DRIVER = read_assignments(SAMPLES / "driver-version.info")
TOOLKIT = read_assignments(SAMPLES / "ascend_toolkit_install.info")
NPU = Installed(
    python="3.11.7",
    torch="2.12.0",
    torch_npu="2.12.0",
    driver={"Version": "26.0.rc1", "Innerversion": "V100R001C30", "compatible_version": ""},
    toolkit={"version": "9.1.0", "compatible_version": "[V100R001C29,V100R001C30]"},
)


def test_a_machine_without_npu_skips_what_is_about_it():
    software = Installed(python="3.11.7", torch="2.13.0", torch_npu=None, driver={}, toolkit={})
    check, fit = check_versions(software)
    assert check.seen == "python 3.11.7, torch 2.13.0"
    assert fit.outcome is CheckOutcome.SKIPPED


def test_this_machine_reports_its_torch():
    assert read_installed().torch.startswith("2.")


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({}, CheckOutcome.OK, ""),
        ({"torch": "2.11.0"}, CheckOutcome.FAILED,
         "torch_npu 2.12.0 needs torch 2.12.0, not 2.11.0"),
        ({"toolkit": {**NPU.toolkit, "version": "8.5.0"}}, CheckOutcome.WARNING,
         "goes with CANN 9.1.0"),
        ({"torch": "2.13.0", "torch_npu": "2.13.0"}, CheckOutcome.WARNING, "not in the table"),
    ],
    ids=["a pair of the table", "another torch", "another CANN", "an unknown pair"],
)  # fmt: skip
def test_versions_that_do_not_fit_fail_and_unknown_ones_are_a_warning(changes, outcome, words):
    fit = check_versions(replace(NPU, **changes))[1]
    assert fit.outcome is outcome
    assert words in fit.seen


def test_driver_and_toolkit_name_each_other():
    assert driver_fits(DRIVER, TOOLKIT)
    assert not driver_fits({"Innerversion": "V100R001C99"}, TOOLKIT)


def test_a_range_of_versions_holds_those_between():
    toolkit = {"compatible_version": "[V100R001C13,V100R001C19],[V100R001C30]"}
    inner = {n: {"Innerversion": f"V100R001C{n}SPC1"} for n in (12, 15, 20, 30)}
    assert [n for n, driver in inner.items() if driver_fits(driver, toolkit)] == [15, 30]


def test_the_table_names_full_versions():
    assert all(version.count(".") >= 2 for version in cann_versions())
    assert cann_versions()["2.7.1.post4"] == ("9.0.0",)
