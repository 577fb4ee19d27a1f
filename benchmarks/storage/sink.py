"""A thin S3 server that keeps objects in memory: `python -m benchmarks.storage.sink`.

Real servers spend seconds of CPU on a gigabyte, so that on a small machine they are what a
benchmark measures. This one spends about what the kernel takes to move the bytes: no signatures
are checked, no hashes computed. Bodies lie in blocks that are reused, for fresh pages cost more
than the copy. Path-style addresses only. An object must not be replaced while it is read.
Sizes are bytes.
"""

from __future__ import annotations

import mmap
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BLOCK_BYTES = 8 * 2**20
HEAD_BYTES = 64 * 2**10
_PART = re.compile(rb"<PartNumber>(\d+)</PartNumber>")
_KEY = re.compile(r"<Key>([^<]+)</Key>")
_STARTED = "2026-01-01T00:00:00.000Z"


@dataclass(slots=True)
class Blocks:
    """Memory that is given out and taken back block by block."""

    _free: list[memoryview] = field(default_factory=list)

    def take(self, size_bytes: int) -> list[memoryview]:
        """Views that add up to a size; small ones are not pooled."""
        if size_bytes < BLOCK_BYTES // 8:
            return [memoryview(bytearray(size_bytes))]
        views = []
        for start in range(0, size_bytes, BLOCK_BYTES):
            try:
                block = self._free.pop()
            except IndexError:
                block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
            views.append(block[: min(BLOCK_BYTES, size_bytes - start)])
        return views

    def give_back(self, views: list[memoryview]) -> None:
        """Take blocks back that are no longer read."""
        self._free += [memoryview(v.obj) for v in views if isinstance(v.obj, mmap.mmap)]


@dataclass(frozen=True, slots=True)
class Stored:
    """One object, or one part of one."""

    views: list[memoryview]
    etag: str

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return sum(view.nbytes for view in self.views)

    def slices(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes from `start` to `end`, without a copy."""
        at = 0
        for view in self.views:
            part = view[max(0, start - at) : max(0, end - at)]
            if part.nbytes:
                yield part
            at += view.nbytes


@dataclass(frozen=True, slots=True)
class Request:
    """One request; the body has been read."""

    method: str
    key: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: list[memoryview]

    @property
    def small_body(self) -> bytes:
        """The body of a request that is not data."""
        return b"".join(self.body)


@dataclass(frozen=True, slots=True)
class Answer:
    """One response; `size_bytes` is set for HEAD, which has no body."""

    status: HTTPStatus = HTTPStatus.OK
    body: list[memoryview] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int | None = None


class Sink:
    """Answers S3 requests from memory."""

    def __init__(self) -> None:
        self._blocks = Blocks()
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, dict[int, Stored]] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket) -> None:
        """Answer for ever, with a thread per connection."""
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        reader = Reader(connection, self._blocks)
        try:
            while (request := reader.request()) is not None:
                _send(connection, request, self.answer(request))
        except OSError:
            return  # the client is gone
        finally:
            connection.close()

    def answer(self, request: Request) -> Answer:
        """What a request asks for, done."""
        match request.method:
            case "PUT":
                return self._put(request)
            case "POST":
                return self._post(request)
            case "GET" | "HEAD":
                is_listing = "list-type" in request.query
                return self._list(request) if is_listing else self._get(request)
            case "DELETE":
                self._abort(request) if "uploadId" in request.query else self._drop(request.key)
                return Answer(HTTPStatus.NO_CONTENT)
        return Answer(HTTPStatus.NOT_IMPLEMENTED)

    def _put(self, request: Request) -> Answer:
        if "uploadId" in request.query:
            return self._put_part(request)
        if "x-amz-copy-source" in request.headers:
            return self._copy(request)
        with self._lock:
            if request.headers.get("if-none-match") == "*" and request.key in self._objects:
                self._blocks.give_back(request.body)
                return _failure(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        return self._keep(request.key, request.body)

    def _copy(self, request: Request) -> Answer:
        stored = self._objects.get(unquote(request.headers["x-amz-copy-source"]).strip("/"))
        if stored is None:
            return _failure(HTTPStatus.NOT_FOUND, "NoSuchKey")
        kept = self._keep(request.key, [memoryview(bytes(view)) for view in stored.views])
        text = f"<ETag>{kept.headers['ETag']}</ETag><LastModified>{_STARTED}</LastModified>"
        return _document("CopyObjectResult", text)

    def _keep(self, key: str, views: list[memoryview]) -> Answer:
        etag = f'"{next(self._numbers):032x}"'
        self._drop(key)
        self._objects[key] = Stored(views, etag)
        return Answer(headers={"ETag": etag})

    def _drop(self, key: str) -> None:
        old = self._objects.pop(key, None)
        if old is not None:
            self._blocks.give_back(old.views)

    def _put_part(self, request: Request) -> Answer:
        parts = self._uploads.get(request.query["uploadId"][0])
        if parts is None:
            self._blocks.give_back(request.body)
            return _failure(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        etag = f'"{next(self._numbers):032x}"'
        parts[int(request.query["partNumber"][0])] = Stored(request.body, etag)
        return Answer(headers={"ETag": etag})

    def _post(self, request: Request) -> Answer:
        if "uploads" in request.query:
            upload_id = f"upload{next(self._numbers)}"
            self._uploads[upload_id] = {}
            bucket, _, key = request.key.partition("/")
            names = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            text = f"{names}<UploadId>{upload_id}</UploadId>"
            return _document("InitiateMultipartUploadResult", text)
        if "delete" in request.query:
            bucket = request.key.partition("/")[0]
            for key in _KEY.findall(request.small_body.decode()):
                self._drop(f"{bucket}/{key}")
            return _document("DeleteResult", "")
        parts = self._uploads.pop(request.query["uploadId"][0], None)
        if parts is None:
            return _failure(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        numbers = map(int, _PART.findall(request.small_body))
        kept = self._keep(request.key, [view for n in numbers for view in parts[n].views])
        return _document("CompleteMultipartUploadResult", f"<ETag>{kept.headers['ETag']}</ETag>")

    def _abort(self, request: Request) -> None:
        for part in self._uploads.pop(request.query["uploadId"][0], {}).values():
            self._blocks.give_back(part.views)

    def _get(self, request: Request) -> Answer:
        if "/" not in request.key:
            return Answer(size_bytes=0)  # a bucket
        stored = self._objects.get(request.key)
        if stored is None:
            return _failure(HTTPStatus.NOT_FOUND, "NoSuchKey")
        size_bytes = stored.size_bytes
        headers = {"ETag": stored.etag, "Accept-Ranges": "bytes", "Last-Modified": formatdate()}
        status, start, end = HTTPStatus.OK, 0, size_bytes
        if "range" in request.headers:
            first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
            start, end = _range(first, last, size_bytes)
            if start >= size_bytes:
                return _failure(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size_bytes}"
        body = [] if request.method == "HEAD" else list(stored.slices(start, end))
        return Answer(status, body, headers, end - start)

    def _list(self, request: Request) -> Answer:
        prefix = request.query.get("prefix", [""])[0]
        delimiter = request.query.get("delimiter", [""])[0]
        bucket = request.key.partition("/")[0]
        folders: set[str] = set()
        entries = []
        for full in sorted(self._objects):
            key = full.removeprefix(f"{bucket}/")
            if not full.startswith(f"{bucket}/{prefix}"):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                folders.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            stored = self._objects[full]
            entries.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{_STARTED}</LastModified>"
                f"<ETag>{stored.etag}</ETag><Size>{stored.size_bytes}</Size></Contents>"
            )
        entries += [
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
            for one in sorted(folders)
        ]
        text = f"<Name>{bucket}</Name><KeyCount>{len(entries)}</KeyCount>"
        return _document(
            "ListBucketResult", f"{text}<IsTruncated>false</IsTruncated>{''.join(entries)}"
        )


class Reader:
    """Reads the requests of one connection."""

    def __init__(self, connection: socket.socket, blocks: Blocks) -> None:
        self._connection = connection
        self._blocks = blocks
        self._left = b""

    def request(self) -> Request | None:
        """The next request, None when the client has closed."""
        while b"\r\n\r\n" not in self._left:
            piece = self._connection.recv(HEAD_BYTES)
            if not piece:
                return None
            self._left += piece
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _version = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.get("expect", "").lower() == "100-continue":
            self._connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        address = urlsplit(target)
        query = parse_qs(address.query, keep_blank_values=True)
        body = self._body(int(headers.get("content-length", 0)))
        return Request(method, unquote(address.path).strip("/"), query, headers, body)

    def _body(self, size_bytes: int) -> list[memoryview]:
        views = self._blocks.take(size_bytes)
        for view in views:
            early, self._left = self._left[: view.nbytes], self._left[view.nbytes :]
            view[: len(early)] = early
            filled = len(early)
            while filled < view.nbytes:
                received = self._connection.recv_into(view[filled:])
                if not received:
                    raise ConnectionError("the client closed within a body")
                filled += received
        return views


def _send(connection: socket.socket, request: Request, answer: Answer) -> None:
    sent = sum(view.nbytes for view in answer.body)
    size_bytes = sent if answer.size_bytes is None else answer.size_bytes
    lines = [f"HTTP/1.1 {answer.status} {answer.status.phrase}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status is not HTTPStatus.NO_CONTENT:
        lines.append(f"Content-Length: {size_bytes}")
    lines += [f"Date: {formatdate(usegmt=True)}", "", ""]
    connection.sendall("\r\n".join(lines).encode("latin-1"))
    if request.method != "HEAD":
        for view in answer.body:
            connection.sendall(view)


def _range(first: str, last: str, size_bytes: int) -> tuple[int, int]:
    """Where a Range begins and ends; `-n` means the last n bytes."""
    if not first:
        return max(0, size_bytes - int(last)), size_bytes
    return int(first), min(size_bytes, int(last) + 1 if last else size_bytes)


def _document(name: str, text: str, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    whole = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{text}</{name}>'
    return Answer(status, [memoryview(whole.encode())], {"Content-Type": "application/xml"})


def _failure(status: HTTPStatus, code: str) -> Answer:
    return _document("Error", f"<Code>{code}</Code><Message>{status.phrase}</Message>", status)


def main() -> None:
    """Listen on a free port of the loopback interface, and print the endpoint."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    Sink().serve(listener)


if __name__ == "__main__":
    main()
