"""Samples of a node while an attempt runs."""

from __future__ import annotations

import threading

from perdure.training.agent.sampler import PeriodicSampler
from perdure.training.wire.agent import StopOrder
from tests.unit.agent.conftest import agent_job
from tests.waiting import wait_for

OFTEN = agent_job(watch={"sample_every_s": 0.1, "log_limit_bytes": 0})


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


def test_a_sample_that_is_older_than_one_that_hangs_does_not_describe_the_node(tmp_path):
    now = [100.0]
    sampled = threading.Event()
    sampling = PeriodicSampler(tmp_path, clock=lambda: now[0])
    sampling.begin(1, 600.0, lambda _sample: sampled.set())
    try:
        assert sampled.wait(240)
        now[0] += 1800.0
        assert sampling.newest is not None
        assert sampling.newest.host.disk_free_bytes
        now[0] += 21.0
        assert sampling.newest.gaps == ("no sample of the node for 1821 s",)
        assert not sampling.newest.host.disk_free_bytes
    finally:
        sampling.end()
    assert sampling.newest.host.disk_free_bytes, "the last one stays"
