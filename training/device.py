"""Which accelerator a worker computes on; the only module that knows torch_npu.

Written against torch 2.13 and torch_npu 2.13; the NPU branch has not been run on hardware.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Mapping

import torch

# Dense bf16/fp16 peak of one device in TFLOP/s, by a part of the device's name, from the
# vendors' data sheets. What is not listed is measured with a matmul.
PEAK_TFLOPS: Mapping[str, float] = {"H200": 989.0, "H100": 989.0, "A100": 312.0}

BACKENDS: Mapping[str, str] = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


def load_npu() -> bool:
    """Register torch_npu where CANN is there. Whether an NPU backend is available."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")
    return True


def pick_device(local_rank: int) -> torch.device:
    """The device of a local rank: its accelerator, or the CPU where there is none."""
    load_npu()
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None  # noqa: S101 an available accelerator has a type
    return torch.device(kind.type, local_rank)


def backend_of(device: torch.device) -> str:
    """The collective library for a device type.

    Raises:
        ValueError: no backend is known for it.
    """
    if device.type not in BACKENDS:
        raise ValueError(f"no collective backend known for {device.type}; known: {list(BACKENDS)}")
    return BACKENDS[device.type]


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of one device: from the table, else what a matmul reaches here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, tflops in PEAK_TFLOPS.items():
            if part in name:
                return tflops * 1e12
    return _measured_flops(device, dtype)


def _measured_flops(device: torch.device, dtype: torch.dtype, *, size: int = 512) -> float:
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
    """The random state of the device, uint8; None on the CPU, whose state is torch's own."""
    if device.type == "cpu":
        return None
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_device_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set what `device_rng_state` returned."""
    torch.get_device_module(device).set_rng_state(state, device)
