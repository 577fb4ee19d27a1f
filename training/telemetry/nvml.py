"""NVIDIA's devices through NVML, where the optional nvidia-ml-py is installed.

Written against nvidia-ml-py 13 and not run on hardware. Percentages are 0 to 100, sizes bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from perdure.training.wire.node import DeviceSample


class NoNvml(RuntimeError):  # noqa: N818 a state of affairs, named as it is shown
    """The library, the driver or a device is missing."""


def read_devices(count: int, *, library: Any | None = None) -> tuple[DeviceSample, ...]:
    """Read the first `count` devices.

    Args:
        count: how many the node has to have.
        library: in place of pynvml.

    Raises:
        NoNvml: names what is missing.
    """
    nvml = library if library is not None else _load_library()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoNvml(str(error)) from error
    try:
        present = min(count, nvml.nvmlDeviceGetCount())
        return tuple(_read_device(nvml, index) for index in range(present))
    except nvml.NVMLError as error:
        raise NoNvml(str(error)) from error
    finally:
        nvml.nvmlShutdown()


def driver_version(*, library: Any | None = None) -> str | None:
    """Read the version of the driver; None without a driver."""
    try:
        nvml = library if library is not None else _load_library()
        nvml.nvmlInit()
    except NoNvml:
        return None
    except nvml.NVMLError:
        return None
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _load_library() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ModuleNotFoundError as error:
        raise NoNvml("nvidia-ml-py is not installed") from error


def _read_device(nvml: Any, index: int) -> DeviceSample:
    """Read a device; a reading that it does not support is None."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def supported(call: Callable[[], Any]) -> Any | None:
        try:
            return call()
        except nvml.NVMLError:
            return None  # a device that is split, or too old, does not have everything

    rates = supported(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    memory = supported(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    power_mw = supported(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    damage = supported(
        lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )
    return DeviceSample(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        health="Alarm" if damage else "OK",
        error_codes=(f"uncorrected ECC errors: {damage}",) if damage else (),
        utilisation_percent=float(rates.gpu) if rates is not None else None,
        memory_percent=100.0 * memory.used / memory.total if memory is not None else None,
        memory_total_bytes=int(memory.total) if memory is not None else None,
        temperature_c=supported(
            lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        power_w=power_mw / 1000.0 if power_mw is not None else None,
    )


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
