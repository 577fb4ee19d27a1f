"""One file of a corpus, and the error that names it. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from training.errors import InputError


class CorpusError(InputError):
    """The corpus cannot be used; `field` is the source or the place in it."""


class Layout(StrEnum):
    """How a file holds documents."""

    TEXT = "text"
    JSONL = "jsonl"
    PARQUET = "parquet"


LAYOUTS = {
    ".txt": Layout.TEXT,
    ".md": Layout.TEXT,
    ".rst": Layout.TEXT,
    ".py": Layout.TEXT,
    ".jsonl": Layout.JSONL,
    ".parquet": Layout.PARQUET,
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ALLOWED = ".txt, .md, .rst, .py, .jsonl (each also with .gz or .zst), .parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the corpus, as it was found."""

    path: str  # absolute
    size_bytes: int  # on disk, compressed if it is
    mtime_ns: int
    layout: Layout
    compression: str | None  # gzip, zstd or None

    @property
    def reading(self) -> str:
        """How the bytes become documents, e.g. "jsonl.gzip"."""
        return f"{self.layout}.{self.compression}" if self.compression else self.layout.value

    def has_changed(self) -> bool:
        """Whether the file is no longer the one that was found."""
        try:
            status = Path(self.path).stat()
        except OSError:
            return True
        return (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns)


def is_known(path: Path) -> bool:
    """Whether the suffix says how to read the file."""
    return _reading_of(path) is not None


def describe(path: Path) -> Source:
    """Look at one file of a known suffix.

    Raises:
        CorpusError: the file cannot be looked at.
    """
    reading = _reading_of(path)
    assert reading is not None  # noqa: S101 the caller has asked is_known
    try:
        status = path.stat()
    except OSError as error:
        raise CorpusError(str(path), f"cannot be read: {error.strerror}") from error
    return Source(str(path), status.st_size, status.st_mtime_ns, *reading)


def _reading_of(path: Path) -> tuple[Layout, str | None] | None:
    name = Path(path.name.lower())
    compression = COMPRESSIONS.get(name.suffix)
    layout = LAYOUTS.get(Path(name.stem).suffix if compression else name.suffix)
    if layout is None or (layout is Layout.PARQUET and compression is not None):
        return None
    return layout, compression
