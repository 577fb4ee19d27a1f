"""One flipped bit of anything that a checkpoint is made of is found."""

from __future__ import annotations

import json

import pytest

from storage.checkpoint import CheckpointStore
from storage.errors import Corrupt
from storage.manifest import checksummed, parse_manifest, verified_document
from storage.share import parse_record, put_record
from tests.unit.storage.nodes import share_of, written


def flips(data: bytes):
    """The data with one bit flipped, each in its turn."""
    for number in range(8 * len(data)):
        changed = bytearray(data)
        changed[number // 8] ^= 1 << number % 8
        yield bytes(changed)


def test_a_sealed_document_is_json_and_comes_back():
    data = checksummed('{"step":5,"extra":{"x":[1,2]}}')
    assert json.loads(data)["step"] == 5
    assert verified_document(data, url="u") == b'{"step":5,"extra":{"x":[1,2]}}'


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"step":5}', b'{"xxh3_128":"0"}'])
def test_what_was_not_sealed_is_corrupt(data):
    with pytest.raises(Corrupt, match="u: not a document with its hash"):
        verified_document(data, url="u")


def test_a_flipped_bit_of_a_manifest_is_found(checkpoints, commit):
    commit(checkpoints, 10)
    data = checkpoints.store.get(checkpoints.key(10, "manifest.json"))
    for changed in flips(data):
        with pytest.raises(Corrupt):
            parse_manifest(changed, url="u")


def test_a_flipped_bit_of_a_share_record_is_found(checkpoints):
    put_record(checkpoints, written(share_of(10)))
    (info,) = checkpoints.store.list("runs/")
    for changed in flips(checkpoints.store.get(info.key)):
        with pytest.raises(Corrupt):
            parse_record(changed, url="u")


def test_a_flipped_bit_of_the_fence_is_found(checkpoints: CheckpointStore):
    checkpoints.fence(3, 2)
    key = f"runs/{checkpoints.run_id}/fence.json"
    data = checkpoints.store.get(key)
    for changed in flips(data):
        checkpoints.store.put(key, changed)
        with pytest.raises(Corrupt):
            checkpoints.read_fence()
