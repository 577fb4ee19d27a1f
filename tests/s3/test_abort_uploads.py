"""Parts of uploads that no writer finishes: what is dropped and what is left alone."""

from __future__ import annotations

import pytest

from perdure.storage.errors import StorageError
from perdure.storage.s3 import S3Store
from perdure.storage.s3_client import server_time_s
from tests.s3.conftest import RCLONE, RGW
from tests.waiting import wait_for

on_rgw = pytest.mark.parametrize("server", [RGW], indirect=True)


def begin(store: S3Store, key: str) -> str:
    at = {"Bucket": store._bucket, "Key": store._prefix + key}
    upload_id: str = store._client().create_multipart_upload(**at)["UploadId"]
    store._client().upload_part(**at, UploadId=upload_id, PartNumber=1, Body=b"part")
    return upload_id


def unfinished(store: S3Store) -> set[str]:
    answer = store._client().list_multipart_uploads(Bucket=store._bucket, Prefix=store._prefix)
    return {upload["Key"].removeprefix(store._prefix) for upload in answer.get("Uploads", [])}


@on_rgw
def test_old_uploads_below_the_prefix_are_dropped(open_store):
    store = open_store(direct=True)
    for key in ("run/a", "run/b", "run/b", "runner/c"):
        begin(store, key)
    assert store.abort_uploads("run/", 3600.0) == 0
    assert unfinished(store) == {"run/a", "run/b", "runner/c"}
    dropped: list[int] = []

    def all_dropped() -> bool:  # their age counts in whole seconds
        dropped.append(store.abort_uploads("run/", 1.0))
        return sum(dropped) == 3

    wait_for(all_dropped, what="the three are a second old")
    assert unfinished(store) == {"runner/c"}
    dropped.clear()

    def last_dropped() -> bool:
        dropped.append(store.abort_uploads("", 1.0))
        return sum(dropped) == 1

    wait_for(last_dropped, what="the fourth is a second old")
    assert store.abort_uploads("", 0.0) == 0


@on_rgw
def test_a_young_upload_goes_on_beside_old_ones(open_store, monkeypatch):
    store = open_store(direct=True)
    listing = store._client().list_multipart_uploads
    for key in ("a-old", "z-old"):
        begin(store, key)

    def are_old() -> bool:
        answer = listing(Bucket=store._bucket, Prefix=store._prefix)
        begun_s = max(upload["Initiated"].timestamp() for upload in answer["Uploads"])
        return server_time_s(answer) - begun_s > 2.5

    wait_for(are_old, what="the two are old")
    pages: list[int] = []

    def paged(**arguments):
        pages.append(1)
        return listing(MaxUploads=1, **arguments)

    monkeypatch.setattr(store._client(), "list_multipart_uploads", paged)
    begin(store, "m-young")
    assert store.abort_uploads("", 2.0) == 2
    assert unfinished(store) == {"m-young"}
    assert len(pages) > 2, "all pages were looked through"


@on_rgw
def test_uploads_of_a_missing_bucket_are_an_error(open_store):
    store = S3Store("no-such-bucket", options=open_store(direct=True)._options)
    with pytest.raises(StorageError, match="NoSuchBucket"):
        store.abort_uploads("", 0.0)


@pytest.mark.parametrize("server", [RCLONE, RGW], indirect=True)
def test_a_store_without_uploads_has_nothing_to_drop(store):
    assert store.abort_uploads("", 0.0) == 0
    assert store.abort_uploads("run/", 0.0) == 0
