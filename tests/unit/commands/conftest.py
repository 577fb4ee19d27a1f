"""Commands run in the processes of a node agent, as the agent's own tests have them."""

from __future__ import annotations

from tests.unit.agent.conftest import new_group

__all__ = ["new_group"]
