"""Devices of a node by the words of their driver; samples are the tools' own."""

from __future__ import annotations

import pytest

from perdure.training.node_checks import devices
from perdure.training.node_checks.devices import check_history, judge_devices
from perdure.training.telemetry.vendor_tools import NoAnswer
from perdure.training.wire.node import CheckOutcome, DeviceSample, NodeSample
from tests.unit.telemetry.driver_tools import SAMPLES

NO_TOOLS = ("npu-smi: not installed", "nvml: nvidia-ml-py is not installed")


def seen(*result, gaps=()):
    return NodeSample(at_s=0.0, devices=result, gaps=gaps)


def test_a_node_without_drivers_has_nothing_to_check():
    check = judge_devices(seen(gaps=NO_TOOLS), 2)
    assert check.outcome is CheckOutcome.SKIPPED
    assert "npu-smi: not installed" in check.seen


def test_healthy_devices_pass():
    result = [DeviceSample(index=i, name="910B", health="OK", link_is_up=True) for i in (0, 1)]
    check = judge_devices(seen(*result, gaps=("hccn_tool: not installed",)), 2)
    assert (check.outcome, check.seen) == (CheckOutcome.OK, "2 x 910B, healthy")


@pytest.mark.parametrize(
    ("changes", "outcome", "word"),
    [
        ({"health": "Alarm", "error_codes": ("8C084E00",)}, CheckOutcome.FAILED,
         "device 0: Alarm (8C084E00)"),
        ({"health": "Critical"}, CheckOutcome.FAILED, "Critical"),
        ({"health": "OK", "link_is_up": False}, CheckOutcome.FAILED, "its link is down"),
        ({"health": "Warning"}, CheckOutcome.WARNING, ""),
        ({"health": "OK", "net_health": "Socket failed"}, CheckOutcome.WARNING, ""),
    ],
)  # fmt: skip
def test_a_device_with_an_error_fails_and_one_in_doubt_is_a_warning(changes, outcome, word):
    check = judge_devices(seen(DeviceSample(index=0, **changes)), 1)
    assert check.outcome is outcome
    assert word in check.seen


def test_missing_devices_fail_and_a_driver_that_does_not_answer_too():
    check = judge_devices(seen(DeviceSample(index=0, health="OK")), 8)
    assert (check.outcome, check.seen) == (CheckOutcome.FAILED, "7 of 8 devices are missing")
    check = judge_devices(seen(gaps=("no answer: timed out",)), 8)
    assert check.outcome is CheckOutcome.FAILED


def answering(**samples):
    """A node whose tools print samples, by a word of the command."""

    def ask(command):
        for word, name in {"ecc": "npu-smi-ecc.txt", **samples}.items():
            if word.strip("_") in " ".join(command):
                return (SAMPLES / name).read_text()
        return (SAMPLES / "npu-smi-info.txt").read_text()

    return ask


def test_a_clean_past_passes(monkeypatch):
    monkeypatch.setattr(devices, "find_tool", lambda _name: None)
    assert check_history(2, ask_tool=answering()).outcome is CheckOutcome.OK


def test_losses_of_the_link_are_reported(monkeypatch):
    monkeypatch.setattr(devices, "find_tool", lambda name: name)
    ask = answering(link_stat="hccn-link-stat.txt", _stat="hccn-stat.txt")
    check = check_history(1, ask_tool=ask)
    assert check.outcome is CheckOutcome.WARNING
    assert check.seen == "device 0: link lost 2 times, last Tue Aug  1 14:44:40 2022"


def test_a_memory_that_is_worn_out_fails(monkeypatch):
    monkeypatch.setattr(devices, "find_tool", lambda _name: None)
    for pages, outcome in ((3, CheckOutcome.WARNING), (64, CheckOutcome.FAILED)):
        worn = f"HBM Double Bit Error Count : 1\nHBM Double Bit Isolated Pages Count : {pages}\n"

        def ask(command, worn=worn):
            return worn if "ecc" in command else answering()(command)

        assert check_history(1, ask_tool=ask).outcome is outcome


def test_a_tool_that_gives_no_answer_is_a_warning():
    def ask(_command):
        raise NoAnswer("timed out")

    assert check_history(1, ask_tool=ask).outcome is CheckOutcome.WARNING
