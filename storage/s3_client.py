"""Client of an S3-compatible store: boto3's client, bodies that copy nothing, and errors.

The code of a failed answer decides about its class; answers without one (to HEAD, or from a
gateway in front of the store) are judged by status. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any

import boto3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
from botocore.parsers import ResponseParserError
from botocore.response import StreamingBody
from typing_extensions import Buffer
from urllib3.exceptions import HTTPError

from perdure.storage.errors import (
    AccessDenied,
    NotFound,
    PermanentError,
    PreconditionFailed,
    ServerError,
    StorageError,
    StorageFull,
    Throttled,
    TimedOut,
    TransientError,
)
from perdure.storage.proxies import is_direct
from perdure.storage.s3_options import S3Options, revealed

S3Client = Any  # boto3 generates its clients at run time

COPY_SIZE_BYTES = 2**18  # of a body that must be copied; stays in the CPU's cache
SEND_SIZE_BYTES = 2**20
# No link that can carry checkpoints is so slow: another connection may be served better.
SLOWEST_BYTES_PER_S = 16 * 2**10
PACE_WINDOW_S = 20.0

CODES: Mapping[str, type[StorageError]] = {
    "SlowDown": Throttled,
    "Throttling": Throttled,
    "ThrottlingException": Throttled,
    "RequestLimitExceeded": Throttled,
    "RequestThrottled": Throttled,
    "TooManyRequests": Throttled,
    "TooManyRequestsException": Throttled,
    "BandwidthLimitExceeded": Throttled,
    "ServiceUnavailable": Throttled,
    "InternalError": ServerError,
    "OperationAborted": ServerError,
    "RequestTimeout": TimedOut,
    "NoSuchKey": NotFound,
    "NotFound": NotFound,
    "NoSuchBucket": PermanentError,  # not NotFound: a reader would take it for an empty run
    "NoSuchUpload": NotFound,
    "PreconditionFailed": PreconditionFailed,
    "ConditionalRequestConflict": ServerError,  # another write is under way: who wins is open
    "AccessDenied": AccessDenied,
    "InvalidAccessKeyId": AccessDenied,
    "SignatureDoesNotMatch": AccessDenied,
    "ExpiredToken": AccessDenied,
    "InvalidToken": AccessDenied,
    "RequestTimeTooSkewed": AccessDenied,
    "NotImplemented": PermanentError,
    "QuotaExceeded": StorageFull,
    "XMinioStorageFull": StorageFull,
    "InsufficientStorage": StorageFull,
    "InsufficientStorageSpace": StorageFull,
}

STATUSES: Mapping[int, type[StorageError]] = {
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    408: TimedOut,
    412: PreconditionFailed,
    429: Throttled,
    500: ServerError,
    501: PermanentError,
    502: ServerError,
    503: Throttled,
    504: TimedOut,
    507: StorageFull,
}

NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.ProfileNotFound,
)
NO_ANSWER = (  # boto.ConnectionError and boto.HTTPClientError have no common root of their own
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
)


def connect(options: S3Options) -> S3Client:
    """A client of its own connections; nothing is sent yet."""
    # A session of its own: boto3's default session must not be shared between threads.
    return boto3.session.Session().client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region,
        aws_access_key_id=revealed(options.access_key),
        aws_secret_access_key=revealed(options.secret_key),
        aws_session_token=revealed(options.session_token),
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
            proxies=_proxies(options.endpoint),
        ),
    )


def _proxies(endpoint: str | None) -> dict[str, str] | None:
    """No proxies for an endpoint that needs none; None: boto3 reads the environment."""
    url = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {} if url and is_direct(url) else None


def read_into(body: StreamingBody, outs: Sequence[memoryview]) -> int:
    """Fill pieces of memory, one after the other, with the body of an answer.

    Returns:
        How many bytes came: fewer than asked for when the body is shorter.

    Raises:
        BotoCoreError: the body broke off or did not come in time.
    """
    raw: Any = getattr(body, "_raw_stream", None)
    answer = _plain_answer(body, raw)
    if answer is None:
        return _fill(outs, lambda out: _copy_some(body, out))
    expected, pace = answer.length or 0, Pace()

    def read_some(out: memoryview) -> int:
        count = _read_once(answer, out)
        pace.check(count, left=answer.length or 0)
        return count

    try:
        filled = _fill(outs, read_some)
    except TimeoutError as exc:
        raise ReadTimeoutError(endpoint_url=raw.url, error=exc) from exc
    except (HTTPException, OSError) as exc:
        raise ResponseStreamingError(error=exc) from exc
    finally:
        if answer.length:  # what is left must not be read as the next answer
            raw.close()
        raw.release_conn()
    if answer.length and filled < sum(out.nbytes for out in outs):
        raise IncompleteReadError(actual_bytes=filled, expected_bytes=expected)
    return filled


def _read_once(answer: HTTPResponse, out: memoryview) -> int:
    """Read what one read of the socket gives; `HTTPResponse.readinto` waits for all of it.

    An answer that trickles would not come back for hours, and no read of it would time out.
    """
    length = answer.length or 0
    count = int(answer.fp.readinto1(out[:length])) if length else 0
    answer.length = length - count
    if not count or not answer.length:
        answer.close()
    return count


@dataclass(slots=True)
class Pace:
    """The pace of an answer, window by window; too slow is as good as silent.

    Attributes:
        clock: monotonic seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _began_s: float | None = None
    _bytes: int = 0

    def check(self, count: int, *, left: int) -> None:
        """Note that some bytes came.

        Args:
            count: how many.
            left: how many are still to come.

        Raises:
            TimeoutError: too few came in the last window.
        """
        now_s = self.clock()
        self._began_s = now_s if self._began_s is None else self._began_s
        self._bytes += count
        took_s = now_s - self._began_s
        if took_s < PACE_WINDOW_S or not left:
            return
        if self._bytes < SLOWEST_BYTES_PER_S * took_s:
            raise TimeoutError(f"only {self._bytes} bytes came in {took_s:.0f} s")
        self._began_s, self._bytes = now_s, 0


def _plain_answer(body: StreamingBody, raw: object) -> HTTPResponse | None:
    """The answer below urllib3's, whose own `readinto` makes bytes first; None: must be copied.

    A body of another class reads along, as for a checksum, and one without a length is
    in chunks.
    """
    answer = getattr(raw, "_fp", None)
    if type(body) is not StreamingBody or not isinstance(answer, HTTPResponse):
        return None
    return None if answer.chunked or answer.length is None else answer


def _copy_some(body: StreamingBody, out: memoryview) -> int:
    try:
        chunk = body.read(min(COPY_SIZE_BYTES, out.nbytes))
    except HTTPError as exc:  # botocore passes on some of urllib3's own, of TLS for one
        raise ResponseStreamingError(error=exc) from exc
    out[: len(chunk)] = chunk
    return len(chunk)


def _fill(outs: Sequence[memoryview], read_some: Callable[[memoryview], int]) -> int:
    total = 0
    for out in outs:
        filled = 0
        while filled < out.nbytes:
            count = read_some(out[filled:])
            if not count:
                return total + filled
            filled += count
        total += filled
    return total


class Body(io.RawIOBase):
    """A seekable reader of memory: botocore takes no memoryview. Copies nothing for `read`."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def readable(self) -> bool:
        """Whether `read` works: always."""
        return True

    def seekable(self) -> bool:
        """Whether `seek` works: always; a request that is repeated starts from the beginning."""
        return True

    def tell(self) -> int:
        """Offset of the next byte to send."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` bytes from the start, the current place or the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._view.nbytes}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Give the next bytes: the memory itself, which a socket and a hash accept.

        At least `SEND_SIZE_BYTES` of it: urllib3 asks for 16 KiB and sends whatever it gets, and
        a system call for each would cost more than the copy.
        """
        end = self._view.nbytes if size < 0 else self._at + max(size, SEND_SIZE_BYTES)
        chunk = self._view[self._at : end]
        self._at += chunk.nbytes
        return chunk  # type: ignore[return-value]

    def readinto(self, buffer: Buffer) -> int:
        """Copy what comes next into `buffer`; returns how many bytes."""
        out = memoryview(buffer).cast("B")
        chunk = self._view[self._at : self._at + out.nbytes]
        out[: chunk.nbytes] = chunk
        self._at += chunk.nbytes
        return chunk.nbytes


def fold(
    error: boto.ClientError | boto.BotoCoreError | ResponseParserError, url: str
) -> StorageError:
    """Our error for boto's, with a one-line message that names the object."""
    if isinstance(error, boto.ClientError):
        return _fold_answer(error, url)
    if isinstance(error, ResponseParserError):
        # Its text quotes the answer, whose origin is unknown.
        return ServerError(f"{url}: the answer is no S3 answer; is a gateway in front ill?")
    return _fold_failure(error, url)


def _fold_failure(error: boto.BotoCoreError, url: str) -> StorageError:
    """Fold failures on this side of the connection."""
    cause = getattr(error, "kwargs", {}).get("error")
    if isinstance(cause, ValueError):
        # Its text quotes the header, which may be the session token.
        return AccessDenied(f"{url}: a key holds a character that no HTTP header may have")
    text = str(error).replace("\n", " ")
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in text:
        return PermanentError(f"{url}: the server's certificate is not trusted; set ca_bundle")
    if isinstance(error, NO_CREDENTIALS):
        return AccessDenied(f"{url}: {text}")
    if isinstance(error, NO_ANSWER) and "No such file" not in text:  # that is the ca_bundle
        return TimedOut(f"{url}: no answer: {text}")
    return PermanentError(f"{url}: {text}")


def _fold_answer(error: boto.ClientError, url: str) -> StorageError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = str(error.response.get("Error", {}).get("Message", "")).replace("\n", " ")
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    kind = CODES.get(code) or STATUSES.get(status)
    if kind is None:
        kind = ServerError if status >= 500 else PermanentError
    text = f"{url}: {error.operation_name} answered {status} {code}: {message}".rstrip(": ")
    folded = kind(text)
    if isinstance(folded, TransientError):
        folded.retry_after_s = _retry_after_s(_headers(error.response))
    return folded


def code_of(error: StorageError) -> str:
    """The store's own code of the answer that `error` was made of, or ""."""
    cause = error.__cause__
    if not isinstance(cause, boto.ClientError):
        return ""
    return str(cause.response.get("Error", {}).get("Code", ""))


def server_time_s(answer: Mapping[str, Any]) -> float:
    """Time of the store's `answer`, by the store's clock, in whole seconds.

    Raises:
        PermanentError: the answer has no date, against the rules of HTTP.
    """
    date = _date(_headers(answer).get("date", ""))
    if date is None:
        raise PermanentError("the store's answers have no Date, by which ages are measured")
    return date.timestamp()


def _headers(answer: Mapping[str, Any]) -> Mapping[str, str]:
    headers: Mapping[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Wait that the store asks for, which it gives in seconds or as a time by its clock."""
    wanted = headers.get("retry-after", "").strip()
    if wanted.isdecimal():
        return float(wanted)
    until, now = _date(wanted), _date(headers.get("date", ""))
    return max(0.0, (until - now).total_seconds()) if until and now else None


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
