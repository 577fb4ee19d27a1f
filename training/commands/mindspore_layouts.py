"""The checkpoints of MindSpore and of MindSpore Transformers, which have no common folder.

    rank_0/llama_rank_0-3_120.safetensors       epoch 3, step 120 of that epoch: a file of each rank
    rank_0/meta.json                            written after the file that it names
    iteration_00000040/                         of the newer layout, with Megatron's tracker beside
    ttp_saved_checkpoints-step_57/rank_1/       end-of-life checkpoint, renamed when it is complete
    ../health_ckpts.json                        rank 0's files, 0 for healthy

A file has its name only when it is complete. A checkpoint is complete when every rank has its file,
and every meta.json names it or a later one. Steps are completed optimizer steps of the run.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json, to_json

from perdure.storage.errors import Corrupt
from perdure.storage.regular_file import NotRegularError, open_regular, read_regular
from perdure.storage.safetensors_file import LENGTH, header_size_bytes
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
from perdure.training.files import write_whole

META = "meta.json"
HEALTH = "health_ckpts.json"
_FILE = re.compile(r"(?P<prefix>.+)-(?P<epoch>\d+)_(?P<step>\d+)\.(?:ckpt|safetensors)")
_RANK_FOLDER = re.compile(r"rank_(\d+)")
_RANK_OF_PREFIX = re.compile(r"rank_\d+")
_ITERATION = re.compile(r"iteration_(\d+)")
_END_OF_LIFE = re.compile(r"ttp_saved_checkpoints-step_(\d+)")
_STEP_NUM = "step_num"
# Of the messages of a .ckpt file: Checkpoint.value, Value.tag, Value.tensor, Tensor.tensor_content.
_VALUE, _TAG, _TENSOR, _CONTENT = 0x0A, 0x0A, 0x12, 0x1A
_MAX_SCALAR_BYTES = 256
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """Files or a folder with the name of a checkpoint; `has_sign`: they are complete."""

    step: int
    paths: tuple[Path, ...]
    has_sign: bool


@dataclass(frozen=True, slots=True)
class _RankFile:
    path: Path
    rank: int | None
    prefix: str
    epoch: int
    step: int

    @property
    def place(self) -> tuple[int, int]:
        return self.epoch, self.step


def list_saved_files(spec: ProgramCheckpointsSpec, root: Path) -> Iterator[SavedFiles]:
    """List what has the name of a checkpoint below the folder that a program saves to."""
    newest = _read_number(root / "latest_checkpointed_iteration.txt")
    for path in sorted(root.glob("iteration_*")):
        number = _ITERATION.fullmatch(path.name)
        if number is not None:
            has_sign = newest is not None and int(number[1]) <= newest
            yield SavedFiles(int(number[1]), (path,), has_sign)
    for path in root.glob("ttp_saved_checkpoints-step_*"):
        number = _END_OF_LIFE.fullmatch(path.name)
        if number is not None:
            yield SavedFiles(int(number[1]), (path,), has_sign=True)
    yield from _list_epoch_files(spec, root)


def _list_epoch_files(spec: ProgramCheckpointsSpec, root: Path) -> Iterator[SavedFiles]:
    files = list(_rank_files(root))
    longest = max((file.step for file in files), default=0)
    unhealthy = _read_unhealthy(root)
    metas = _read_metas(root)
    saves: defaultdict[tuple[str, int, int], list[_RankFile]] = defaultdict(list)
    for file in files:
        saves[(_RANK_OF_PREFIX.sub("rank_#", file.prefix), *file.place)].append(file)
    ranks = {file.rank for file in files if file.rank is not None}
    if spec.kind is CheckpointKind.MINDFORMERS:
        ranks |= set(range(spec.ranks or 0))
    for save in saves.values():
        save.sort(key=lambda file: file.rank or 0)
        is_whole = save[0].rank is None or _is_of_all(save, spec, ranks, metas)
        is_healthy = save[0].path.name not in unhealthy
        paths = tuple(file.path for file in save)
        yield SavedFiles(_step_of(save[0], spec, longest), paths, is_whole and is_healthy)


def _is_of_all(
    save: Sequence[_RankFile],
    spec: ProgramCheckpointsSpec,
    ranks: Collection[int],
    metas: Mapping[int, tuple[int, int]],
) -> bool:
    """Whether the files of one epoch and step are all that their program has saved of it."""
    place = save[0].place
    if spec.end_of_life and all(meta < place for meta in metas.values()):
        return True  # the survivors' own save, which no meta.json names
    if spec.kind is CheckpointKind.MINDFORMERS and not all(
        metas.get(rank, (0, 0)) >= place for rank in ranks
    ):
        return False
    return set(ranks) <= {file.rank for file in save}


def _rank_files(root: Path) -> Iterator[_RankFile]:
    """List the files of epochs and steps, in the folders of ranks or without any."""
    folders = [(None, root), *((rank, root / f"rank_{rank}") for rank in _rank_numbers(root))]
    for rank, folder in folders:
        for path in folder.glob("*-*_*.*"):
            name = _FILE.fullmatch(path.name)
            if name is not None and path.is_file():
                yield _RankFile(path, rank, name["prefix"], int(name["epoch"]), int(name["step"]))


def _rank_numbers(root: Path) -> list[int]:
    names = (_RANK_FOLDER.fullmatch(path.name) for path in root.glob("rank_*"))
    return sorted(int(name[1]) for name in names if name is not None)


def _step_of(file: _RankFile, spec: ProgramCheckpointsSpec, longest: int) -> int:
    """Return the step in the run of a file that names its step in the epoch.

    A plain callback counts `step_num` from the start of its process: it is taken only where it
    fits the name.
    """
    if file.epoch <= 1:
        return file.step
    if spec.steps_per_epoch is None:
        number = read_step_num(file.path)
        if number is not None:
            of_epoch, remainder = divmod(number - file.step, file.epoch - 1)
            if not remainder and of_epoch >= longest:
                return number
    return (file.epoch - 1) * (spec.steps_per_epoch or longest) + file.step


def _read_metas(root: Path) -> Mapping[int, tuple[int, int]]:
    """Read the epoch and step that each rank's meta.json names."""
    metas: dict[int, tuple[int, int]] = {}
    for rank in _rank_numbers(root):
        meta = _read_json(root / f"rank_{rank}" / META)
        epoch, step = (
            (meta.get("last_epoch"), meta.get("last_step"))
            if isinstance(meta, dict)
            else (None, None)
        )
        if isinstance(epoch, int) and isinstance(step, int):
            metas[rank] = epoch, step
    return metas


def _read_unhealthy(root: Path) -> set[str]:
    """List the names of rank 0's files that the program calls unhealthy; the last word counts."""
    entries = _read_json(root.parent / HEALTH)
    health: dict[str, Any] = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("ckpt_name"), str):
            health[entry["ckpt_name"]] = entry.get("is_health")
    return {name for name, value in health.items() if value != 0}


def _read_json(path: Path) -> Any:
    try:
        return from_json(read_regular(path))
    except (FileNotFoundError, NotADirectoryError, NotRegularError, ValueError):
        return None


def _read_number(path: Path) -> int | None:
    number = _read_json(path)
    return number if isinstance(number, int) else None


def name_in_metas(paths: Sequence[Path]) -> None:
    """Let each rank's meta.json name a file that remains, where the file it named is gone.

    Raises:
        OSError: it cannot be written.
    """
    for path in paths:
        name, meta_path = _FILE.fullmatch(path.name), path.parent / META
        meta = _read_json(meta_path)
        if name is None or not isinstance(meta, dict):
            continue
        if (path.parent / str(meta.get("last_ckpt_file"))).exists():
            continue
        place = {"last_epoch": int(name["epoch"]), "last_step": int(name["step"])}
        write_whole(meta_path, to_json({**meta, **place, "last_ckpt_file": path.name}).decode())


def read_step_num(path: Path) -> int | None:
    """Read the number that `append_info` puts into a file; None where there is none."""
    try:
        with open_regular(path) as file:
            if path.suffix == ".safetensors":
                return _safetensors_scalar(file, str(path))
            values = (value for value in _messages(file) if value is not None)
            return next((n for value in values if (n := _ckpt_scalar(value)) is not None), None)
    except (OSError, ValueError, Corrupt, struct.error):
        return None


def _safetensors_scalar(file: BinaryIO, url: str) -> int | None:
    length = header_size_bytes(file.read(LENGTH.size), url=url)
    entry = from_json(file.read(length - LENGTH.size)).get(_STEP_NUM)
    if entry is None or entry["dtype"] != "I64":
        return None
    file.seek(length + entry["data_offsets"][0])
    (number,) = struct.unpack("<q", file.read(8))
    return int(number)


def _ckpt_scalar(message: bytes) -> int | None:
    """Return the value of a message of a .ckpt file, if it is that of `step_num`."""
    fields = dict(_fields(message))
    if fields.get(_TAG) != _STEP_NUM.encode():
        return None
    content = dict(_fields(fields.get(_TENSOR, b""))).get(_CONTENT, b"")
    return int(struct.unpack("<q", content)[0]) if len(content) == struct.calcsize("<q") else None


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """List the fields of a message that have bytes; fields that are numbers are skipped."""
    at = 0
    while at < len(message):
        key, at = message[at], at + 1
        length, size = _varint(message[at : at + _MAX_VARINT_BYTES])
        at += size
        if key & 7 == 2:
            yield key, message[at : at + length]
            at += length


def _varint(data: bytes) -> tuple[int, int]:
    """Read a number of protobuf. Returns it with the number of its bytes.

    Raises:
        ValueError: it has no end.
    """
    number = 0
    for index, byte in enumerate(data):
        number |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return number, index + 1
    raise ValueError("a number without end")


def _messages(file: BinaryIO) -> Iterator[bytes | None]:
    """List the messages of a .ckpt file; None for one that is no number.

    Raises:
        ValueError: the last message has no end.
    """
    size_bytes = file.seek(0, 2)
    at = 0
    while at < size_bytes:
        file.seek(at)
        head = file.read(1 + _MAX_VARINT_BYTES)
        if head[0] != _VALUE:
            return  # a checksum is behind the messages, or the format is another
        length, size = _varint(head[1:])
        at += 1 + size
        if at + length > size_bytes:
            raise ValueError("a message without end")
        if length <= _MAX_SCALAR_BYTES:
            file.seek(at)
            yield file.read(length)
        else:
            yield None
        at += length


def has_whole_messages(file: BinaryIO) -> bool:
    """Whether a .ckpt file of MindSpore has the end of its last message."""
    try:
        for _ in _messages(file):
            pass
    except ValueError:
        return False
    return True
