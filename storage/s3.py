"""Objects in an S3-compatible store (OBS, Ceph RGW, AWS) through boto3.

Large objects go out as parallel parts straight from the caller's memory and come back as parallel
ranges straight into it. botocore's own retries are off: `Retry` decides alone. Sizes are bytes,
times seconds.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from perdure.storage.bakery_lock import (
    CLAIMS_FOLDER,
    BakeryLock,
    LockEntries,
    Target,
    publish_once,
)
from perdure.storage.errors import (
    AccessDenied,
    Corrupt,
    NotFound,
    PermanentError,
    PreconditionFailed,
    StorageError,
)
from perdure.storage.objects import ObjectInfo, check_key, check_prefix, in_parallel
from perdure.storage.retry import Retry
from perdure.storage.s3_client import (
    Body,
    S3Client,
    code_of,
    connect,
    fold,
    read_into,
    server_time_s,
)
from perdure.storage.s3_options import S3Options

T = TypeVar("T")

MAX_PUT_BYTES = 5 * 2**30  # S3 API reference, PutObject; OBS has the same limit
MAX_PARTS = 10_000  # S3's limit for one multipart upload
CLEARING_STREAMS = 8
CLAIM_LIFETIME_REQUESTS = 2.5  # half of it must be longer than one request can take


class S3Store:
    """An `ObjectStore` below `prefix` of `bucket`; may be used from threads and after a fork.

    Where the store has no conditional put, `if_absent` is kept by claims in `.claims` below
    `prefix`, which no listing shows: all writers of a key must use the same `prefix`.
    """

    def __init__(
        self, bucket: str, prefix: str = "", *, options: S3Options, retry: Retry | None = None
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._options = options
        self._retry = retry or Retry()
        self._connection: tuple[int, S3Client] | None = None
        self._has_conditional_put: bool | None = None

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        view = memoryview(data).cast("B")
        if if_absent:
            # Whole, however large, up to S3's own limit: Ceph RGW, among others, ignores
            # If-None-Match on CompleteMultipartUpload.
            if view.nbytes > MAX_PUT_BYTES:
                raise ValueError(
                    f"if_absent with {view.nbytes} bytes: one request takes {MAX_PUT_BYTES}"
                )
            put = self._put_if_absent if self.has_conditional_put() else self._put_claimed
            put(key, view)
        elif view.nbytes <= self._options.part_size_bytes:
            at = self._at(key)
            self._call(key, lambda _tries: self._client().put_object(**at, Body=Body(view)))
        else:
            self._put_parts(key, view)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """See `ObjectStore.get`."""
        if length == 0:
            self.stat(key)
            return b""
        last = "" if length is None else start + length - 1
        ranged: dict[str, Any] = {"Range": f"bytes={start}-{last}"} if start or length else {}

        def read(_tries: int) -> bytes:
            try:
                answer = self._client().get_object(**self._at(key), **ranged)
                data = bytearray(answer["ContentLength"])
                filled = read_into(answer["Body"], [memoryview(data)])
                return bytes(data[:filled])
            except ClientError as exc:
                if exc.response.get("Error", {}).get("Code") in ("InvalidRange", "416"):
                    return b""
                raise

        return self._call(key, read)

    def get_into(self, key: str, out: memoryview, *, start: int = 0) -> None:
        """See `ObjectStore.get_into`."""
        view = out.cast("B")
        size = self._options.part_size_bytes
        pieces = [(at, view[at : at + size]) for at in range(0, view.nbytes, size)]
        in_parallel(
            lambda piece: self._get_range(key, [piece[1]], start + piece[0]),
            pieces,
            num_threads=self._options.num_threads,
        )

    def get_scattered(self, key: str, outs: Sequence[memoryview], *, start: int = 0) -> None:
        """See `ObjectStore.get_scattered`; one request, of one large piece several."""
        views = [out.cast("B") for out in outs if out.nbytes]
        if len(views) == 1:
            self.get_into(key, views[0], start=start)
        elif views:
            self._get_range(key, views, start)

    def stat(self, key: str) -> ObjectInfo:
        """See `ObjectStore.stat`."""
        answer = self._call(key, lambda _tries: self._client().head_object(**self._at(key)))
        return ObjectInfo(
            key,
            answer["ContentLength"],
            answer["ETag"].strip('"'),
            answer["LastModified"].timestamp(),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        for page in self._pages(check_prefix(prefix)):
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(self._prefix)
                if CLAIMS_FOLDER not in key.split("/"):  # also those of stores further down
                    etag, modified = entry["ETag"].strip('"'), entry["LastModified"]
                    yield ObjectInfo(key, entry["Size"], etag, modified.timestamp())

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._remove(key, self._at(key))

    def now_s(self) -> float:
        """See `ObjectStore.now_s`; one request."""
        return server_time_s(next(self._pages(f"{CLAIMS_FOLDER}/")))

    def url(self, key: str) -> str:
        """See `ObjectStore.url`."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def local_path(self, key: str) -> Path | None:  # noqa: ARG002 the protocol's signature
        """Return None: no object can be memory-mapped."""
        return None

    def has_conditional_put(self) -> bool:
        """Whether the store keeps `If-None-Match`; found out once, by publishing one key twice.

        Some stores (rclone serve s3) accept the header and replace the object all the same.
        """
        if self._has_conditional_put is None:
            self._has_conditional_put = self._probe_conditional_put()
        return self._has_conditional_put

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        """See `ObjectStore.abort_uploads`; stores keep such parts for ever."""
        request = {"Bucket": self._bucket, "Prefix": self._prefix + check_prefix(prefix)}
        aborted, now_s = 0, None
        while True:
            try:
                page = self._call(
                    prefix, lambda _tries: self._client().list_multipart_uploads(**request)
                )
            except NotFound:  # rclone's answer when there are none
                return aborted
            now_s = now_s or server_time_s(page)  # one time for all pages
            for upload in page.get("Uploads", []):
                if now_s - upload["Initiated"].timestamp() > older_than_s:
                    aborted += self._abort(upload["Key"], upload["UploadId"])
            if not page.get("IsTruncated"):
                return aborted
            request["KeyMarker"] = page["NextKeyMarker"]
            request["UploadIdMarker"] = page["NextUploadIdMarker"]

    def clear(self) -> None:
        """See `ObjectStore.clear`: everything below the prefix, claims and uploads included."""
        if not self._prefix:
            raise ValueError(f"s3://{self._bucket}: a whole bucket is not cleared")
        keys = [entry["Key"] for page in self._pages("") for entry in page.get("Contents", [])]

        def remove(key: str) -> None:
            self._remove(key.removeprefix(self._prefix), {"Bucket": self._bucket, "Key": key})

        in_parallel(remove, keys, num_threads=CLEARING_STREAMS)
        # Uploads of any age: the server counts whole seconds, and may be behind an upload.
        self.abort_uploads("", -math.inf)

    def _pages(self, prefix: str) -> Iterator[dict[str, Any]]:
        request = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = self._call(prefix, lambda _tries: self._client().list_objects_v2(**request))
            yield page
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def _abort(self, full_key: str, upload_id: str) -> bool:
        at = {"Bucket": self._bucket, "Key": full_key}
        try:
            self._call(
                full_key.removeprefix(self._prefix),
                lambda _tries: self._client().abort_multipart_upload(**at, UploadId=upload_id),
            )
        except NotFound:  # finished or aborted meanwhile
            return False
        return True

    def _probe_conditional_put(self) -> bool:
        key = f"{CLAIMS_FOLDER}/probe"
        at = {"Bucket": self._bucket, "Key": self._prefix + key}
        try:
            for _ in range(2):  # the probe of an earlier process answers the first time
                self._call(
                    key, lambda _tries: self._client().put_object(**at, Body=b"", IfNoneMatch="*")
                )
        except PreconditionFailed:
            return True
        except PermanentError as exc:
            if code_of(exc) in ("NotImplemented", "501"):
                return False
            raise
        return False

    def _put_if_absent(self, key: str, view: memoryview) -> None:
        def send(tries: int) -> None:
            try:
                self._send(key, view, IfNoneMatch="*")
            except PreconditionFailed:
                # An earlier try that timed out may have been the one that published.
                if tries == 0 or self.get(key) != view:
                    raise

        self._retry.run(send)

    def _put_claimed(self, key: str, view: memoryview) -> None:
        options = self._options
        target = Target(
            exists=lambda: self._exists(key),
            is_ours=lambda: self.get(key) == view,
            publish=lambda: self._send(key, view),
        )
        published = publish_once(
            target,
            self._bakery_lock(key),
            lifetime_s=CLAIM_LIFETIME_REQUESTS
            * (options.connect_timeout_s + options.read_timeout_s),
            retry=self._retry,
        )
        if not published:
            raise PreconditionFailed(f"{self.url(key)}: exists already")

    def _bakery_lock(self, key: str) -> BakeryLock:
        # One folder per key, of a length that any file system takes.
        folder = f"{CLAIMS_FOLDER}/{hashlib.sha256(key.encode()).hexdigest()[:32]}/"

        def at(name: str) -> dict[str, str]:
            return {"Bucket": self._bucket, "Key": self._prefix + folder + name}

        def read() -> LockEntries:
            pages = list(self._pages(folder))
            entries = [entry for page in pages for entry in page.get("Contents", [])]
            written_s = {
                entry["Key"].rpartition("/")[2]: entry["LastModified"].timestamp()
                for entry in entries
            }
            return LockEntries(server_time_s(pages[0]), written_s)

        return BakeryLock(
            write=lambda name: self._call(
                key, lambda _tries: self._client().put_object(**at(name), Body=key.encode())
            ),
            read=read,
            remove=lambda name: self._remove(key, at(name)),
        )

    def _send(self, key: str, view: memoryview, **condition: str) -> None:
        at = self._at(key)
        self._folded(key, lambda: self._client().put_object(**at, Body=Body(view), **condition))

    def _remove(self, key: str, at: dict[str, str]) -> None:
        with suppress(NotFound):
            self._call(key, lambda _tries: self._client().delete_object(**at))

    def _exists(self, key: str) -> bool:
        try:
            self.stat(key)
        except NotFound:
            return False
        return True

    def _put_parts(self, key: str, view: memoryview) -> None:
        size = max(self._options.part_size_bytes, -(-view.nbytes // MAX_PARTS))
        at = self._at(key)
        upload = self._call(key, lambda _tries: self._client().create_multipart_upload(**at))
        upload_id = upload["UploadId"]

        def send(number: int) -> dict[str, Any]:
            part = view[(number - 1) * size : number * size]
            answer = self._call(
                key,
                lambda _tries: self._client().upload_part(
                    **at, UploadId=upload_id, PartNumber=number, Body=Body(part)
                ),
            )
            return {"ETag": answer["ETag"], "PartNumber": number}

        numbers = range(1, -(-view.nbytes // size) + 1)
        try:
            parts = in_parallel(send, numbers, num_threads=self._options.num_threads)
            self._complete(key, upload_id, parts, view.nbytes)
        except BaseException:
            # Best effort: the first failure is the one to report.
            with suppress(StorageError):
                self._folded(
                    key,
                    lambda: self._client().abort_multipart_upload(**at, UploadId=upload_id),
                )
            raise

    def _complete(
        self, key: str, upload_id: str, parts: Sequence[dict[str, Any]], size_bytes: int
    ) -> None:
        def complete(tries: int) -> None:
            try:
                self._folded(
                    key,
                    lambda: self._client().complete_multipart_upload(
                        **self._at(key), UploadId=upload_id, MultipartUpload={"Parts": list(parts)}
                    ),
                )
            except NotFound:
                # The upload is gone because an earlier try that timed out completed it.
                if tries == 0 or self.stat(key).size_bytes != size_bytes:
                    raise

        self._retry.run(complete)

    def _get_range(self, key: str, outs: Sequence[memoryview], start: int) -> None:
        size_bytes = sum(out.nbytes for out in outs)
        ends = f"{self.url(key)}: ends before {start + size_bytes}"
        wanted = f"bytes={start}-{start + size_bytes - 1}"

        def read(_tries: int) -> None:
            answer = self._client().get_object(**self._at(key), Range=wanted)
            if read_into(answer["Body"], outs) < size_bytes:
                raise Corrupt(ends)

        try:
            self._call(key, read)
        except PermanentError as exc:
            if code_of(exc) == "InvalidRange":
                raise Corrupt(ends) from exc
            raise

    def _call(self, key: str, request: Callable[[int], T]) -> T:
        return self._retry.run(lambda tries: self._folded(key, lambda: request(tries)))

    def _folded(self, key: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except (ClientError, BotoCoreError, ResponseParserError) as exc:
            error = fold(exc, self.url(key))
            # A cause that quotes keys must not reach a log by way of the traceback.
            raise error from (None if isinstance(error, AccessDenied) else exc)

    def _at(self, key: str) -> dict[str, Any]:
        if CLAIMS_FOLDER in check_key(key).split("/"):
            raise ValueError(f"not a key: {key!r}; {CLAIMS_FOLDER!r} is the store's own")
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _client(self) -> S3Client:
        # No lock: one could be held by another thread while we are forked. Two threads that
        # connect at once make two clients, and one of them is dropped.
        held = self._connection
        if held is None or held[0] != os.getpid():
            held = (os.getpid(), connect(self._options))
            self._connection = held
        return held[1]
