"""Memory on its way: bodies that are sent without copies, answers read to where they belong."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import urllib3
from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
from botocore.response import StreamingBody
from urllib3.exceptions import ReadTimeoutError as Urllib3ReadTimeoutError
from urllib3.exceptions import SSLError

from perdure.storage.s3_client import COPY_SIZE_BYTES, SEND_SIZE_BYTES, Body, read_into


class Failing(io.RawIOBase):
    """A response's stream of a kind that must be copied, and that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self, _size: int = -1) -> bytes:
        raise self._error


def body_of(data: bytes, *, length: int) -> StreamingBody:
    raw: Any = urllib3.HTTPResponse(io.BytesIO(data), preload_content=False)
    return StreamingBody(raw, length)


def test_a_body_is_sent_in_large_pieces_of_the_memory_itself():
    memory = bytearray(3 * SEND_SIZE_BYTES + 5)
    body = Body(memoryview(memory))
    sent: list[Any] = [body.read(16 * 2**10) for _ in range(5)]
    assert [len(piece) for piece in sent] == [*[SEND_SIZE_BYTES] * 3, 5, 0]
    assert all(piece.obj is memory for piece in sent)


def test_a_body_starts_anew_for_another_try():
    body = Body(memoryview(b"0123456789"))
    assert bytes(body.read()) == b"0123456789"
    assert body.seek(4) == 4
    assert bytes(body.read()) == b"456789"
    assert body.seek(-2, io.SEEK_END) == 8
    out = bytearray(5)
    assert body.readinto(out) == 2
    assert out[:2] == b"89"


def test_a_stream_of_another_kind_is_copied():
    data = os.urandom(COPY_SIZE_BYTES + 7)
    outs = [bytearray(3), bytearray(len(data) - 3)]
    filled = read_into(body_of(data, length=len(data)), [memoryview(out) for out in outs])
    assert filled == len(data)
    assert b"".join(outs) == data


def test_a_body_shorter_than_what_is_asked_for_shows_how_much_came():
    out = bytearray(10)
    assert read_into(body_of(b"01234", length=5), [memoryview(out)]) == 5


def test_a_copied_body_that_breaks_off_is_an_error():
    with pytest.raises(IncompleteReadError):
        read_into(body_of(b"01234", length=10), [memoryview(bytearray(10))])


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (SSLError("bad record"), ResponseStreamingError),
        (Urllib3ReadTimeoutError(None, None, "late"), ReadTimeoutError),  # type: ignore[arg-type]
    ],
)
def test_what_breaks_a_body_is_an_error_of_botocore(raised, expected):
    stream: Any = Failing(raised)
    with pytest.raises(expected):
        read_into(StreamingBody(stream, 10), [memoryview(bytearray(10))])


def test_what_is_left_of_an_answer_is_not_taken_for_the_next(faulty, faulty_store):
    faulty.objects["/bucket/a"] = b"0123456789"  # this server does not look at ranges
    out = bytearray(4)
    faulty_store.get_into("a", memoryview(out))
    assert out == b"0123"
    assert faulty_store.get("a") == b"0123456789"
