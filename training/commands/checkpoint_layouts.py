"""The checkpoints that a program has saved, found by the signs that its framework leaves.

Only complete checkpoints count, never a half-written folder: each needs its own sign, and the files
in it must have their ends. Once the program has ended, nothing is written any more: a checkpoint is
complete at once, or its save was cut short for good. Nothing in a checkpoint is unpickled; where
only its content has the step, the pickle's opcodes are read and not carried out. Sizes are bytes,
times seconds since the epoch, steps completed optimizer steps.

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
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from pydantic_core import from_json

from perdure.storage.errors import Corrupt
from perdure.storage.regular_file import NotRegularError, open_regular, read_regular
from perdure.storage.safetensors_file import LENGTH, header_size_bytes, parse_header
from perdure.training.commands.mindspore_layouts import has_whole_messages, list_saved_files
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
_NUMBER = re.compile(r"\d+")
# No program takes a name with this beginning and this end for that of a checkpoint.
_SET_ASIDE, _SET_ASIDE_SUFFIX = "set-aside-", ".perdure"
# A crash of a machine leaves such files without a byte.
_DATA_SUFFIXES = frozenset({".bin", ".ckpt", ".pt", ".pth", ".safetensors"})
# Two checkpoints of one program differ less in size, unless one was cut short.
_LEAST_SHARE = 0.9
NO_STEP = -1  # of a file whose step nobody can read


@dataclass(frozen=True, slots=True)
class ProgramCheckpoint:
    """A complete checkpoint of a program.

    Attributes:
        step: step at which it was saved.
        path: file or folder; of a checkpoint in files of all ranks, that of the first rank.
        size_bytes: size of all of its files; 0 stands for a part that a node does not have.
        written_s: when the newest of its files was written.
        more_files: files of the other ranks.
    """

    step: int
    path: Path
    size_bytes: int
    written_s: float
    more_files: tuple[Path, ...] = ()

    def is_unchanged(self) -> bool:
        """Whether the files are as they were; a part without bytes still has none."""
        now = None
        if self.path.exists():
            now = next(measure_checkpoint(self.step, self.path, self.more_files), None)
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file or folder with the name of a checkpoint; `has_sign`: its framework calls it whole."""

    step: int
    path: Path
    has_sign: bool
    more_files: tuple[Path, ...] = ()


def find_checkpoints(
    spec: ProgramCheckpointsSpec,
    root: Path,
    *,
    now_s: float,
    since_s: float = 0.0,
    is_over: bool = False,
) -> list[ProgramCheckpoint]:
    """List the complete checkpoints of a program, in the order of their steps.

    Args:
        spec: names the framework.
        root: path of the spec, with variables filled in.
        now_s: the time, or when the program ended.
        since_s: start of the run; older files are ignored.
        is_over: whether the program has ended, so that nothing is written any more.

    Raises:
        OSError: the folder cannot be read; a missing folder has no checkpoints.
    """
    surveyed = _survey(spec, root, now_s=now_s, since_s=since_s, is_over=is_over)
    return [saved for saved, is_whole in surveyed if is_whole]


def find_torn(
    spec: ProgramCheckpointsSpec, root: Path, *, now_s: float, since_s: float
) -> list[ProgramCheckpoint]:
    """List saves that were cut short, once the program has ended; arguments as above.

    Raises:
        OSError: the folder cannot be read.
    """
    surveyed = _survey(spec, root, now_s=now_s, since_s=since_s, is_over=True)
    return [saved for saved, is_whole in surveyed if not is_whole]


def set_aside(path: Path) -> Path | None:
    """Rename a checkpoint so that no program finds it; None where another node has done so."""
    for number in range(1_000):
        more = f".{number}" if number else ""
        # Programs that search names look for `step-40` anywhere, such as torchtitan.
        name = re.sub(r"[-=](?=\d)", "_", path.name)
        new_path = path.with_name(f"{_SET_ASIDE}{name}{more}{_SET_ASIDE_SUFFIX}")
        if not new_path.exists():
            try:
                return path.rename(new_path)
            except FileNotFoundError:
                return None
    raise FileExistsError(f"{path} was set aside too often: delete some of its {_SET_ASIDE}*")


def _survey(
    spec: ProgramCheckpointsSpec, root: Path, *, now_s: float, since_s: float, is_over: bool
) -> list[tuple[ProgramCheckpoint, bool]]:
    """List what has the name of a checkpoint, in the order of steps, and whether it is whole."""
    settle_s = _settle_s(spec)
    surveyed: list[tuple[ProgramCheckpoint, bool]] = []
    in_doubt: list[ProgramCheckpoint] = []
    for entry in _list_entries(spec, root):
        saved = next(measure_checkpoint(entry.step, entry.path, entry.more_files), None)
        saved = saved or _measure_empty(entry)
        if saved is None or saved.written_s < since_s:
            continue
        is_whole = entry.has_sign and saved.size_bytes > 0
        is_whole = is_whole and all(map(_has_whole_files, (saved.path, *saved.more_files)))
        is_settled = now_s - saved.written_s >= settle_s
        if spec.kind is CheckpointKind.GLOB and is_whole and not is_settled:
            in_doubt.append(saved)
        surveyed.append((saved, is_whole and (is_settled or is_over)))
    cut_short = _find_cut_short(surveyed, in_doubt)
    return sorted(
        ((saved, is_whole and saved != cut_short) for saved, is_whole in surveyed),
        key=lambda judged: judged[0].step,
    )


def _list_entries(spec: ProgramCheckpointsSpec, root: Path) -> Iterator[_Entry]:
    if not spec.kind.is_of_mindspore:
        yield from _LAYOUTS[spec.kind](root)
        return
    for saved in list_saved_files(spec, root):
        first, *more_files = saved.paths
        yield _Entry(saved.step, first, saved.has_sign, tuple(more_files))


def _settle_s(spec: ProgramCheckpointsSpec) -> float:
    """How long a checkpoint stands still before it is complete, while the program runs on."""
    if spec.kind is CheckpointKind.GLOB:
        return spec.settle_s
    return OTHER_RANKS_S if spec.kind is CheckpointKind.TRANSFORMERS else 0.0


def _find_cut_short(
    surveyed: list[tuple[ProgramCheckpoint, bool]], in_doubt: list[ProgramCheckpoint]
) -> ProgramCheckpoint | None:
    """Find the last save without a sign that is smaller than the one of its name before it."""
    last = max(in_doubt, key=lambda saved: saved.written_s, default=None)
    if last is None:
        return None
    earlier = [
        saved
        for saved, is_whole in surveyed
        if is_whole and saved != last and _series(saved.path) == _series(last.path)
    ]
    previous = max(earlier, key=lambda saved: saved.written_s, default=None)
    if previous is None:
        return None
    lacks = _file_names(previous.path) - _file_names(last.path)
    return last if lacks or last.size_bytes < _LEAST_SHARE * previous.size_bytes else None


def _series(path: Path) -> tuple[Path, str]:
    return path.parent, _NUMBER.sub("#", path.name)


def _file_names(path: Path) -> set[str]:
    """List the files of a folder by their names without numbers, such as those of ranks."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {_NUMBER.sub("#", str(file.relative_to(path))) for file in files}


def _measure_empty(entry: _Entry) -> ProgramCheckpoint | None:
    """Describe a folder or file without a byte, of a save that had just begun."""
    try:
        written_s = entry.path.stat().st_mtime
    except FileNotFoundError:
        return None
    return ProgramCheckpoint(entry.step, entry.path, 0, written_s)


def _megatron(root: Path) -> Iterator[_Entry]:
    """List folders; the tracker is written after each, and names the newest whole one."""
    newest = Tracker(root).step  # None: no save is complete, or it is "release", without a step
    for path in root.glob("iter_*"):
        step = _ITERATION.fullmatch(path.name)
        if step is not None:
            yield _Entry(int(step[1]), path, newest is not None and int(step[1]) <= newest)


def _transformers(root: Path) -> Iterator[_Entry]:
    """List folders with the Trainer's state, which rank 0 writes last; other ranks may be late."""
    for path in root.glob("checkpoint-*"):
        step = _HF_STEP.fullmatch(path.name)
        if step is not None:
            yield _Entry(int(step[1]), path, _read_global_step(path) == int(step[1]))


def _read_global_step(path: Path) -> object:
    try:
        state = from_json(read_regular(path / TRAINER_STATE))
    except (FileNotFoundError, NotADirectoryError, NotRegularError, ValueError):
        return None
    return state.get("global_step") if isinstance(state, dict) else None


def _lightning(root: Path) -> Iterator[_Entry]:
    """List files, or folders of a sharded checkpoint, with the step in their names."""
    for path in root.rglob("*.ckpt"):
        step = _LIGHTNING_STEP.search(path.name)
        if step is None:
            continue
        if not path.is_dir():
            yield _Entry(int(step[1]), path, has_sign=True)
        elif any(path.glob("*.distcp")) or (path / "meta.pt").exists():  # of FSDP
            yield _Entry(int(step[1]), path, (path / "meta.pt").exists())
        elif (path / "checkpoint").is_dir():  # of DeepSpeed
            yield _Entry(int(step[1]), path, (path / "latest").is_file())


def _nanogpt(root: Path) -> Iterator[_Entry]:
    """Read the step from the only file, which is written anew each time."""
    path = root / NANOGPT_FILE
    if path.exists():
        step = read_number(path, "iter_num")
        yield _Entry(NO_STEP if step is None else step, path, step is not None)


def _torchtitan(root: Path) -> Iterator[_Entry]:
    """List folders with the sign that is written after the parts of all ranks."""
    for path in root.glob("step-*"):
        step = _TORCHTITAN_STEP.fullmatch(path.name)
        if step is not None:
            has_sign = any((path / sign).is_file() for sign in TORCHTITAN_SIGNS)
            yield _Entry(int(step[1]), path, has_sign)


def _glob(pattern: Path) -> Iterator[_Entry]:
    anchor = Path(pattern.anchor)
    for path in anchor.glob(str(pattern.relative_to(anchor))):
        step = _LAST_NUMBER.search(path.name if path.is_dir() else path.stem)
        if step is not None and not path.name.startswith(_SET_ASIDE):
            yield _Entry(int(step[1]), path, has_sign=True)


_LAYOUTS: Mapping[CheckpointKind, Callable[[Path], Iterator[_Entry]]] = {
    CheckpointKind.MEGATRON: _megatron,
    CheckpointKind.TRANSFORMERS: _transformers,
    CheckpointKind.LIGHTNING: _lightning,
    CheckpointKind.NANOGPT: _nanogpt,
    CheckpointKind.TORCHTITAN: _torchtitan,
    CheckpointKind.GLOB: _glob,
}


def _has_whole_files(path: Path) -> bool:
    """Whether each file has its end, as far as its format shows that."""
    files = (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else (path,)
    return all(is_whole_file(file) for file in files)


def is_whole_file(path: Path) -> bool:
    """Whether a file of `torch.save` or safetensors has its end; other files count as whole."""
    try:
        status = path.stat()
        return _has_end(path, status.st_size, status.st_mtime_ns)
    except OSError:
        return False


@lru_cache(maxsize=65_536)  # each poll looks at all files again
def _has_end(path: Path, size_bytes: int, _written_ns: int) -> bool:
    with open_regular(path) as file:
        begin = file.read(LENGTH.size)
        if begin[:4] == b"PK\x03\x04":
            return zipfile.is_zipfile(file)
        if path.suffix == ".safetensors" and len(begin) == LENGTH.size:
            return _fits_header(file, begin, size_bytes, str(path))
        if path.suffix == ".ckpt" and size_bytes:
            return has_whole_messages(file)
    return size_bytes > 0 or path.suffix not in _DATA_SUFFIXES


def _fits_header(file: BinaryIO, begin: bytes, size_bytes: int, url: str) -> bool:
    """Whether a safetensors header fits the length of its file, as far as it is a header."""
    try:
        length = header_size_bytes(begin, url=url)
    except Corrupt:
        return True  # of another format, whatever its name says
    try:
        header = begin + file.read(length - len(begin))
        parse_header(header, size_bytes=size_bytes, url=url)
    except Corrupt:
        return False
    return True


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


def measure_checkpoint(
    step: int, path: Path, more_files: tuple[Path, ...] = ()
) -> Iterator[ProgramCheckpoint]:
    """Measure the files at a path; yields nothing if the program deletes them meanwhile."""
    try:
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        files += more_files
        stats = [file.stat() for file in files]
    except FileNotFoundError:
        return
    size = sum(status.st_size for status in stats)
    if size:
        newest_s = max(status.st_mtime for status in stats)
        yield ProgramCheckpoint(step, path, size, newest_s, more_files)


def find_parts(root: Path) -> Iterator[ProgramCheckpoint]:
    """List a node's folders of Megatron-LM's steps, whether or not they are complete."""
    for path in root.glob("iter_*"):
        step = _ITERATION.fullmatch(path.name)
        if step is not None:
            yield from measure_checkpoint(int(step[1]), path)


def part_path(root: Path, step: int) -> Path:
    """Return the folder in which Megatron-LM saves a step."""
    return root / f"iter_{step:07d}"
