"""Addresses of stores: the storage section of a job, the keys apart from it, and opening a store.

A spec holds no secret and may be written anywhere; keys are `SecretStr` and appear in no repr,
dump or error text. Times are seconds.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

from perdure.storage.errors import Corrupt, StorageError
from perdure.storage.frozen_model import FrozenModel, SettingsModel
from perdure.storage.local import TEMPORARY_FOLDER, LocalStore
from perdure.storage.objects import ObjectStore, check_key
from perdure.storage.retry import Retry
from perdure.storage.s3_options import AddressingStyle, S3Options, revealed

FILE_SCHEME = "file://"
S3_SCHEME = "s3://"


def _hint(address: str) -> str:
    """Suggest the address that a user may have meant when the scheme is unknown."""
    path = address.removeprefix("file:")
    if path.startswith("/"):
        return f"for a folder write {FILE_SCHEME}{path}"
    if "://" in address:
        location = address.partition("://")[2]
        return (
            f"for a bucket of an S3-compatible store write {S3_SCHEME}{location}, with its endpoint"
        )
    return f"write {FILE_SCHEME}/absolute/folder or {S3_SCHEME}bucket/prefix"


class Credentials(FrozenModel):
    """Keys of a store that are not in boto3's default chain."""

    access_key: SecretStr = Field(description="access key id")
    secret_key: SecretStr = Field(description="secret access key")
    session_token: SecretStr | None = Field(None, description="session token of temporary keys")

    @field_validator("access_key", "secret_key", "session_token")
    @classmethod
    def _fits_a_header(cls, secret: SecretStr | None) -> SecretStr | None:
        # A file's trailing newline, mostly; HTTP clients quote such a header in their errors.
        if secret is not None and not secret.get_secret_value().isprintable():
            raise ValueError("holds a line break or another unprintable character")
        return secret


class StorageSpec(SettingsModel):
    """Address of the store that holds checkpoints, data and the ledger; keys are not part of it."""

    address: str = Field(description="file:///absolute/folder or s3://bucket/prefix")
    endpoint: str | None = Field(
        None, description="URL of an S3-compatible store, such as https://obs.REGION.DOMAIN"
    )
    region: str | None = Field(None, description="region that requests are signed for")
    addressing_style: AddressingStyle = Field(
        "auto",
        description="place of the bucket in a URL: virtual (in the host name, as OBS requires), "
        "path (in the path), or auto (path at every endpoint outside AWS)",
    )
    ca_bundle: str | None = Field(None, description="file with the CA certificates to trust")
    connect_timeout_s: float = Field(10.0, gt=0, description="seconds to open a connection")
    read_timeout_s: float = Field(
        60.0, gt=0, description="seconds to wait for the next byte of a response"
    )
    credentials_block: str | None = Field(
        None,
        description="Prefect block that holds the keys; default: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, a profile, or the instance role",
    )

    @field_validator("address")
    @classmethod
    def _known_address(cls, address: str) -> str:
        if not address.startswith(tuple(STORES)):
            schemes = " nor ".join(STORES)
            raise ValueError(f"{address!r} begins with neither {schemes}; {_hint(address)}")
        if address.startswith(FILE_SCHEME) and not address.startswith(f"{FILE_SCHEME}/"):
            raise ValueError(f"{address!r} is a relative path; write file:///absolute/folder")
        if address.startswith(S3_SCHEME):
            bucket, _, prefix = address.removeprefix(S3_SCHEME).partition("/")
            if not bucket:
                raise ValueError(f"{address!r} names no bucket; write s3://bucket/prefix")
            if prefix.strip("/"):
                check_key(prefix.strip("/"))
        return address

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"{endpoint!r} must start with https:// or http://")
        if endpoint is not None and "@" in endpoint:  # not shown: it may hold a password
            raise ValueError("endpoint must not hold credentials")
        return endpoint

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.endpoint is not None and self.folder is not None:
            raise ValueError(f"endpoint={self.endpoint!r} needs an s3:// address")
        return self

    @property
    def folder(self) -> Path | None:
        """The folder that is the store, None for a store that is elsewhere."""
        return _folder(self) if self.address.startswith(FILE_SCHEME) else None


def open_store(
    spec: StorageSpec, credentials: Credentials | None = None, *, retry: Retry | None = None
) -> ObjectStore:
    """The store of `spec`; nothing is read or written yet.

    Args:
        spec: address and settings of the store.
        credentials: keys; None: boto3's default chain (environment, profile, instance role).
        retry: patience with passing failures, among them a folder that is not mounted;
            None: `Retry()`, and a folder that this process has never seen mounted not at all.
    """
    scheme = next(prefix for prefix in STORES if spec.address.startswith(prefix))
    return STORES[scheme](spec, credentials, retry)


def _open_s3(
    spec: StorageSpec, credentials: Credentials | None, retry: Retry | None
) -> ObjectStore:
    # boto3 takes a quarter of a second to import.
    from perdure.storage.s3 import S3Store  # noqa: PLC0415

    bucket, _, prefix = spec.address.removeprefix(S3_SCHEME).partition("/")
    options = S3Options(
        endpoint=spec.endpoint,
        region=spec.region,
        addressing_style=spec.addressing_style,
        access_key=credentials.access_key if credentials else None,
        secret_key=credentials.secret_key if credentials else None,
        session_token=credentials.session_token if credentials else None,
        ca_bundle=spec.ca_bundle,
        connect_timeout_s=spec.connect_timeout_s,
        read_timeout_s=spec.read_timeout_s,
    )
    return S3Store(bucket, prefix, options=options, retry=retry)


# Functions that open the store of an address, by the scheme that the address begins with.
STORES: Mapping[str, Callable[[StorageSpec, Credentials | None, Retry | None], ObjectStore]] = {
    FILE_SCHEME: lambda spec, _keys, retry: LocalStore(_folder(spec), is_marked=True, retry=retry),
    S3_SCHEME: _open_s3,
}


def _folder(spec: StorageSpec) -> Path:
    return Path(spec.address.removeprefix(FILE_SCHEME))


def has_store(spec: StorageSpec) -> bool:
    """Whether a store has been made at an address, and is there.

    A bucket is taken to be: it cannot vanish silently, and answers itself where it does not exist.

    Raises:
        StorageError: the folder's file system does not answer.
    """
    return spec.folder is None or LocalStore(spec.folder, is_marked=True).is_there


def make_store(spec: StorageSpec) -> None:
    """Make the store of an address where there is none: a folder with its marker.

    For the start of a first run alone. An address that had a store must not be made a new one.

    Raises:
        StorageError: it cannot be made.
    """
    if spec.folder is not None:
        LocalStore(spec.folder, is_marked=True).make()


def check_can_make(spec: StorageSpec) -> None:
    """Write, read and delete a probe where `make_store` would make a store; leaves nothing.

    Raises:
        StorageError: what failed, on one line.
    """
    folder = spec.folder
    if folder is None:
        return
    new_folders = [
        path for path in (folder / TEMPORARY_FOLDER, folder, *folder.parents) if not path.exists()
    ]
    try:
        check_reachable(LocalStore(folder), "")
    finally:
        with suppress(OSError):  # there already, or somebody has put something into it
            for path in new_folders:
                path.rmdir()


def clear(spec: StorageSpec, credentials: Credentials | None = None) -> None:
    """Delete everything at an address that no other run uses; a folder goes with its contents.

    Raises:
        StorageError: it cannot be deleted.
        ValueError: the address is a whole bucket.
    """
    open_store(spec, credentials).clear()


KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")


def worker_environment(spec: StorageSpec, credentials: Credentials | None) -> dict[str, str]:
    """The keys as the variables of boto3's default chain, for a process or container.

    Without credentials they are those of this process: a container elsewhere inherits nothing. So
    are endpoint and region that the job does not name.
    """
    if spec.folder is not None:
        return {}
    inherited = (
        *(_ENDPOINT_VARIABLES if spec.endpoint is None else ()),
        *(_REGION_VARIABLES if spec.region is None else ()),
        *(KEY_VARIABLES if credentials is None else ()),
    )
    variables = {name: os.environ[name] for name in inherited if name in os.environ}
    if credentials is None:
        return variables
    keys = {
        "AWS_ACCESS_KEY_ID": revealed(credentials.access_key),
        "AWS_SECRET_ACCESS_KEY": revealed(credentials.secret_key),
        "AWS_SESSION_TOKEN": revealed(credentials.session_token),
    }
    return variables | {name: value for name, value in keys.items() if value is not None}


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
            raise Corrupt(f"{store.url(key)}: the bytes read differ from those written")
        action = "delete"
        store.delete(key)
    except StorageError as exc:
        raise type(exc)(f"storage check: cannot {action}: {exc}") from exc
