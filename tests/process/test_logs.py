"""Logs of ended attempts are in the store, whatever becomes of their nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.storage.address import open_store
from perdure.training.wire.logs import logs_prefix
from tests.waiting import wait_for

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


# Prints a line now and then; the first attempt dies while somebody reads along.
TALKING = """
i=0
while [ $$i -lt 12 ]; do
  i=$$((i + 1)); echo "line $$i of attempt $PERDURE_ATTEMPT"; sleep 0.5
  test "$PERDURE_ATTEMPT.$$i" != 1.8 || kill -SEGV $$$$
done
"""


@pytest.mark.long
def test_who_follows_the_logs_gets_every_line_of_every_attempt_until_the_run_ends(bench):
    engine = {"nodes": 1, "slots_per_node": 1, "spares": 0, "grace_s": 2}
    job = bench.apart("followed", worker={"command": ["sh", "-c", TALKING]}, engine=engine)
    del job["data"]
    running = bench.start(job)
    living = wait_for(
        lambda: [row for row in listed(bench) if row["is_living"]], timeout_s=90, what=running.out
    )
    assert ("node-0", "command-00000.stdout.log") in {(row["node"], row["file"]) for row in living}
    assert "line 1 of attempt 1" in bench.perdure("logs", "followed", "--node", "node-0")
    text = bench.perdure("logs", "followed", "--follow")
    assert running.finish() == 0, running.out
    assert running.rungs() == ["in_place_restart"]
    lines = [line.removeprefix("node-0 | ") for line in text.splitlines()]
    first, second = (n for n, line in enumerate(lines) if line.startswith("==> "))
    assert (lines[first], lines[second]) == ("==> attempt 1.1 <==", "==> attempt 1.2 <==")
    assert lines[first + 1 : second] == [f"line {n} of attempt 1" for n in range(1, 9)]
    assert lines[second + 1 :] == [f"line {n} of attempt 2" for n in range(1, 13)]
    assert [row for row in listed(bench) if row["is_living"]] == []
    again = bench.perdure("logs", "followed", "-f")
    assert again.splitlines()[0] == "==> attempt 1.2 <==", "of a run that is over the end"


def listed(bench) -> list[dict[str, Any]]:
    done = bench.python("-m", "perdure", "logs", "followed", "--json")
    return json.loads(done.stdout)["logs"] if done.returncode == 0 else []
