"""A state that goes from one rank to another: real processes, real gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from perdure.training.runtime.state.transfer import (
    TensorLayout,
    receive_header,
    receive_tensors,
    send_state,
)

CPU = torch.device("cpu")
EXTRA = {"data": {"samples": 12}, "optimizer": {}, "scheduler": None, "text": "gr\u00fc\u00df"}


def state() -> dict[str, Tensor]:
    """Tensors of every kind that a training has."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(6, 4, generator=generator)
    weight[0, 0] = float("nan")
    kinds = {
        "weight": weight,
        "turned": torch.randn(5, 3, generator=generator).t(),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "count": torch.tensor(41),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.zeros(0, 7),
        "bytes": torch.arange(200, dtype=torch.uint8),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=generator)),
    }
    # More than are under way at a time.
    return kinds | {f"small/{n}": torch.full((2,), float(n)) for n in range(100)}


def blank() -> dict[str, Tensor]:
    """Tensors of the same shapes that hold something else."""
    tensors = {}
    for name, tensor in state().items():
        own = torch.ones_like(tensor) if name != "turned" else torch.ones(5, 3).t()
        tensors[name] = torch.nn.Parameter(own) if name == "parameter" else own
    return tensors


def as_bytes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {
        name: tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        for name, tensor in tensors.items()
    }


def give_or_take(rank: int) -> Any:
    """Rank 0 gives its state to rank 1; what rank 1 holds then."""
    if rank == 0:
        send_state(state(), EXTRA, to=1, device=CPU)
        return as_bytes(state())
    layouts, extra = receive_header(source=0, device=CPU)
    tensors = blank()
    receive_tensors(tensors, layouts, source=0, device=CPU)
    assert extra == EXTRA
    assert layouts == {name: TensorLayout.of(tensor) for name, tensor in state().items()}
    return as_bytes(tensors)


def test_a_state_arrives_bit_by_bit_and_in_place(cluster):
    given, taken = cluster.run(give_or_take, num_ranks=2)
    assert given == taken


def give_shards(rank: int) -> list[float]:
    """Rank 0 gives its part of a distributed tensor to rank 1."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.full((4,), float(rank)), mesh, [Replicate()], run_check=False)
    if rank == 0:
        send_state({"weight": tensor}, {}, to=1, device=CPU)
    else:
        layouts, _ = receive_header(source=0, device=CPU)
        receive_tensors({"weight": tensor}, layouts, source=0, device=CPU)
    return list(tensor.to_local().tolist())


def test_of_a_distributed_tensor_the_own_part_goes_over(cluster):
    assert cluster.run(give_shards, num_ranks=2) == [[0.0] * 4, [0.0] * 4]


def end_early(rank: int) -> str:
    """Rank 0 ends after the names; what rank 1 makes of it."""
    if rank == 0:
        send_state({}, {}, to=1, device=CPU)
        return ""
    receive_header(source=0, device=CPU)
    with pytest.raises(RuntimeError) as caught:
        receive_tensors(blank(), ["weight", "bytes"], source=0, device=CPU)
    return str(caught.value)


def test_a_source_that_dies_on_the_way_is_noticed_at_once(cluster):
    _, error = cluster.run(end_early, num_ranks=2)
    assert "gloo" in error


def test_a_tensor_that_this_rank_has_not_is_named():
    with pytest.raises(ValueError, match="the replica has optim/exp_avg, which this rank has not"):
        receive_tensors(
            {"weight": torch.zeros(1)}, ["weight", "optim/exp_avg"], source=0, device=CPU
        )
