"""The ranks of a gloo world: `python ranks.py SCENARIO WORLD_SIZE FOLDER`.

Exits with 0 when everything that the scenario asserts held on every rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from storage.checkpoint import CheckpointStore
from storage.errors import PermanentError, PreconditionFailed, StaleAttempt
from storage.loading import load as load_state
from storage.local import LocalStore
from storage.saving import DirectSaver
from storage.staging import SavePlans

REPLICATED, SHARDED, PLAIN, FAILED = 10, 20, 25, 30
RANKS_THAT_SAVED = 4


class FullDisk(LocalStore):
    """Takes no shard of rank 2."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        if "rank00002" in key:
            raise PermanentError(f"{key}: the disk is full")
        super().put(key, data, if_absent=if_absent)


def replicated_state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"weight/{n}": torch.randn(8, 8, generator=generator).bfloat16() for n in range(8)}


def rank_state(rank: int) -> dict[str, Tensor]:
    return {f"random/rank{rank:05d}": torch.full((rank + 1,), rank, dtype=torch.uint8)}


def model(seed: int) -> nn.Module:
    """Its layers have 6, 3 and 1 rows: on 4 ranks some hold nothing of a parameter."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(3, 1))


def sharded_model(seed: int, world_size: int) -> nn.Module:
    sharded = model(seed)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world_size,)))
    return sharded


def save(rank: int, world_size: int, folder: Path) -> None:
    checkpoints = CheckpointStore(LocalStore(folder), "run")
    saver = DirectSaver(
        checkpoints=checkpoints,
        plans=SavePlans(),
        run_id="run",
        placement=0,
        attempt=1,
        rank=rank,
        world_size=world_size,
    )
    extra = {"rank": rank}
    state = replicated_state() | rank_state(rank)
    saver.save(state, REPLICATED, extra)
    assert (saver.newest is not None) == (rank == 0)

    saver.save(sharded_model(0, world_size).state_dict(), SHARDED, extra)
    # As DDP has it: the same whole tensors on every rank.
    saver.save(model(2).state_dict(), PLAIN, extra)

    saver.checkpoints = CheckpointStore(FullDisk(folder), "run")
    with pytest.raises(PermanentError, match=r"^rank 2: .*the disk is full$"):
        saver.save(state, FAILED, extra)
    saver.checkpoints = checkpoints
    no_json: Any = {1, 2}
    with pytest.raises(ValueError, match=r"^rank 0: (?s:.*)extra"):
        saver.save(state, FAILED, {"bad": no_json} if rank == 0 else extra)
    no_tensor: Any = 3
    with pytest.raises(ValueError, match="cannot be saved" if rank else "bad is not a tensor"):
        saver.save(state if rank else state | {"bad": no_tensor}, FAILED, extra)
    assert checkpoints.steps() == [REPLICATED, SHARDED, PLAIN]

    with pytest.raises(PreconditionFailed):
        saver.save(state, SHARDED, extra)
    if rank == 0:
        checkpoints.fence(0, 2)
    dist.barrier()
    with pytest.raises(StaleAttempt):
        saver.save(state, FAILED, extra)


def load(rank: int, world_size: int, folder: Path) -> None:
    checkpoints = CheckpointStore(LocalStore(folder), "run")
    own = rank_state(rank) if rank < RANKS_THAT_SAVED else {}
    expected = replicated_state() | own
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_state(state, checkpoints.manifest(REPLICATED), checkpoints=checkpoints)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name

    for step, seed in ((SHARDED, 0), (PLAIN, 2)):
        sharded = sharded_model(1, world_size)
        load_state(sharded.state_dict(), checkpoints.manifest(step), checkpoints=checkpoints)
        original = model(seed).state_dict()
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), original[name]), (step, name)


def main() -> None:
    scenario, world_size, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # Forked, so that torch is imported once; nothing has used its threads yet.
    ranks = start_processes(
        run_rank, (scenario, world_size, folder), world_size, join=False, start_method="fork"
    )
    while not ranks.join():
        pass


def run_rank(rank: int, scenario: str, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}-{scenario}-{world_size}-rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    {"save": save, "load": load}[scenario](rank, world_size, Path(folder))
    dist.destroy_process_group()
    # torch 2.13: after DTensor collectives over gloo about one interpreter in fifty aborts while it
    # is torn down ("terminate called without an active exception"), also without our code.
    os._exit(0)


if __name__ == "__main__":
    main()
