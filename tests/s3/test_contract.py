"""The contract of ObjectStore, the same on every kind of store there is."""

from __future__ import annotations

import os

import pytest

from perdure.storage.errors import Corrupt, NotFound, PreconditionFailed
from perdure.storage.objects import check_key
from perdure.storage.s3 import S3Store
from tests.s3.conftest import EVERY_KIND
from tests.unit.storage.stores import PART_SIZE_BYTES, race

pytestmark = pytest.mark.parametrize("server", EVERY_KIND, indirect=True)

MIB = 2**20
ESCAPES = ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\0b", ".", ".."]
ODD_KEYS = [
    "with space",
    "plus+and%2Bcode",
    "query?a=b&c=d#e",
    "quotes'\"<&>",
    "colon:semi;comma,at@",
    "brackets[1](2){3}",
    "tilde~star*dollar$",
    "..dots../...",
    "gr\u00f6\u00dfe/\u6b65\u9aa4",
    "back\\slash",
    "a" * 200 + "/" + "b" * 200,
]


def test_what_was_put_is_what_comes_back(store):
    store.put("a/b", b"0123456789")
    assert store.get("a/b") == b"0123456789"
    assert store.get("a/b", start=3) == b"3456789"
    assert store.get("a/b", start=3, length=2) == b"34"
    assert store.get("a/b", length=0) == b""
    assert store.get("a/b", start=8, length=5) == b"89"
    assert store.get("a/b", start=10, length=5) == b""
    assert store.get("a/b", start=99) == b""


def test_the_time_of_a_store_is_by_the_clock_of_its_objects(store):
    before_s = store.now_s()
    store.put("a", b"1")
    # Either may be in whole seconds.
    assert before_s <= store.stat("a").modified_s <= store.now_s() + 1.0


def test_put_replaces(store):
    store.put("a", b"first, and longer")
    etag = store.stat("a").etag
    store.put("a", b"second")
    assert store.get("a") == b"second"
    assert store.stat("a").etag != etag


def test_empty_objects_are_objects(store):
    store.put("a", b"")
    assert store.get("a") == b""
    assert store.get("a", length=8) == b""
    assert store.get("a", start=3, length=8) == b""
    store.get_into("a", memoryview(bytearray()))
    assert store.stat("a").size_bytes == 0
    assert [info.size_bytes for info in store.list("")] == [0]


@pytest.mark.parametrize("size_bytes", [PART_SIZE_BYTES, PART_SIZE_BYTES + 1, 16 * MIB + 3])
def test_large_objects_go_and_come_in_parts(store, size_bytes):
    data = os.urandom(size_bytes)
    store.put("shard", memoryview(data))
    assert store.stat("shard").size_bytes == size_bytes
    out = bytearray(size_bytes)
    store.get_into("shard", memoryview(out))
    assert out == data
    middle = bytearray(size_bytes - 2 * 777)
    store.get_into("shard", memoryview(middle), start=777)
    assert middle == data[777:-777]
    assert store.get("shard", start=size_bytes - 5, length=99) == data[-5:]


def test_what_is_not_there_is_not_found(store):
    for read in (
        lambda: store.get("no/such"),
        lambda: store.get("no/such", length=0),
        lambda: store.stat("no/such"),
        lambda: store.get_into("no/such", memoryview(bytearray(1))),
    ):
        with pytest.raises(NotFound, match="no/such"):
            read()
    assert list(store.list("no/")) == []
    store.delete("no/such")


def test_listing_is_by_prefix_and_in_key_order(store):
    for key in ("run/b", "run/a/z", "run/a-1", "runner", "other"):
        store.put(key, key.encode())
    assert [info.key for info in store.list("run/")] == ["run/a-1", "run/a/z", "run/b"]
    assert [info.key for info in store.list("run/a")] == ["run/a-1", "run/a/z"]
    assert [info.key for info in store.list("run")][-1] == "runner"
    assert len(list(store.list(""))) == 5
    assert next(iter(store.list("runner"))).size_bytes == 6


def test_listing_goes_through_all_pages(store, monkeypatch):
    if not isinstance(store, S3Store):
        pytest.skip("a folder is listed at once")
    keys = [f"many/{number:02d}" for number in range(7)]
    for key in keys:
        store.put(key, b"")
    client = store._client()
    list_page = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **a: list_page(MaxKeys=3, **a))
    assert [info.key for info in store.list("many/")] == keys


def test_a_listing_and_a_stat_agree(store):
    store.put("a/b", b"data")
    (listed,) = store.list("a/")
    stated = store.stat("a/b")
    assert (listed.key, listed.size_bytes, listed.etag) == (
        stated.key,
        stated.size_bytes,
        stated.etag,
    )
    assert abs(listed.modified_s - stated.modified_s) <= 1.0


@pytest.mark.parametrize("key", ODD_KEYS)
def test_odd_keys_come_back_as_they_are_and_are_gone_once_deleted(store, key):
    store.put(key, key.encode())
    assert store.get(key) == key.encode()
    assert [info.key for info in store.list("")] == [key]
    assert store.stat(key).key == key
    store.delete(key)
    assert list(store.list("")) == []
    with pytest.raises(NotFound):
        store.get(key)


def test_if_absent_publishes_once(store):
    store.put("a", b"first", if_absent=True)
    with pytest.raises(PreconditionFailed, match="a: "):
        store.put("a", b"second", if_absent=True)
    assert store.get("a") == b"first"
    assert [info.key for info in store.list("")] == ["a"]
    store.delete("a")
    store.put("a", b"third", if_absent=True)
    assert store.get("a") == b"third"


def test_exactly_one_of_racing_writers_wins(request, store):
    if "moto" in request.node.callspec.id:
        pytest.skip("moto looks and writes in two steps")
    race([store] * 8, "folder/claim")
    assert [info.key for info in store.list("")] == ["folder/claim"]


def test_keys_and_prefixes_that_leave_the_address_are_refused(store):
    for key in ESCAPES:
        for use in (lambda key: store.put(key, b""), store.get, store.stat, store.delete):
            with pytest.raises(ValueError, match="not a key"):
                use(key)
    for prefix in ("../", "/", "a/../../"):
        with pytest.raises(ValueError, match="not a key"):
            list(store.list(prefix))


def test_one_read_fills_pieces_of_memory_one_after_the_other(store):
    store.put("a", bytes(range(100)))
    for sizes in ((3, 0, 20, 1), (24,)):
        outs = [bytearray(size) for size in sizes]
        store.get_scattered("a", [memoryview(out) for out in outs], start=50)
        assert b"".join(outs) == bytes(range(50, 74))
    out = bytearray(20)
    store.get_into("a", memoryview(out), start=50)
    assert bytes(out) == bytes(range(50, 70))


def test_a_read_into_memory_refuses_an_object_that_ends_before(store):
    store.put("a", bytes(100))
    for start in (90, 100, 200):
        with pytest.raises(Corrupt, match="ends"):
            store.get_into("a", memoryview(bytearray(20)), start=start)
        with pytest.raises(Corrupt, match="ends"):
            store.get_scattered("a", [memoryview(bytearray(8))] * 2, start=start)


def test_dots_inside_names_are_fine(store):
    assert store.url("run-1.2/..a/b..c").endswith("/run-1.2/..a/b..c")
    assert check_key("run-1.2/..a/b..c") == "run-1.2/..a/b..c"
