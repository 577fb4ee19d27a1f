"""Values of a job's `env_from` that are in Prefect blocks.

Read as documents, so that the class of a block need not be installed here. They go to the nodes
with the order that starts an attempt, and are in no parameter, state, result or log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from perdure.tasks.prefect_client import client_without_retries
from perdure.training.config.job import Job
from perdure.training.config.secrets import SecretSource, checked_value
from perdure.training.errors import EngineError, InputError

SECRET_TYPE = "secret"  # noqa: S105 slug of Prefect's own block for one text


class BlockSecrets:
    """Reads the values anew for every attempt: one that was renewed reaches the next.

    While the server does not answer, and when a block is gone, an attempt gets what this process
    read before: a restart must not fail for it.

    Args:
        job: job whose `env_from` refers to blocks.
    """

    def __init__(self, job: Job) -> None:
        self._sources = _of_blocks(job)
        self._values: dict[str, SecretStr] = {}

    def __call__(self) -> Mapping[str, SecretStr]:
        """The values, by name of the variable.

        Raises:
            EngineError: one cannot be read, and never was.
        """
        if not self._sources:
            return {}
        try:
            with client_without_retries() as client:
                for name, source in self._sources.items():
                    self._values[name] = _value(client, name, source)
        except (httpx.HTTPError, InputError, OSError) as error:
            missing = [name for name in self._sources if name not in self._values]
            if missing:
                raise EngineError(f"env_from.{missing[0]}: {error}") from error
        return dict(self._values)


def check_blocks(job: Job) -> None:
    """Check that every block of a job's env_from is there and holds a text.

    Raises:
        InputError: one does not; names the variable, never the value.
    """
    sources = _of_blocks(job)
    if not sources:
        return
    with get_client(sync_client=True) as client:
        for name, source in sources.items():
            _value(client, name, source)


def _of_blocks(job: Job) -> dict[str, SecretSource]:
    return {name: source for name, source in job.env_from.items() if source.block is not None}


def _value(client: SyncPrefectClient, name: str, source: SecretSource) -> SecretStr:
    assert source.block is not None  # noqa: S101 the caller chose these
    kind, _, block = source.block.rpartition("/")
    field = f"env_from.{name}"
    try:
        document = client.read_block_document_by_name(
            block, kind or SECRET_TYPE, include_secrets=True
        )
    except ObjectNotFound:
        problem = f"no {f'block of type {kind}' if kind else 'Secret block'} named {block!r}"
        raise InputError(field, f"{problem}; 'prefect block ls' lists them") from None
    content: Any = document.data
    path = source.field.split(".") if source.field else []
    for part in [*(["value"] if not kind else []), *path]:
        content = content.get(part) if isinstance(content, Mapping) else None
    if not isinstance(content, str | int | float) or isinstance(content, bool):
        where = f"field {source.field}" if source.field else "a field"
        raise InputError(field, f"block {source.block!r} has no text in {where}; set 'field'")
    try:
        return SecretStr(checked_value(name, str(content)))
    except ValueError as error:
        raise InputError("", str(error)) from None
