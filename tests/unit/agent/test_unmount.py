"""The platform's number of seconds until a container that goes away has no volumes any more."""

from __future__ import annotations

import pytest

from perdure.training.agent.preparation import leaving_grace_s, platform_variables
from perdure.training.platforms.forms import GRACE
from tests.unit.agent.conftest import agent_config, agent_job, start_order


# (entry of the job, variable of the agent's own container, what processes see, their grace of 20)
@pytest.mark.parametrize(
    ("entry", "outside", "shown", "grace_s"),
    [
        (None, None, "-1", 20),
        ("-1", None, "-1", 20),
        ("10", None, "10", 5),
        ("300", None, "300", 20),
        ("22", None, "22", 17),
        ("4", None, "4", 2),
        ("0", None, "0", 0),
        (None, "10", "10", 5),
        ("30", "10", "30", 20),
        (None, "-1", "-1", 20),
        (None, "soon", "-1", 20),
    ],
)
def test_processes_see_the_platforms_number_and_end_before_their_volumes_go(
    tmp_path, monkeypatch, entry, outside, shown, grace_s
):
    monkeypatch.delenv(GRACE, raising=False)
    if outside is not None:
        monkeypatch.setenv(GRACE, outside)
    restart = {"from_platform": {GRACE: entry}} if entry is not None else {}
    job = agent_job(restart={**restart, "failover_grace_s": 7})
    order = start_order(tmp_path, "true", job=job)
    assert platform_variables(agent_config(), order, tmp_path, 1)[GRACE] == shown
    assert leaving_grace_s(job, 20) == grace_s
