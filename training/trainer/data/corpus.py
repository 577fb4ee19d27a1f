"""The corpus: which files the sources name, and their documents as text.

Files come in the order of their absolute paths, each once, however many sources name it; empty
files and, below folders and globs, files of other kinds and hidden ones are passed over. Every
read is streamed: memory is bounded by one document, and plain text is cut at line ends into
documents of about `BLOCK_CHARS`, or of a shard where shards are smaller. Bytes that are not UTF-8
become U+FFFD. Sizes are bytes.
"""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from perdure.training.config.model import DataSpec

BLOCK_CHARS = 1024 * 1024
MAX_ROW_BYTES = 1024 * 1024 * 1024
PARQUET_BATCH_ROWS = 256

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KNOWN = ".txt .md .py .rst .jsonl (each plain, .gz or .zst) and .parquet"


class CorpusError(ValueError):
    """The corpus cannot be used as it is; one line that names the source and what is allowed."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus as it was found; a change shows in its size or time."""

    path: Path  # absolute
    size_bytes: int
    mtime_ns: int

    def changed(self) -> bool:
        """Whether the file differs in size or time now, or is gone."""
        try:
            status = self.path.stat()
        except OSError:
            return True
        return (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.mtime_ns)


def find_sources(spec: DataSpec) -> tuple[SourceFile, ...]:
    """List every file that is not empty, in path order.

    Raises:
        CorpusError: a source names nothing usable, a file cannot be read, or all are empty.
    """
    paths = sorted({path for source in spec.sources for path in _expand(source)})
    sources = tuple(file for path in paths if (file := _inspect(path)).size_bytes > 0)
    if not sources:
        raise CorpusError(f"data.sources={list(spec.sources)}: all {len(paths)} files are empty")
    return sources


def iterate_documents(
    path: Path, *, text_field: str, block_chars: int = BLOCK_CHARS
) -> Iterator[str]:
    """Yield the documents of a file in order, none of them empty; always encodable as UTF-8.

    Args:
        path: a file of a known kind.
        text_field: field of a jsonl row, or parquet column.
        block_chars: longer text is cut at the first line end behind so many characters.

    Raises:
        CorpusError: the file is damaged, or a row has no text; names the file and the row.
    """
    kind, compression = _kind(path.name)
    with _named(path):
        if kind == ".parquet":
            yield from _parquet_documents(path, text_field)
            return
        with _open(path, compression) as stream:
            if kind == ".jsonl":
                yield from _jsonl_documents(path, stream, text_field)
            else:
                yield from _text_documents(stream, block_chars)


def _kind(name: str) -> tuple[str | None, str | None]:
    """Return suffix and compression; no suffix where the kind is unknown."""
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122 a name, not a path
    if suffix == ".parquet":
        return suffix, None
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]  # noqa: PTH122 as above
    return (suffix if suffix in (*TEXT_SUFFIXES, ".jsonl") else None), compression


def _expand(source: str) -> list[Path]:
    if "://" in source:
        raise CorpusError(f"source {source!r}: is an address; sources are paths of mounted files")
    path = Path(source).expanduser().absolute()
    if path.is_file():
        if _kind(path.name)[0] is None:
            raise CorpusError(f"source {source!r}: unknown suffix; known are {KNOWN}")
        return [path]
    if path.is_dir():
        candidates = list(_walk(path, source))
    elif glob.has_magic(source):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207 absolute
        candidates = [match for match in matches if match.is_file()]
        for folder in (match for match in matches if match.is_dir() and "**" not in source):
            candidates.extend(_walk(folder, source))
    else:
        raise CorpusError(f"source {source!r}: no such file or folder")
    files = [path for path in candidates if _kind(path.name)[0] is not None]
    if not files:
        raise CorpusError(
            f"source {source!r}: nothing usable among {len(candidates)} files; known are {KNOWN}"
        )
    return files


def _walk(folder: Path, source: str) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise CorpusError(f"source {source!r}: cannot list {error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _inspect(path: Path) -> SourceFile:
    with _named(path):
        status = path.stat()
    if not os.access(path, os.R_OK):
        raise CorpusError(f"{path}: permission denied; the corpus must be readable")
    return SourceFile(path, status.st_size, status.st_mtime_ns)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an error of reading into a line with the file's name."""
    try:
        yield
    except CorpusError:
        raise
    except (OSError, EOFError, pa.ArrowException) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise CorpusError(f"{path}: cannot be read: {reason}") from exc


def _open(path: Path, compression: str | None) -> IO[bytes]:
    if compression is None:
        return path.open("rb")
    # pyarrow's streams read concatenated members and, unlike zstandard's, notice a cut-off file.
    stream: Any = pa.CompressedInputStream(pa.OSFile(str(path)), compression)
    return io.BufferedReader(stream, buffer_size=BLOCK_CHARS)


def _text_documents(stream: IO[bytes], block_chars: int) -> Iterator[str]:
    with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="") as text:
        while block := text.read(block_chars):
            # A line may have no end: the limit bounds memory.
            yield block + text.readline(block_chars)


def _jsonl_documents(path: Path, stream: IO[bytes], text_field: str) -> Iterator[str]:
    number = 0
    while line := stream.readline(MAX_ROW_BYTES):
        number += 1
        where = f"{path}, line {number}"
        if len(line) == MAX_ROW_BYTES:
            raise CorpusError(f"{where}: longer than {MAX_ROW_BYTES} bytes; is it jsonl?")
        if line.isspace():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig", errors="replace"))
        except (ValueError, RecursionError) as exc:
            reason = str(exc).partition(": line 1")[0]
            raise CorpusError(
                f"{where}: broken JSON ({reason}); each line must be one JSON object "
                f"with the text as a string in {text_field!r}"
            ) from exc
        text = _text_of(row, where, text_field)
        if text:
            yield text


def _text_of(row: Any, where: str, text_field: str) -> str:
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: a JSON {type(row).__name__}, must be an object")
    if text_field not in row:
        fields = ", ".join(map(repr, list(row)[:10])) or "none"
        raise CorpusError(
            f"{where}: no field {text_field!r}; fields are {fields}; set data.text_field"
        )
    text = row[text_field]
    if not isinstance(text, str):
        raise CorpusError(
            f"{where}: field {text_field!r} is a {type(text).__name__}, must be a string"
        )
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _parquet_documents(path: Path, text_field: str) -> Iterator[str]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if text_field not in names:
            raise CorpusError(
                f"{path}: no column {text_field!r}; columns are {', '.join(map(repr, names))}; "
                "set data.text_field"
            )
        kind = file.schema_arrow.field(text_field).type
        row_number = 0
        for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[text_field]):
            for raw in _parquet_bytes(path, text_field, kind, batch.column(0)):
                row_number += 1
                if raw is None:
                    raise CorpusError(
                        f"{path}, row {row_number}: column {text_field!r} is null, must be a string"
                    )
                if raw:
                    yield raw.decode("utf-8", errors="replace")


def _parquet_bytes(path: Path, text_field: str, kind: Any, column: Any) -> list[bytes | None]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise CorpusError(f"{path}: column {text_field!r} is of type {kind}, must be string")
    values: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return values
