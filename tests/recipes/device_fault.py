"""The reference program, in which an emulated NPU fails at one step.

Attention is by its definition, so that every device computes the same. The rank, the step and the
emulator's command come from the environment.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from perdure.training.config.job import Job
from perdure.training.runtime.session import Session
from perdure.training.trainer import pretrain

RANK, STEP, COMMAND, MARK, WAIT_S = (
    f"DEVICE_FAULT_{name}" for name in ("RANK", "STEP", "COMMAND", "MARK", "WAIT_S")
)
OUT_OF_MEMORY = "oom"
MORE_BYTES = 1 << 30  # than the allocator has cached
IN_A_PARAMETER = "in-a-parameter"  # of a command, for the address of one
DAMAGED_BYTES = 64


def main(job: Job) -> None:
    """Train up to the job's target step."""
    with sdpa_kernel(SDPBackend.MATH):
        pretrain.main(job, in_step=lambda: fail_once(os.environ))


def fail_once(environment: os._Environ[str]) -> None:
    """Arm the fault in the step and the rank that it is for, once in the whole run."""
    is_here = environment["RANK"] == environment.get(RANK)
    if not is_here or Session.completed_step() + 1 != int(environment[STEP]):
        return
    try:
        Path(environment[MARK]).touch(exist_ok=False)
    except FileExistsError:
        return
    import ascend_emulator

    index = torch.accelerator.current_device_index()
    if WAIT_S in environment:  # meanwhile the others come to this step, and wait for this rank
        torch.accelerator.synchronize(index)
        time.sleep(float(environment[WAIT_S]))
    ascend_emulator.fault(f"{_with_address(environment[COMMAND])} device={index}")
    if environment[COMMAND] == OUT_OF_MEMORY:
        torch.empty(MORE_BYTES, dtype=torch.uint8, device=f"npu:{index}")


def _with_address(command: str) -> str:
    if IN_A_PARAMETER not in command:
        return command
    loop = Session._loop
    assert loop is not None
    address = next(iter(loop.training.model.parameters())).data_ptr()
    return command.replace(IN_A_PARAMETER, f"address={address} size={DAMAGED_BYTES}")
