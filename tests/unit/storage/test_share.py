"""Shares of a checkpoint: what makes a whole, and what does not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.storage.checkpoint import shard_name
from perdure.storage.errors import Corrupt, NotFound
from perdure.storage.manifest import (
    Chunk,
    Manifest,
    TensorRecord,
    checksummed,
    parse_manifest,
    verified_document,
)
from perdure.storage.share import (
    SaveId,
    WrittenShare,
    delete_records,
    merge,
    parse_record,
    put_record,
    read_record,
    recorded_ranks,
)
from tests.unit.storage.nodes import share_of, written

OWNER = (3, 2)


def world(size: int, *, step: int = 10) -> list[WrittenShare]:
    return [written(share_of(step, rank=rank, world_size=size)) for rank in range(size)]


def changed(one: WrittenShare, **fields: Any) -> WrittenShare:
    of_save = {name: fields.pop(name) for name in SaveId.model_fields if name in fields}
    save_id = one.share.save_id.model_copy(update=of_save)
    share = one.share.model_copy(update={"save_id": save_id, **fields})
    return one.model_copy(update={"share": share})


def merged(shares: list[WrittenShare]) -> Manifest:
    return merge(shares, owner=OWNER, written_at_s=5.0)


@given(size=st.integers(1, 40), order=st.randoms(use_true_random=False))
def test_the_shares_of_all_ranks_in_any_order_make_the_manifest(size, order):
    shares = world(size)
    order.shuffle(shares)
    manifest = merged(shares)
    assert (manifest.placement, manifest.attempt, manifest.step) == (*OWNER, 10)
    assert manifest.world_size == size
    assert manifest.written_at_s == 5.0
    assert manifest.extra == {"step": 10}
    assert manifest.shards == {one.share.shard: one.record for one in shares}
    offsets = [chunk.offsets for chunk in manifest.tensors["weight"].chunks]
    assert offsets == [(rank, 0) for rank in range(size)]


def test_the_first_ranks_extra_is_the_checkpoints():
    shares = [changed(one, extra={"rank": one.share.rank}) for one in world(3)]
    assert merged(shares[::-1]).extra == {"rank": 0}


@given(size=st.integers(2, 8), data=st.data())
def test_a_rank_that_is_missing_or_there_twice_is_corrupt(size, data):
    shares = world(size)
    lost = data.draw(st.integers(0, size - 1))
    with pytest.raises(Corrupt, match="not one share of each"):
        merged(shares[:lost] + shares[lost + 1 :])
    twice = data.draw(st.integers(0, size - 1))
    with pytest.raises(Corrupt, match="not one share of each"):
        merged([*shares, shares[twice]])
    with pytest.raises(Corrupt, match="not one share of each"):
        merged([*shares[:lost], *shares[lost + 1 :], shares[lost - 1]])


@pytest.mark.parametrize(
    "foreign",
    [{"step": 11}, {"placement": 2}, {"attempt": 7}, {"world_size": 4}, {"run_id": "other"}],
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_share_of_another_save_is_corrupt(foreign, rank):
    shares = world(3)
    shares[rank] = changed(shares[rank], **foreign)
    with pytest.raises(Corrupt, match="not one share of each"):
        merged(shares)


@st.composite
def shardings(draw) -> tuple[tuple[int, ...], list[list[Chunk]]]:
    """A tensor cut into boxes along its axes, and the boxes dealt out to ranks."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        bounds = [0, *cuts, size]
        pieces = [(a, b - a) for a, b in itertools.pairwise(bounds)]
        boxes = [((*o, a), (*n, b)) for o, n in boxes for a, b in pieces]
    num_ranks = draw(st.integers(1, 4))
    dealt: list[list[Chunk]] = [[] for _ in range(num_ranks)]
    for number, (offsets, lengths) in enumerate(boxes):
        rank = draw(st.integers(0, num_ranks - 1))
        shard = shard_name(1, 1, rank)
        chunk = Chunk(offsets=offsets, lengths=lengths, shard=shard, key=f"w@{number}")
        dealt[rank].append(chunk)
    return shape, dealt


def sharded(shape: tuple[int, ...], dealt: list[list[Chunk]]) -> list[WrittenShare]:
    return [
        changed(
            one,
            tensors={"w": TensorRecord(dtype="F32", shape=shape, chunks=tuple(chunks))}
            if chunks
            else {},
        )
        for one, chunks in zip(world(len(dealt)), dealt, strict=True)
    ]


@given(shardings())
def test_any_way_of_cutting_a_tensor_over_the_ranks_makes_a_whole(sharding):
    shape, dealt = sharding
    manifest = merged(sharded(shape, dealt))
    assert manifest.tensors["w"].shape == shape
    assert set(manifest.tensors["w"].chunks) == {chunk for chunks in dealt for chunk in chunks}


@given(shardings(), st.data())
def test_a_chunk_that_is_missing_or_there_twice_is_corrupt(sharding, data):
    shape, dealt = sharding
    rank, at = data.draw(
        st.sampled_from([(r, i) for r, chunks in enumerate(dealt) for i in range(len(chunks))])
    )
    twice = [list(chunks) for chunks in dealt]
    twice[rank].append(dealt[rank][at])
    with pytest.raises(Corrupt):
        merged(sharded(shape, twice))
    if sum(map(len, dealt)) > 1:
        missing = [list(chunks) for chunks in dealt]
        del missing[rank][at]
        with pytest.raises(Corrupt):
            merged(sharded(shape, missing))


def test_an_overlap_that_makes_up_for_a_hole_is_corrupt():
    halves = [
        Chunk(offsets=(0,), lengths=(4,), shard=shard_name(1, 1, rank), key="w") for rank in (0, 1)
    ]
    with pytest.raises(Corrupt):
        merged(sharded((8,), [[halves[0]], [halves[1]]]))


@pytest.mark.parametrize(
    "other", [{"dtype": "F64", "shape": (2, 64)}, {"dtype": "U8", "shape": (4, 64)}]
)
def test_ranks_that_disagree_about_a_tensor_are_corrupt(other):
    first, second = world(2)
    part = second.share.tensors["weight"].model_copy(update=other)
    with pytest.raises(Corrupt, match="weight: ranks saved it with different types or shapes"):
        merged([first, changed(second, tensors={"weight": part})])


def test_records_are_found_by_save_and_rank(checkpoints):
    of_run = [changed(one, run_id=checkpoints.run_id) for one in world(3) + world(3, step=20)]
    for one in of_run[:2] + of_run[4:]:
        put_record(checkpoints, one)
    save = of_run[0].share.save_id
    assert recorded_ranks(checkpoints, save) == {0, 1}
    assert read_record(checkpoints, save, 1) == of_run[1]
    with pytest.raises(NotFound):
        read_record(checkpoints, save, 2)
    delete_records(checkpoints, save, range(3))
    assert recorded_ranks(checkpoints, save) == set()
    assert recorded_ranks(checkpoints, of_run[4].share.save_id) == {1, 2}


def test_another_attempts_record_does_not_count(checkpoints):
    put_record(checkpoints, changed(world(1)[0], run_id=checkpoints.run_id))
    later = share_of(10, owner=(1, 2), run_id=checkpoints.run_id)
    assert recorded_ranks(checkpoints, later.save_id) == set()


@pytest.mark.parametrize("text", ["", "{}", '{"share":null}'])
def test_a_document_that_is_no_record_or_is_not_checksummed_is_corrupt(checkpoints, text):
    key = checkpoints.key(10, "p0001-a0001-rank00000.json")
    checkpoints.store.put(key, text.encode())
    with pytest.raises(Corrupt, match="not a document with its hash at the end"):
        read_record(checkpoints, share_of(10).save_id, 0)
    checkpoints.store.put(key, checksummed(text or "{}"))
    with pytest.raises(Corrupt, match="not the record of a share"):
        read_record(checkpoints, share_of(10).save_id, 0)


@pytest.mark.parametrize(
    "foreign", [{"rank": 1}, {"step": 20}, {"attempt": 2}, {"run_id": "other"}, {"world_size": 9}]
)
def test_a_record_of_something_else_in_its_place_is_corrupt(checkpoints, foreign):
    own = changed(world(1)[0], run_id=checkpoints.run_id)
    key = checkpoints.key(10, "p0001-a0001-rank00000.json")
    checkpoints.store.put(key, checksummed(changed(own, **foreign).model_dump_json()))
    with pytest.raises(Corrupt, match="is of another share"):
        read_record(checkpoints, own.share.save_id, 0)


def test_numbers_that_json_does_not_know_come_back(checkpoints):
    one = changed(world(1)[0], run_id=checkpoints.run_id, extra={"loss": float("inf")})
    put_record(checkpoints, one)
    assert read_record(checkpoints, one.share.save_id, 0).share.extra == {"loss": float("inf")}


STORED = (
    '{"share":{"run_id":"run","placement":3,"attempt":2,"step":10,"rank":1,"world_size":2,'
    '"size_bytes":4,"tensors":{"weight":{"dtype":"U8","shape":[2,4],"chunks":[{"offsets":[1,0],'
    '"lengths":[1,4],"shard":"p0003-a0002-rank00001.safetensors","key":"weight"}]}},'
    '"extra":{"step":10},"attachments":{},"first_file":0},"record":{"size_bytes":4,'
    '"xxh3_128":"HASH"}}'
)


def test_a_record_has_the_fields_of_its_save_beside_the_others():
    one = written(share_of(10, rank=1, world_size=2, owner=(3, 2), size_bytes=4))
    stored = STORED.replace("HASH", one.record.xxh3_128)
    assert parse_record(checksummed(stored), url="u") == one
    assert json.loads(one.model_dump_json()) == json.loads(stored)


def flips(data: bytes):
    """The data with one bit flipped, each in its turn."""
    for number in range(8 * len(data)):
        changed = bytearray(data)
        changed[number // 8] ^= 1 << number % 8
        yield bytes(changed)


def test_a_checksummed_document_is_json_and_comes_back():
    data = checksummed('{"step":5,"extra":{"x":[1,2]}}')
    assert json.loads(data)["step"] == 5
    assert verified_document(data, url="u") == b'{"step":5,"extra":{"x":[1,2]}}'


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[1]", b'{"step":5}', b'{"xxh3_128":"0"}'])
def test_what_was_not_checksummed_is_corrupt(data):
    with pytest.raises(Corrupt, match="u: not a document with its hash"):
        verified_document(data, url="u")


def test_a_flipped_bit_of_a_manifest_a_share_record_or_the_fence_is_found(checkpoints, commit):
    commit(checkpoints, 10)
    put_record(checkpoints, changed(world(1)[0], run_id=checkpoints.run_id))
    checkpoints.fence(3, 2)
    fence = f"runs/{checkpoints.run_id}/fence.json"
    readers: dict[str, Callable[[bytes], object]] = {
        checkpoints.key(10, "manifest.json"): lambda data: parse_manifest(data, url="u"),
        checkpoints.key(10, "p0001-a0001-rank00000.json"): lambda data: parse_record(data, url="u"),
        fence: lambda data: (checkpoints.store.put(fence, data), checkpoints.read_fence()),
    }
    for key, read in readers.items():
        for damaged in flips(checkpoints.store.get(key)):
            with pytest.raises(Corrupt):
                read(damaged)
