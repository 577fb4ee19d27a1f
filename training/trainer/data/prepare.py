"""Corpus to token shards and a manifest, doing only what is not done yet.

Below the prefix: `shards/` hold ids, `groups/` a receipt per finished group of sources,
`manifests/` one manifest per state of the inputs, `verified.json` which shards were checked. The
manifest is written last and is the commit; a preparation that was killed before goes on behind
its last receipt. Every document ends with the tokenizer's end of document. Sizes are bytes,
times seconds.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.objects import ObjectStore, check_key
from perdure.training.config.model import DataSpec
from perdure.training.trainer.data.corpus import (
    BLOCK_CHARS,
    CorpusError,
    SourceFile,
    find_sources,
    iterate_documents,
)
from perdure.training.trainer.data.first_look import num_strange, strange_text
from perdure.training.trainer.data.manifest import (
    DTYPES,
    FORMAT_VERSION,
    CorpusManifest,
    Shard,
    Source,
    dtype_name,
    hash_bytes,
    hash_file,
    load_manifest,
)
from perdure.training.trainer.data.shard_cache import ShardCache
from perdure.training.trainer.data.tokenizer import Tokenizer

ENCODE_BATCH_CHARS = 2 * 1024 * 1024
HASH_RANGE = 1 << 64

# The unit that is reused or redone when the corpus changes: a run of sources in path order with
# about `shard_size_bytes` of text, or one larger source.
Group = tuple[SourceFile, ...]


class Receipt(FrozenModel):
    """Receipt of a group: written after its shards, and all that reuse needs."""

    stem: str  # shard keys without '-PART.tokens'
    sources: tuple[Source, ...]
    shards: tuple[Shard, ...]  # none when the sources hold no text


class DataOutcome(FrozenModel):
    """Result of a preparation, in plain values, as ledger and orchestrator keep it."""

    manifest_key: str
    num_tokens: int
    num_shards: int
    skipped: bool  # everything was there and intact
    written_shards: int
    reused_shards: int
    damaged_shards: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """The manifest and what it took."""

    manifest: CorpusManifest
    manifest_key: str
    skipped: bool  # everything was there and intact
    written_shards: int
    reused_shards: int
    damaged_shards: int  # recorded, but missing or different: redone
    duration_s: float

    @property
    def outcome(self) -> DataOutcome:
        """The same in plain values."""
        return DataOutcome(
            manifest_key=self.manifest_key,
            num_tokens=self.manifest.num_tokens,
            num_shards=len(self.manifest.shards),
            skipped=self.skipped,
            written_shards=self.written_shards,
            reused_shards=self.reused_shards,
            damaged_shards=self.damaged_shards,
            duration_s=self.duration_s,
        )


def inputs_of(spec: DataSpec, tokenizer: Tokenizer) -> str:
    """Compute the fingerprint of the inputs, which names their manifest; reads no source.

    Raises:
        CorpusError: the sources cannot be used.
    """
    return fingerprint(settings_fingerprint(spec, tokenizer), find_sources(spec))


def _ignore(line: str) -> None:
    del line


def find_prepared(
    store: ObjectStore, inputs: str, *, prefix: str = "data", log: Callable[[str], None] = _ignore
) -> PrepareResult | None:
    """Find an earlier preparation of these inputs, if all of it is there and intact.

    Args:
        store: holds the shards.
        inputs: as `inputs_of` has it.
        prefix: key prefix of everything written.
        log: takes a line when the manifest is damaged.

    Raises:
        StorageError: the store failed.
    """
    started_s = time.monotonic()
    key = f"{prefix}/manifests/{inputs}.json"
    try:
        manifest = load_manifest(store, key)
    except NotFound:
        return None
    except Corrupt as exc:
        log(f"manifest is damaged and will be made again: {exc}")
        return None
    cache = ShardCache(store, prefix)
    intact = all(map(cache.is_intact, manifest.shards))
    cache.save()
    if not intact:
        return None
    return PrepareResult(
        manifest=manifest,
        manifest_key=key,
        skipped=True,
        written_shards=0,
        reused_shards=len(manifest.shards),
        damaged_shards=0,
        duration_s=time.monotonic() - started_s,
    )


def prepare(
    spec: DataSpec,
    tokenizer: Tokenizer,
    store: ObjectStore,
    *,
    prefix: str = "data",
    log: Callable[[str], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> PrepareResult:
    """Bring shards and manifest of these inputs into the store.

    Args:
        spec: sources and shard size.
        tokenizer: text to ids.
        store: takes the shards.
        prefix: key prefix of everything written.
        log: takes progress, one line per shard written or found damaged.
        warn: takes a line for each file that is no text; None: `log` does.

    Raises:
        CorpusError: the sources cannot be used, or changed while they were read.
        StorageError: the store failed.
        ValueError: the prefix is not a key, or the tokenizer gives ids beyond its vocabulary.
    """
    inputs = inputs_of(spec, tokenizer)
    log = log or _ignore
    prepared = find_prepared(store, inputs, prefix=check_key(prefix), log=log)
    if prepared is not None:
        return prepared
    return _Preparation(spec, tokenizer, store, prefix, log, warn or log).run()


class _Preparation:
    def __init__(
        self,
        spec: DataSpec,
        tokenizer: Tokenizer,
        store: ObjectStore,
        prefix: str,
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        self._spec = spec
        self._tokenizer = tokenizer
        self._store = store
        self._prefix = prefix
        self._log = log
        self._settings = settings_fingerprint(spec, tokenizer)
        self._cache = ShardCache(store, prefix)
        self._written = 0
        self._damaged: set[str] = set()

    def run(self) -> PrepareResult:
        started_s = time.monotonic()
        sources = find_sources(self._spec)
        inputs = fingerprint(self._settings, sources)
        key = f"{self._prefix}/manifests/{inputs}.json"
        groups = group_sources(sources, shard_size_bytes=self._spec.shard_size_bytes)
        manifest = self._manifest(inputs, [s for group in groups for s in self._settle(group)])
        self._cache.save()
        self._store.put(key, manifest.model_dump_json().encode())
        return PrepareResult(
            manifest=manifest,
            manifest_key=key,
            skipped=False,
            written_shards=self._written,
            reused_shards=len(manifest.shards) - self._written,
            damaged_shards=len(self._damaged),
            duration_s=time.monotonic() - started_s,
        )

    def _manifest(self, inputs: str, shards: list[Shard]) -> CorpusManifest:
        if not shards:
            raise CorpusError(f"data.sources={list(self._spec.sources)}: no text in any file")
        return CorpusManifest(
            fingerprint=inputs,
            tokenizer_fingerprint=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            dtype=dtype_name(self._tokenizer.vocab_size),
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_documents=sum(shard.num_documents for shard in shards),
            shards=tuple(shards),
        )

    def _settle(self, group: Group) -> tuple[Shard, ...]:
        """Make or reuse the group's shards."""
        key = f"{self._prefix}/groups/{_name(self._settings, group)}.json"
        try:
            receipt, touched = load_receipt(self._store, key, group)
            if receipt is None or not self._repair(group, receipt):
                receipt, touched = self._make(group), True
        except OSError as exc:
            raise CorpusError(f"{exc.filename}: cannot be read: {exc.strerror}") from exc
        if touched:
            self._store.put(key, receipt.model_dump_json().encode())
        return receipt.shards

    def _make(self, group: Group) -> Receipt:
        stem = f"{self._prefix}/shards/{fingerprint(self._settings, group)}"
        sources = describe_sources(group)
        shards = tuple(self._write_parts(group, stem=stem, sources=sources))
        return Receipt(stem=stem, sources=sources, shards=shards)

    def _repair(self, group: Group, receipt: Receipt) -> bool:
        """Redo the shards that are not intact; False if they come out different."""
        damaged = {s.key: s for s in receipt.shards if not self._cache.is_intact(s)}
        for key in damaged:
            self._log(f"shard {key} is missing or damaged and will be made again")
        self._damaged |= damaged.keys()
        if not damaged:
            return True
        redone = self._write_parts(
            group, stem=receipt.stem, sources=receipt.sources, wanted=damaged.keys()
        )
        return {shard.key: shard for shard in redone} == damaged

    def _write_parts(
        self,
        group: Group,
        *,
        stem: str,
        sources: tuple[Source, ...],
        wanted: Iterable[str] | None = None,
    ) -> Iterator[Shard]:
        parts = _split(self._documents(group), self._spec.shard_size_bytes)
        keep = None if wanted is None else set(wanted)
        for part, items in itertools.groupby(parts, key=lambda item: item[0]):
            key = f"{stem}-{part:05d}.tokens"
            if keep is not None and key not in keep:
                continue  # read, to find the parts behind it, but not tokenized
            yield self._write(key, (text for _, text in items), sources)
        for source in group:
            if source.changed():
                raise CorpusError(
                    f"{source.path}: changed while it was read; sources must not change meanwhile"
                )

    def _documents(self, group: Group) -> Iterator[str]:
        # Text has no documents of its own: without smaller blocks it could not fill small shards.
        block_chars = min(BLOCK_CHARS, self._spec.shard_size_bytes)
        for source in group:
            strange = chars = 0
            for text in iterate_documents(
                source.path, text_field=self._spec.text_field, block_chars=block_chars
            ):
                strange, chars = strange + num_strange(text), chars + len(text)
                yield text
            problem = strange_text(strange, chars)
            if problem is not None:
                self._warn(f"{source.path}: {problem}")

    def _write(self, key: str, texts: Iterator[str], sources: tuple[Source, ...]) -> Shard:
        tokens, num_documents = self._encode(texts)
        data = tokens.view(np.uint8).data
        self._cache.put(key, data)
        self._written += 1
        self._log(f"shard {key}: documents: {num_documents}, tokens: {tokens.size}")
        return Shard(
            key=key,
            num_tokens=tokens.size,
            size_bytes=data.nbytes,
            xxh3_128=hash_bytes(data),
            num_documents=num_documents,
            sources=sources,
        )

    def _encode(self, texts: Iterator[str]) -> tuple[npt.NDArray[np.unsignedinteger], int]:
        """Encode all documents in order, each with its end."""
        vocab_size = self._tokenizer.vocab_size
        dtype = DTYPES[dtype_name(vocab_size)]
        end = np.array([self._tokenizer.eos_id], dtype=dtype)
        pieces: list[npt.NDArray[np.unsignedinteger]] = []
        for batch in _batches(texts):
            for ids in self._tokenizer.encode_batch(batch):
                if ids.size and int(ids.max()) >= vocab_size:
                    raise ValueError(f"id {ids.max()} is beyond vocab_size={vocab_size}")
                pieces += (ids.astype(dtype), end)
        return np.concatenate(pieces, dtype=dtype), len(pieces) // 2


def settings_fingerprint(spec: DataSpec, tokenizer: Tokenizer) -> str:
    """Hash everything but the sources that decides about the content of shards."""
    identity = (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eos_id)
    layout = (FORMAT_VERSION, BLOCK_CHARS, spec.text_field, spec.shard_size_bytes)
    return _digest("", [*identity, *layout])


def fingerprint(settings: str, sources: Iterable[SourceFile]) -> str:
    """Same as long as no file was touched; names manifests and shards."""
    return _digest(settings, [(str(s.path), s.size_bytes, s.mtime_ns) for s in sources])


def _name(settings: str, group: Group) -> str:
    """Same as long as the same files have the same sizes; finds the receipt."""
    return _digest(settings, [(str(s.path), s.size_bytes) for s in group])


def group_sources(sources: Iterable[SourceFile], *, shard_size_bytes: int) -> Iterator[Group]:
    """Cut the sources, in their order, into groups of at most the given size where possible.

    Where groups end depends on the neighbourhood only, so a new or grown file moves the borders
    beside it and not those of all that follow.
    """
    group: list[SourceFile] = []
    size_bytes = 0
    for source in sources:
        if group and size_bytes + source.size_bytes > shard_size_bytes:
            yield tuple(group)
            group, size_bytes = [], 0
        group.append(source)
        size_bytes += source.size_bytes
        if size_bytes > shard_size_bytes // 4 and _ends_group(source, shard_size_bytes):
            yield tuple(group)
            group, size_bytes = [], 0
    if group:
        yield tuple(group)


def describe_sources(group: Group) -> tuple[Source, ...]:
    """Hash the group's sources, which takes a reading of each.

    Raises:
        OSError: a source cannot be read.
    """
    return tuple(
        Source(
            path=str(source.path),
            size_bytes=source.size_bytes,
            mtime_ns=source.mtime_ns,
            xxh3_128=hash_file(source.path),
        )
        for source in group
    )


def load_receipt(store: ObjectStore, key: str, group: Group) -> tuple[Receipt | None, bool]:
    """Read the group's receipt if it still holds, and whether files were merely touched since.

    Raises:
        OSError: a touched file cannot be read.
        StorageError: the store failed.
    """
    try:
        receipt = Receipt.model_validate_json(store.get(key))
    except (NotFound, ValueError):
        return None, False  # without a receipt the group is prepared again, which is always right
    recorded = {source.path: source for source in receipt.sources}
    touched = False
    for source in group:
        recorded_look = recorded.get(str(source.path))
        if recorded_look is None or recorded_look.size_bytes != source.size_bytes:
            return None, False
        if recorded_look.mtime_ns != source.mtime_ns:
            touched = True
            if recorded_look.xxh3_128 != hash_file(source.path):
                return None, False
    return _touched(receipt, group) if touched else receipt, touched


def _touched(receipt: Receipt, group: Group) -> Receipt:
    times = {str(source.path): source.mtime_ns for source in group}
    sources = tuple(s.model_copy(update={"mtime_ns": times[s.path]}) for s in receipt.sources)
    shards = tuple(s.model_copy(update={"sources": sources}) for s in receipt.shards)
    return receipt.model_copy(update={"sources": sources, "shards": shards})


def _ends_group(source: SourceFile, shard_size_bytes: int) -> bool:
    """By the hash of its path, about twice per `shard_size_bytes` of sources."""
    value = xxhash.xxh3_64_intdigest(str(source.path).encode("utf-8", "surrogateescape"))
    return value * shard_size_bytes < 2 * source.size_bytes * HASH_RANGE


def _digest(settings: str, content: object) -> str:
    return hash_bytes(json.dumps([settings, content]).encode())


def _split(texts: Iterable[str], limit_bytes: int) -> Iterator[tuple[int, str]]:
    """Number each text with its part; a part ends before the text that would overfill it."""
    part, filled_bytes = 0, 0
    for text in texts:
        size_bytes = len(text) if text.isascii() else len(text.encode())
        if filled_bytes and filled_bytes + size_bytes > limit_bytes:
            part, filled_bytes = part + 1, 0
        filled_bytes += size_bytes
        yield part, text


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
