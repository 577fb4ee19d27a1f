"""Which class of error an S3 answer is: one table for codes, one for statuses.

The code decides; stores that send none (HEAD answers, gateways in front) are judged by status.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from storage.errors import (
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


def fold(
    error: boto.ClientError | boto.BotoCoreError | ResponseParserError, url: str
) -> StorageError:
    """Our error for boto's, with a one-line message that names the object."""
    if isinstance(error, boto.ClientError):
        return _fold_answer(error, url)
    if isinstance(error, ResponseParserError):
        # Its text quotes the answer, which comes from who knows where.
        return ServerError(f"{url}: the answer is no S3 answer; is a gateway in front ill?")
    return _fold_failure(error, url)


def _fold_failure(error: boto.BotoCoreError, url: str) -> StorageError:
    """For what boto3 met on its own side of the connection."""
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
    """When the store gave `answer`, by its own clock, in whole seconds.

    Raises:
        PermanentError: it does not tell, against the rules of HTTP.
    """
    date = _date(_headers(answer).get("date", ""))
    if date is None:
        raise PermanentError("the store's answers have no Date, by which ages are measured")
    return date.timestamp()


def _headers(answer: Mapping[str, Any]) -> Mapping[str, str]:
    headers: Mapping[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return headers


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long the store asks to wait: given in seconds, or as a time by the store's clock."""
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
