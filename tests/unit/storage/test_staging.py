"""Plans of saves: made once, again when something changed, and spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load as load_with_the_library
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from perdure.storage.staging import SavePlans, Staging
from tests.unit.storage.nodes import Cluster

SHARD = "p0001-a0001-rank00000.safetensors"


def copied(staging: Staging) -> dict[str, Tensor]:
    """What the library reads from the staged bytes."""
    memory = bytearray(b"\xff" * (staging.size_bytes + 10))
    staging.copy_into(memory)
    return load_with_the_library(bytes(memory[: staging.size_bytes]))


def test_the_staged_bytes_are_a_safetensors_file_of_the_state():
    state = {"a": torch.randn(3, 4).t(), "b": torch.tensor(2.5, dtype=torch.bfloat16)}
    staging = SavePlans().stage(state, SHARD)
    opened = copied(staging)
    assert all(torch.equal(opened[name], state[name]) for name in state)
    parts = staging.parts()
    assert (parts["a"].dtype, parts["a"].shape) == ("F32", (4, 3))
    assert [chunk.shard for chunk in parts["b"].chunks] == [SHARD]


def test_a_second_save_has_the_new_values_and_the_new_name():
    plans, state = SavePlans(), {"a": torch.zeros(3)}
    plans.stage(state, SHARD)
    other = SHARD.replace("a0001", "a0002")
    staging = plans.stage({"a": torch.ones(3)}, other)
    assert copied(staging)["a"].tolist() == [1, 1, 1]
    assert staging.parts()["a"].chunks[0].shard == other


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.ones(4)},
        {"a": torch.ones(3, dtype=torch.float64)},
        {"b": torch.ones(3)},
        {"a": torch.ones(3), "b": torch.ones(3)},
        {},
    ],
)
def test_a_changed_state_is_planned_anew(change):
    plans = SavePlans()
    plans.stage({"a": torch.ones(3)}, SHARD)
    opened = copied(plans.stage(change, SHARD))
    assert set(opened) == set(change)
    assert all(torch.equal(opened[name], tensor) for name, tensor in change.items())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    cluster = Cluster.at(tmp_path_factory.mktemp("staging"))
    yield cluster
    cluster.close()


def names_staged(plans: SavePlans, state: dict[str, Tensor], rank: int) -> list[str]:
    return sorted(plans.stage(state, f"p0001-a0001-rank{rank:05d}.safetensors").parts())


def save_three_times(rank: int) -> dict[str, list[str] | list[int]]:
    """Two saves of a state, and one after the last rank's has grown; collectives of each."""
    counts: list[int] = []
    called = Mock()
    for name in ("all_reduce", "gather", "scatter"):
        called.attach_mock(Mock(side_effect=getattr(dist, name)), name)
        setattr(dist, name, getattr(called, name))
    plans = SavePlans()
    state = {f"w{n}": torch.full((100,), float(n)) for n in range(8)}
    state[f"own{rank}"] = torch.tensor([rank])
    answer: dict[str, list[str] | list[int]] = {}
    for save in ("first", "second", "third"):
        if save == "third" and rank == dist.get_world_size() - 1:
            state["more"] = torch.ones(5)
        called.reset_mock()
        answer[save] = names_staged(plans, state, rank)
        counts.append(len(called.mock_calls))
    return {**answer, "counts": counts}


def test_ranks_spread_replicas_and_exchange_plans_only_when_something_changed(cluster):
    found = cluster.run(save_three_times, num_ranks=4)
    for rank, one in enumerate(found):
        assert one["first"] == one["second"]
        assert f"own{rank}" in one["first"]
        assert len(one["first"]) == 3, "two of eight replicas, and what it alone has"
        assert one["counts"] == [3, 1, 3], "a vote; the plans go round only with a change"
        assert ("more" in one["third"]) == (rank == 3)
    saved = sorted(name for one in found for name in one["third"])
    assert saved == sorted([f"w{n}" for n in range(8)] + [f"own{r}" for r in range(4)] + ["more"])


def stage_sharded(rank: int) -> dict[str, list[tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(5 * 4.0).reshape(5, 4)
    state: dict[str, Tensor] = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
    }
    staging = SavePlans().stage(state, f"p0001-a0001-rank{rank:05d}.safetensors")
    opened = copied(staging)
    offsets = {}
    for name, part in staging.parts().items():
        sharded = state[name]
        assert isinstance(sharded, DTensor)
        for chunk in part.chunks:
            assert torch.equal(opened[chunk.key], sharded.to_local())
        offsets[name] = [chunk.offsets for chunk in part.chunks]
    return offsets


def test_each_rank_saves_its_own_box_of_a_sharded_tensor(cluster):
    first, second = cluster.run(stage_sharded, num_ranks=2)
    assert first == {"rows": [(0, 0)], "columns": [(0, 0)]}
    assert second == {"rows": [(3, 0)], "columns": [(0, 2)]}
