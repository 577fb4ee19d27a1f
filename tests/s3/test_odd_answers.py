"""Answers of loaded stores: a failure with a status of success, and bodies that trickle."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from perdure.storage import s3_client
from perdure.storage.errors import Corrupt, ServerError
from perdure.storage.retry import Retry
from tests.s3.proxy import Answer, Trickle

MIB = 2**20


pytestmark = pytest.mark.parametrize("server", ["moto"], indirect=True)


@pytest.fixture
def pauses_s() -> list[float]:
    return []


@pytest.fixture
def retry(pauses_s: list[float]) -> Retry:
    return Retry(clock=lambda: 0.0, sleep=pauses_s.append)


@dataclass(frozen=True)
class FailureWithSuccess(Answer):
    """The status says that it was done, and the body that it was not."""

    status: int = 200
    code: str = "InternalError"


@pytest.mark.parametrize("code", ["InternalError", "SlowDown", "ServiceUnavailable"])
@pytest.mark.parametrize(
    ("method", "path", "size"),
    [
        ("POST", "uploadId=", 6 * MIB),
        ("POST", "uploads", 6 * MIB),
        ("PUT", "partNumber=2", 6 * MIB),
        ("PUT", "shard", 100),
    ],
    ids=["complete", "create", "part", "whole"],
)
def test_a_failure_with_a_status_of_success_is_asked_again_and_is_no_upload(
    proxy, open_store, retry, pauses_s, method, path, size, code
):
    data = os.urandom(size)
    store = open_store(retry=retry)
    proxy.inject(FailureWithSuccess(code=code), method=method, path=path, times=2)
    store.put("shard", data)
    assert len(proxy.struck) == len(pauses_s) == 2
    assert open_store(direct=True).get("shard") == data


@pytest.mark.parametrize("size", [6 * MIB, 100])
def test_an_upload_that_only_ever_fails_with_success_is_reported_as_a_failure(
    proxy, open_store, size
):
    store = open_store(retry=Retry(max_tries=3, sleep=lambda _s: None))
    method, path = ("POST", "uploadId=") if size > MIB else ("PUT", "shard")
    proxy.inject(FailureWithSuccess(), method=method, path=path, times=99)
    with pytest.raises(ServerError, match="InternalError"):
        store.put("shard", os.urandom(size))
    assert list(open_store(direct=True).list("")) == []


def test_a_conditional_put_that_fails_with_success_is_asked_again(
    proxy, open_store, retry, pauses_s
):
    store = open_store(retry=retry)
    assert store.has_conditional_put()
    proxy.inject(FailureWithSuccess(), method="PUT", path="manifest")
    store.put("manifest", b"{}", if_absent=True)
    assert len(pauses_s) == 1
    assert open_store(direct=True).get("manifest") == b"{}"


@pytest.mark.parametrize("after_bytes", [0, 5000, 2 * MIB])
@pytest.mark.parametrize("how", ["into", "whole"])
def test_a_trickling_answer_is_given_up_and_read_again(
    proxy, open_store, retry, pauses_s, monkeypatch, after_bytes, how
):
    monkeypatch.setattr(s3_client, "PACE_WINDOW_S", 0.3)
    data = os.urandom(3 * MIB)
    store = open_store(retry=retry)
    store.put("shard", data)
    proxy.inject(Trickle(after_bytes), method="GET", path="shard")
    if how == "into":
        out = bytearray(len(data))
        store.get_into("shard", memoryview(out))
    else:
        out = bytearray(store.get("shard"))
    assert out == data
    assert len(pauses_s) == len(proxy.struck) == 1


def test_an_object_that_is_shorter_than_asked_for_is_still_corrupt(open_store):
    store = open_store()
    store.put("shard", bytes(100))
    with pytest.raises(Corrupt):
        store.get_into("shard", memoryview(bytearray(200)))
    assert store.get("shard", start=90, length=20) == bytes(10)
    assert store.get("shard", start=300) == b""
