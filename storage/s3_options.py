"""Settings of the client of an S3-compatible store.

They stand apart from the client, because boto3 takes a quarter of a second to import. Sizes are
bytes, times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import SecretStr

AddressingStyle = Literal["auto", "virtual", "path"]
PART_SIZE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class S3Options:
    """Endpoint, keys and limits of the client; None leaves a field to boto3's default chain."""

    endpoint: str | None = None
    region: str | None = None
    addressing_style: AddressingStyle = "auto"
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    session_token: SecretStr | None = None
    ca_bundle: str | None = None
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    part_size_bytes: int = PART_SIZE_BYTES
    num_threads: int = 4


def revealed(secret: SecretStr | None) -> str | None:
    """The text of a secret, for the request that needs it."""
    return secret.get_secret_value() if secret is not None else None
