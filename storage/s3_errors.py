"""Which class of error an S3 answer is: one table for codes, one for statuses.

The code decides; stores that send none (HEAD answers, gateways in front) are judged by status.
"""

from __future__ import annotations

from collections.abc import Mapping

from botocore import exceptions as boto

from storage.errors import (
    AccessDenied,
    NotFound,
    PermanentError,
    PreconditionFailed,
    ServerError,
    StorageError,
    Throttled,
    TimedOut,
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


def fold(error: boto.ClientError | boto.BotoCoreError, url: str) -> StorageError:
    """Our error for boto's, with a one-line message that names the object."""
    if isinstance(error, boto.ClientError):
        return _fold_answer(error, url)
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
    return kind(f"{url}: {error.operation_name} answered {status} {code}: {message}".rstrip(": "))
