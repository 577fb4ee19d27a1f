"""What a store goes through: every fault here really happens, in front of a real server."""

from __future__ import annotations

import os
import random
import traceback
from functools import partial
from threading import Thread

import pytest

from perdure.storage.errors import (
    AccessDenied,
    NotFound,
    PreconditionFailed,
    TimedOut,
)
from perdure.storage.retry import Retry
from tests.s3.conftest import RGW
from tests.s3.proxy import Answer, Fault, InUpload, LostAnswer, Page, Reset, Stall
from tests.s3.servers import ACCESS_KEY, SECRET_KEY
from tests.waiting import PATIENCE_S, wait_for

pytestmark = pytest.mark.parametrize("server", [RGW], indirect=True)

MIB = 2**20


@pytest.fixture
def pauses_s() -> list[float]:
    """What `retry` slept between its tries, if sleeping were real."""
    return []


@pytest.fixture
def retry(pauses_s: list[float]) -> Retry:
    return Retry(clock=lambda: 0.0, sleep=pauses_s.append)


def test_a_gateway_killed_and_restarted_in_the_middle_of_an_upload_is_outlasted(
    server, proxy, open_store
):
    data = os.urandom(16 * MIB)
    store = open_store(retry=Retry(max_tries=12, base_s=0.1, cap_s=1.0))
    proxy.inject(
        InUpload(server.kill_gateway, after_bytes=2 * MIB), method="PUT", path="partNumber=2"
    )
    upload = Thread(target=store.put, args=("shard", data))
    upload.start()
    wait_for(lambda: proxy.struck, what="the second part is under way")
    num_requests = len(proxy.requests)
    wait_for(lambda: len(proxy.requests) > num_requests, what="it is retried")
    server.start_gateway()
    assert list(open_store(direct=True).list("")) == [], "nothing is visible before it is whole"
    upload.join()
    assert open_store(direct=True).get("shard") == data


def test_an_upload_that_a_dead_gateway_ends_leaves_no_half_of_an_object(server, proxy, open_store):
    store = open_store(retry=Retry(max_tries=2, base_s=0.01))
    proxy.inject(InUpload(server.kill_gateway, after_bytes=MIB), method="PUT", path="partNumber=3")
    try:
        with pytest.raises(TimedOut, match="shard: no answer"):
            store.put("shard", os.urandom(16 * MIB))
    finally:
        server.start_gateway()
    direct = open_store(direct=True)
    assert list(direct.list("")) == []
    with pytest.raises(NotFound):
        direct.stat("shard")
    # The parts are still there, until someone drops them: the age counts in whole seconds.
    wait_for(lambda: direct.abort_uploads("", 0.0) == 1, what="it is dropped")


def test_a_whole_object_cut_off_while_it_is_sent_is_not_published(server, proxy, open_store):
    store = open_store(retry=Retry(max_tries=1))
    store.put("a", b"old")
    proxy.inject(InUpload(server.kill_gateway, after_bytes=MIB), method="PUT")
    try:
        with pytest.raises(TimedOut):
            store.put("a", os.urandom(4 * MIB))
    finally:
        server.start_gateway()
    assert open_store(direct=True).get("a") == b"old"


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests")])
def test_a_storm_of_throttling_is_waited_out_by_every_part(
    proxy, open_store, retry, pauses_s, status, code
):
    data = os.urandom(16 * MIB)
    store = open_store(retry=retry)
    for number in range(1, 5):
        answer = Answer(status, code)
        proxy.inject(answer, method="PUT", path=f"partNumber={number}", times=4)
    store.put("shard", data)
    assert len(proxy.struck) == len(pauses_s) == 16
    assert open_store(direct=True).get("shard") == data
    # Each of the four waited 0.125 .. 0.25 s first and 1 .. 2 s at last.
    assert sorted(pauses_s)[3] <= 0.25
    assert sorted(pauses_s)[-4] >= 1.0


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (503, {"Retry-After": "7"}),
        (429, {"Retry-After": "7"}),
        # A time is read by the server's clock, however wrong ours is.
        (
            503,
            {
                "Retry-After": "Thu, 01 Jan 1970 00:00:07 GMT",
                "Date": "Thu, 01 Jan 1970 00:00:00 GMT",
            },
        ),
    ],
)
def test_a_pause_that_the_store_asks_for_is_kept(
    proxy, open_store, retry, pauses_s, status, headers
):
    proxy.inject(Answer(status, "SlowDown", headers), method="PUT", times=3)
    open_store(retry=retry).put("a", b"data")
    assert len(pauses_s) == 3
    assert all(7.0 < pause_s <= 7.0 + 1.0 for pause_s in pauses_s)
    assert len(set(pauses_s)) == 3, "a thousand ranks do not come back at the same moment"


@pytest.mark.parametrize("after_bytes", [0, 1000, 3 * MIB])
def test_an_answer_that_stalls_is_asked_for_again(proxy, open_store, retry, pauses_s, after_bytes):
    data = os.urandom(4 * MIB)
    store = open_store(retry=retry, read_timeout_s=1.5)
    store.put("a", data)
    proxy.inject(Stall(after_bytes), method="GET")
    out = bytearray(len(data))
    store.get_into("a", memoryview(out))
    assert out == data
    assert len(pauses_s) == len(proxy.struck) == 1


def test_an_upload_that_stalls_is_sent_again(proxy, open_store, retry, pauses_s):
    store = open_store(retry=retry, read_timeout_s=1.5)
    proxy.inject(InUpload(partial(proxy.released.wait, PATIENCE_S), after_bytes=1), method="PUT")
    store.put("a", bytes(MIB))
    assert len(pauses_s) == len(proxy.struck) == 1
    assert store.stat("a").size_bytes == MIB


def test_a_store_that_stays_silent_is_a_time_out(proxy, open_store):
    store = open_store(retry=Retry(max_tries=1), read_timeout_s=0.3)
    proxy.inject(InUpload(partial(proxy.released.wait, PATIENCE_S), after_bytes=1), method="PUT")
    with pytest.raises(TimedOut, match="Read timeout"):
        store.put("a", bytes(100))


@pytest.mark.parametrize("after_bytes", [0, 1, 3 * MIB])
def test_a_connection_reset_in_the_middle_of_a_range_costs_that_range_only(
    proxy, open_store, retry, pauses_s, after_bytes
):
    data = os.urandom(16 * MIB)
    store = open_store(retry=retry)
    store.put("shard", data)
    num_before = len(proxy.requests)
    proxy.inject(Reset(after_bytes), method="GET", path="shard")
    out = bytearray(len(data))
    store.get_into("shard", memoryview(out))
    assert out == data
    assert len(pauses_s) == len(proxy.struck) == 1
    assert len(proxy.requests) - num_before == 4 + 1


def test_internal_errors_are_asked_again(proxy, open_store, retry, pauses_s):
    store = open_store(retry=retry)
    for method in ("PUT", "GET", "HEAD", "DELETE"):
        proxy.inject(Answer(500, "InternalError"), method=method, times=2)
    store.put("a", b"data")
    assert store.get("a") == b"data"
    assert store.stat("a").size_bytes == 4
    store.delete("a")
    assert list(store.list("")) == []
    assert len(pauses_s) == len(proxy.struck) == 8


def test_an_answer_that_is_not_s3s_is_asked_for_again(proxy, open_store, retry, pauses_s):
    store = open_store(retry=retry)
    store.put("a", b"data")
    proxy.inject(Page(), method="GET", path="list-type")
    assert [info.key for info in store.list("")] == ["a"]
    assert len(pauses_s) == len(proxy.struck) == 1


@pytest.mark.parametrize(
    "wrong", [{"secret_key": "wrong-secret-key"}, {"access_key": "unknown-access-key"}]
)
def test_wrong_keys_are_reported_at_once_and_never_shown(open_store, retry, pauses_s, wrong):
    store = open_store(direct=True, retry=retry, **wrong)
    for use in (
        lambda: store.put("a", b"data"),
        lambda: store.get("a"),
        lambda: store.stat("a"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(AccessDenied) as raised:
            use()
        text = "".join(traceback.format_exception(raised.value))
        for key in (ACCESS_KEY, SECRET_KEY, *wrong.values()):
            assert key not in text
    assert pauses_s == []


def test_a_conditional_put_whose_answer_was_lost_is_a_success(proxy, open_store, retry, pauses_s):
    store = open_store(retry=retry)
    assert store.has_conditional_put()
    num_before = len(proxy.requests)
    proxy.inject(LostAnswer(), method="PUT", path="/a")
    store.put("a", b"ours", if_absent=True)
    assert proxy.struck == [LostAnswer()]
    assert len(pauses_s) == 1
    # Refused by the object of its own first try, which it then reads.
    assert [method for method, _ in proxy.requests[num_before:]] == ["PUT", "PUT", "GET"]
    with pytest.raises(PreconditionFailed):
        store.put("a", b"theirs", if_absent=True)
    assert open_store(direct=True).get("a") == b"ours"


def test_a_conditional_put_that_lost_and_whose_answer_was_lost_fails(
    proxy, open_store, retry, pauses_s
):
    open_store(direct=True).put("a", b"theirs", if_absent=True)
    store = open_store(retry=retry)
    assert store.has_conditional_put()
    proxy.inject(LostAnswer(), method="PUT", path="/a")
    with pytest.raises(PreconditionFailed):
        store.put("a", b"ours", if_absent=True)
    assert len(pauses_s) == len(proxy.struck) == 1
    assert open_store(direct=True).get("a") == b"theirs"


def test_a_completed_upload_whose_answer_was_lost_is_a_success(proxy, open_store, retry, pauses_s):
    data = os.urandom(6 * MIB)
    store = open_store(retry=retry)
    proxy.inject(LostAnswer(), method="POST", path="uploadId")
    store.put("shard", data)
    assert len(pauses_s) == len(proxy.struck) == 1
    assert store.get("shard") == data


def test_a_mixture_of_faults_loses_and_doubles_nothing(proxy, open_store, retry):
    rng = random.Random(1)  # noqa: S311 the same faults every time
    store = open_store(retry=retry, read_timeout_s=5.0)
    faults: list[Fault] = [Answer(503, "SlowDown"), Answer(500, "InternalError"), LostAnswer()]
    written: dict[str, bytes] = {}
    for number in range(16):
        key, data = f"shard-{number:02d}", os.urandom(rng.randrange(1, 200_000))
        for method in ("PUT", "GET"):
            proxy.inject(rng.choice([*faults, Reset(rng.randrange(1000))]), method=method)
        store.put(key, data, if_absent=number % 2 == 0)
        written[key] = data
        assert store.get(key) == data
    assert len(proxy.struck) == 32
    assert {info.key: store.get(info.key) for info in store.list("")} == written
