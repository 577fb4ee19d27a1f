"""Storage credentials kept in Prefect: a block whose secrets are encrypted in its database."""

from __future__ import annotations

from typing import Any, ClassVar

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from perdure.storage.address import Credentials, StorageSpec
from perdure.tasks.prefect_client import needed_for
from perdure.training.errors import InputError


class ObjectStoreCredentials(Block):
    """Keys of an OBS or S3 store; a job names the block in storage.credentials_block."""

    _block_type_name: ClassVar[str] = "Perdure Object Store Credentials"
    _block_type_slug: ClassVar[str] = "perdure-object-store-credentials"

    access_key: SecretStr = Field(description="access key id")
    secret_key: SecretStr = Field(description="secret access key")
    session_token: SecretStr | None = Field(None, description="token of temporary keys")


def credentials_of(spec: StorageSpec) -> Credentials | None:
    """The keys in the block that a job's storage names; None when it names none.

    Raises:
        InputError: no such block.
    """
    if spec.credentials_block is None:
        return None
    try:
        with needed_for("storage.credentials_block"):
            block: Any = ObjectStoreCredentials.load(spec.credentials_block)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            "storage.credentials_block", f"{spec.credentials_block!r}: no such Prefect block"
        ) from error
    return Credentials(
        access_key=block.access_key,
        secret_key=block.secret_key,
        session_token=block.session_token,
    )
