"""A checkpoint's weights as plain safetensors files, from shards of any sharding.

Every shard that holds a wanted tensor is read once, from its beginning to its end: its bytes are
hashed, and those of wanted tensors go to their place in the output. Needs no process group and,
whatever the sizes, memory for a few blocks. The files appear under their names when all of them
are whole and synced, or not at all. Sizes are bytes.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import Buffer

from perdure.storage.checkpoint import CheckpointStore
from perdure.storage.errors import Corrupt, PermanentError
from perdure.storage.manifest import Chunk, Manifest, TensorRecord
from perdure.storage.objects import ObjectStore
from perdure.storage.safetensors_file import (
    ITEM_SIZE_BYTES,
    LENGTH,
    Entry,
    Layout,
    header_size_bytes,
    parse_header,
    plan_layout,
)

BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Piece:
    """A chunk, and the open file that it goes into."""

    chunk: Chunk
    weight: Weight
    begin: int  # of the tensor in the output
    descriptor: int


def export(
    checkpoints: CheckpointStore,
    manifest: Manifest,
    files: Sequence[OutputFile],
    *,
    folder: Path,
    force: bool,
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> list[Path]:
    """Write the files, and beside several an index; returns where they are.

    Args:
        checkpoints: checkpoints of the run, in the store.
        manifest: manifest of the exported step.
        files: files to write, from `plan_files`.
        folder: created where it is missing.
        force: whether files of these names may be replaced.
        on_bytes: called with the size of every piece that was read.

    Raises:
        FileExistsError: a file is there, and `force` is not set.
        Corrupt: a shard is not as published.
        StorageError: the store does not answer.
        OSError: the output cannot be written. After any error, no output is left.
    """
    targets = [folder / file.name for file in files]
    targets += [folder / INDEX_NAME] if len(files) > 1 else []
    if not force:
        _refuse_existing(targets)
    with ExitStack() as cleanup:  # after a success it finds nothing left to undo
        _make_folder(folder, cleanup)
        temporaries = [_temporary_of(target, cleanup) for target in targets]
        outputs = [cleanup.enter_context(path.open("w+b")) for path in temporaries]
        _write_weights(checkpoints, manifest, list(zip(files, outputs, strict=False)), on_bytes)
        if len(files) > 1:
            outputs[-1].write(index_of(files))
        _flush(outputs)
        _publish(temporaries, targets, force=force)
    return targets


def _write_weights(
    checkpoints: CheckpointStore,
    manifest: Manifest,
    outputs: Sequence[tuple[OutputFile, BinaryIO]],
    on_bytes: Callable[[int], None],
) -> None:
    pieces: dict[str, list[_Piece]] = {}
    for file, output in outputs:
        output.write(file.layout.header)
        output.flush()
        os.truncate(output.fileno(), file.layout.size_bytes)
        for weight in file.weights:
            begin = file.layout.entries[weight.name].begin
            for chunk in weight.record.chunks:
                piece = _Piece(chunk, weight, begin, output.fileno())
                pieces.setdefault(chunk.shard, []).append(piece)
    for shard in sorted(pieces):
        _copy_shard(checkpoints, manifest, shard, pieces[shard], on_bytes)


def _copy_shard(
    checkpoints: CheckpointStore,
    manifest: Manifest,
    shard: str,
    pieces: Sequence[_Piece],
    on_bytes: Callable[[int], None],
) -> None:
    """Read one shard from its beginning to its end, and take out what is wanted.

    Raises:
        Corrupt: the shard is not as published. Tensors copied out of it must be discarded.
    """
    key, wanted = checkpoints.key(manifest.step, shard), manifest.shards[shard]
    url = checkpoints.store.url(key)
    raw = _HashedObject(checkpoints.store, key, wanted.size_bytes, on_bytes)
    reader = io.BufferedReader(raw, BLOCK_BYTES)
    prefix = reader.read(LENGTH.size)
    at = header_size_bytes(prefix, url=url)
    entries = parse_header(
        prefix + reader.read(at - LENGTH.size), size_bytes=wanted.size_bytes, url=url
    )
    for entry, piece in _in_order(pieces, entries, url):
        if entry.begin < at:
            raise Corrupt(f"{url}: {piece.chunk.key} overlaps what lies before it")
        _skip(reader, entry.begin - at)
        _copy_piece(reader, piece)
        at = entry.end
    _skip(reader, wanted.size_bytes - at)
    if raw.hexdigest() != wanted.xxh3_128:
        raise Corrupt(f"{url}: xxh3_128 {raw.hexdigest()} instead of {wanted.xxh3_128}")


def _in_order(
    pieces: Sequence[_Piece], entries: Mapping[str, Entry], url: str
) -> list[tuple[Entry, _Piece]]:
    """Pair the pieces with their entries in the shard, in the order of their bytes."""
    placed: list[tuple[Entry, _Piece]] = []
    for piece in pieces:
        entry = entries.get(piece.chunk.key)
        published = (piece.weight.record.dtype, piece.chunk.lengths)
        if entry is None or (entry.dtype, entry.shape) != published:
            raise Corrupt(f"{url}: {piece.chunk.key} is not as the manifest says")
        placed.append((entry, piece))
    return sorted(placed, key=lambda pair: (pair[0].begin, pair[0].end))


def _copy_piece(reader: io.BufferedReader[Any], piece: _Piece) -> None:
    source, target = piece.weight.record.dtype, piece.weight.dtype
    size, wide = ITEM_SIZE_BYTES[source], ITEM_SIZE_BYTES[target]
    for first, count in _runs(piece.chunk, piece.weight.record.shape):
        for done in range(0, count, BLOCK_BYTES // size):
            length = min(BLOCK_BYTES // size, count - done)
            data = convert(_read(reader, length * size), source, target)
            _write_at(piece.descriptor, data, piece.begin + (first + done) * wide)


def _runs(chunk: Chunk, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of a chunk's elements, in order, within a tensor of `shape`: (first, count)."""
    if not math.prod(chunk.lengths):
        return
    # The innermost axes that the chunk spans whole are one run with the axis before them.
    inner = len(shape)
    while inner > 1 and chunk.lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    axis = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(chunk.lengths[axis:])
    base = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    outer = [range(length) for length in chunk.lengths[:axis]]
    for index in itertools.product(*outer):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), count


def _read(reader: io.BufferedReader[Any], size: int) -> bytes:
    data = reader.read(size)
    assert len(data) == size  # noqa: S101 an object that ends before is an error of the store
    return data


def _skip(reader: io.BufferedReader[Any], size: int) -> None:
    while size > 0:
        size -= len(_read(reader, min(size, BLOCK_BYTES)))


def _write_at(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


class _HashedObject(io.RawIOBase):
    """An object of a known size as a stream that hashes what it hands out."""

    def __init__(
        self, store: ObjectStore, key: str, size_bytes: int, on_bytes: Callable[[int], None]
    ) -> None:
        self._store, self._key, self._size_bytes = store, key, size_bytes
        self._on_bytes = on_bytes
        self._hasher = xxhash.xxh3_128()
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        out = memoryview(buffer).cast("B")[: self._size_bytes - self._at]
        if out.nbytes:
            self._store.get_into(self._key, out, start=self._at)
            self._hasher.update(out)
            self._on_bytes(out.nbytes)
        self._at += out.nbytes
        return out.nbytes

    def hexdigest(self) -> str:
        """Hash of the bytes that were handed out."""
        return self._hasher.hexdigest()


def _refuse_existing(targets: Sequence[Path]) -> None:
    for target in targets:
        if target.exists():
            raise FileExistsError(f"{target} exists")


def _make_folder(folder: Path, cleanup: ExitStack) -> None:
    """Create a folder; undone with the rest as far as it was not there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        cleanup.callback(_remove_folder, path)


def _remove_folder(path: Path) -> None:
    with suppress(OSError):  # another program has put something there
        path.rmdir()


def _temporary_of(target: Path, cleanup: ExitStack) -> Path:
    path = target.with_name(f".{target.name}.{os.getpid()}.partial")
    cleanup.callback(path.unlink, missing_ok=True)
    return path


def _flush(outputs: Sequence[BinaryIO]) -> None:
    for output in outputs:
        output.flush()
        os.fsync(output.fileno())


def _publish(temporaries: Sequence[Path], targets: Sequence[Path], *, force: bool) -> None:
    """Give the files their names, the index last, and keep them through a power cut."""
    if not force:
        _refuse_existing(targets)  # hours may have passed since the first check
    for temporary, target in zip(temporaries, targets, strict=True):
        temporary.replace(target)
    descriptor = os.open(targets[0].parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PART_PATTERN = "model-*-of-*.safetensors"
METADATA = {"format": "pt"}  # Hugging Face's loaders refuse a file that does not say so


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be exported: its name in the output, its record and its type there."""

    name: str
    record: TensorRecord
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in the output."""
        return math.prod(self.record.shape) * ITEM_SIZE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the output."""

    name: str
    weights: tuple[Weight, ...]
    layout: Layout


def weights_of(manifest: Manifest, *, prefix: str, dtype: str | None = None) -> list[Weight]:
    """The tensors whose names begin with `prefix`, which is cut off.

    Args:
        manifest: manifest of the exported step.
        prefix: common start of the names of the model's tensors.
        dtype: type of floating-point tensors in the output; None: as they were saved.

    Raises:
        PermanentError: there is none, or one is of a type that no file can hold.
    """
    weights = [
        Weight(
            name.removeprefix(prefix),
            record,
            dtype if dtype is not None and is_convertible(record.dtype) else record.dtype,
        )
        for name, record in manifest.tensors.items()
        if name.startswith(prefix)
    ]
    if not weights:
        raise PermanentError(
            f"step {manifest.step} holds no tensor whose name begins with {prefix}"
        )
    for weight in weights:
        if weight.dtype not in ITEM_SIZE_BYTES:
            raise PermanentError(f"{weight.name}: dtype {weight.dtype} is unknown here")
    return weights


def plan_files(
    weights: Sequence[Weight], *, file_name: str = WHOLE_NAME, shard_size_bytes: int | None = None
) -> list[OutputFile]:
    """Spread the weights over files.

    Args:
        weights: tensors in the order in which they fill the files.
        file_name: name of the file when there is only one.
        shard_size_bytes: limit for the tensors of one file, which a single tensor may exceed;
            None: one file.
    """
    groups: list[list[Weight]] = [[]]
    filled = 0
    for weight in weights:
        if groups[-1] and shard_size_bytes and filled + weight.size_bytes > shard_size_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(weight)
        filled += weight.size_bytes
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [
        OutputFile(name, tuple(group), _layout_of(group))
        for name, group in zip(names if count > 1 else [file_name], groups, strict=True)
    ]


def index_of(files: Sequence[OutputFile]) -> bytes:
    """Index beside several files: the file of each tensor."""
    weight_map = {weight.name: file.name for file in files for weight in file.weights}
    total = sum(weight.size_bytes for file in files for weight in file.weights)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(document, indent=2).encode() + b"\n"


def bytes_to_read(manifest: Manifest, files: Sequence[OutputFile]) -> int:
    """Bytes that an export reads, for a progress bar."""
    return sum(manifest.shards[name].size_bytes for name in _shards_of(files))


def other_exports(folder: Path, files: Sequence[OutputFile]) -> list[Path]:
    """Files of an earlier export into `folder` that a loader would mix up with these."""
    new_names = {file.name for file in files} | ({INDEX_NAME} if len(files) > 1 else set())
    candidates = [folder / WHOLE_NAME, folder / INDEX_NAME, *sorted(folder.glob(PART_PATTERN))]
    return [path for path in candidates if path.exists() and path.name not in new_names]


def _layout_of(weights: Sequence[Weight]) -> Layout:
    return plan_layout([(w.name, w.dtype, w.record.shape) for w in weights], metadata=METADATA)


def _shards_of(files: Sequence[OutputFile]) -> list[str]:
    chunks = (c for file in files for weight in file.weights for c in weight.record.chunks)
    return sorted({chunk.shard for chunk in chunks})


Floats = NDArray[np.float32]


def convert(data: bytes, source: str, target: str) -> bytes:
    """The little-endian elements in `data` as another type; untouched if it is the same.

    Raises:
        ValueError: one of the types is not one that is known here.
    """
    if source == target:
        return data
    if source not in _READ or target not in _WRITE:
        raise ValueError(f"no conversion from {source} to {target}")
    with np.errstate(over="ignore"):  # too large becomes infinite
        return _WRITE[target](_READ[source](data))


def is_convertible(dtype: str) -> bool:
    """Whether a tensor of this type takes part in a conversion."""
    return dtype in _READ


def _from_bf16(data: bytes) -> Floats:
    upper = np.frombuffer(data, "<u2").astype(np.uint32)
    return (upper << np.uint32(16)).view(np.float32)


def _to_bf16(values: Floats) -> bytes:
    bits = values.view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    quiet = upper | np.uint32(0x40)  # rounding could make an infinity of a NaN
    return np.where(np.isnan(values), quiet, rounded).astype("<u2").tobytes()


_READ: Mapping[str, Callable[[bytes], Floats]] = {
    "BF16": _from_bf16,
    "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
    "F32": lambda data: np.frombuffer(data, "<f4").astype(np.float32),
    "F64": lambda data: np.frombuffer(data, "<f8").astype(np.float32),
}
_WRITE: Mapping[str, Callable[[Floats], bytes]] = {
    "BF16": _to_bf16,
    "F32": lambda values: values.astype("<f4").tobytes(),
}
