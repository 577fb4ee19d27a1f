"""The accelerator of a worker; the only module that knows torch_npu.

Written against torch 2.13 and torch_npu 2.13. docs/ascend.md lists the tests on hardware, and the
file of torch_npu behind each statement about it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Dense bf16/fp16 peak of one device in TFLOP/s, by a part of the device's name: NVIDIA's from its
# data sheets, that of the first Ascend 910 from Huawei's talk at Hot Chips 2019. Huawei publishes
# none of the 910B and 910C: theirs are third parties' figures, and `peak_tflops` of a job replaces
# them. A 910C has two dies, each a device of its own. A matmul measures other devices.
_PEAK_TFLOPS: Mapping[str, float] = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "Ascend910A": 256.0,
    "Ascend910B2": 376.0,
    "Ascend910B3": 313.0,
    "Ascend910_939": 376.0,
}
_MEASURED_SIZE = 512  # of the matrices on a CPU
_MEASURED_SIZE_OF_ACCELERATORS = 4096  # a smaller product measures how fast kernels are launched

_BACKENDS: Mapping[str, str] = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
# Backends whose operations end with the device's tasks, and by no abort of their own.
ENDED_BY_THE_DEVICE = frozenset({"hccl"})


def _load_npu() -> bool:
    """Register torch_npu where it is installed. Return whether an NPU backend is available.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0, torch's own switch, keeps to the CPU.
    """
    is_wanted = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if not is_wanted or importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")
    return True


def pick_device(local_rank: int) -> torch.device:
    """Choose the device of a local rank: its accelerator, or the CPU where there is none."""
    _load_npu()
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # noqa: S101 an available accelerator has a type
    return torch.device(kind.type, local_rank)


def local_devices() -> int:
    """Count the accelerators that this process sees."""
    _load_npu()
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Return free and total bytes of the device's memory; None on the CPU."""
    if device.type == "cpu":
        return None
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(free), int(total)


def backend_of(device: torch.device) -> str:
    """Return the collective library for a device type.

    Raises:
        ValueError: no backend is known for the type.
    """
    if device.type not in _BACKENDS:
        raise ValueError(f"no collective backend known for {device.type}; known: {list(_BACKENDS)}")
    return _BACKENDS[device.type]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device: from the table, else by a matmul here."""
    name = device_name(device)
    for part, tflops in _PEAK_TFLOPS.items():
        if part in name:
            return tflops * 1e12
    size = _MEASURED_SIZE if device.type == "cpu" else _MEASURED_SIZE_OF_ACCELERATORS
    return _measure_flops(device, dtype, size=size)


def device_name(device: torch.device) -> str:
    """Return the vendor's name, such as Ascend910B3; empty on the CPU."""
    if device.type == "cpu":
        return ""
    return str(torch.get_device_module(device).get_device_name(device))


def _measure_flops(device: torch.device, dtype: torch.dtype, *, size: int) -> float:
    a_MM = torch.ones(size, size, device=device, dtype=dtype)  # noqa: N806 shape suffix
    best_s = float("inf")
    for _ in range(10):
        synchronize(device)
        before_s = time.perf_counter()
        a_MM @ a_MM
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - before_s)
    return 2.0 * size**3 / best_s


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_rng_state(device: torch.device) -> torch.Tensor | None:
    """Return the device's random state, uint8; None on the CPU, whose state torch has."""
    if device.type == "cpu":
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_device_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set a state from `device_rng_state`."""
    torch.get_device_module(device).set_rng_state(state, device)


def pin(host: torch.Tensor, device: torch.device) -> Callable[[], None]:
    """Page-lock memory of the host, so that copies from the device take the link's full speed.

    Args:
        host: uint8, memory that stays mapped until the returned function has been called.
        device: device that copies into it; only CUDA has a call for memory of another owner.

    Returns:
        A function that releases the lock.
    """
    if device.type != "cuda":
        return lambda: None
    runtime, address = torch.cuda.cudart(), host.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, host.nbytes, 0)) != 0:
        return lambda: None  # slower, and just as right
    return lambda: runtime.cudaHostUnregister(address) and None


def abort_group(collectives: Any) -> None:
    """Have every operation of an NCCL group fail, or have HCCL's watchdog leave a group alone.

    From any thread. ProcessGroupNCCL.abort of torch 2.13. HCCL's operations end when the device is
    stopped (`Healing.stop`), and the communicators are destroyed with their group, once the device
    has been started again: HcclCommDestroy frees what tasks on the device still use. MindSpeed-LLM
    keeps the same order (stop_device, restart_device, abort_hccl_comm).

    Raises:
        RuntimeError: the backend has no abort.
    """
    if hasattr(collectives, "set_watchdog_status"):
        collectives.set_watchdog_status(WATCHDOG_STOP)
    elif hasattr(collectives, "abort"):
        collectives.abort()
    else:
        raise RuntimeError(f"{type(collectives).__name__} cannot be aborted")


# torch_npu/npu/_recovery.py; a watchdog that runs again forgets what it has seen of a fault.
_WATCHDOG_RUN = 1
WATCHDOG_STOP = 2


def open_group(group: Any, collectives: Any, device: torch.device) -> None:
    """Make the communicator of an HCCL group now; collective.

    Otherwise the first operation of each rank would make it, and that may be a transfer between two
    ranks. `get_hccl_comm_name` would make it, too, and hold Python's lock while it waits for ranks
    that do not come (Init.cpp has no call_guard there).

    Args:
        group: the group with these `collectives`.
        collectives: a ProcessGroupHCCL.
        device: the device of this process, set for the calling thread.
    """
    torch.accelerator.set_device_index(device.index or 0)
    collectives.set_watchdog_status(_WATCHDOG_RUN)
    group.allreduce([torch.zeros(1, device=device)], dist.AllreduceOptions())


class DeviceBeyondHealing(RuntimeError):  # noqa: N818 a state of affairs, named as it is shown
    """A device takes no work in this process any more."""


class Healing(Protocol):
    """The steps of a device between a fault and the next step of training."""

    def stop(self) -> None:
        """End the device's tasks; from any thread."""
        ...

    def settle(self) -> None:
        """Wait for tasks that a later `stop` would cut short, and which must be whole."""
        ...

    def clean(self, tensors: Sequence[torch.Tensor], *, is_damaged: bool) -> bool:
        """Make the device take work again.

        Args:
            tensors: model and optimizer state on the device.
            is_damaged: whether the device has reported damaged memory.

        Returns:
            Whether the tensors still have their values.

        Raises:
            DeviceBeyondHealing: only a new process helps.
        """
        ...


class NothingToHeal:
    """Healing of the CPU, which needs none."""

    def stop(self) -> None:
        """Do nothing: no task outlives its call."""

    def settle(self) -> None:
        """Do nothing: a call returns after its task."""

    def clean(self, tensors: Sequence[torch.Tensor], *, is_damaged: bool) -> bool:  # noqa: ARG002
        """Do nothing: no task is left."""
        return not is_damaged


class CudaHealing:
    """Healing of CUDA, not run on hardware; NCCL's groups have been aborted before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stop(self) -> None:
        """Do nothing: an aborted kernel returns by itself."""

    def settle(self) -> None:
        """Do nothing: launched tasks run even without their groups."""

    def clean(self, tensors: Sequence[torch.Tensor], *, is_damaged: bool) -> bool:  # noqa: ARG002
        """Wait for the queue; an uncorrectable memory error stays with the context.

        Raises:
            DeviceBeyondHealing: it did.
        """
        if is_damaged:
            raise DeviceBeyondHealing("an uncorrectable memory error ends the CUDA context")
        torch.accelerator.synchronize(self._device)
        return True


# check_uce_in_memory of torch_npu/npu/utils.py.
UCE_LOW_LEVEL = 2  # the damage is outside of tensors
UCE_HIGH_LEVEL = 3  # tensors have lost their data; always so for HBM multi-bit ECC


class NpuHealing:
    """Healing of Ascend, in MindCluster's order.

    stop_device, then check_uce_in_memory and tensors made safe where memory is damaged, then
    restart_device. Process groups are new ones with every generation. Source: MindCluster's
    description of fast recovery of HBM faults inside processes; torch_npu/npu/_recovery.py.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index or 0
        self._npu = importlib.import_module("torch_npu").npu

    def stop(self) -> None:
        """Abort the device's tasks; threads that wait for it get FORCE STOP.

        Raises:
            RuntimeError: the driver did not abort them.
        """
        if self._npu.stop_device(self._index):
            raise RuntimeError("stop_device: the driver has not aborted the device's tasks")

    def settle(self) -> None:
        """Wait for the stream: a stop of the device would drop its tasks.

        MindSpeed-LLM does the same at the end of an optimizer's step (tft_replica_optimizer.py).
        """
        torch.accelerator.current_stream(self._device).synchronize()

    def clean(self, tensors: Sequence[torch.Tensor], *, is_damaged: bool) -> bool:
        """Assess the damage, make tensors safe to write, and start the device again.

        Raises:
            DeviceBeyondHealing: the damage is of a kind that the driver does not repair.
        """
        is_whole = True
        if is_damaged:
            level = self._npu.check_uce_in_memory(self._index)
            if level not in (UCE_LOW_LEVEL, UCE_HIGH_LEVEL):
                raise DeviceBeyondHealing(f"check_uce_in_memory gives {level}: not recoverable")
            is_whole = level == UCE_LOW_LEVEL
        if not is_whole:
            recovery = importlib.import_module("torch_npu.npu._recovery")
            for tensor in tensors:
                recovery.update_npu_tensor_to_safe(tensor)
        self._npu.restart_device(self._index)
        return is_whole


def healing_of(device: torch.device) -> Healing:
    """Choose the healing of a device."""
    match device.type:
        case "npu":
            return NpuHealing(device)
        case "cuda":
            return CudaHealing(device)
        case _:
            return NothingToHeal()
