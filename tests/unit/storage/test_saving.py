"""Saves and loads: bit-exact, resharded, all or nothing, and nothing executed."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load as load_with_the_library
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure.storage.checkpoint import CheckpointStore, StepState
from perdure.storage.errors import Corrupt, PermanentError, PreconditionFailed, StaleAttempt
from perdure.storage.loading import load
from perdure.storage.local import LocalStore
from perdure.storage.saving import DirectSaver
from perdure.storage.staging import SavePlans
from tests.unit.storage.nodes import Cluster
from tests.unit.storage.stores import bits, save_directly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

REPLICATED, SHARDED, PLAIN, FAILED = 10, 20, 25, 30
RANKS_THAT_SAVED = 4
SHARD = "p0000-a0000-rank00000.safetensors"


def every_kind() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(7, 5, generator=generator)
    return {
        "fp32": torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45, 3.4e38]),
        "fp32/wide": wide,
        "fp32/transposed": wide.t(),
        "fp32/slice": wide[1:6:2, 1:4],
        "bf16": torch.randn(3, 1, 2, generator=generator).bfloat16(),
        "fp16": torch.randn(9, generator=generator).half(),
        "fp8": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "fp64": torch.randn(3, dtype=torch.float64, generator=generator),
        "int64": torch.tensor([-(2**63), 2**63 - 1, 0]),
        "int32": torch.tensor([-(2**31)], dtype=torch.int32),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "0-dim/fp32": torch.tensor(3.25),
        "0-dim/int64": torch.tensor(12),
        "empty": torch.empty(0),
        "empty/2-dim": torch.empty(0, 4, dtype=torch.bfloat16),
        "empty/other": torch.empty(3, 0, dtype=torch.int64),
        "parameter": nn.Parameter(torch.randn(2, 2, generator=generator)),
        "name with spaces, umlaut \u00fc and @0,0": torch.tensor([1.0]),
    }


def zeros_like(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


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


def save_on_rank(rank: int, folder: Path) -> None:
    world_size = dist.get_world_size()
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


def load_on_rank(rank: int, folder: Path) -> None:
    world_size = dist.get_world_size()
    checkpoints = CheckpointStore(LocalStore(folder), "run")
    own = rank_state(rank) if rank < RANKS_THAT_SAVED else {}
    expected = replicated_state() | own
    state = zeros_like(expected)
    load(state, checkpoints.manifest(REPLICATED), checkpoints=checkpoints)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name

    for step, seed in ((SHARDED, 0), (PLAIN, 2)):
        sharded = sharded_model(1, world_size)
        load(sharded.state_dict(), checkpoints.manifest(step), checkpoints=checkpoints)
        original = model(seed).state_dict()
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), original[name]), (step, name)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster.at(tmp_path_factory.mktemp("four"))
    cluster.run(save_on_rank, cluster.folder / "store", num_ranks=4)
    yield cluster
    cluster.close()


@pytest.fixture
def of_four(cluster: Cluster) -> CheckpointStore:
    return cluster.checkpoints


def test_every_kind_of_tensor_comes_back_bit_by_bit_also_by_the_safetensors_library(checkpoints):
    state = every_kind()
    manifest = save_directly(checkpoints, state, extra={"seen": 3})
    assert manifest == checkpoints.manifest(10)
    assert manifest.extra == {"seen": 3}
    assert checkpoints.verify(10) == []
    loaded = zeros_like(state)
    load(loaded, manifest, checkpoints=checkpoints)
    for name, tensor in state.items():
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor), name
    opened = load_with_the_library(checkpoints.store.get(checkpoints.key(10, SHARD)))
    assert set(opened) == set(state)
    for name, tensor in state.items():
        assert opened[name].dtype == tensor.dtype
        assert bits(opened[name]) == bits(tensor), name


def test_tensors_come_back_from_s3(s3):
    checkpoints = CheckpointStore(s3, "run-1")
    state = {"a": torch.arange(10), "b": torch.tensor(1.5)}
    manifest = save_directly(checkpoints, state)
    loaded = zeros_like(state)
    load(loaded, manifest, checkpoints=checkpoints)
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"], state["b"])


def test_loading_fills_the_callers_tensors_in_place(checkpoints):
    linear = nn.Linear(3, 2)
    saved = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    manifest = save_directly(checkpoints, saved)
    weight = linear.weight
    with torch.no_grad():
        weight.zero_()
    load(linear.state_dict(), manifest, checkpoints=checkpoints)
    assert linear.weight is weight
    assert torch.equal(weight, saved["weight"])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"c": torch.zeros(2)}, "Missing key.*c"), ({"a": torch.zeros(3)}, "rank 0: .*a")],
)
def test_what_the_checkpoint_does_not_hold_is_an_error(checkpoints, wanted, message):
    manifest = save_directly(checkpoints, {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=message):
        load(wanted, manifest, checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"nested": 1}, "'?bad'? is not a tensor: put it into extra"),
        (3, "bad is not a tensor: put it into extra"),
        (torch.zeros(1, dtype=torch.complex64), "bad: torch.complex64 cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_an_error_and_nothing_is_committed(checkpoints, value, message):
    with pytest.raises(ValueError, match=message):
        save_directly(checkpoints, {"good": torch.zeros(1), "bad": value})
    assert checkpoints.steps() == []


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_in_place_of_a_shard_is_rejected_without_executing_it(checkpoints, tmp_path):
    manifest = save_directly(checkpoints, {"a": torch.ones(200)})
    marker = tmp_path / "executed"
    payload = pickle.dumps(Bomb(marker))
    size_bytes = manifest.shards[SHARD].size_bytes
    payload += bytes(size_bytes - len(payload))
    disguised = struct.pack("<Q", size_bytes - 8) + payload[:-8]
    for data in (payload, disguised):
        checkpoints.store.put(checkpoints.key(10, SHARD), data)
        assert len(checkpoints.verify(10)) == 1
        with pytest.raises(Corrupt, match=r"rank 0: .*not a safetensors"):
            load({"a": torch.zeros(200)}, manifest, checkpoints=checkpoints)
    assert not marker.exists()
    pickle.loads(payload)  # noqa: S301 proves that the payload would have worked
    assert marker.exists()


def test_a_replicated_state_is_written_once_and_spread_over_the_ranks(of_four):
    manifest = of_four.manifest(REPLICATED)
    assert manifest.world_size == 4
    assert manifest.extra == {"rank": 0}
    weights = {name: t for name, t in manifest.tensors.items() if name.startswith("weight/")}
    assert len(weights) == 8
    assert all(len(tensor.chunks) == 1 for tensor in weights.values())
    shards = [f"p0000-a0001-rank{rank:05d}.safetensors" for rank in range(4)]
    assert sorted(manifest.shards) == shards
    spread = [tensor.chunks[0].shard for tensor in weights.values()]
    assert [spread.count(shard) for shard in shards] == [2, 2, 2, 2]
    for shard in shards:
        stored = load_with_the_library(of_four.store.get(of_four.key(REPLICATED, shard)))
        assert sum(name.startswith("weight/") for name in stored) == 2
    assert of_four.verify(REPLICATED) == []


def test_names_that_one_rank_has_survive(of_four):
    manifest = of_four.manifest(REPLICATED)
    loaded = {f"random/rank{r:05d}": torch.zeros(r + 1, dtype=torch.uint8) for r in range(4)}
    load(loaded, manifest, checkpoints=of_four)
    for rank in range(4):
        name = f"random/rank{rank:05d}"
        assert manifest.tensors[name].chunks[0].shard.endswith(f"{name[7:]}.safetensors")
        assert loaded[name].tolist() == [rank] * (rank + 1)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(8, marks=pytest.mark.long)])
def test_a_state_of_four_ranks_replicated_or_sharded_loads_into_shards_of_two_and_of_eight(
    cluster, num_ranks
):
    cluster.run(load_on_rank, cluster.folder / "store", num_ranks=num_ranks)


def test_a_state_of_four_ranks_loads_in_one_process(of_four):
    loaded = zeros_like(replicated_state())
    load(loaded, of_four.manifest(REPLICATED), checkpoints=of_four)
    for name, tensor in replicated_state().items():
        assert torch.equal(loaded[name], tensor)


def test_fsdp_shards_of_four_ranks_load_into_a_plain_model(of_four):
    manifest = of_four.manifest(SHARDED)
    assert len(manifest.tensors["0.weight"].chunks) >= 3
    assert of_four.verify(SHARDED) == []
    plain = model(1)
    load(plain.state_dict(), manifest, checkpoints=of_four)
    for loaded, expected in zip(plain.parameters(), model(0).parameters(), strict=True):
        assert torch.equal(loaded, expected)


def test_a_rank_whose_write_failed_left_nothing_committed(of_four):
    assert of_four.states() == {
        REPLICATED: StepState.COMMITTED,
        SHARDED: StepState.COMMITTED,
        PLAIN: StepState.COMMITTED,
        FAILED: StepState.UNCOMMITTED,
    }
