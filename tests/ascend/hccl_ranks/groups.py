"""ProcessGroupHCCL where collectives fail and groups end; the argument is a function here."""

from __future__ import annotations

import datetime as dt
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_npu

from tests.ascend.hccl_ranks import LIMIT_S
from tests.ascend.hccl_ranks.meeting import RANK, SIZE, join, say

DEVICE = torch.device("npu", RANK % 8)
INITIAL = 1.0


def backend(group: Any = None) -> Any:
    """The ProcessGroupHCCL of a group."""
    chosen = dist.distributed_c10d._get_default_group() if group is None else group
    return chosen._get_backend(DEVICE)


def reduced(group: Any = None) -> list[float]:
    """An all-reduce of ones, waited for."""
    tensor = torch.full((3,), INITIAL, device=DEVICE)
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    return tensor.tolist()


def text_of(run: Callable[[], Any]) -> str:
    """What the exception says; empty where there is none."""
    try:
        run()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def struck() -> Any:
    """The fault of the second argument strikes the last rank."""
    before = reduced()
    if RANK == SIZE - 1:
        import ascend_emulator  # only there in the lab

        ascend_emulator.fault(f"{sys.argv[2]} device={DEVICE.index}")
    return {"before": before, "text": text_of(reduced)}


def late() -> Any:
    """The last rank does not enter a collective."""
    reduced()
    text = text_of(reduced) if RANK != SIZE - 1 else ""
    wait_for_all("end")
    return {"text": text}


def wait_for_all(where: str) -> None:
    """Meet in the store, which no device is part of."""
    store = dist.distributed_c10d._get_default_store()
    store.add(where, 1)
    while int(store.add(where, 0)) < SIZE:
        time.sleep(0.05)


def generations() -> Any:
    """Groups are destroyed and made anew."""
    seen: list[Any] = []
    for generation in range(3):
        group = dist.new_group(list(range(SIZE)), timeout=dt.timedelta(seconds=60))
        seen.append(reduced(group))
        name = backend(group).get_hccl_comm_name(RANK)
        dist.destroy_process_group(group)
        seen.append(bool(name) and generation)
    return seen


def stopped() -> Any:
    """A collective of rank 0 waits while the device is stopped; then all go on with new links."""
    before = reduced()
    text = ""
    if RANK == 0:
        threading.Timer(1.5, torch_npu.npu.stop_device, (DEVICE.index,)).start()
        text = text_of(reduced)
    else:
        torch_npu.npu.stop_device(DEVICE.index)
    wait_for_all("stopped")
    torch_npu.npu.restart_device(DEVICE.index)
    rebuild = sys.argv[2] == "rebuild"
    torch_npu.distributed.reinit_process_group(None, rebuild_link=rebuild)
    # Each rank deletes the group's keys in the store: also those of a rank that has gone ahead.
    wait_for_all("reinitialized")
    return {"before": before, "text": text, "after": reduced()}


def aborted() -> Any:
    """A collective of rank 0 waits while its communicator is destroyed."""
    reduced()
    text = ""
    if RANK == 0:
        threading.Timer(1.5, backend().abort_hccl_comm, ("a test",)).start()
        text = text_of(reduced)
        if os.environ["TORCH_HCCL_ASYNC_ERROR_HANDLING"] == "1":
            time.sleep(LIMIT_S)  # until the watchdog ends this process
    say({"text": text})
    os._exit(0)


def main() -> None:
    """Run one."""
    torch.accelerator.set_device_index(DEVICE.index)
    join("hccl")
    say(globals()[sys.argv[1]]())
    sys.stdout.flush()
    os._exit(0)  # a device that has failed would make of the end another error


if __name__ == "__main__":
    main()
