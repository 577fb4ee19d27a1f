"""Content hashes of files and objects: XXH3-128 as 32 hex digits, in bounded memory.

They detect damage, not malice. Sizes are bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from pathlib import Path

    from storage.objects import ObjectStore

CHUNK_BYTES = 8 * 1024 * 1024


def hash_bytes(data: bytes | memoryview) -> str:
    """Hash of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_file(path: Path) -> str:
    """Hash of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def hash_object(store: ObjectStore, key: str, size_bytes: int) -> str:
    """Hash of the first `size_bytes` of an object.

    Raises:
        StorageError: as `ObjectStore.get_into` does; Corrupt where the object ends before.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, size_bytes)))
    for start in range(0, size_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, size_bytes - start)]
        store.get_into(key, chunk, start=start)
        digest.update(chunk)
    return digest.hexdigest()
