"""Whether the outputs of a preparation are there, whole, and made of the present inputs.

A record beside the first output has the inputs' sizes and times, and size, time and hash of every
file that was written. It is written last. A file whose size and time are as recorded is not read;
another time alone has its content compared. Sizes are bytes, times nanoseconds.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from perdure.storage.frozen_model import FrozenModel
from perdure.training.files import write_whole


class PreparedFile(FrozenModel):
    """A file that the command has written."""

    path: str
    size_bytes: int
    time_ns: int
    sha256: str


class PreparedRecord(FrozenModel):
    """A preparation that came to its end.

    Attributes:
        inputs: fingerprint of the command and of its inputs.
    """

    inputs: str
    files: tuple[PreparedFile, ...]


class Preparation:
    """A command with its inputs and outputs, in a folder.

    Args:
        command: with its variables filled in, and so are the paths.
    """

    def __init__(
        self, command: Sequence[str], inputs: Sequence[str], outputs: Sequence[str], cwd: Path
    ) -> None:
        self._command = command
        self._inputs = inputs
        self._cwd = cwd
        self._outputs = [cwd / output for output in outputs]
        name = hashlib.sha256("\n".join(map(str, self._outputs)).encode()).hexdigest()[:12]
        self._record = self._outputs[0].parent / f".perdure-prepared-{name}.json"

    def fingerprint(self) -> str:
        """Return a hash of the command and of the names, sizes and times of its inputs.

        Raises:
            FileNotFoundError: an input is not there.
        """
        facts: list[object] = [list(self._command), list(map(str, self._outputs))]
        for pattern in self._inputs:
            paths = sorted(glob.glob(str(self._cwd / pattern), recursive=True))  # noqa: PTH207 may be absolute
            files = [file for path in paths for file in _files_of(Path(path))]
            if not files:
                raise FileNotFoundError(f"prepare.inputs: {pattern!r} matches no file")
            for file in files:
                stat = file.stat()
                facts.append([str(file), stat.st_size, stat.st_mtime_ns])
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def why_not(self) -> str | None:
        """Say why the command has to run; None: its outputs are there and whole.

        Raises:
            OSError: an input is not there, or a file cannot be read.
        """
        fingerprint = self.fingerprint()
        try:
            record = PreparedRecord.model_validate_json(self._record.read_bytes())
        except FileNotFoundError:
            return "nothing is prepared yet"
        except ValidationError:
            return f"{self._record} is damaged"
        if record.inputs != fingerprint:
            return "the inputs have changed"
        return next((why for file in record.files if (why := _why_damaged(file))), None)

    def begin(self) -> None:
        """Forget the outputs of before: from now on they may be written over."""
        self._record.unlink(missing_ok=True)

    def complete(self, fingerprint: str) -> str | None:
        """Record the outputs of a command that exited with 0. Returns which one is missing.

        Args:
            fingerprint: of the inputs, from before the command has run.
        """
        files = []
        for output in self._outputs:
            written = list(_files_of(output))
            if not written:
                return f"prepare.outputs: {str(output)!r} is missing after exit code 0"
            files += [_prepared(file) for file in written if file != self._record]
        record = PreparedRecord(inputs=fingerprint, files=tuple(files))
        write_whole(self._record, record.model_dump_json())
        return None


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(file for file in path.rglob("*") if file.is_file())
    elif path.exists():
        yield path


def _prepared(file: Path) -> PreparedFile:
    stat = file.stat()
    return PreparedFile(
        path=str(file), size_bytes=stat.st_size, time_ns=stat.st_mtime_ns, sha256=_hash_of(file)
    )


def _why_damaged(file: PreparedFile) -> str | None:
    path = Path(file.path)
    try:
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) == (file.size_bytes, file.time_ns):
            return None
        is_same = stat.st_size == file.size_bytes and _hash_of(path) == file.sha256
    except FileNotFoundError:
        return f"{path} is missing"
    return None if is_same else f"{path} is damaged"


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
