"""The agent's looks at its node, while an attempt runs."""

from __future__ import annotations

import json

from tests.unit.agent.conftest import JOB, wait_for
from training.agent.protocol import StopOrder

OFTEN = json.dumps(json.loads(JOB) | {"watch": {"sample_every_s": 0.1, "log_limit_bytes": 0}})


def test_samples_are_taken_while_an_attempt_runs_and_the_last_one_stays(new_container):
    container = new_container()
    assert container.status().sample is None
    container.start("sleep", "600", job=OFTEN)
    first = wait_for(lambda: container.status().sample)
    assert first.host.disk_free_bytes > 0
    assert first.gaps or first.devices
    wait_for(lambda: container.status().sample.at_s > first.at_s)
    container.call(StopOrder(grace_s=0))
    container.until("ended")
    last = container.status().sample
    assert last is not None
    assert container.status().sample == last
