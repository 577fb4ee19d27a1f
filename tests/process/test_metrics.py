"""A real Prometheus scrapes a real run, and answers what the dashboard asks."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from perdure.training.processes import free_port
from tests.process.harness import REPO
from tests.prometheus import MISSING, PROGRAM, Answers
from tests.waiting import wait_for

HOST = "127.0.0.1"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
]

SCRAPE = "500ms"
# What a machine without devices does not have, and what asks for something to be wrong.
EMPTY = ("perdure_device_", "perdure_mfu_ratio", "perdure_past_recoveries")


class Prometheus:
    """A Prometheus of its own, that scrapes one address."""

    def __init__(self, folder: Path, target: str) -> None:
        self.answers = Answers(f"{HOST}:{free_port(HOST)}")
        jobs = [{"job_name": "perdure", "static_configs": [{"targets": [target]}]}]
        times = {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE}
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump({"global": times, "scrape_configs": jobs}))
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    str(PROGRAM),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder}/tsdb",
                    f"--web.listen-address={self.answers.address}",
                ],
                stdout=log,
                stderr=log,
            )

    def is_ready(self) -> bool:
        assert self.process.poll() is None
        return self.answers.is_ready()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(240)


@pytest.fixture
def running(bench):
    """A run that lasts until it is cancelled."""
    job = bench.apart("metrics", steps=5000, watch={"sample_every_s": 0.5})
    running = bench.start(job)
    try:
        running.reach(3)
        yield running
    finally:  # late or not, nothing of it is left to the tests that follow
        running.kill_supervisor()
        running.local.kill_node("node-0")
        running.local.kill_node("node-1")


@pytest.fixture
def prometheus(running, tmp_path):
    """Scrapes the address that `perdure status` prints."""
    status = running.status()
    url = urllib.parse.urlsplit(status["metrics_url"])
    assert (url.hostname, url.path) == (HOST, "/metrics")
    prometheus = Prometheus(tmp_path, url.netloc)
    try:
        wait_for(prometheus.is_ready, what="Prometheus is ready")
        yield prometheus.answers
    finally:
        prometheus.close()


def expressions() -> Iterator[str]:
    """What the dashboard's panels ask, as Grafana would fill it in."""
    document = json.loads((REPO / "dashboards" / "perdure.json").read_text())
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$run_id", "metrics")
            yield text.replace("$__rate_interval", "10s")


def test_prometheus_answers_what_the_dashboard_asks_and_shows_a_recovery(running, prometheus):
    recoveries = 'perdure_recoveries_total{run_id="metrics",outcome="recovered"}'
    wait_for(lambda: (prometheus.value("perdure_step") or 0) > 5, what="steps")
    assert prometheus.value("perdure_generation") == 1
    assert prometheus.ask(recoveries) == []

    assert len(running.local.kill_rank(1)) == 1
    wait_for(lambda: prometheus.value(recoveries) == 1, what="a recovery is counted")
    (recovery,) = prometheus.ask(recoveries)
    labels = recovery["metric"]
    assert (labels["rung"], labels["fault_class"]) == ("process_replace", "native_crash")
    assert (labels["placement"], labels["attempt"]) == ("1", "1")
    assert prometheus.value("perdure_generation") == 2

    asked = [one for one in expressions() if not any(name in one for name in EMPTY)]
    assert len(asked) > 20
    for one in asked:
        wait_for(partial(prometheus.ask, one), what=f"data of {one}")
    nodes = {one["metric"]["node"] for one in prometheus.ask("perdure_disk_free_bytes")}
    assert nodes == {"node-0", "node-1"}
    stage = prometheus.ask('perdure_attempt_stage{run_id="metrics"} == 1')
    assert [one["metric"]["stage"] for one in stage] == ["training"]
    for one in expressions():
        prometheus.ask(one)  # what has no data here is understood all the same
