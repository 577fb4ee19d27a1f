"""The device seam, as far as it can be seen without a device."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from perdure.training.device import (
    UCE_HIGH_LEVEL,
    UCE_LOW_LEVEL,
    WATCHDOG_STOP,
    DeviceBeyondHealing,
    abort_group,
    healing_of,
    peak_flops,
    pin,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NPU_INDEX = 3


@dataclass
class RecordedRuntime:
    """Stands for CUDA's runtime, which is not here: writes down what it is asked to do."""

    answer: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)

    def cudaHostRegister(  # noqa: N802 its name there
        self, address: int, size_bytes: int, flags: int
    ) -> int:
        self.calls.append(("register", address))
        assert (size_bytes, flags) == (64, 0)
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 its name there
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def runtime(monkeypatch):
    recorded = RecordedRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: recorded)
    return recorded


@pytest.fixture
def host():
    return torch.zeros(64, dtype=torch.uint8)


def test_memory_is_locked_for_cuda_and_let_go_again(runtime, host):
    undo = pin(host, CUDA)
    assert runtime.calls == [("register", host.data_ptr())]
    undo()
    assert runtime.calls[1:] == [("unregister", host.data_ptr())]


def test_memory_that_cannot_be_locked_is_used_as_it_is(runtime, host):
    runtime.answer = 2  # cudaErrorMemoryAllocation
    pin(host, CUDA)()
    assert [name for name, _ in runtime.calls] == ["register"]


def test_other_devices_are_asked_nothing(runtime, host):
    pin(host, CPU)()
    assert runtime.calls == []


@dataclass
class RecordedNpu:
    """Stands for torch_npu, which is not here: writes down what it is asked to do."""

    level: int = UCE_LOW_LEVEL
    stopped: int = 0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def stop_device(self, index: int) -> int:
        self.calls.append(("stop_device", index))
        return self.stopped

    def check_uce_in_memory(self, index: int) -> int:
        self.calls.append(("check_uce_in_memory", index))
        return self.level

    def update_npu_tensor_to_safe(self, tensor: torch.Tensor) -> None:
        self.calls.append(("update_npu_tensor_to_safe", tensor.item()))

    def restart_device(self, index: int) -> None:
        self.calls.append(("restart_device", index))


@pytest.fixture
def npu(monkeypatch):
    recorded = RecordedNpu()
    module, recovery = ModuleType("torch_npu"), ModuleType("torch_npu.npu._recovery")
    vars(module)["npu"] = recorded
    vars(recovery)["update_npu_tensor_to_safe"] = recorded.update_npu_tensor_to_safe
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setitem(sys.modules, "torch_npu.npu._recovery", recovery)
    return recorded


@dataclass(frozen=True)
class FakeDevice:
    """torch knows no npu without its extension."""

    type: str
    index: int | None = NPU_INDEX


def heal_npu(*tensors: torch.Tensor, is_damaged: bool) -> bool:
    npu: Any = FakeDevice("npu")
    healing = healing_of(npu)
    healing.stop()
    return healing.clean(tensors, is_damaged=is_damaged)


def test_an_npu_whose_memory_is_whole_is_stopped_and_started_again(npu):
    assert heal_npu(torch.tensor(1.0), is_damaged=False), "its tensors have their values"
    assert npu.calls == [("stop_device", NPU_INDEX), ("restart_device", NPU_INDEX)]


def test_damage_outside_of_tensors_needs_no_tensor_made_safe(npu):
    assert heal_npu(torch.tensor(1.0), is_damaged=True), "its tensors have their values"
    names = [call[0] for call in npu.calls]
    assert names == ["stop_device", "check_uce_in_memory", "restart_device"]


def test_damaged_tensors_are_made_safe_before_the_npu_starts_again(npu):
    npu.level = UCE_HIGH_LEVEL
    assert not heal_npu(torch.tensor(1.0), torch.tensor(2.0), is_damaged=True)
    assert npu.calls[2:] == [
        ("update_npu_tensor_to_safe", 1.0),
        ("update_npu_tensor_to_safe", 2.0),
        ("restart_device", NPU_INDEX),
    ]


def test_a_driver_that_does_not_abort_the_tasks_is_an_error(npu):
    npu.stopped = 1
    with pytest.raises(RuntimeError, match="has not aborted"):
        heal_npu(is_damaged=False)


@pytest.mark.parametrize("level", [0, 1, 4])
def test_an_npu_that_the_driver_does_not_repair_is_left_to_a_new_process(npu, level):
    npu.level = level
    with pytest.raises(DeviceBeyondHealing, match=f"check_uce_in_memory gives {level}"):
        heal_npu(is_damaged=True)
    assert npu.calls[-1] == ("check_uce_in_memory", NPU_INDEX), "it was not started again"


def test_a_damaged_cuda_context_is_left_to_a_new_process():
    with pytest.raises(DeviceBeyondHealing):
        healing_of(CUDA).clean((), is_damaged=True)


def test_the_cpu_needs_nothing(npu):
    healing = healing_of(CPU)
    healing.stop()
    healing.settle()
    assert healing.clean((torch.zeros(1),), is_damaged=False)
    assert npu.calls == []


def test_what_a_cpu_has_reported_as_damaged_has_no_values():
    assert not healing_of(CPU).clean((torch.zeros(1),), is_damaged=True)


def test_a_group_is_aborted_by_the_name_that_its_library_has_for_it():
    calls: list[str] = []

    class Nccl:
        def abort(self) -> None:
            calls.append("abort")

    class Hccl:
        def set_watchdog_status(self, status: int) -> None:
            calls.append(f"set_watchdog_status: {status}")

    abort_group(Nccl())
    abort_group(Hccl())
    assert calls == ["abort", f"set_watchdog_status: {WATCHDOG_STOP}"]
    with pytest.raises(RuntimeError, match="object cannot be aborted"):
        abort_group(object())


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("Ascend910B3", 313.0),
        ("Ascend910B2", 376.0),
        ("Ascend910_9392", 376.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_name(monkeypatch, name, tflops):
    device: Any = FakeDevice("npu")
    asked = SimpleNamespace(get_device_name=lambda _device: name)
    monkeypatch.setattr(torch, "get_device_module", lambda _device: asked)
    assert peak_flops(device, torch.bfloat16) == tflops * 1e12


def test_the_peak_of_a_device_that_is_not_listed_is_measured():
    assert peak_flops(CPU, torch.float32) > 1e6
