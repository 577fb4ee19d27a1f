"""How an S3-compatible store is reached: boto3's client, made of what is set, and its answers.

Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from storage.s3_options import S3Options, revealed

S3Client = Any  # boto3 generates its clients at run time

COPY_SIZE_BYTES = 2**18  # of a body that must be copied; stays in the CPU's cache


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
        ),
    )


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
    expected = answer.length or 0
    try:
        filled = _fill(outs, answer.readinto)
    except TimeoutError as exc:
        raise ReadTimeoutError(endpoint_url=raw.url, error=exc) from exc
    except (HTTPException, OSError) as exc:
        raise ResponseStreamingError(error=exc) from exc
    finally:
        if answer.length:  # still to come: not to be taken for the next answer
            raw.close()
        raw.release_conn()
    if answer.length and filled < sum(out.nbytes for out in outs):
        raise IncompleteReadError(actual_bytes=filled, expected_bytes=expected)
    return filled


def _plain_answer(body: StreamingBody, raw: object) -> HTTPResponse | None:
    """The answer below urllib3's, whose own `readinto` makes bytes first; None: must be copied.

    A body of another class looks at what passes, as for a checksum, and one without a length is
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
