"""The documents of a corpus file, in order, with bounded memory. Sizes are bytes.

A text file is one document, or one per block when it is larger than a block. A jsonl or parquet
row is one document. Empty documents are left out. Every document is valid Unicode: what cannot be
decoded is replaced and counted.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from training.trainer.data.source import CorpusError, Layout, Source
from training.trainer.data.spec import MIB

MAX_LINE_BYTES = 256 * MIB
PARQUET_BATCH_ROWS = 256


@dataclass(slots=True)
class ReadStats:
    """What was not quite right while reading."""

    num_undecodable: int = 0  # documents with bytes that are not UTF-8


def documents_of(
    source: Source, text_field: str, *, block_bytes: int, stats: ReadStats
) -> Iterator[str]:
    """Read one file.

    Args:
        source: the file.
        text_field: key of the text in a jsonl row, or name of the parquet column.
        block_bytes: largest document of a text file; larger files are cut at line ends.
        stats: counted up while reading.

    Raises:
        CorpusError: names the file, the line or row, and what is allowed.
    """
    with _explained(source):
        if source.layout is Layout.PARQUET:
            yield from _parquet_rows(source, text_field, stats)
            return
        # pyarrow's decompressors report a truncated file; zstandard's stream_reader ends early.
        with pa.input_stream(source.path, compression=source.compression) as raw:
            stream = io.BufferedReader(raw, MIB)
            if stream.peek(3).startswith(codecs.BOM_UTF8):
                stream.read(3)
            if source.layout is Layout.JSONL:
                yield from _jsonl_rows(stream, source, text_field, stats)
            else:
                yield from _text_blocks(cast("BinaryIO", stream), block_bytes, stats)


@contextmanager
def _explained(source: Source) -> Iterator[None]:
    try:
        yield
    except CorpusError:
        raise
    except (OSError, pa.ArrowException) as error:
        message = " ".join(str(error).split())[:200]
        raise CorpusError(source.path, f"cannot be read as {source.reading}: {message}") from error


def _text_blocks(stream: BinaryIO, block_bytes: int, stats: ReadStats) -> Iterator[str]:
    rest = b""
    while True:
        block = rest + stream.read(block_bytes - len(rest))
        if len(block) < block_bytes:
            break
        cut = block.rfind(b"\n") + 1 or _character_start(block)
        yield _decode(block[:cut], stats)
        rest = block[cut:]
    if block:
        yield _decode(block, stats)


def _character_start(block: bytes) -> int:
    """Where the last UTF-8 character of a block without line end begins; it may be incomplete."""
    for index in range(len(block) - 1, max(0, len(block) - 4), -1):
        if block[index] & 0xC0 != 0x80:
            return index
    return len(block)


def _jsonl_rows(
    stream: io.BufferedReader, source: Source, text_field: str, stats: ReadStats
) -> Iterator[str]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{source.path}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise CorpusError(where, f"the line is longer than {MAX_LINE_BYTES} bytes")
        if line.strip():
            text = _text_of_row(_decode(line, stats), where, text_field)
            if b"\\u" in line:
                text = _without_surrogates(text, stats)
            if text:
                yield text


def _text_of_row(line: str, where: str, text_field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(where, f"is not JSON: {error}; allowed is one object per line") from error
    if not isinstance(row, dict):
        raise CorpusError(where, f"is a JSON {type(row).__name__}; allowed is one object per line")
    if text_field not in row:
        fields = ", ".join(sorted(map(str, row))[:10]) or "none"
        raise CorpusError(where, f"has no field {text_field!r} (data.text_field); it has: {fields}")
    text = row[text_field]
    if not isinstance(text, str):
        raise CorpusError(where, f"{text_field!r} is {json.dumps(text)[:40]}; allowed is a string")
    return text


def _parquet_rows(source: Source, text_field: str, stats: ReadStats) -> Iterator[str]:
    with pq.ParquetFile(source.path) as file:
        names = file.schema_arrow.names
        if text_field not in names:
            raise CorpusError(
                source.path,
                f"has no column {text_field!r} (data.text_field); it has: {', '.join(names[:10])}",
            )
        column_type = file.schema_arrow.field(text_field).type
        if pa.types.is_dictionary(column_type):
            column_type = column_type.value_type
        if not (pa.types.is_string(column_type) or pa.types.is_large_string(column_type)):
            raise CorpusError(
                source.path, f"column {text_field!r} is {column_type}; allowed is string"
            )
        row = 0
        for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[text_field]):
            # As bytes: a string column may hold what is not UTF-8.
            for value in batch.column(0).cast(column_type).cast(pa.large_binary()):
                data = value.as_py()
                if data is None:
                    where = f"{source.path}: row {row}"
                    raise CorpusError(where, f"{text_field!r} is null; allowed is a string")
                if data:
                    yield _decode(data, stats)
                row += 1


def _decode(data: bytes, stats: ReadStats) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        stats.num_undecodable += 1
        return data.decode("utf-8", "replace")


def _without_surrogates(text: str, stats: ReadStats) -> str:
    """Replace halves of surrogate pairs, which JSON can spell but no encoder takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        stats.num_undecodable += 1
        return text.encode("utf-8", "replace").decode("utf-8")
    return text
