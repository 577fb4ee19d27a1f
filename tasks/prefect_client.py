"""A Prefect client that sends each request once, for callers that repeat it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SettingsContext, get_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, Settings

from perdure.training.errors import InputError

_cached: tuple[Settings, Settings] | None = None


@contextmanager
def without_retries() -> Iterator[None]:
    """Inside, what fails once has failed: the client's own back-off grows to minutes."""
    context = get_settings_context()
    with SettingsContext(profile=context.profile, settings=_without_retries(context.settings)):
        yield


@contextmanager
def client_without_retries() -> Iterator[SyncPrefectClient]:
    """A client for one try: with a run's retries, a cancellation would wait for half an hour."""
    with (
        without_retries(),
        get_client(sync_client=True, httpx_settings={"timeout": 5.0}) as client,
    ):
        yield client


@contextmanager
def needed_for(field: str) -> Iterator[None]:
    """Say on a line which field of a job needs the server, where that does not answer.

    Raises:
        InputError: no answer came, or none that helps.
    """
    try:
        yield
    except (httpx.HTTPError, OSError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        url = PREFECT_API_URL.value() or "no address"
        raise InputError(
            field, f"is kept on the Prefect server ({url}), which does not answer: {why}"
        ) from error


def _without_retries(settings: Settings) -> Settings:
    """Copy settings, without retries, once: reading all sources takes a tenth of a second.

    Two threads that make them at once make the same.
    """
    global _cached  # noqa: PLW0603 a cache of one
    if _cached is None or _cached[0] is not settings:
        changed = settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
        _cached = (settings, changed)
    return _cached[1]
