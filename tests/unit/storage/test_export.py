"""Weights as plain files: the same numbers from any sharding, whole or not at all."""

from __future__ import annotations

import io
import itertools
import json
import math
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from perdure.storage import export as module
from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.errors import Corrupt, NotFound, PermanentError
from perdure.storage.export import (
    bytes_to_read,
    convert,
    export,
    is_convertible,
    other_exports,
    plan_files,
    weights_of,
)
from perdure.storage.local import LocalStore
from perdure.storage.manifest import Chunk, Manifest, ShardRecord, TensorRecord
from perdure.storage.safetensors_file import plan_layout
from perdure.storage.staging import DTYPES
from tests.unit.storage.stores import bits, save_directly

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PREFIX = "model/"
CODES = {dtype: code for code, dtype in DTYPES.items()}
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and lengths


def weights(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding.weight": torch.randn(9, 4, generator=generator),
        "norm.weight": torch.randn(5, generator=generator).bfloat16(),
        "conv.weight": torch.randn(3, 4, 2, 6, generator=generator),
        "half": torch.randn(2, 2, generator=generator).half(),
        "scale": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "num_batches_tracked": torch.tensor(7),
    }


def cut(shape: Sequence[int], dim: int, parts: int) -> Iterator[Box]:
    """Boxes of nearly equal size along one dim; the last ones may be empty and are left out."""
    size = -(-shape[dim] // parts)
    for start in range(0, shape[dim], size):
        offsets, lengths = [0] * len(shape), list(shape)
        offsets[dim], lengths[dim] = start, min(size, shape[dim] - start)
        yield tuple(offsets), tuple(lengths)


def grid(shape: Sequence[int], parts: int) -> Iterator[Box]:
    """Boxes cut along every dim."""
    axes = [[(b[0][dim], b[1][dim]) for b in cut(shape, dim, parts)] for dim in range(len(shape))]
    for cell in itertools.product(*axes):
        yield tuple(start for start, _ in cell), tuple(length for _, length in cell)


def publish(
    checkpoints: CheckpointStore, tensors: Mapping[str, Tensor], boxes: Mapping[str, list[Box]]
) -> Manifest:
    """A checkpoint whose boxes are dealt out to three ranks, beside other state."""
    state = {**{PREFIX + n: t for n, t in tensors.items()}, "optim/m": torch.randn(50)}
    held: dict[str, dict[str, Tensor]] = {shard_name(1, 1, rank): {} for rank in range(3)}
    records: dict[str, TensorRecord] = {}
    turn = itertools.cycle(held)
    for name, tensor in state.items():
        whole: list[Box] = [((0,) * tensor.dim(), tuple(tensor.shape))]
        chunks = []
        for offsets, lengths in boxes.get(name.removeprefix(PREFIX), whole):
            shard, key = next(turn), f"{name}@{offsets}"
            index = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
            held[shard][key] = tensor[index]
            chunks.append(Chunk(offsets=offsets, lengths=lengths, shard=shard, key=key))
        dtype = CODES[tensor.dtype]
        records[name] = TensorRecord(dtype=dtype, shape=tuple(tensor.shape), chunks=tuple(chunks))
    shards = {shard: put(checkpoints, shard, parts) for shard, parts in held.items()}
    manifest = Manifest(
        run_id=checkpoints.run_id, placement=1, attempt=1, step=10, world_size=3,
        written_at_s=0.0, tensors=records, shards=shards,
    )  # fmt: skip
    checkpoints.commit(manifest)
    return manifest


def put(checkpoints: CheckpointStore, shard: str, parts: Mapping[str, Tensor]) -> ShardRecord:
    layout = plan_layout([(k, CODES[t.dtype], tuple(t.shape)) for k, t in parts.items()])
    file = bytearray(layout.size_bytes)
    file[: len(layout.header)] = layout.header
    for key, entry in layout.entries.items():
        file[entry.begin : entry.end] = bits(parts[key])
    return checkpoints.put_shard(10, shard, memoryview(file))


def exported(
    checkpoints: CheckpointStore, manifest: Manifest, folder: Path, *, dtype: str | None = None
) -> dict[str, Tensor]:
    files = plan_files(weights_of(manifest, prefix=PREFIX, dtype=dtype))
    (path,) = export(checkpoints, manifest, files, folder=folder, force=False)
    return load_file(path)


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor), name


SHARDINGS = {
    "whole": {},
    "rows": {"embedding.weight": list(cut((9, 4), 0, 4))},
    "columns": {"embedding.weight": list(cut((9, 4), 1, 2)), "half": list(cut((2, 2), 1, 2))},
    "inner": {"conv.weight": list(cut((3, 4, 2, 6), 2, 2))},
    "grid": {"conv.weight": list(grid((3, 4, 2, 6), 2)), "embedding.weight": list(grid((9, 4), 3))},
}


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_weights_come_out_of_any_sharding_bit_by_bit(checkpoints, tmp_path, sharding):
    manifest = publish(checkpoints, weights(), SHARDINGS[sharding])
    assert_same(exported(checkpoints, manifest, tmp_path / "out"), weights())


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    parts=st.integers(1, 3),
    block_bytes=st.sampled_from([4, 12, 64]),
)
def test_every_shape_cut_along_every_dim_is_put_together_in_blocks_of_any_size(
    tmp_path_factory, shape, parts, block_bytes
):
    folder = tmp_path_factory.mktemp("export")
    checkpoints = CheckpointStore(LocalStore(folder / "store"), "run-1")
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    manifest = publish(checkpoints, {"a": tensor}, {"a": list(grid(shape, parts))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block_bytes)
        assert_same(exported(checkpoints, manifest, folder / "out"), {"a": tensor})


def test_what_the_planners_saved_is_exported_without_a_process_group(checkpoints, tmp_path):
    state = {PREFIX + name: tensor for name, tensor in weights().items()}
    manifest = save_directly(checkpoints, state, step=3)
    assert_same(exported(checkpoints, manifest, tmp_path / "out"), weights())


def test_weights_come_out_of_an_object_store(s3, tmp_path):
    checkpoints = CheckpointStore(s3, "run-1")
    manifest = publish(checkpoints, weights(), SHARDINGS["grid"])
    assert_same(exported(checkpoints, manifest, tmp_path), weights())


def test_the_file_says_what_hugging_face_asks_for(checkpoints, tmp_path):
    exported(checkpoints, publish(checkpoints, weights(), {}), tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("code", "dtype"), [("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_floating_point_weights_are_converted_and_others_left_alone(
    checkpoints, tmp_path, code, dtype
):
    manifest = publish(checkpoints, weights(), SHARDINGS["grid"])
    found = exported(checkpoints, manifest, tmp_path, dtype=code)
    wanted = {n: t.to(dtype) if t.is_floating_point() else t for n, t in weights().items()}
    assert_same(found, wanted)


def test_several_files_have_an_index_as_hugging_face_writes_it(checkpoints, tmp_path):
    manifest = publish(checkpoints, weights(), SHARDINGS["grid"])
    files = plan_files(weights_of(manifest, prefix=PREFIX), shard_size_bytes=200)
    export(checkpoints, manifest, files, folder=tmp_path, force=False)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    count = len(names)
    assert count > 1
    assert names == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert index["metadata"]["total_size"] == sum(len(bits(t)) for t in weights().values())
    found: dict[str, Tensor] = {}
    for name in names:
        held = load_file(tmp_path / name)
        assert all(index["weight_map"][key] == name for key in held)
        assert len(held) == 1 or sum(len(bits(t)) for t in held.values()) <= 200
        found |= held
    assert_same(found, weights())
    assert len(list(tmp_path.iterdir())) == count + 1 + 1, "and the store beside them"


def test_what_fits_into_one_file_gets_no_index(checkpoints):
    manifest = publish(checkpoints, weights(), {})
    files = plan_files(weights_of(manifest, prefix=PREFIX), shard_size_bytes=10**6)
    assert [file.name for file in files] == ["model.safetensors"]


@pytest.mark.parametrize("byte", [3, 400, -1])
def test_a_damaged_shard_is_an_error_and_no_output_is_left(checkpoints, tmp_path, byte):
    """Also where the damage is not in the weights: nothing shows that they are whole then."""
    manifest = publish(checkpoints, weights(), SHARDINGS["grid"])
    for shard in manifest.shards:
        key = checkpoints.key(10, shard)
        data = bytearray(checkpoints.store.get(key))
        whole = bytes(data)
        data[byte] ^= 0x10
        checkpoints.store.put(key, bytes(data))
        with pytest.raises(Corrupt, match=shard):
            exported(checkpoints, manifest, tmp_path / "a" / "b")
        assert not (tmp_path / "a").exists()
        checkpoints.store.put(key, whole)


def test_a_truncated_or_missing_shard_is_an_error_too(checkpoints, tmp_path):
    manifest = publish(checkpoints, weights(), {})
    key = checkpoints.key(10, min(manifest.shards))
    checkpoints.store.put(key, checkpoints.store.get(key)[:-1])
    with pytest.raises(Corrupt, match="ends 1 bytes before"):
        exported(checkpoints, manifest, tmp_path / "out")
    checkpoints.store.delete(key)
    with pytest.raises(NotFound):
        exported(checkpoints, manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_there_is_replaced_only_by_force(checkpoints, tmp_path):
    manifest = publish(checkpoints, weights(), {})
    path = tmp_path / "model.safetensors"
    path.write_text("mine")
    files = plan_files(weights_of(manifest, prefix=PREFIX))
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists"):
        export(checkpoints, manifest, files, folder=tmp_path, force=False)
    assert path.read_text() == "mine"
    export(checkpoints, manifest, files, folder=tmp_path, force=True)
    assert_same(load_file(path), weights())


def test_a_file_that_appears_meanwhile_is_not_replaced(checkpoints, tmp_path):
    manifest = publish(checkpoints, weights(), {})
    path = tmp_path / "model.safetensors"
    files = plan_files(weights_of(manifest, prefix=PREFIX))

    def appear(_count: int) -> None:
        path.write_text("mine")

    with pytest.raises(FileExistsError):
        export(checkpoints, manifest, files, folder=tmp_path, force=False, on_bytes=appear)
    assert path.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["model.safetensors"]


def test_only_shards_that_hold_weights_are_read(checkpoints, tmp_path):
    manifest = publish(checkpoints, {"a": torch.zeros(3)}, {})
    files = plan_files(weights_of(manifest, prefix=PREFIX))
    counts: list[int] = []
    export(checkpoints, manifest, files, folder=tmp_path, force=False, on_bytes=counts.append)
    assert sum(counts) == bytes_to_read(manifest, files) < manifest.size_bytes


def test_memory_is_bounded_by_blocks_and_not_by_tensors(checkpoints, tmp_path, monkeypatch):
    tensor = torch.zeros(4_000_000)
    manifest = publish(checkpoints, {"a": tensor}, {"a": list(cut(tensor.shape, 0, 2))})
    monkeypatch.setattr(module, "BLOCK_BYTES", 2**16)
    files = plan_files(weights_of(manifest, prefix=PREFIX))
    tracemalloc.start()
    export(checkpoints, manifest, files, folder=tmp_path, force=False)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**20 < tensor.nbytes


def test_a_checkpoint_without_weights_is_an_error(checkpoints):
    manifest = publish(checkpoints, {}, {})
    with pytest.raises(PermanentError, match="no tensor whose name begins with model/"):
        weights_of(manifest, prefix=PREFIX)


def test_files_of_another_export_are_kept_apart_from_these(checkpoints, tmp_path):
    manifest = publish(checkpoints, weights(), {})
    planned = weights_of(manifest, prefix=PREFIX)
    one, several = plan_files(planned), plan_files(planned, shard_size_bytes=200)
    export(checkpoints, manifest, one, folder=tmp_path, force=False)
    assert other_exports(tmp_path, one) == []
    assert [p.name for p in other_exports(tmp_path, several)] == ["model.safetensors"]
    export(checkpoints, manifest, several, folder=tmp_path, force=False)
    assert len(other_exports(tmp_path, one)) == len(several) + 1


def test_a_stream_of_an_object_ends_where_the_manifest_says(checkpoints):
    checkpoints.store.put("a", b"0123456789")
    stream = module._HashedObject(checkpoints.store, "a", 7, lambda _count: None)
    assert io.BufferedReader(stream, 4).read() == b"0123456"


SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-41, 3.4e38, 65504.0]


@pytest.mark.parametrize("source", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["F32", "BF16"])
@given(values=st.lists(st.floats(width=32), max_size=30))
def test_every_value_becomes_what_torch_makes_of_it(source, target, values):
    tensor = torch.tensor(SPECIAL + values, dtype=torch.float64).to(DTYPES[source])
    data = convert(bits(tensor), source, target)
    found = torch.frombuffer(bytearray(data), dtype=DTYPES[target])
    expected = tensor.to(torch.float32).to(DTYPES[target])
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert bits(found[kept]) == bits(expected[kept])


@pytest.mark.parametrize(
    ("source", "target"), [("I64", "F32"), ("F8_E4M3", "I64"), ("BF16", "F16")]
)
def test_a_type_that_stays_the_same_is_left_alone_and_other_conversions_are_refused(source, target):
    data = bytes(range(16))
    assert convert(data, source, source) is data
    with pytest.raises(ValueError, match=f"no conversion from {source} to {target}"):
        convert(b"", source, target)


def test_integers_and_8_bit_floats_take_no_part():
    assert [d for d in ("F64", "BF16", "I32", "BOOL", "F8_E5M2") if is_convertible(d)] == [
        "F64",
        "BF16",
    ]
