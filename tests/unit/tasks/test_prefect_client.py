"""Asking a Prefect server once."""

from __future__ import annotations

from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from perdure.tasks.prefect_client import without_retries


def test_inside_the_client_does_not_try_again_and_afterwards_as_before():
    before = PREFECT_CLIENT_MAX_RETRIES.value()
    with without_retries():
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0
    assert PREFECT_CLIENT_MAX_RETRIES.value() == before > 0


def test_settings_are_made_once_and_again_when_the_others_change():
    with without_retries():
        first = get_current_settings()
    with without_retries():
        assert get_current_settings() is first
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 7}), without_retries():
        assert get_current_settings() is not first
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0
