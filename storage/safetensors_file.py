"""The safetensors container: eight bytes of header length, a JSON header, raw little-endian data.

Parsed here rather than by the library because shards are read by ranges of remote objects. Nothing
in it can execute. Offsets and sizes are bytes from the beginning of the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.storage.errors import Corrupt

LENGTH = struct.Struct("<Q")
ALIGNMENT_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit

ITEM_SIZE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Size of the raw data."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of all tensors in a file to be written."""

    header: bytes
    entries: Mapping[str, Entry]
    size_bytes: int


def plan_layout(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Lay out (name, dtype, shape) triples; wide dtypes first, so that each is aligned.

    Args:
        tensors: name, dtype code and shape of each tensor.
        metadata: free text by name, for the programs that ask for it.

    Raises:
        ValueError: a name occurs twice.
    """
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_SIZE_BYTES[tensor[1]], tensor[0]))
    document: dict[str, Any] = {}
    at = 0
    for name, dtype, shape in ordered:
        if name in document:
            raise ValueError(f"two tensors are called {name!r}")
        end = at + math.prod(shape) * ITEM_SIZE_BYTES[dtype]
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    noted = {"__metadata__": dict(metadata), **document} if metadata else document
    text = json.dumps(noted, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    header = LENGTH.pack(len(text)) + text
    entries = {name: _entry(fields, len(header)) for name, fields in document.items()}
    return Layout(header, entries, len(header) + at)


def header_size_bytes(prefix: bytes, *, url: str) -> int:
    """Bytes before the data, from the first eight of a file.

    Raises:
        Corrupt: no safetensors file begins like this.
    """
    if len(prefix) < LENGTH.size:
        raise Corrupt(f"{url}: too short for a safetensors file")
    (length,) = LENGTH.unpack(prefix[: LENGTH.size])
    if length > MAX_HEADER_BYTES:
        raise Corrupt(f"{url}: not a safetensors file: header of {length} bytes")
    return LENGTH.size + int(length)


def parse_header(header: bytes, *, size_bytes: int, url: str) -> dict[str, Entry]:
    """The tensors of a file of `size_bytes` from its whole header, length included.

    Raises:
        Corrupt: not a header, or it does not fit the file.
    """
    try:
        document = json.loads(header[LENGTH.size :])
        document.pop("__metadata__", None)
        entries = {name: _entry(fields, len(header)) for name, fields in document.items()}
        whole = all(_is_whole(entry, len(header), size_bytes) for entry in entries.values())
        ends = max((entry.end for entry in entries.values()), default=len(header)) == size_bytes
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as exc:
        raise Corrupt(f"{url}: not a safetensors header: {exc}") from exc
    if not whole or not ends:
        raise Corrupt(f"{url}: header and file of {size_bytes} bytes do not fit")
    return entries


def _entry(fields: Mapping[str, Any], data_begin: int) -> Entry:
    begin, end = fields["data_offsets"]
    shape = tuple(int(size) for size in fields["shape"])
    return Entry(str(fields["dtype"]), shape, data_begin + int(begin), data_begin + int(end))


def _is_whole(entry: Entry, data_begin: int, size_bytes: int) -> bool:
    wanted = math.prod(entry.shape) * ITEM_SIZE_BYTES[entry.dtype]
    if min(entry.shape, default=0) < 0:
        return False
    return data_begin <= entry.begin <= entry.end <= size_bytes and entry.size_bytes == wanted
