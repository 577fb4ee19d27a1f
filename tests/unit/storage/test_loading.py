"""Reading parts of a checkpoint: any box of any chunk, bit by bit, and no damage unseen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from perdure.storage import loading
from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt, NotFound, StorageError
from perdure.storage.loading import ManifestReader, ShardReads, load
from perdure.storage.local import LocalStore
from perdure.storage.manifest import Manifest
from perdure.storage.staging import DTYPES
from tests.unit.storage.nodes import flip_bit
from tests.unit.storage.stores import RecordingStore, bits, save_directly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARD = "p0000-a0000-rank00000.safetensors"
MIB = 2**20
KIB = 2**10


@pytest.fixture
def store(tmp_path) -> RecordingStore:
    return RecordingStore(tmp_path / "store")


@pytest.fixture
def checkpoints(store) -> CheckpointStore:
    return CheckpointStore(store, "run")


def held(checkpoints: CheckpointStore) -> dict[str, Tensor]:
    """The whole shard, as a checkpoint server's memory has it: with more behind it."""
    file = checkpoints.store.get(checkpoints.key(10, SHARD))
    return {SHARD: torch.frombuffer(bytearray(file + bytes(100)), dtype=torch.uint8)}


def random_bits(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    """Any bits at all, NaN and denormal ones too; booleans have but two."""
    generator = torch.Generator().manual_seed(seed)
    size_bytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (size_bytes,), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        data %= 2
    return data.view(dtype).reshape(list(shape))


def read_boxes(reads: ShardReads, boxes: Sequence[tuple[str, tuple[int, ...], Tensor]]) -> None:
    """Fill tensors with boxes of what was saved: (name, offsets in it, target)."""
    state = {f"{number}": target for number, (_, _, target) in enumerate(boxes)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), ManifestReader(reads).read_metadata(), False)
    items = [
        ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(f"{number}"),
            dest_offsets=torch.Size((0,) * target.dim()),
            storage_index=MetadataIndex(name, torch.Size((0,) * target.dim())),
            storage_offsets=torch.Size(offsets),
            lengths=target.shape,
        )
        for number, (name, offsets, target) in enumerate(boxes)
    ]
    reads.read(items, planner)


@st.composite
def boxes_of(draw) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, and boxes in it: offsets and lengths, some of them empty."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        lengths = tuple(
            draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True)
        )
        boxes.append((offsets, lengths))
    return shape, boxes


@given(
    cut=boxes_of(),
    code=st.sampled_from(sorted(DTYPES)),
    source=st.sampled_from(["store", "verified", "memory"]),
    contiguous=st.booleans(),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_boxes_of_any_tensor_come_back_bit_by_bit(
    tmp_path_factory, cut, code, source, contiguous
):
    shape, boxes = cut
    checkpoints = CheckpointStore(LocalStore(tmp_path_factory.mktemp("box")), "run")
    state = {
        "before": random_bits(torch.uint8, (5,), 1),
        "wanted": random_bits(DTYPES[code], shape, 2),
        "zzz": random_bits(torch.float64, (3,), 3),
    }
    manifest = save_directly(checkpoints, state)
    reads = ShardReads(
        checkpoints,
        manifest,
        held=held(checkpoints) if source == "memory" else {},
        verify=frozenset({SHARD}) if source == "verified" else frozenset(),
    )
    wanted = []
    for offsets, lengths in boxes:
        target = torch.zeros(lengths, dtype=DTYPES[code])
        if not contiguous and len(lengths) > 1:
            target = torch.zeros(lengths[::-1], dtype=DTYPES[code]).permute(
                *reversed(range(len(lengths)))
            )
        wanted.append(("wanted", offsets, target))
    read_boxes(reads, wanted)
    for (offsets, lengths), (_, _, target) in zip(boxes, wanted, strict=True):
        index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        assert bits(target) == bits(state["wanted"][index])


def test_a_target_of_another_type_gets_the_values(checkpoints):
    manifest = save_directly(checkpoints, {"a": torch.tensor([1.5, -2.0])})
    target = torch.zeros(2, dtype=torch.float64)
    read_boxes(ShardReads(checkpoints, manifest), [("a", (0,), target)])
    assert target.tolist() == [1.5, -2.0]


def test_small_neighbours_are_fetched_with_one_request(checkpoints, store):
    state = {f"{n:02d}": random_bits(torch.float32, (50, n + 1), n) for n in range(30)}
    manifest = save_directly(checkpoints, state)
    store.reads.clear()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(loaded, manifest, checkpoints=checkpoints)
    assert len(store.reads) == 2, "the header, and everything else"
    assert all(bits(loaded[name]) == bits(state[name]) for name in state)


def test_far_neighbours_are_fetched_apart_and_nothing_in_between(checkpoints, store):
    state = {name: random_bits(torch.uint8, (MIB,), n) for n, name in enumerate("abc")}
    manifest = save_directly(checkpoints, state)
    store.reads.clear()
    loaded = {name: torch.zeros(MIB, dtype=torch.uint8) for name in "ac"}
    load(loaded, manifest, checkpoints=checkpoints)
    assert sorted(request.size_bytes for request in store.reads[1:]) == [MIB, MIB]
    assert all(bits(loaded[name]) == bits(state[name]) for name in "ac")


@pytest.mark.parametrize("verify", [False, True])
def test_a_large_tensor_is_fetched_in_pieces(checkpoints, store, monkeypatch, verify):
    monkeypatch.setattr(loading, "SPAN_BYTES", 64 * KIB)
    state = {"large": random_bits(torch.int32, (100 * KIB,), 1), "small": torch.ones(3)}
    manifest = save_directly(checkpoints, state)
    store.reads.clear()
    loaded = {"large": torch.zeros(100 * KIB, dtype=torch.int32)}
    load(
        loaded,
        manifest,
        checkpoints=checkpoints,
        verify=frozenset({SHARD}) if verify else frozenset(),
    )
    assert bits(loaded["large"]) == bits(state["large"])
    sizes = [request.size_bytes for request in store.reads[1:]]
    assert max(sizes) <= 64 * KIB
    assert len(sizes) in (7, 8)


def test_a_header_longer_than_the_first_request_is_read_whole(checkpoints):
    state = {f"a long name {'x' * 300} {n}": torch.tensor([n]) for n in range(1000)}
    manifest = save_directly(checkpoints, state)
    name = next(reversed(state))
    loaded = {name: torch.zeros(1, dtype=torch.int64)}
    load(loaded, manifest, checkpoints=checkpoints)
    assert loaded[name].item() == 999


def test_memory_at_hand_costs_no_request(checkpoints, store):
    state = {"a": random_bits(torch.int16, (7, 9), 1)}
    manifest = save_directly(checkpoints, state)
    file = held(checkpoints)
    store.reads.clear()
    loaded = {"a": torch.zeros(7, 9, dtype=torch.int16)}
    load(loaded, manifest, checkpoints=checkpoints, held=file)
    assert bits(loaded["a"]) == bits(state["a"])
    assert store.reads == []


@pytest.fixture
def mixed(checkpoints) -> tuple[Manifest, dict[str, Tensor], int]:
    """A checkpoint of which only some is wanted: manifest, what is wanted, bits of the file."""
    state = {f"{n}": random_bits(torch.float32, (n + 2, 3), n) for n in range(8)}
    manifest = save_directly(checkpoints, state)
    wanted = {name: torch.zeros_like(state[name]) for name in ("1", "2", "6")}
    return manifest, wanted, 8 * manifest.shards[SHARD].size_bytes


def verified(checkpoints: CheckpointStore, mixed: Any) -> None:
    manifest, wanted, _ = mixed
    load(wanted, manifest, checkpoints=checkpoints, verify=frozenset({SHARD}))


def test_a_whole_shard_passes_and_a_flipped_bit_anywhere_is_found(checkpoints, mixed, store):
    size_bits = mixed[2]
    key = checkpoints.key(10, SHARD)
    folder = LocalStore(store._root)
    verified(checkpoints, mixed)
    # Every byte of the header's length, then a prime stride through header, data and gaps.
    for at in [*range(0, 64, 3), *range(64, size_bits, 61), size_bits - 1]:
        flip_bit(folder, key, at)
        with pytest.raises(Corrupt):
            verified(checkpoints, mixed)
        flip_bit(folder, key, at)
    verified(checkpoints, mixed)


def test_damage_outside_of_the_wanted_tensors_is_found_too(checkpoints, mixed, store):
    manifest, _, size_bits = mixed
    flip_bit(LocalStore(store._root), checkpoints.key(10, SHARD), size_bits - 1)
    reads = ShardReads(checkpoints, manifest, verify=frozenset({SHARD}))
    with pytest.raises(Corrupt, match="xxh3_128"):
        read_boxes(reads, [])


def test_a_truncated_or_deleted_shard_is_found(checkpoints, mixed):
    key = checkpoints.key(10, SHARD)
    whole = checkpoints.store.get(key)
    for left in (0, 4, 8, 100, -1):
        checkpoints.store.put(key, whole[:left])
        with pytest.raises(Corrupt):
            verified(checkpoints, mixed)
    checkpoints.store.delete(key)
    with pytest.raises(NotFound):
        verified(checkpoints, mixed)


def test_boxes_that_overlap_are_read_and_hashed_as_one_file(checkpoints):
    tensor = random_bits(torch.int64, (20, 4), 5)
    manifest = save_directly(checkpoints, {"a": tensor})
    boxes = [((0, 0), 20, 4), ((3, 1), 5, 2), ((3, 0), 9, 4), ((0, 0), 20, 4), ((19, 3), 1, 1)]
    wanted = [("a", at, torch.zeros(n, m, dtype=torch.int64)) for at, n, m in boxes]
    read_boxes(ShardReads(checkpoints, manifest, verify=frozenset({SHARD})), wanted)
    for (_, (i, j), target), (_, n, m) in zip(wanted, boxes, strict=True):
        assert torch.equal(target, tensor[i : i + n, j : j + m])


def test_what_one_request_meets_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "SPAN_BYTES", KIB)
    store = LocalStore(tmp_path / "store")
    checkpoints = CheckpointStore(store, "run")
    manifest = save_directly(checkpoints, {"a": torch.zeros(100 * KIB, dtype=torch.uint8)})
    key = checkpoints.key(10, SHARD)
    store.put(key, store.get(key)[: 50 * KIB])
    with pytest.raises(StorageError, match="ends"):
        load({"a": torch.ones(100 * KIB, dtype=torch.uint8)}, manifest, checkpoints=checkpoints)
