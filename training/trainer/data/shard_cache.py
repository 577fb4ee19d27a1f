"""Which shards in the store are intact, without reading those that did not change.

A cache beside the manifests holds size, version and time of every shard that was written or
hashed; a shard with the same ones in a listing is not read again. Without the cache every shard
is hashed once. Sizes are bytes.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.objects import ObjectInfo, ObjectStore
from perdure.training.trainer.data.manifest import Shard, hash_object


class ShardCache:
    """The shards below one prefix of a store, as one listing shows them.

    Raises:
        StorageError: the store failed.
    """

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._folder = f"{prefix}/shards/"
        self._record_key = f"{prefix}/verified.json"
        self._listed = self._list()
        self._record = self._load()
        self._saved = dict(self._record)
        self._damaged: set[str] = set()
        self._written: set[str] = set()

    def is_intact(self, shard: Shard) -> bool:
        """Whether the shard is there with the recorded content; reads it if it looks new.

        Raises:
            StorageError: the store failed.
        """
        version = self._listed.get(shard.key)
        if shard.key in self._damaged or version is None or version[0] != shard.size_bytes:
            return False
        if self._record.get(shard.key) == version:
            return True
        try:
            intact = hash_object(self._store, shard.key, shard.size_bytes) == shard.xxh3_128
        except (Corrupt, NotFound):
            intact = False
        if intact:
            self._record[shard.key] = version
        else:
            self._damaged.add(shard.key)
        return intact

    def put(self, key: str, data: memoryview) -> None:
        """Write a shard, which then counts as intact.

        Raises:
            StorageError: the store failed.
        """
        self._store.put(key, data)
        self._written.add(key)

    def save(self) -> None:
        """Publish the record if it changed.

        Raises:
            StorageError: the store failed.
        """
        if self._written:
            # A listing and a stat may differ in the resolution of times: always listings.
            self._listed = self._list()
            self._record.update(
                {key: self._listed[key] for key in self._written if key in self._listed}
            )
        self._record = {
            key: version for key, version in self._record.items() if key in self._listed
        }
        if self._record != self._saved:
            self._store.put(self._record_key, json.dumps(self._record).encode())
            self._saved = dict(self._record)

    def _list(self) -> dict[str, list[Any]]:
        return {info.key: _version(info) for info in self._store.list(self._folder)}

    def _load(self) -> dict[str, list[Any]]:
        try:
            record = from_json(self._store.get(self._record_key))
        except (NotFound, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def _version(info: ObjectInfo) -> list[Any]:
    return [info.size_bytes, info.etag, info.modified_s]
