"""What is asked of stores beside the contract that tests/s3 has for every kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from storage.errors import Corrupt, PreconditionFailed
from storage.objects import ObjectStore, check_key

ESCAPES = ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\0b", ".", ".."]


@pytest.mark.parametrize("kind", ["local", "faulty_store"])  # moto's condition is not atomic
def test_exactly_one_of_racing_writers_wins(request: pytest.FixtureRequest, kind: str) -> None:
    store: ObjectStore = request.getfixturevalue(kind)
    num_writers = 8
    barrier = Barrier(num_writers)

    def write(number: int) -> bool:
        barrier.wait()
        try:
            store.put("folder/claim", str(number).encode() * 1000, if_absent=True)
        except PreconditionFailed:
            return False
        return True

    with ThreadPoolExecutor(num_writers) as pool:
        won = list(pool.map(write, range(num_writers)))
    assert won.count(True) == 1
    assert store.get("folder/claim") == str(won.index(True)).encode() * 1000


def test_dots_inside_names_are_fine() -> None:
    assert check_key("run-1.2/..a/b..c") == "run-1.2/..a/b..c"


def test_addresses_name_the_object(store: ObjectStore) -> None:
    assert store.url("a/b").endswith("/a/b")
    assert store.url("a/b").startswith(("file:///", "s3://bucket-"))


def test_one_read_fills_pieces_of_memory_one_after_the_other(store: ObjectStore) -> None:
    store.put("a", bytes(range(100)))
    for sizes in ((3, 0, 20, 1), (24,)):
        outs = [bytearray(size) for size in sizes]
        store.get_scattered("a", [memoryview(out) for out in outs], start=50)
        assert b"".join(outs) == bytes(range(50, 74))


def test_a_read_of_pieces_refuses_an_object_that_ends_before(store: ObjectStore) -> None:
    store.put("a", bytes(100))
    for start in (90, 100, 200):
        with pytest.raises(Corrupt, match="ends"):
            store.get_scattered("a", [memoryview(bytearray(8))] * 2, start=start)
