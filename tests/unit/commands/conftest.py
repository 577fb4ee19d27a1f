"""Processes of an attempt for the tests of commands."""

from __future__ import annotations

from tests.unit.agent.conftest import new_group

__all__ = ["new_group"]
