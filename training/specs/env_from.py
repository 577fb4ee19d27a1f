"""Environment variables of the workers whose values are kept elsewhere; the job has references.

A value is read when an attempt starts, so one that is renewed reaches the next attempt. It goes
into the environment of the workers, and into no job, ledger, parameter, order on a disk or log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from perdure.storage.frozen_model import FrozenModel
from perdure.training.masking import MAX_MATCH_BYTES, MIN_SECRET_BYTES, has_key

MAX_FILE_BYTES = 64 << 10
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretSource(FrozenModel):
    """The place of one variable's value: exactly one of block, file and secret."""

    block: str | None = Field(
        None,
        description="Prefect block: the name of a Secret block, or type/name of any other block; "
        "the flow's process reads it and hands the value to the nodes",
    )
    field: str | None = Field(
        None,
        description="field of the block that holds the value, with dots for nested fields; a "
        "Secret block with a single text needs none",
    )
    file: str | None = Field(
        None,
        description="absolute path of a file on the nodes, such as a mounted Kubernetes Secret; a "
        "newline at its end is dropped",
    )
    secret: str | None = Field(
        None,
        description="environment variable of the node agent's container, as the platform sets it "
        "from a secret; local engine: of the supervisor's environment",
    )

    @model_validator(mode="after")
    def _is_one_reference(self) -> Self:
        given = [self.block, self.file, self.secret]
        if len([one for one in given if one]) != 1:
            raise ValueError("needs exactly one of block, file and secret")
        if any(one and has_key(one) for one in given):
            raise ValueError("holds a secret itself; it names where the secret is kept")
        if self.field is not None and self.block is None:
            raise ValueError("field is of a block, and there is none")
        if self.file is not None and not self.file.startswith("/"):
            raise ValueError("file must be an absolute path on the nodes")
        if self.secret is not None and not _VARIABLE.fullmatch(self.secret):
            raise ValueError("secret must be the name of an environment variable of the container")
        return self

    @property
    def text(self) -> str:
        """The reference for people."""
        if self.block is not None:
            return f"Prefect block {self.block}" + (f", field {self.field}" if self.field else "")
        return f"file {self.file}" if self.file is not None else f"variable {self.secret}"


def values_on_node(
    sources: Mapping[str, SecretSource],
    *,
    delivered: Mapping[str, str],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """The values of the variables, as a node has them.

    Args:
        sources: by name of the variable.
        delivered: values of the blocks, by name of the variable.
        environment: of the node agent.

    Raises:
        ValueError: one is not there, or cannot be used; names the variable, never the value.
    """
    return {
        name: checked_value(name, _read(name, source, delivered, environment))
        for name, source in sources.items()
    }


def checked_value(name: str, value: str) -> str:
    """The same value.

    Raises:
        ValueError: no process can have it as a variable, or no log could be kept free of it.
    """
    sizes = [len(line.encode(errors="surrogateescape")) for line in value.splitlines()]
    longest = max(sizes, default=0)
    if not MIN_SECRET_BYTES <= longest <= MAX_MATCH_BYTES:
        limits = f"{MIN_SECRET_BYTES} to {MAX_MATCH_BYTES}"
        raise ValueError(f"env_from.{name}: {longest} bytes, {limits} can be kept out of logs")
    if "\0" in value:
        raise ValueError(f"env_from.{name}: holds a zero byte, no variable can")
    return value


def _read(
    name: str,
    source: SecretSource,
    delivered: Mapping[str, str],
    environment: Mapping[str, str],
) -> str:
    if source.file is not None:
        try:
            with Path(source.file).open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ValueError(f"env_from.{name}: {source.file}: {error.strerror}") from None
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"env_from.{name}: {source.file}: more than {MAX_FILE_BYTES} bytes")
        return raw.decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")
    if source.secret is not None:
        if source.secret not in environment:
            raise ValueError(f"env_from.{name}: the container has no variable {source.secret}")
        return environment[source.secret]
    if name not in delivered:
        raise ValueError(f"env_from.{name}: the value of {source.text} did not come with the order")
    return delivered[name]
