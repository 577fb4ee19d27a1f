"""Groups of sources: the unit that is reused or redone when the corpus changes.

A group is a run of sources in path order with about `shard_size_bytes` of text, or one larger
source. Where groups end depends on the neighbourhood only, so a new or grown file moves the
borders beside it and not those of all that follow. Sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import xxhash

from storage.errors import NotFound
from storage.model import FrozenModel
from storage.objects import ObjectStore
from training.specs.data import DataSpec
from training.trainer.data.corpus import BLOCK_CHARS, SourceFile
from training.trainer.data.manifest import FORMAT_VERSION, Shard, Source, hash_bytes, hash_file
from training.trainer.data.tokenizer import Tokenizer

HASH_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class Group:
    """Sources whose text shares its shards."""

    sources: tuple[SourceFile, ...]

    def name(self, settings: str) -> str:
        """Same as long as the same files have the same sizes; finds the receipt."""
        return _digest(settings, [(str(s.path), s.size_bytes) for s in self.sources])

    def fingerprint(self, settings: str) -> str:
        """Same as long as no file was touched; names the shards."""
        return fingerprint(settings, self.sources)


class Receipt(FrozenModel):
    """What became of a group: written after its shards, and all that reuse needs."""

    stem: str  # shard keys without '-PART.tokens'
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]  # none when the sources hold no text


def settings_fingerprint(spec: DataSpec, tokenizer: Tokenizer) -> str:
    """Of everything but the sources that decides about the content of shards."""
    identity = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id)
    layout = (FORMAT_VERSION, BLOCK_CHARS, spec.text_field, spec.shard_size_bytes)
    return _digest("", [*identity, *layout])


def fingerprint(settings: str, sources: Iterable[SourceFile]) -> str:
    """Of the settings and the sources' paths, sizes and times."""
    return _digest(settings, [(str(s.path), s.size_bytes, s.mtime_ns) for s in sources])


def group_sources(sources: Iterable[SourceFile], *, shard_size_bytes: int) -> Iterator[Group]:
    """Cut the sources, in their order, into groups of at most the given size where possible."""
    group: list[SourceFile] = []
    size_bytes = 0
    for source in sources:
        if group and size_bytes + source.size_bytes > shard_size_bytes:
            yield Group(tuple(group))
            group, size_bytes = [], 0
        group.append(source)
        size_bytes += source.size_bytes
        if size_bytes > shard_size_bytes // 4 and _ends_group(source, shard_size_bytes):
            yield Group(tuple(group))
            group, size_bytes = [], 0
    if group:
        yield Group(tuple(group))


def describe_sources(group: Group) -> tuple[Source, ...]:
    """The group's sources with their hashes, which takes a reading of each.

    Raises:
        OSError: one cannot be read.
    """
    return tuple(
        Source(
            path=str(source.path),
            size_bytes=source.size_bytes,
            mtime_ns=source.mtime_ns,
            xxh3_128=hash_file(source.path),
        )
        for source in group.sources
    )


def load_receipt(store: ObjectStore, key: str, group: Group) -> tuple[Receipt | None, bool]:
    """The group's receipt if it still holds, and whether files were merely touched since.

    Raises:
        OSError: a touched file cannot be read.
        StorageError: the store failed.
    """
    try:
        receipt = Receipt.model_validate_json(store.get(key))
    except (NotFound, ValueError):
        return None, False  # without one the group is prepared again, which is always right
    recorded = {source.path: source for source in receipt.sources}
    touched = False
    for source in group.sources:
        known = recorded.get(str(source.path))
        if known is None or known.size_bytes != source.size_bytes:
            return None, False
        if known.mtime_ns != source.mtime_ns:
            touched = True
            if known.xxh3_128 != hash_file(source.path):
                return None, False
    return _touched(receipt, group) if touched else receipt, touched


def _touched(receipt: Receipt, group: Group) -> Receipt:
    times = {str(source.path): source.mtime_ns for source in group.sources}
    sources = tuple(s.model_copy(update={"mtime_ns": times[s.path]}) for s in receipt.sources)
    shards = tuple(s.model_copy(update={"sources": sources}) for s in receipt.shards)
    return receipt.model_copy(update={"sources": sources, "shards": shards})


def _ends_group(source: SourceFile, shard_size_bytes: int) -> bool:
    """By the hash of its path, about twice per `shard_size_bytes` of sources."""
    value = xxhash.xxh3_64_intdigest(str(source.path).encode("utf-8", "surrogateescape"))
    return value * shard_size_bytes < 2 * source.size_bytes * HASH_RANGE


def _digest(settings: str, content: object) -> str:
    return hash_bytes(json.dumps([settings, content]).encode())
