"""Data preparation: corpus files become token shards and a manifest, once.

The manifest is the commit: it is written last, under a key that depends on the inputs. Running
again with the same inputs looks at the shards and changes nothing; a damaged or missing shard is
redone alone; other inputs reuse the shards of the files that are the same. Times are seconds,
sizes bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage.errors import Corrupt, NotFound
from storage.objects import ObjectStore
from training.trainer.data.corpus import expand_sources
from training.trainer.data.groups import (
    KnownHashes,
    identify,
    inputs_fingerprint,
    plan_groups,
)
from training.trainer.data.manifest import FORMAT_VERSION, Manifest, dtype_for, load_manifest
from training.trainer.data.shards import ShardWriter
from training.trainer.data.source import CorpusError, Source
from training.trainer.data.spec import DataSpec
from training.trainer.data.tokenizer import Tokenizer
from training.trainer.data.verified import StoreVerifier

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """What preparation found and did."""

    manifest: Manifest
    manifest_key: str
    skipped: bool  # everything was there already
    written_shards: int
    reused_shards: int
    damaged_shards: int  # promised, but missing or different; among the written
    duration_s: float


def prepare(
    spec: DataSpec,
    tokenizer: Tokenizer,
    store: ObjectStore,
    *,
    prefix: str = "data",
    log: Callable[[str], None] = _LOGGER.info,
) -> PrepareResult:
    """Make sure that the store holds the corpus as token shards and their manifest.

    Args:
        spec: the corpus.
        tokenizer: makes the ids.
        store: where the shards and the manifest go.
        prefix: below which they go.
        log: takes one line per shard written, and warnings.

    Raises:
        CorpusError: the corpus is missing, unreadable, empty, or changes while it is read.
        StorageError: the store fails.
    """
    started_s = time.perf_counter()
    sources = expand_sources(spec.sources)
    fingerprint = inputs_fingerprint(sources, spec, tokenizer.fingerprint)
    key = f"{prefix}/manifests/{fingerprint}.json"
    verifier = StoreVerifier(store, prefix)
    committed = _manifest_at(store, key)
    if committed is not None and all(map(verifier.is_intact, committed.shards)):
        verifier.save()
        return PrepareResult(
            manifest=committed,
            manifest_key=key,
            skipped=True,
            written_shards=0,
            reused_shards=len(committed.shards),
            damaged_shards=0,
            duration_s=time.perf_counter() - started_s,
        )
    writer = ShardWriter(spec, tokenizer, store, prefix=prefix, verifier=verifier, log=log)
    earlier = committed or _newest_manifest(store, prefix)
    manifest = _write_shards(
        writer, sources, spec, tokenizer, fingerprint=fingerprint, earlier=earlier
    )
    verifier.save()
    if manifest != committed:
        store.put(key, manifest.model_dump_json().encode())
    if manifest.num_undecodable:
        log(f"{manifest.num_undecodable} documents are not UTF-8: what cannot be read is replaced")
    return PrepareResult(
        manifest=manifest,
        manifest_key=key,
        skipped=False,
        written_shards=writer.tally.written,
        reused_shards=writer.tally.reused,
        damaged_shards=writer.tally.damaged,
        duration_s=time.perf_counter() - started_s,
    )


def _write_shards(
    writer: ShardWriter,
    sources: tuple[Source, ...],
    spec: DataSpec,
    tokenizer: Tokenizer,
    *,
    fingerprint: str,
    earlier: Manifest | None,
) -> Manifest:
    known = KnownHashes(earlier)
    promised: frozenset[str] = frozenset()
    if earlier is not None and earlier.fingerprint == fingerprint:
        promised = frozenset(shard.key for shard in earlier.shards)
    shards = tuple(
        entry
        for files in plan_groups(sources, spec.shard_size_bytes)
        for entry in writer.entries_of(
            identify(files, spec, tokenizer.fingerprint, known), promised
        )
    )
    if not shards:
        raise CorpusError(", ".join(spec.sources), "the corpus is empty: no file holds any text")
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype_for(tokenizer.vocab_size),
        num_tokens=sum(shard.num_tokens for shard in shards),
        num_documents=sum(shard.num_documents for shard in shards),
        shards=shards,
    )


def _manifest_at(store: ObjectStore, key: str) -> Manifest | None:
    try:
        return load_manifest(store, key)
    except (NotFound, Corrupt):
        return None  # made again from the shards, which are still there


def _newest_manifest(store: ObjectStore, prefix: str) -> Manifest | None:
    """The manifest of inputs that are most likely close to these ones."""
    found = sorted(store.list(f"{prefix}/manifests/"), key=lambda info: info.modified_s)
    return _manifest_at(store, found[-1].key) if found else None
