"""Where bytes are kept: the storage section of a job, and the store it opens.

Secrets are `SecretStr`: they appear in no repr, dump or error text. Times are seconds.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from storage.errors import Corrupt, StorageError
from storage.local import LocalStore
from storage.objects import ObjectStore, check_key
from storage.s3 import AddressingStyle, S3Options, S3Store

FILE_SCHEME = "file://"
S3_SCHEME = "s3://"


class StorageSpec(BaseModel):
    """Where checkpoints, data and the ledger are kept, and with whose keys."""

    # hide_input_in_errors: pydantic would print the keys as given, before they are SecretStr.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    address: str = Field(description="file:///absolute/folder or s3://bucket/prefix")
    endpoint: str | None = Field(
        None, description="URL of an S3-compatible store, e.g. https://obs.<region>.<domain>"
    )
    region: str | None = Field(None, description="region the requests are signed for")
    addressing_style: AddressingStyle = Field(
        "auto", description="bucket in the host name (virtual), in the path (path), or auto"
    )
    access_key: SecretStr | None = Field(
        None, description="access key id; none: environment, profile or instance role"
    )
    secret_key: SecretStr | None = Field(None, description="secret of access_key")
    session_token: SecretStr | None = Field(None, description="token of temporary keys")
    ca_bundle: str | None = Field(None, description="file with the certificates to trust")
    connect_timeout_s: float = Field(10.0, gt=0, description="to open a connection")
    read_timeout_s: float = Field(60.0, gt=0, description="between two bytes of an answer")
    credentials_block: str | None = Field(
        None, description="name of a Prefect block that holds the keys"
    )

    @field_validator("address")
    @classmethod
    def _known_address(cls, address: str) -> str:
        if address.startswith(FILE_SCHEME):
            if not address.removeprefix(FILE_SCHEME).startswith("/"):
                raise ValueError(f"{address!r} is a relative path; write file:///absolute/folder")
        elif address.startswith(S3_SCHEME):
            bucket, _, prefix = address.removeprefix(S3_SCHEME).partition("/")
            if not bucket:
                raise ValueError(f"{address!r} names no bucket; write s3://bucket/prefix")
            if prefix.strip("/"):
                check_key(prefix.strip("/"))
        else:
            raise ValueError(f"{address!r} is neither file:///folder nor s3://bucket/prefix")
        return address

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"{endpoint!r} must start with https:// or http://")
        if endpoint is not None and "@" in endpoint:  # not shown: it may hold a password
            raise ValueError("endpoint must not hold credentials: use access_key and secret_key")
        return endpoint

    @field_validator("access_key", "secret_key", "session_token")
    @classmethod
    def _fits_a_header(cls, secret: SecretStr | None) -> SecretStr | None:
        # A file's trailing newline, mostly; HTTP clients quote such a header in their errors.
        if secret is not None and not secret.get_secret_value().isprintable():
            raise ValueError("holds a line break or another unprintable character")
        return secret

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.endpoint is not None and self.address.startswith(FILE_SCHEME):
            raise ValueError(f"endpoint={self.endpoint!r} needs an s3:// address")
        if (self.access_key is None) != (self.secret_key is None):
            missing = "access_key" if self.access_key is None else "secret_key"
            raise ValueError(f"{missing} is missing: access_key and secret_key go together")
        if self.session_token is not None and self.access_key is None:
            raise ValueError("session_token needs access_key and secret_key")
        if self.credentials_block is not None and self.access_key is not None:
            raise ValueError("credentials_block and access_key exclude each other")
        return self


def open_store(spec: StorageSpec) -> ObjectStore:
    """The store of `spec`; nothing is read or written yet."""
    if spec.address.startswith(FILE_SCHEME):
        return LocalStore(Path(spec.address.removeprefix(FILE_SCHEME)))
    bucket, _, prefix = spec.address.removeprefix(S3_SCHEME).partition("/")
    options = S3Options(
        endpoint=spec.endpoint,
        region=spec.region,
        addressing_style=spec.addressing_style,
        access_key=_revealed(spec.access_key),
        secret_key=_revealed(spec.secret_key),
        session_token=_revealed(spec.session_token),
        ca_bundle=spec.ca_bundle,
        connect_timeout_s=spec.connect_timeout_s,
        read_timeout_s=spec.read_timeout_s,
    )
    return S3Store(bucket, prefix, options=options)


def worker_environment(spec: StorageSpec) -> dict[str, str]:
    """The given keys as the variables of boto3's default chain, for a child process.

    The child gets `without_secrets(spec)` beside it; empty when the keys come from the chain.
    """
    keys = {
        "AWS_ACCESS_KEY_ID": _revealed(spec.access_key),
        "AWS_SECRET_ACCESS_KEY": _revealed(spec.secret_key),
        "AWS_SESSION_TOKEN": _revealed(spec.session_token),
    }
    return {name: value for name, value in keys.items() if value is not None}


def without_secrets(spec: StorageSpec) -> StorageSpec:
    """A copy that may be written to disk: no keys, no token."""
    return spec.model_copy(update={"access_key": None, "secret_key": None, "session_token": None})


def check_reachable(store: ObjectStore, prefix: str) -> None:
    """Write, read and delete a probe object below `prefix`.

    Raises:
        StorageError: what failed, on one line; of the class that the store raised.
    """
    key = f"{prefix.rstrip('/')}/probe-{uuid.uuid4().hex}".lstrip("/")
    payload = key.encode()
    action = "write"
    try:
        store.put(key, payload)
        action = "read"
        if store.get(key) != payload:
            raise Corrupt(f"{store.url(key)}: other bytes came back than were written")
        action = "delete"
        store.delete(key)
    except StorageError as exc:
        raise type(exc)(f"storage check: cannot {action}: {exc}") from exc


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
