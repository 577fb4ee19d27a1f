"""The checkpoints that a program has saved, found by the signs that its framework leaves.

Only complete checkpoints count: a half-written folder is none. Nothing in a checkpoint is
unpickled; where only its content has the step, the pickle's opcodes are read and not carried out.
Sizes are bytes, times seconds since the epoch, steps completed optimizer steps.

Megatron-LM's layout:

    latest_checkpointed_iteration.txt    the sign, which rank 0 writes last
    iter_0000040/mp_rank_00/model_optim_rng.pt
"""

from __future__ import annotations

import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
from perdure.training.files import write_whole

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"  # of a rank of tensor and pipeline parallelism
_ITERATION = re.compile(r"iter_(\d{7,})")

TRAINER_STATE = "trainer_state.json"
NANOGPT_FILE = "ckpt.pt"
# Torchtitan goes on from a folder that has one of them: torch's, or of a last save in safetensors.
TORCHTITAN_SIGNS = (".metadata", "model.safetensors.index.json")
OTHER_RANKS_S = 5.0  # they write their random numbers while rank 0 ends its part
MAX_OPCODES = 1_000_000
MAX_PICKLE_BYTES = 64 << 20
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4"})
_HF_STEP = re.compile(r"checkpoint-(\d+)")
_TORCHTITAN_STEP = re.compile(r"step-(\d+)")
_LIGHTNING_STEP = re.compile(r"step=(\d+)")
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def find_checkpoints(
    spec: ProgramCheckpointsSpec, root: Path, *, now_s: float, since_s: float = 0.0
) -> list[ProgramCheckpoint]:
    """The complete checkpoints that are there, by their steps.

    Args:
        spec: of the job; its kind.
        root: its path, with variables filled in.
        now_s: the time; when the program ended, where it has.
        since_s: what was written before is none of this run.

    Raises:
        OSError: the folder cannot be read; one that is not there has none.
    """
    checkpoints = _LAYOUTS[spec.kind](root, spec.settle_s, now_s)
    return sorted(
        (saved for saved in checkpoints if saved.written_s >= since_s), key=lambda saved: saved.step
    )


def _megatron(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """Folders up to the iteration of the tracker, which is written behind each of them."""
    newest = tracked_step(root)
    if newest is not None:  # else no save has come to its end, or it is "release", without a step
        yield from (part for part in find_parts(root) if part.step <= newest)


def _transformers(root: Path, _settle_s: float, now_s: float) -> Iterator[ProgramCheckpoint]:
    """Folders with the Trainer's state, which rank 0 writes last; other ranks may be behind it."""
    for path in root.glob("checkpoint-*"):
        step = _HF_STEP.fullmatch(path.name)
        if step is None:
            continue
        try:
            state = json.loads((path / TRAINER_STATE).read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        if isinstance(state, dict) and state.get("global_step") == int(step[1]):
            yield from _filter_settled(measure_checkpoint(int(step[1]), path), OTHER_RANKS_S, now_s)


def _lightning(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """Files, or folders of a sharded checkpoint, with the step in their names."""
    for path in root.rglob("*.ckpt"):
        step = _LIGHTNING_STEP.search(path.name)
        is_whole = (path / "meta.pt").exists() if path.is_dir() else is_whole_file(path)
        if step is not None and is_whole:
            yield from measure_checkpoint(int(step[1]), path)


def _nanogpt(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """One file, which is written anew each time; the step is in it alone."""
    path = root / NANOGPT_FILE
    step = read_number(path, "iter_num") if path.exists() else None
    if step is not None:
        yield from measure_checkpoint(step, path)


def _torchtitan(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """Folders with the sign that is written when all ranks have written their parts."""
    for path in root.glob("step-*"):
        step = _TORCHTITAN_STEP.fullmatch(path.name)
        if step is not None and any((path / sign).is_file() for sign in TORCHTITAN_SIGNS):
            yield from measure_checkpoint(int(step[1]), path)


def _glob(pattern: Path, settle_s: float, now_s: float) -> Iterator[ProgramCheckpoint]:
    anchor = Path(pattern.anchor)
    for path in anchor.glob(str(pattern.relative_to(anchor))):
        step = _LAST_NUMBER.search(path.stem if path.is_file() else path.name)
        if step is not None and (path.is_dir() or is_whole_file(path)):
            yield from _filter_settled(measure_checkpoint(int(step[1]), path), settle_s, now_s)


_LAYOUTS: Mapping[CheckpointKind, Callable[[Path, float, float], Iterator[ProgramCheckpoint]]] = {
    CheckpointKind.MEGATRON: _megatron,
    CheckpointKind.TRANSFORMERS: _transformers,
    CheckpointKind.LIGHTNING: _lightning,
    CheckpointKind.NANOGPT: _nanogpt,
    CheckpointKind.TORCHTITAN: _torchtitan,
    CheckpointKind.GLOB: _glob,
}


def mark_newest(spec: ProgramCheckpointsSpec, root: Path, step: int) -> None:
    """Leave the sign by which the program finds a checkpoint that was brought, where it needs one.

    Raises:
        OSError: it cannot be written.
    """
    if spec.kind is CheckpointKind.MEGATRON:
        set_tracker(root, str(step))


def _filter_settled(
    checkpoints: Iterator[ProgramCheckpoint], settle_s: float, now_s: float
) -> Iterator[ProgramCheckpoint]:
    return (saved for saved in checkpoints if now_s - saved.written_s >= settle_s)


def is_whole_file(path: Path) -> bool:
    """Whether a file that `torch.save` has begun has its end; of others there is no sign."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        return not is_zip or zipfile.is_zipfile(path)
    except OSError:
        return False


def read_number(path: Path, key: str) -> int | None:
    """A number that a file of `torch.save` has under a key; None where it is not whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if not names or names[0].file_size > MAX_PICKLE_BYTES:
                return None
            pickled = archive.read(names[0])
    except (OSError, zipfile.BadZipFile):
        return None
    return _number_after(pickled, key)


def _number_after(pickled: bytes, key: str) -> int | None:
    is_next = False
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            if count > MAX_OPCODES:
                return None
            if is_next and "PUT" not in opcode.name and opcode.name != "MEMOIZE":
                if isinstance(argument, int) and opcode.name in _NUMBERS:
                    return argument
                is_next = False
            is_next = is_next or (isinstance(argument, str) and argument == key)
    except ValueError:
        return None
    return None


@dataclass(frozen=True, slots=True)
class ProgramCheckpoint:
    """A complete checkpoint of a program.

    Attributes:
        step: at which it was saved.
        path: file or folder.
        size_bytes: of all of its files.
        written_s: when the newest of them was written.
    """

    step: int
    path: Path
    size_bytes: int
    written_s: float


def measure_checkpoint(step: int, path: Path) -> Iterator[ProgramCheckpoint]:
    """What is at a path; nothing, if it goes away meanwhile: programs keep the newest ones only."""
    try:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except FileNotFoundError:
        return
    size = sum(status.st_size for status in stats)
    if size:
        yield ProgramCheckpoint(step, path, size, max(status.st_mtime for status in stats))


def is_unchanged(saved: ProgramCheckpoint) -> bool:
    """Whether a checkpoint is as it was found; one without bytes has none yet."""
    now = next(measure_checkpoint(saved.step, saved.path), None) if saved.path.exists() else None
    return now == (saved if saved.size_bytes else None)


def find_parts(root: Path) -> Iterator[ProgramCheckpoint]:
    """A node's own folders of steps, whether or not they are complete."""
    for path in root.glob("iter_*"):
        step = _ITERATION.fullmatch(path.name)
        if step is not None:
            yield from measure_checkpoint(int(step[1]), path)


def part_path(root: Path, step: int) -> Path:
    """Where Megatron-LM saves a step."""
    return root / f"iter_{step:07d}"


def is_distributed(names: Iterable[str]) -> bool:
    """Whether files are those of `torch_dist`, of which every rank reads all that others wrote."""
    return any(name.endswith((".distcp", ".metadata")) for name in names)


def rank_folders(names: Iterable[str]) -> list[str]:
    """Those of ranks of tensor and pipeline parallelism."""
    return [name for name in names if name.startswith("mp_rank_")]


def is_self_contained(names: Collection[str], folders: Iterable[str]) -> bool:
    """Whether a part has all that the ranks of its node read.

    Where a rank is a replica of one on another node, or has a share of the optimizer, there is a
    folder for it, and the file of the model is missing.

    Args:
        names: of its files, relative to the folder of the step.
        folders: those directly in that, also empty ones.
    """
    ranks = rank_folders(folders)
    has_all = all(f"{folder}/{RANK_FILE}" in names for folder in ranks)
    return bool(ranks) and has_all and not is_distributed(names)


def tracker_text(root: Path) -> str | None:
    """What the program's sign of a complete checkpoint says; None where there is none."""
    try:
        return (root / TRACKER).read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def tracked_step(root: Path) -> int | None:
    """The iteration that the program's sign names."""
    text = tracker_text(root)
    return int(text) if text is not None and text.isdecimal() else None


def set_tracker(root: Path, text: str | None) -> None:
    """Have the program's sign say this; None: be gone.

    Raises:
        OSError: it cannot be written.
    """
    if text is None:
        (root / TRACKER).unlink(missing_ok=True)
    else:
        write_whole(root / TRACKER, text)
