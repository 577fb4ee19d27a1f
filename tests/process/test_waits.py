"""Runs whose store is silent, and runs whose scratch disk is full."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from perdure.storage.address import open_store
from perdure.storage.checkpoint import CheckpointStore
from perdure.training.recovery.faults import NODE_UNWRITABLE, FaultClass
from perdure.training.supervisor.checkpoints import node_tiers
from perdure.training.supervisor.store_outage import read_outage
from tests.process.harness import Workbench
from tests.process.small_disk import NOT_HERE, fill, small_disk
from tests.s3.proxy import Answer, FaultProxy, LostRequest
from tests.s3.servers import ACCESS_KEY, SECRET_KEY, Moto
from tests.values import not_none
from tests.waiting import wait_for

pytestmark = pytest.mark.process


@pytest.fixture
def proxy(tmp_path, monkeypatch) -> Iterator[FaultProxy]:
    """An S3 server that falls silent when a test has it so."""
    for name, value in (("ACCESS_KEY_ID", ACCESS_KEY), ("SECRET_ACCESS_KEY", SECRET_KEY)):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = Moto(tmp_path)
    try:
        client = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{server.port}", region_name="us-east-1"
        )
        client.create_bucket(Bucket="pretrain")
        with FaultProxy(server.port) as running:
            yield running
    finally:
        server.end()


@pytest.mark.long
def test_a_run_whose_store_is_silent_says_so_and_is_cancelled_soon(bench: Workbench, proxy):
    storage = {
        "address": "s3://pretrain/team",
        "endpoint": f"http://127.0.0.1:{proxy.server_port}",
        "region": "us-east-1",
        "read_timeout_s": 3,
    }
    running = bench.start(bench.pair("silent", storage=storage))
    running.reach(12)
    wait_for(lambda: running.history.committed_step >= 10, what="the first commit")
    proxy.inject(LostRequest(), method="", times=10**6)
    noted = wait_for(lambda: read_outage(bench.home, "silent"), what="the supervisor to notice")
    wait_for(
        lambda: "waiting for the store since" in running.out, what="the line to have it as phase"
    )
    asked = bench.python("-m", "perdure", "status", "silent")
    assert asked.returncode == 1
    assert f"waiting for the store since {noted.since}: s3://" in " ".join(asked.stderr.split())

    assert "the store does not answer" in bench.perdure("cancel", "silent")
    wait_for(
        lambda: not running.local.rank(0) and not running.local.rank(1),
        what="the ranks to end while the store is silent",
    )
    in_memory = max(node_tiers(bench.home, "silent"))
    proxy.reset()
    assert running.finish() == 1, running.out
    assert not_none(running.history.ended).outcome == "cancelled"
    assert running.rungs() == []
    saved = CheckpointStore(open_store(running.job.storage), "silent").latest()
    assert running.history.committed_step == saved == in_memory, "what was in memory is committed"
    running.leave_nothing()


@pytest.mark.long
def test_a_store_that_answers_slow_down_costs_time_and_nothing_else(
    bench: Workbench, proxy, undisturbed_pair
):
    storage = {
        "address": "s3://pretrain/team",
        "endpoint": f"http://127.0.0.1:{proxy.server_port}",
        "region": "us-east-1",
    }
    running = bench.start(bench.pair("slow-down", storage=storage))
    running.reach(12)
    proxy.inject(Answer(503, "SlowDown"), method="", times=10**6)
    wait_for(
        lambda: "waiting for the store since" in running.out, what="the line to have it as phase"
    )
    time.sleep(float(os.environ.get("PERDURE_SLOW_DOWN_S", "0")))
    asked = bench.python("-m", "perdure", "status", "slow-down")
    assert "SlowDown" in asked.stderr
    assert running.local.rank(0)
    assert running.local.rank(1)
    proxy.reset()
    running.complete(undisturbed_pair)
    history = running.history
    assert (len(history.attempts), running.rungs()) == (1, [])
    saved = CheckpointStore(open_store(running.job.storage), "slow-down")
    assert saved.latest() == history.committed_step == 60


@pytest.fixture
def scratch(bench: Workbench) -> Iterator[Path]:
    """A small file system for the scratch folders of a run."""
    folder = bench.home / "runs" / "full-scratch"
    with small_disk(folder, size="24m") as is_mounted:
        if not is_mounted:
            pytest.skip(NOT_HERE)
        yield folder


def test_a_full_scratch_disk_ends_the_run_with_what_a_person_must_do(bench: Workbench, scratch):
    document = bench.pair("full-scratch", restart={"pod_retries": 0, "process_replace": False})
    document["engine"]["spares"] = 0
    running = bench.start(document)
    running.reach(12)
    fill(scratch)
    for rank in (0, 1):
        running.local.kill_rank(rank)
    assert running.finish() == 1, running.out
    history = running.history
    fault = not_none(not_none(history.attempts[-1].ended).fault)
    assert (fault.fault_class, fault.code) == (FaultClass.STORAGE_ERROR, NODE_UNWRITABLE)
    assert f"No space left on device: {scratch}" in fault.evidence
    assert running.rungs()[-1] == "stop"
    assert len(history.attempts) <= 2
    assert "make room there" in not_none(history.ended).message
    refused = history.attempts[1:]
    assert all(not_none(view.ended).to_step is None for view in refused)
    running.leave_nothing()
