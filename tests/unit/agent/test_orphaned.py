"""How long a container waits for a supervisor."""

from __future__ import annotations

import pytest

from perdure.training.agent.agent import is_orphaned


@pytest.mark.parametrize(
    ("limit_s", "uncalled_s", "idle_s", "ends"),
    [
        (86_400.0, 86_000.0, 0.0, False),
        (86_400.0, 86_401.0, 0.0, True),
        (86_400.0, 80_000.0, 3_599.0, False),
        (86_400.0, 80_000.0, 3_601.0, True),
        (86_400.0, 3_601.0, 3_601.0, True),
        (60.0, 61.0, 0.0, True),
        (60.0, 59.0, 59.0, False),
    ],
    ids=str,
)
def test_a_container_whose_processes_have_ended_waits_an_hour_for_a_supervisor_at_most(
    limit_s, uncalled_s, idle_s, ends
):
    assert is_orphaned(limit_s, uncalled_s=uncalled_s, idle_s=idle_s) is ends
