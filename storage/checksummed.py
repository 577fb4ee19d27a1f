"""JSON documents that carry their own hash: one flipped bit is found, though it stays JSON.

The hash is the last field of the object, of the bytes that the document has without it.
"""

from __future__ import annotations

import re

import xxhash

from storage.errors import Corrupt

_SEAL = re.compile(rb',"xxh3_128":"([0-9a-f]{32})"\}\Z')


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 as manifests hold it: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def checksummed(document: str) -> bytes:
    """A JSON object with fields, UTF-8, with its hash."""
    body = document.encode()
    return body[:-1] + b',"xxh3_128":"' + digest(body).encode() + b'"}'


def verified_document(data: bytes, *, url: str) -> bytes:
    """The document of `checksummed`.

    Raises:
        Corrupt: it is not as it was checksummed.
    """
    seal = _SEAL.search(data)
    if seal is None:
        raise Corrupt(f"{url}: not a document with its hash at the end")
    body = data[: seal.start()] + b"}"
    found = digest(body)
    if found != seal[1].decode():
        raise Corrupt(f"{url}: xxh3_128 {found} instead of {seal[1].decode()}")
    return body
