"""The shards of one group of corpus files: reused, mended or written. Sizes are bytes.

Each shard is published with a record beside it, written after it: a run that was killed goes on
behind its last record. Documents are cut into shards by a rule that depends on the documents
alone, so a damaged shard is written again as it was, without touching its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from pydantic import ValidationError

from storage.errors import NotFound
from storage.objects import ObjectStore
from training.trainer.data.documents import ReadStats, documents_of
from training.trainer.data.groups import Group
from training.trainer.data.manifest import Record, ShardEntry, ShardRecord, dtype_for
from training.trainer.data.source import CorpusError
from training.trainer.data.spec import MIB, DataSpec
from training.trainer.data.tokenizer import Tokenizer
from training.trainer.data.verified import StoreVerifier

BATCH_BYTES = MIB  # enough for a tokenizer that works in parallel, little beside a shard
MAX_BLOCK_BYTES = MIB


class PartRecord(Record):
    """What lies beside a shard: the shard itself, and whether it ends its group."""

    shard: ShardRecord
    is_last: bool


@dataclass(slots=True)
class Tally:
    """Shards by what became of them; damaged ones are among the written."""

    written: int = 0
    reused: int = 0
    damaged: int = 0


class ShardWriter:
    """Brings the shards of groups into the store.

    Args:
        spec: text field and shard size.
        tokenizer: makes the ids.
        store: where the shards go.
        prefix: below which they go.
        verifier: tells which of the shards there are intact.
        log: takes one line per shard written.
    """

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: Tokenizer,
        store: ObjectStore,
        *,
        prefix: str,
        verifier: StoreVerifier,
        log: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._store = store
        self._prefix = prefix
        self._verifier = verifier
        self._log = log
        self._dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder("<")
        self._eos = np.array([tokenizer.eos_id], dtype=self._dtype).tobytes()
        self.tally = Tally()

    def entries_of(self, group: Group, promised: frozenset[str]) -> Iterator[ShardEntry]:
        """The group's shards in order, without those that have no token.

        Args:
            group: the files.
            promised: keys that the manifest of these inputs names; a missing one is damage.

        Raises:
            CorpusError: a file is not what its suffix says, or changed meanwhile.
        """
        reader = _GroupReader(group, self._spec)
        part, first_document, is_last = 0, 0, False
        while not is_last:
            name = f"{self._prefix}/shards/{group.fingerprint}-{part:05d}"
            record = self._stored(name)
            if record is not None and self._verifier.is_intact(record.shard):
                self.tally.reused += 1
            else:
                self.tally.damaged += record is not None or _shard_key(name) in promised
                reader.skip_to(first_document)
                record = self._write(reader, name)
            if record.shard.num_tokens:
                yield ShardEntry(
                    **record.shard.model_dump(),
                    sources_fingerprint=group.fingerprint,
                    sources=group.records,
                )
            part, is_last = part + 1, record.is_last
            first_document += record.shard.num_documents

    def _stored(self, name: str) -> PartRecord | None:
        try:
            return PartRecord.model_validate_json(self._store.get(_record_key(name)))
        except (NotFound, ValidationError):
            return None  # written again, with its shard

    def _write(self, reader: _GroupReader, name: str) -> PartRecord:
        data = bytearray()
        num_documents = num_undecodable = 0
        for batch in reader.read_part():
            for ids in self._tokenizer.encode_batch([document.text for document in batch]):
                data += ids.astype(self._dtype).tobytes() + self._eos
            num_documents += len(batch)
            num_undecodable += sum(document.is_undecodable for document in batch)
        reader.check_unchanged()
        shard = ShardRecord(
            key=_shard_key(name),
            num_tokens=len(data) // self._dtype.itemsize,
            size_bytes=len(data),
            xxh3_128=xxhash.xxh3_128_hexdigest(data),
            num_documents=num_documents,
            num_undecodable=num_undecodable,
        )
        record = PartRecord(shard=shard, is_last=reader.is_exhausted)
        if data:
            self._store.put(shard.key, memoryview(data))
            self._verifier.trust(shard)
        self._store.put(_record_key(name), record.model_dump_json().encode())
        self.tally.written += 1
        self._log(f"wrote {shard.key}: {shard.num_tokens} tokens of {num_documents} documents")
        return record


@dataclass(frozen=True, slots=True)
class _Document:
    text: str
    is_undecodable: bool


class _GroupReader:
    """The documents of a group, forward only, read when they are asked for."""

    def __init__(self, group: Group, spec: DataSpec) -> None:
        self._group = group
        self._spec = spec
        self._documents = self._read()
        self._num_taken = 0
        self._ahead: list[_Document] = []

    @property
    def is_exhausted(self) -> bool:
        """Whether no document is left."""
        if not self._ahead:
            self._ahead = [document for document in [next(self._documents, None)] if document]
        return not self._ahead

    def skip_to(self, first_document: int) -> None:
        """Leave out documents up to the one of this number, counted from 0 in the group."""
        while self._num_taken < first_document and not self.is_exhausted:
            self._take()

    def read_part(self) -> Iterator[list[_Document]]:
        """The documents of one shard, in batches: until the shard size is reached."""
        limit = self._spec.shard_size_bytes
        part_bytes = 0
        while part_bytes < limit and not self.is_exhausted:
            batch: list[_Document] = []
            batch_bytes = 0
            while batch_bytes < min(BATCH_BYTES, limit - part_bytes) and not self.is_exhausted:
                batch.append(self._take())
                batch_bytes += len(batch[-1].text.encode("utf-8"))
            part_bytes += batch_bytes
            yield batch

    def check_unchanged(self) -> None:
        """Make sure that the checksums that name the group are those of what was read.

        Raises:
            CorpusError: a file changed.
        """
        for source in self._group.sources:
            if source.has_changed():
                raise CorpusError(source.path, "changed while it was being prepared; run it again")

    def _take(self) -> _Document:
        self._num_taken += 1
        return self._ahead.pop()

    def _read(self) -> Iterator[_Document]:
        stats = ReadStats()
        block_bytes = min(MAX_BLOCK_BYTES, self._spec.shard_size_bytes)
        for source in self._group.sources:
            texts = documents_of(
                source, self._spec.text_field, block_bytes=block_bytes, stats=stats
            )
            for text in texts:
                yield _Document(text, is_undecodable=stats.num_undecodable > 0)
                stats.num_undecodable = 0


def _shard_key(name: str) -> str:
    return f"{name}.bin"


def _record_key(name: str) -> str:
    return f"{name}.json"
