"""The checkpoints that a program has saved, found by the signs that its framework leaves.

Only complete checkpoints count, never a half-written folder. Nothing in a checkpoint is unpickled;
where only its content has the step, the pickle's opcodes are read and not carried out. Sizes are
bytes, times seconds since the epoch, steps completed optimizer steps.

Megatron-LM's layout:

    latest_checkpointed_iteration.txt    the sign, which rank 0 writes last
    iter_0000040/mp_rank_00/model_optim_rng.pt
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from perdure.storage.regular_file import NotRegularError, open_regular, read_regular
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
from perdure.training.files import write_whole

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")

TRAINER_STATE = "trainer_state.json"
NANOGPT_FILE = "ckpt.pt"
# Torchtitan resumes from a folder with either: torch's, or that of a last save in safetensors.
TORCHTITAN_SIGNS = (".metadata", "model.safetensors.index.json")
OTHER_RANKS_S = 5.0  # ranks write their random numbers while rank 0 ends its part
MAX_OPCODES = 1_000_000
MAX_PICKLE_BYTES = 64 << 20
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4"})
_HF_STEP = re.compile(r"checkpoint-(\d+)")
_TORCHTITAN_STEP = re.compile(r"step-(\d+)")
_LIGHTNING_STEP = re.compile(r"step=(\d+)")
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


@dataclass(frozen=True, slots=True)
class ProgramCheckpoint:
    """A complete checkpoint of a program.

    Attributes:
        step: step at which it was saved.
        path: file or folder.
        size_bytes: size of all of its files; 0 stands for a part that a node does not have.
        written_s: when the newest of its files was written.
    """

    step: int
    path: Path
    size_bytes: int
    written_s: float

    def is_unchanged(self) -> bool:
        """Whether the files are as they were; a part without bytes still has none."""
        now = None
        if self.path.exists():
            now = next(measure_checkpoint(self.step, self.path), None)
        return now == (self if self.size_bytes else None)


@dataclass(frozen=True, slots=True)
class Tracker:
    """Megatron-LM's sign of a complete checkpoint in a folder, which names the iteration."""

    root: Path

    @property
    def text(self) -> str | None:
        """Text of the sign; None where there is none."""
        try:
            return read_regular(self.root / TRACKER).decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError, NotRegularError):
            return None

    @property
    def step(self) -> int | None:
        """The iteration that the sign names."""
        text = self.text
        return int(text) if text is not None and text.isdecimal() else None

    def write(self, text: str | None) -> None:
        """Change the sign; None deletes it.

        Raises:
            OSError: it cannot be written.
        """
        if text is None:
            (self.root / TRACKER).unlink(missing_ok=True)
        else:
            write_whole(self.root / TRACKER, text)


def find_checkpoints(
    spec: ProgramCheckpointsSpec, root: Path, *, now_s: float, since_s: float = 0.0
) -> list[ProgramCheckpoint]:
    """List the complete checkpoints of a program, in the order of their steps.

    Args:
        spec: names the framework.
        root: path of the spec, with variables filled in.
        now_s: the time, or when the program ended.
        since_s: start of the run; older files are ignored.

    Raises:
        OSError: the folder cannot be read; a missing folder has no checkpoints.
    """
    checkpoints = _LAYOUTS[spec.kind](root, spec.settle_s, now_s)
    return sorted(
        (saved for saved in checkpoints if saved.written_s >= since_s), key=lambda saved: saved.step
    )


def _megatron(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """List folders up to the iteration of the tracker, which is written after each of them."""
    newest = Tracker(root).step
    if newest is not None:  # else no save is complete, or it is "release", without a step
        yield from (part for part in find_parts(root) if part.step <= newest)


def _transformers(root: Path, _settle_s: float, now_s: float) -> Iterator[ProgramCheckpoint]:
    """List folders with the Trainer's state, which rank 0 writes last; other ranks may be late."""
    for path in root.glob("checkpoint-*"):
        step = _HF_STEP.fullmatch(path.name)
        if step is None:
            continue
        try:
            state = from_json(read_regular(path / TRAINER_STATE))
        except (FileNotFoundError, NotADirectoryError, NotRegularError, ValueError):
            continue
        if isinstance(state, dict) and state.get("global_step") == int(step[1]):
            yield from _filter_settled(measure_checkpoint(int(step[1]), path), OTHER_RANKS_S, now_s)


def _lightning(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """List files, or folders of a sharded checkpoint, with the step in their names."""
    for path in root.rglob("*.ckpt"):
        step = _LIGHTNING_STEP.search(path.name)
        is_whole = (path / "meta.pt").exists() if path.is_dir() else is_whole_file(path)
        if step is not None and is_whole:
            yield from measure_checkpoint(int(step[1]), path)


def _nanogpt(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """Read the step from the only file, which is written anew each time."""
    path = root / NANOGPT_FILE
    step = read_number(path, "iter_num") if path.exists() else None
    if step is not None:
        yield from measure_checkpoint(step, path)


def _torchtitan(root: Path, _settle_s: float, _now_s: float) -> Iterator[ProgramCheckpoint]:
    """List folders with the sign that is written after the parts of all ranks."""
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


def _filter_settled(
    checkpoints: Iterator[ProgramCheckpoint], settle_s: float, now_s: float
) -> Iterator[ProgramCheckpoint]:
    return (saved for saved in checkpoints if now_s - saved.written_s >= settle_s)


def is_whole_file(path: Path) -> bool:
    """Whether a file of `torch.save` has its end; other files count as whole."""
    try:
        with open_regular(path) as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        return not is_zip or zipfile.is_zipfile(path)
    except OSError:
        return False


def read_number(path: Path, key: str) -> int | None:
    """Read the number that a file of `torch.save` has under a key; None unless it is whole."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
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


def measure_checkpoint(step: int, path: Path) -> Iterator[ProgramCheckpoint]:
    """Measure the files at a path; yields nothing if the program deletes them meanwhile."""
    try:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except FileNotFoundError:
        return
    size = sum(status.st_size for status in stats)
    if size:
        yield ProgramCheckpoint(step, path, size, max(status.st_mtime for status in stats))


def find_parts(root: Path) -> Iterator[ProgramCheckpoint]:
    """List a node's folders of Megatron-LM's steps, whether or not they are complete."""
    for path in root.glob("iter_*"):
        step = _ITERATION.fullmatch(path.name)
        if step is not None:
            yield from measure_checkpoint(int(step[1]), path)


def part_path(root: Path, step: int) -> Path:
    """Return the folder in which Megatron-LM saves a step."""
    return root / f"iter_{step:07d}"
