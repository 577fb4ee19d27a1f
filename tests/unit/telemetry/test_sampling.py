"""One look at a node: tools that are there, missing, or hang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from perdure.training.telemetry import nvml, sampling, vendor_tools
from perdure.training.telemetry.nvml import NoNvml, read_devices
from perdure.training.telemetry.sampling import Sampler
from perdure.training.telemetry.vendor_tools import NoAnswer, find_tool, run_tool
from tests.unit.telemetry.driver_tools import SAMPLES, install, only_tools_of


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.setattr(vendor_tools, "PLACES", {})
    return only_tools_of(tmp_path / "bin", monkeypatch)


def npu_smi(health="npu-smi-health.txt"):
    return f"""case "$*" in
info) cat {SAMPLES}/npu-smi-info.txt ;;
*"-t health"*) cat {SAMPLES}/{health} ;;
esac"""


HCCN = f"""case "$*" in
*-link*) cat {SAMPLES}/hccn-link.txt ;;
*-net_health*) cat {SAMPLES}/hccn-net-health.txt ;;
esac"""


@pytest.fixture
def npu(tools):
    """npu-smi with two devices."""
    install(tools, "npu-smi", npu_smi())
    return tools


def test_a_node_without_any_tool_has_gaps_and_a_host(tools, tmp_path, monkeypatch):
    def missing():
        raise NoNvml("nvidia-ml-py is not installed")

    monkeypatch.setattr(nvml, "_load_library", missing)
    sample = Sampler(tmp_path, 2, now=lambda: 7.0).take_sample()
    assert (sample.at_s, sample.devices) == (7.0, ())
    assert sample.gaps == ("npu-smi: not installed", "nvml: nvidia-ml-py is not installed")
    assert sample.host.memory_percent is not None
    assert (sample.host.disk_free_bytes or 0) > 0


def test_devices_come_from_the_tools_of_the_driver(npu, tmp_path):
    install(npu, "hccn_tool", HCCN)
    sample = Sampler(tmp_path, 8).take_sample()
    assert [(d.index, d.health, d.link_is_up, d.net_health) for d in sample.devices] == [
        (0, "OK", True, "Init"),
        (1, "OK", True, "Init"),
    ]
    assert sample.gaps == ()


def test_only_the_devices_that_are_used_are_looked_at(npu, tmp_path):
    assert [d.index for d in Sampler(tmp_path, 1).take_sample().devices] == [0]


def test_an_alarm_comes_with_its_codes(tools, tmp_path):
    install(tools, "npu-smi", npu_smi("npu-smi-health-alarm.txt"))
    sample = Sampler(tmp_path, 1).take_sample()
    assert sample.devices[0].health == "Alarm"
    assert sample.devices[0].error_codes[0] == "A4025021"
    assert not sample.devices[0].is_healthy
    assert sample.gaps == ("hccn_tool: not installed",)


def test_a_tool_that_gives_no_answer_is_a_gap_and_the_rest_stays(npu, tmp_path):
    def timing_out(command):
        if "health" in command:
            raise NoAnswer("timed out")
        return run_tool(command)

    sample = Sampler(tmp_path, 2, ask_tool=timing_out).take_sample()
    assert [device.health for device in sample.devices] == ["OK", "OK"]
    assert sample.gaps[-1] == "no answer: timed out"


def test_tools_that_are_slow_are_not_asked_about_every_device(npu, tmp_path):
    times = iter([0.0, 1.0, sampling.SAMPLE_LIMIT_S + 1])
    sample = Sampler(tmp_path, 2, clock=lambda: next(times)).take_sample()
    assert len(sample.devices) == 2
    assert sample.gaps[-1].startswith("devices 1 on: not asked")


def test_a_tool_without_a_table_is_a_gap(tools, tmp_path):
    install(tools, "npu-smi", "echo dcmi model initialized failed, ret is -8005")
    sample = Sampler(tmp_path, 2).take_sample()
    assert (sample.devices, sample.gaps[-1]) == ((), "npu-smi: no table of devices")


def test_a_tool_that_hangs_is_killed_with_what_it_started(tools):
    install(tools, "npu-smi", "sleep 60 & wait")
    with pytest.raises(NoAnswer, match="timed out"):
        run_tool(["npu-smi", "info"], timeout_s=0.2)


def test_a_tool_is_found_outside_of_path_where_the_driver_puts_it(tools, tmp_path, monkeypatch):
    install(tmp_path, "hccn_tool", "true")
    assert find_tool("hccn_tool") is None
    monkeypatch.setattr(vendor_tools, "PLACES", {"hccn_tool": str(tmp_path / "hccn_tool")})
    assert find_tool("hccn_tool") == str(tmp_path / "hccn_tool")


class NvmlError(Exception):
    pass


def library(**changes):
    """pynvml with one device of two that are asked for."""

    def unsupported(*_arguments):
        raise NvmlError("Not Supported")

    calls = {
        "NVMLError": NvmlError,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _handle: b"NVIDIA H200",
        "nvmlDeviceGetUtilizationRates": lambda _handle: SimpleNamespace(gpu=97),
        "nvmlDeviceGetMemoryInfo": lambda _handle: SimpleNamespace(used=25, total=100),
        "nvmlDeviceGetPowerUsage": lambda _handle: 512_000,
        "nvmlDeviceGetTotalEccErrors": lambda *_arguments: 0,
        "nvmlDeviceGetTemperature": unsupported,
    }
    return SimpleNamespace(**{**calls, **changes})


def test_nvml_reports_what_the_device_supports():
    (device,) = read_devices(2, library=library())
    assert (device.index, device.name, device.health) == (0, "NVIDIA H200", "OK")
    assert (device.utilisation_percent, device.memory_percent, device.power_w) == (97, 25, 512)
    assert device.temperature_c is None


def test_uncorrected_memory_errors_are_an_alarm():
    (device,) = read_devices(1, library=library(nvmlDeviceGetTotalEccErrors=lambda *_: 2))
    assert (device.health, device.error_codes) == ("Alarm", ("uncorrected ECC errors: 2",))


def test_a_machine_without_a_driver_is_no_error_of_ours():
    def fail():
        raise NvmlError("NVML Shared Library Not Found")

    with pytest.raises(NoNvml, match="Shared Library"):
        read_devices(1, library=library(nvmlInit=fail))
