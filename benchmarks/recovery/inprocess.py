"""The training under nvidia-resiliency-ext's in-process restart, as its optimal example has it.

    python -m benchmarks.recovery.inprocess

Model, optimizer and store outlive restarts; process group, DDP and the state, loaded from the
checkpoint of the newest step, do not. Its intervals are set as short as they go without starving
its own monitor: its work is measured, not its timeouts. Written against 0.4.
"""

import gc
import logging
import os
import traceback
from datetime import timedelta
from typing import Optional

import nvidia_resiliency_ext.inprocess as nvrx
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.optim import Optimizer

from benchmarks.recovery.plain import train
from benchmarks.recovery.workload import NUM_RANKS, Workload, new_model, new_optimizer, prepare

MONITOR_S = 0.1
TIMEOUT_S = 60.0


def main() -> None:
    """Train, as one rank or as a spare one."""
    workload = Workload.of_environment()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    prepare()
    base = new_model()
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        port,
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    wrapper = nvrx.Wrapper(
        store_kwargs={"port": port + 1},
        rank_assignment=nvrx.Compose(
            nvrx.rank_assignment.MaxActiveWorldSize(NUM_RANKS),
            nvrx.rank_assignment.FillGaps(),
        ),
        monitor_process_interval=timedelta(seconds=MONITOR_S),
        last_call_wait=timedelta(0),
    )
    wrapper(_train)(workload, store, base, new_optimizer(base))


# Annotations are no strings in this module: the wrapper reads them.
def _train(
    workload: Workload,
    store: Store,
    base: nn.Module,
    optimizer: Optimizer,
    call: Optional[nvrx.CallWrapper] = None,  # noqa: UP045 the wrapper looks for this very form
) -> None:
    assert call is not None  # noqa: S101 the wrapper fills it in
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = PrefixStore(str(call.iteration), store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    try:
        train(workload, base, optimizer)
    except BaseException as exc:
        # Gloo has no abort: a rank whose neighbours live waits until they close their links, and
        # they do not while frames of the broken step hold the group.
        traceback.clear_frames(exc.__traceback__)
        gc.collect()
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
