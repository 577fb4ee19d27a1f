"""FSDP2 on the CPU, which accelerate has for accelerators alone.

With ranks on the CPU accelerate 1.15 drops its FSDP plugin and says nothing: the model would be
wrapped in DDP. `fully_shard` itself works there, so what a run on devices does can be tried on
any machine.
"""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType


def shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Have an accelerator of ranks on the CPU shard the models that it prepares.

    Args:
        accelerator: of accelerate, before it prepares a model; those of devices stay as they are.
        plugin: its FullyShardedDataParallelPlugin of version 2.
    """
    if accelerator.distributed_type is not DistributedType.MULTI_CPU:
        return
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState().distributed_type = DistributedType.FSDP
