"""S3Store: parts, ranges, retries, and which answers are worth a retry."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.exceptions import ClientError, ReadTimeoutError
from pydantic import SecretStr

from perdure.storage import s3 as s3_module
from perdure.storage.errors import (
    AccessDenied,
    NotFound,
    PermanentError,
    PreconditionFailed,
    ServerError,
    StorageError,
    Throttled,
    TimedOut,
    TransientError,
)
from perdure.storage.retry import Retry
from perdure.storage.s3 import S3Store
from perdure.storage.s3_client import fold
from perdure.storage.s3_options import S3Options
from tests.unit.storage.conftest import REFUSALS, _Handler
from tests.unit.storage.stores import race

MIB = 2**20
HOUR_S = 3600.0


def random_bytes(size_bytes: int) -> bytes:
    return os.urandom(1024) * (size_bytes // 1024) + os.urandom(size_bytes % 1024)


def refused(operation: str, status: int, code: str) -> ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": "no"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(response, operation)


def watch_calls(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the requests that `store` sends from now on."""
    sent: list[str] = []
    client = store._client()
    send = client._make_api_call

    def watched(operation: str, arguments: dict[str, Any]) -> Any:
        sent.append(operation)
        return send(operation, arguments)

    monkeypatch.setattr(client, "_make_api_call", watched)
    return sent


@pytest.mark.parametrize("size_bytes", [5 * MIB, 5 * MIB + 1, 16 * MIB + 3])
def test_large_objects_take_one_request_for_each_part(s3, monkeypatch, size_bytes):
    data = random_bytes(size_bytes)
    sent = watch_calls(s3, monkeypatch)
    s3.put("shard", memoryview(data))
    num_parts = -(-size_bytes // (5 * MIB)) if size_bytes > 5 * MIB else 0
    assert sent.count("UploadPart") == num_parts
    out = bytearray(size_bytes)
    s3.get_into("shard", memoryview(out))
    assert out == data
    assert sent.count("GetObject") == max(1, num_parts)


def test_a_failed_part_aborts_the_upload_and_nothing_appears(s3, monkeypatch):
    client = s3._client()
    upload_part = client.upload_part

    def failing(**arguments: Any) -> Any:
        if arguments["PartNumber"] == 2:
            raise refused("UploadPart", 403, "AccessDenied")
        return upload_part(**arguments)

    monkeypatch.setattr(client, "upload_part", failing)
    with pytest.raises(AccessDenied, match="UploadPart"):
        s3.put("shard", bytes(11 * MIB))
    assert list(s3.list("")) == []
    assert "Uploads" not in client.list_multipart_uploads(Bucket=s3._bucket)


def test_a_completed_upload_whose_answer_was_lost_is_a_success(s3, monkeypatch):
    monkeypatch.setattr(s3, "_retry", Retry(sleep=lambda _: None))
    client = s3._client()
    complete = client.complete_multipart_upload
    num_calls = 0

    def losing(**arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:  # moto forgives a second completion; real stores forget the upload
            raise refused("CompleteMultipartUpload", 404, "NoSuchUpload")
        complete(**arguments)
        raise ReadTimeoutError(endpoint_url="http://s3")

    monkeypatch.setattr(client, "complete_multipart_upload", losing)
    data = random_bytes(6 * MIB)
    s3.put("shard", data)
    assert num_calls == 2
    assert s3.get("shard") == data


def test_a_conditional_put_is_never_sent_in_parts(s3):
    s3.put("manifest", bytes(6 * MIB), if_absent=True)
    assert s3.stat("manifest").size_bytes == 6 * MIB
    assert "-" not in s3.stat("manifest").etag, "the mark of parts"
    with pytest.raises(PreconditionFailed):
        s3.put("manifest", bytes(7 * MIB), if_absent=True)


def test_a_conditional_put_beyond_one_request_is_refused(s3, monkeypatch):
    monkeypatch.setattr(s3_module, "MAX_PUT_BYTES", 3)
    with pytest.raises(ValueError, match="if_absent with 4 bytes: one request takes 3"):
        s3.put("manifest", b"four", if_absent=True)


def test_stores_of_other_prefixes_are_apart(s3):
    other = S3Store(s3._bucket, "team/run", options=s3._options)
    s3.put("a", b"1")
    assert list(other.list("")) == []
    assert s3.url("a") == f"s3://{s3._bucket}/team/runs/a"


def test_a_store_that_honours_conditions_is_recognised_once(s3, monkeypatch):
    sent = watch_calls(s3, monkeypatch)
    assert s3.has_conditional_put()
    assert s3.has_conditional_put()
    assert sent == ["PutObject", "PutObject"]
    assert list(s3.list("")) == [], "the probe is not listed"


@pytest.mark.parametrize("answer", ["ignored", "NotImplemented"])
def test_a_store_without_conditions_is_recognised(s3, monkeypatch, answer):
    client = s3._client()
    put = client.put_object

    def without(**arguments: Any) -> Any:
        if arguments.pop("IfNoneMatch", None) and answer != "ignored":
            raise refused("PutObject", 501, answer)
        return put(**arguments)

    monkeypatch.setattr(client, "put_object", without)
    assert not s3.has_conditional_put()
    s3.put("a", b"first", if_absent=True)
    with pytest.raises(PreconditionFailed, match="a: exists already"):
        s3.put("a", b"second", if_absent=True)
    assert [info.key for info in s3.list("")] == ["a"], "no claim is listed"
    assert s3.get("a") == b"first"


def test_the_folder_of_the_claims_is_no_place_for_objects(s3):
    assert s3.has_conditional_put()
    assert list(s3.list(".claims/")) == list(s3.list(".cl")) == []
    for use in (lambda key: s3.put(key, b""), s3.get, s3.stat, s3.delete):
        with pytest.raises(ValueError, match="the store's own"):
            use(".claims/probe")
    above = S3Store(s3._bucket, options=s3._options)
    assert list(above.list("")) == [], "nor does a store further up show it"


def test_a_store_that_gives_no_time_cannot_have_claims(s3, monkeypatch):
    client = s3._client()
    put, list_page = client.put_object, client.list_objects_v2

    def without_date(**arguments: Any) -> Any:
        page = list_page(**arguments)
        del page["ResponseMetadata"]["HTTPHeaders"]["date"]
        return page

    def without_condition(**arguments: Any) -> Any:
        arguments.pop("IfNoneMatch", None)
        return put(**arguments)

    monkeypatch.setattr(client, "put_object", without_condition)
    monkeypatch.setattr(client, "list_objects_v2", without_date)
    with pytest.raises(PermanentError, match="no Date"):
        s3.put("a", b"ours", if_absent=True)
    assert list(s3.list("")) == []


def test_a_refused_probe_is_an_error_and_is_sent_again(faulty, faulty_store):
    faulty.faults[:] = ["denied"]
    with pytest.raises(AccessDenied):
        faulty_store.put("a", b"ours", if_absent=True)
    faulty_store.put("a", b"ours", if_absent=True)
    assert faulty.objects["/bucket/a"] == b"ours"


def test_a_forked_child_makes_its_own_connections(s3, monkeypatch):
    ours = s3._client()
    assert s3._client() is ours
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert s3._client() is not ours


def test_a_missing_bucket_is_not_an_empty_one(s3):
    missing = S3Store("no-such-bucket", options=s3._options)
    with pytest.raises(PermanentError, match="NoSuchBucket") as raised:
        missing.get("a")
    assert not isinstance(raised.value, NotFound)
    with pytest.raises(PermanentError, match="NoSuchBucket"):
        list(missing.list(""))


def test_throttling_is_waited_out(faulty, faulty_store, pauses_s):
    faulty.faults[:] = ["slow_down"] * 3
    faulty_store.put("a", b"data")
    assert faulty.objects == {"/bucket/a": b"data"}
    assert faulty.requests == ["PUT"] * 4
    assert len(pauses_s) == 3
    assert all(later > earlier / 2 for earlier, later in pairwise(pauses_s))


def test_throttling_without_end_is_given_up(faulty, faulty_store, pauses_s):
    faulty.faults[:] = ["slow_down"] * 100
    with pytest.raises(Throttled, match="s3://bucket/a: PutObject answered 503 SlowDown"):
        faulty_store.put("a", b"data")
    assert len(faulty.requests) == Retry().max_tries
    assert len(pauses_s) == Retry().max_tries - 1


def test_a_refusal_is_not_repeated(faulty, faulty_store, pauses_s):
    faulty.faults[:] = ["denied"]
    with pytest.raises(AccessDenied, match="403 AccessDenied"):
        faulty_store.put("a", b"data")
    assert faulty.requests == ["PUT"]
    assert pauses_s == []


@pytest.mark.parametrize(
    ("fault", "requests"), [("answer_lost", ["PUT", "PUT", "GET"]), ("conflict", ["PUT", "PUT"])]
)
def test_a_conditional_put_without_an_answer_or_in_conflict_is_sent_again(
    faulty, faulty_store, fault, requests
):
    assert faulty_store.has_conditional_put()
    faulty.requests.clear()
    faulty.faults[:] = [fault]
    faulty_store.put("a", b"ours", if_absent=True)
    assert faulty.objects["/bucket/a"] == b"ours"
    assert faulty.requests == requests


def test_a_conditional_put_that_lost_to_another_during_its_retry_fails(faulty, faulty_store):
    assert faulty_store.has_conditional_put()
    faulty.objects["/bucket/a"] = b"theirs"
    faulty.faults[:] = ["slow_down"]
    with pytest.raises(PreconditionFailed):
        faulty_store.put("a", b"ours", if_absent=True)
    assert faulty.objects["/bucket/a"] == b"theirs"


def test_an_answer_that_breaks_off_is_read_again(faulty, faulty_store):
    faulty.objects["/bucket/a"] = b"0123456789"
    faulty.faults[:] = ["half_a_body"]
    assert faulty_store.get("a") == b"0123456789"
    faulty.faults[:] = ["half_a_body"]
    outs = [bytearray(3), bytearray(7)]
    faulty_store.get_scattered("a", [memoryview(out) for out in outs])
    assert outs == [b"012", b"3456789"]
    assert len(faulty.requests) == 4


def test_a_store_that_cannot_be_reached_is_tried_again(faulty_store, pauses_s):
    options = replace(faulty_store._options, endpoint="http://127.0.0.1:1")
    unreachable = S3Store("bucket", options=options, retry=faulty_store._retry)
    with pytest.raises(TimedOut, match="Could not connect"):
        unreachable.get("a")
    assert len(pauses_s) == Retry().max_tries - 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (boto.ConnectTimeoutError(endpoint_url="u"), TimedOut),
        (boto.EndpointConnectionError(endpoint_url="u"), TimedOut),
        (boto.ProxyConnectionError(proxy_url="u"), TimedOut),
        (boto.ReadTimeoutError(endpoint_url="u"), TimedOut),
        (boto.ConnectionClosedError(endpoint_url="u"), TimedOut),
        (boto.ResponseStreamingError(error="broken"), TimedOut),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), TimedOut),
        (boto.SSLError(endpoint_url="u", error=OSError("EOF occurred")), TimedOut),
        (
            boto.SSLError(endpoint_url="u", error=OSError("CERTIFICATE_VERIFY_FAILED")),
            PermanentError,
        ),
        (boto.NoCredentialsError(), AccessDenied),
        (boto.NoRegionError(), PermanentError),
        (refused("HeadObject", 404, "404"), NotFound),
    ],
)
def test_every_error_of_boto_has_its_class(error, expected):
    folded = fold(error, "s3://bucket/a")
    assert type(folded) is expected
    assert str(folded).startswith("s3://bucket/a: ")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (503, "SlowDown", Throttled),
        (503, "", Throttled),
        (429, "", Throttled),
        (429, "UnknownCode", Throttled),
        (500, "InternalError", ServerError),
        (502, "", ServerError),
        (599, "UnknownCode", ServerError),
        (504, "", TimedOut),
        (400, "RequestTimeout", TimedOut),
        (403, "AccessDenied", AccessDenied),
        (400, "ExpiredToken", AccessDenied),
        (404, "NoSuchKey", NotFound),
        (404, "NoSuchBucket", PermanentError),
        (400, "InvalidArgument", PermanentError),
        (418, "UnknownCode", PermanentError),
    ],
)
def test_answers_are_kept_apart(faulty, faulty_store, monkeypatch, status, code, expected):
    monkeypatch.setitem(REFUSALS, "refused", (status, code))
    faulty.faults[:] = ["refused"] * Retry().max_tries
    with pytest.raises(StorageError) as raised:
        faulty_store.get("a")
    assert type(raised.value) is expected
    assert "\n" not in str(raised.value)


def test_missing_keys_are_reported_at_once(faulty, pauses_s):
    options = S3Options(endpoint=faulty.endpoint, region="us-east-1")
    store = S3Store("bucket", options=options, retry=Retry(sleep=pauses_s.append))
    with pytest.raises(AccessDenied, match="Unable to locate credentials"):
        store.get("a")
    assert pauses_s == []


def test_a_missing_ca_bundle_is_reported_at_once(faulty, faulty_store):
    endpoint = faulty.endpoint.replace("http", "https")
    options = replace(faulty_store._options, endpoint=endpoint, ca_bundle="/no/such/bundle.pem")
    store = S3Store("bucket", options=options, retry=faulty_store._retry)
    with pytest.raises(PermanentError) as raised:
        store.get("a")
    assert not isinstance(raised.value, TransientError)


def test_keys_never_reach_an_error_or_its_traceback(faulty, faulty_store, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDSECRET\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "KEYSECRET\n")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKENSECRET\n")
    options = S3Options(endpoint=faulty.endpoint, region="us-east-1")
    store = S3Store("bucket", options=options, retry=faulty_store._retry)
    with pytest.raises(AccessDenied, match="a key holds a character") as raised:
        store.get("a")
    text = "".join(traceback.format_exception(raised.value))
    assert "SECRET" not in text
    secret = SecretStr("SECRET")
    options = S3Options(access_key=secret, secret_key=secret, session_token=secret)
    assert "SECRET" not in f"{options} {options!r} {asdict(options)}"


@pytest.mark.parametrize("ahead_s", [-7 * HOUR_S, 7 * HOUR_S])
def test_the_time_of_a_store_is_that_of_its_server(faulty, faulty_store, ahead_s):
    faulty.ahead_s = ahead_s
    faulty.faults.append("slow_down")
    assert faulty_store.now_s() == pytest.approx(time.time() + ahead_s, abs=60.0)


def test_a_server_without_a_date_is_not_asked_for_ages(faulty_store, monkeypatch):
    monkeypatch.setattr(_Handler, "date_time_string", lambda *_args: "today")
    with pytest.raises(PermanentError, match="have no Date"):
        faulty_store.now_s()


def test_exactly_one_of_racing_writers_wins(faulty_store):
    race([faulty_store] * 8, "folder/claim")
