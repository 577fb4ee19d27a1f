"""Which corpus files share a shard, and what a group is called. Sizes are bytes.

A group is named by the content of its files, not by their names or times, so a file that was
touched, copied or moved costs a reading and no new shard. Boundaries depend on the names near
them, so a file that is added, removed or resized leaves most other groups as they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from training.trainer.data.manifest import FORMAT_VERSION, Manifest, SourceRecord
from training.trainer.data.source import CorpusError, Source
from training.trainer.data.spec import DataSpec
from training.trainer.data.verified import hash_file

BOUNDARY_ODDS = 8  # one file in so many may end a group that is half full


@dataclass(frozen=True, slots=True)
class Group:
    """Files whose documents follow one another in one or more shards of their own."""

    sources: tuple[Source, ...]
    records: tuple[SourceRecord, ...]  # one per source, with the content's checksum
    fingerprint: str


def plan_groups(sources: tuple[Source, ...], shard_size_bytes: int) -> Iterator[tuple[Source, ...]]:
    """Cut the sorted sources into groups of at most `shard_size_bytes`, or of one file."""
    group: list[Source] = []
    filled = 0
    for source in sources:
        if group and filled + source.size_bytes > shard_size_bytes:
            yield tuple(group)
            group, filled = [], 0
        group.append(source)
        filled += source.size_bytes
        if filled >= shard_size_bytes // 2 and _may_end_group(source):
            yield tuple(group)
            group, filled = [], 0
    if group:
        yield tuple(group)


def identify(
    sources: tuple[Source, ...], spec: DataSpec, tokenizer_fingerprint: str, known: KnownHashes
) -> Group:
    """Read, unless they are known, the files of a group and name it by their content.

    Raises:
        CorpusError: a file cannot be read.
    """
    records = tuple(known.record_of(source) for source in sources)
    content = [
        (source.reading, record.xxh3_128) for source, record in zip(sources, records, strict=True)
    ]
    return Group(sources, records, _digest(_treatment(spec, tokenizer_fingerprint), content))


def inputs_fingerprint(
    sources: tuple[Source, ...], spec: DataSpec, tokenizer_fingerprint: str
) -> str:
    """Name of the inputs as a look at the folders shows them: paths, sizes and times."""
    seen = [(source.path, source.size_bytes, source.mtime_ns) for source in sources]
    return _digest(_treatment(spec, tokenizer_fingerprint), seen)


class KnownHashes:
    """Checksums of corpus files, from an earlier manifest while size and time are the same."""

    def __init__(self, manifest: Manifest | None) -> None:
        shards = manifest.shards if manifest is not None else ()
        self._records: Mapping[str, SourceRecord] = {
            record.path: record for shard in shards for record in shard.sources
        }

    def record_of(self, source: Source) -> SourceRecord:
        """The file's record; the file is read if it is new or was touched.

        Raises:
            CorpusError: the file cannot be read.
        """
        seen = (source.size_bytes, source.mtime_ns)
        known = self._records.get(source.path)
        if known is not None and (known.size_bytes, known.mtime_ns) == seen:
            return known
        try:
            digest = hash_file(Path(source.path))
        except OSError as error:
            raise CorpusError(source.path, f"cannot be read: {error.strerror}") from error
        return SourceRecord(
            path=source.path,
            size_bytes=source.size_bytes,
            mtime_ns=source.mtime_ns,
            xxh3_128=digest,
        )


def _may_end_group(source: Source) -> bool:
    name = Path(source.path).name.encode("utf-8", "surrogateescape")
    return xxhash.xxh3_64_intdigest(name) % BOUNDARY_ODDS == 0


def _treatment(spec: DataSpec, tokenizer_fingerprint: str) -> list[str | int]:
    return [FORMAT_VERSION, tokenizer_fingerprint, spec.text_field, spec.shard_size_bytes]


def _digest(treatment: list[str | int], items: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([treatment, items]).encode())
