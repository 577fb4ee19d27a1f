"""Objects in an S3-compatible store (OBS, Ceph RGW, AWS) through boto3.

Large objects go out as parallel parts straight from the caller's memory and come back as parallel
ranges straight into it. botocore's own retries are off: `Retry` decides alone. Sizes are bytes,
times seconds.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from typing_extensions import Buffer

from storage.errors import (
    AccessDenied,
    Corrupt,
    NotFound,
    PermanentError,
    PreconditionFailed,
    StorageError,
)
from storage.objects import ObjectInfo, check_key, check_prefix
from storage.retry import Retry
from storage.s3_errors import fold

T = TypeVar("T")
Item = TypeVar("Item")
S3Client = Any  # boto3 generates its clients at run time

AddressingStyle = Literal["auto", "virtual", "path"]
PART_SIZE_BYTES = 64 * 2**20
MAX_PARTS = 10_000  # S3's limit for one multipart upload
COPY_SIZE_BYTES = 2**20  # of a response body; stays in the CPU's cache


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach the store; None means boto3's own default chain."""

    endpoint: str | None = None
    region: str | None = None
    addressing_style: AddressingStyle = "auto"
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    part_size_bytes: int = PART_SIZE_BYTES
    num_threads: int = 4


class S3Store:
    """An `ObjectStore` below `prefix` of `bucket`; may be used from threads and after a fork."""

    def __init__(
        self, bucket: str, prefix: str = "", *, options: S3Options, retry: Retry | None = None
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._options = options
        self._retry = retry or Retry()
        self._connection: tuple[int, S3Client] | None = None

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """See `ObjectStore.put`."""
        view = memoryview(data).cast("B")
        if view.nbytes <= self._options.part_size_bytes:
            self._put_whole(key, view, if_absent=if_absent)
        elif if_absent:
            # Ceph RGW, among others, ignores If-None-Match on CompleteMultipartUpload.
            raise ValueError(
                f"if_absent with {view.nbytes} bytes: only up to "
                f"part_size_bytes={self._options.part_size_bytes} can be published conditionally"
            )
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
                return bytes(answer["Body"].read())
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
        _parallel(
            lambda piece: self._get_range(key, piece[1], start + piece[0]),
            pieces,
            num_threads=self._options.num_threads,
        )

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
        wanted: dict[str, Any] = {
            "Bucket": self._bucket,
            "Prefix": self._prefix + check_prefix(prefix),
        }
        while True:
            page = self._call(prefix, lambda _tries: self._client().list_objects_v2(**wanted))
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(self._prefix)
                yield ObjectInfo(
                    key, entry["Size"], entry["ETag"].strip('"'), entry["LastModified"].timestamp()
                )
            if not page.get("IsTruncated"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        with suppress(NotFound):
            self._call(key, lambda _tries: self._client().delete_object(**self._at(key)))

    def url(self, key: str) -> str:
        """See `ObjectStore.url`."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def local_path(self, key: str) -> Path | None:  # noqa: ARG002 the protocol's signature
        """None: nothing here can be memory-mapped."""
        return None

    def probe_conditional_put(self, prefix: str) -> bool:
        """Find out whether the store honours `if_absent`, by publishing one key twice.

        Some stores (rclone serve s3) accept the header and replace the object all the same.
        """
        key = f"{prefix.rstrip('/')}/probe-{uuid.uuid4().hex}"
        try:
            self.put(key, b"first", if_absent=True)
            self.put(key, b"second", if_absent=True)
        except PreconditionFailed:
            return True
        except PermanentError as exc:
            if "NotImplemented" in str(exc):
                return False
            raise
        else:
            return False
        finally:
            self.delete(key)

    def _put_whole(self, key: str, view: memoryview, *, if_absent: bool) -> None:
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if if_absent else {}

        def send(tries: int) -> None:
            try:
                self._folded(
                    key,
                    lambda: self._client().put_object(
                        **self._at(key), Body=_Body(view), **condition
                    ),
                )
            except PreconditionFailed:
                # An earlier try that timed out may have been the one that published.
                if tries == 0 or self.get(key) != view:
                    raise

        self._retry.run(send)

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
                    **at, UploadId=upload_id, PartNumber=number, Body=_Body(part)
                ),
            )
            return {"ETag": answer["ETag"], "PartNumber": number}

        numbers = range(1, -(-view.nbytes // size) + 1)
        try:
            parts = _parallel(send, numbers, num_threads=self._options.num_threads)
            self._complete(key, upload_id, parts, view.nbytes)
        except BaseException:
            # Best effort: the first failure is the one to tell about.
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

    def _get_range(self, key: str, out: memoryview, start: int) -> None:
        wanted = f"bytes={start}-{start + out.nbytes - 1}"

        def read(_tries: int) -> None:
            answer = self._client().get_object(**self._at(key), Range=wanted)
            body, filled = answer["Body"], 0
            while filled < out.nbytes:
                chunk = body.read(min(COPY_SIZE_BYTES, out.nbytes - filled))
                if not chunk:
                    raise Corrupt(f"{self.url(key)}: ends before {start + out.nbytes}")
                out[filled : filled + len(chunk)] = chunk
                filled += len(chunk)

        try:
            self._call(key, read)
        except PermanentError as exc:
            if "InvalidRange" in str(exc):
                raise Corrupt(f"{self.url(key)}: ends before {start + out.nbytes}") from exc
            raise

    def _call(self, key: str, request: Callable[[int], T]) -> T:
        return self._retry.run(lambda tries: self._folded(key, lambda: request(tries)))

    def _folded(self, key: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except (ClientError, BotoCoreError) as exc:
            error = fold(exc, self.url(key))
            # A cause that quotes keys must not reach a log by way of the traceback.
            raise error from (None if isinstance(error, AccessDenied) else exc)

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _client(self) -> S3Client:
        # No lock: one could be held by another thread while we are forked. Two threads that
        # connect at once make two clients, and one of them is dropped.
        held = self._connection
        if held is None or held[0] != os.getpid():
            held = (os.getpid(), _connect(self._options))
            self._connection = held
        return held[1]


class _Body(io.RawIOBase):
    """A seekable reader of memory: botocore takes no memoryview. Copies only what is sent."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._view.nbytes}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        out = memoryview(buffer).cast("B")
        chunk = self._view[self._at : self._at + out.nbytes]
        out[: chunk.nbytes] = chunk
        self._at += chunk.nbytes
        return chunk.nbytes


def _parallel(work: Callable[[Item], T], items: Iterable[Item], *, num_threads: int) -> list[T]:
    todo = list(items)
    if len(todo) < 2:
        return [work(item) for item in todo]
    # A pool per transfer survives a fork, and threads cost nothing beside 64 MiB parts.
    with ThreadPoolExecutor(min(num_threads, len(todo))) as pool:
        futures = [pool.submit(work, item) for item in todo]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _connect(options: S3Options) -> S3Client:
    # A session of its own: boto3's default session must not be shared between threads.
    return boto3.session.Session().client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
        verify=options.ca_bundle,
        config=Config(
            s3={"addressing_style": options.addressing_style},
            signature_version="s3v4",
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            retries={"total_max_attempts": 1},
            # RGW 16 and OBS reject aws-chunked bodies with trailing checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=4 * options.num_threads,
        ),
    )
