"""Logs of ended attempts are in the store, whatever becomes of their nodes."""

from __future__ import annotations

import json

import pytest

from storage.address import open_store
from training.agent.log_collection import logs_prefix

pytestmark = pytest.mark.process

SECRET = "hf-this-is-of-the-users-environment"
# Fails in its first attempt, and prints secrets. A command's `$$` becomes `$`.
PROGRAM = """
echo "rank prints: token is $$HF_TOKEN, attempt $PERDURE_ATTEMPT"
echo "password=hunter2" >&2
sleep 1
test "$PERDURE_ATTEMPT" != 1 || kill -SEGV $$$$
"""


def test_the_logs_of_every_attempt_are_in_the_store_without_secrets(bench, monkeypatch):
    monkeypatch.setenv("SITE_TOKEN", SECRET)
    job = bench.apart("logs", worker={"command": ["sh", "-c", PROGRAM]},
                     env_from={"HF_TOKEN": {"secret": "SITE_TOKEN"}})  # fmt: skip
    del job["data"]
    running = bench.start(job)
    assert running.finish() == 0, running.out
    assert running.rungs() == ["in_place_restart"]

    report = json.loads(bench.perdure("logs", "logs", "--json"))
    assert report["gaps"] == []
    files = {(row["attempt"], row["node"], row["file"]) for row in report["logs"]}
    for attempt in (1, 2):
        for rank in (0, 1):
            assert (attempt, f"node-{rank}", f"command-{rank:05d}.stdout.log") in files
    text = bench.perdure("logs", "logs", "--node", "node-1", "--attempt", "1.1")
    assert "rank prints: token is ***, attempt 1" in text
    assert "password=***" in text
    assert "attempt 2" in bench.perdure("logs", "logs", "--node", "node-1")

    store = open_store(running.job.storage)
    assert all(SECRET.encode() not in store.get(i.key) for i in store.list(logs_prefix("logs")))
    running.leave_nothing()


@pytest.mark.long
def test_the_gap_that_a_lost_node_leaves_is_reported(bench):
    running = bench.start(bench.apart("logs-lost", steps=40))
    running.reach(3)
    assert running.local.kill_node("node-1")
    assert running.finish() == 0, running.out
    text = bench.perdure("logs", "logs-lost")
    assert "attempt 1.1: node-1 was lost or did not finish collecting" in text
    assert "coordinator.log" in text
    text = bench.perdure("logs", "logs-lost", "--file", "coordinator.log", "--attempt", "1.1")
    assert "metrics at http://127.0.0.1:" in text
    running.leave_nothing()
