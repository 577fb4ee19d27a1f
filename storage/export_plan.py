"""Which tensors of a checkpoint go into which files of an export, as Hugging Face names them.

Pure. Sizes are bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.convert import is_convertible
from storage.errors import PermanentError
from storage.manifest import Manifest, TensorRecord
from storage.safetensors_file import ITEM_SIZE_BYTES, Layout, plan_layout

WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PART_PATTERN = "model-*-of-*.safetensors"
METADATA = {"format": "pt"}  # Hugging Face's loaders refuse a file that does not say so


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor to be exported: its name in the output, its record and its type there."""

    name: str
    record: TensorRecord
    dtype: str

    @property
    def size_bytes(self) -> int:
        """In the output."""
        return math.prod(self.record.shape) * ITEM_SIZE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to be written."""

    name: str
    weights: tuple[Weight, ...]
    layout: Layout


def weights_of(manifest: Manifest, *, prefix: str, dtype: str | None = None) -> list[Weight]:
    """The tensors whose names begin with `prefix`, which is cut off.

    Args:
        manifest: of the checkpoint.
        prefix: what the names of the model's tensors begin with.
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
        weights: in the order in which they fill the files.
        file_name: of a single file.
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
    """What lies beside several files: in which of them each tensor is."""
    weight_map = {weight.name: file.name for file in files for weight in file.weights}
    total = sum(weight.size_bytes for file in files for weight in file.weights)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(document, indent=2).encode() + b"\n"


def bytes_to_read(manifest: Manifest, files: Sequence[OutputFile]) -> int:
    """What an export reads, for a progress bar."""
    return sum(manifest.shards[name].size_bytes for name in _shards_of(files))


def other_exports(folder: Path, files: Sequence[OutputFile]) -> list[Path]:
    """Files of an earlier export into `folder` that a loader would mix up with these."""
    own = {file.name for file in files} | ({INDEX_NAME} if len(files) > 1 else set())
    found = [folder / WHOLE_NAME, folder / INDEX_NAME, *sorted(folder.glob(PART_PATTERN))]
    return [path for path in found if path.exists() and path.name not in own]


def _layout_of(weights: Sequence[Weight]) -> Layout:
    return plan_layout([(w.name, w.dtype, w.record.shape) for w in weights], metadata=METADATA)


def _shards_of(files: Sequence[OutputFile]) -> list[str]:
    chunks = (c for file in files for weight in file.weights for c in weight.record.chunks)
    return sorted({chunk.shard for chunk in chunks})
