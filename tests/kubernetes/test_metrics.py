"""A Prometheus in the cluster finds a run by the annotations of its pods, and gets its metrics.

Debian's Prometheus is built without the discovery of Kubernetes. What that would tell of pods, this
test tells it over HTTP; what is made of it, by the configuration of docs/kubernetes.md, and the
scrapes are Prometheus' own. The lab's network carries out no NetworkPolicy: of the one in
`options/monitoring` it is shown that it means the pod and the port that are scraped, and not that
others are kept out.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from perdure.training.config.job import Job
from tests.kubernetes.conftest import absent
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.places import HUB_IP, REPO
from tests.kubernetes.overlay import DEPLOY
from tests.kubernetes.pods import pod, wait_until_running
from tests.prometheus import MISSING, PROGRAM, Answers
from tests.waiting import wait_for

PORT = 9090
STEPS = 2000  # more than it comes to
START_S = 120.0
ARRIVES_S = 60.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def configuration(discovery: str) -> dict[str, Any]:
    """What docs/kubernetes.md tells users to write, with another discovery and more often."""
    text = (REPO / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n# prometheus.yml\n(.*?)```", text, re.DOTALL)
    document: dict[str, Any] = yaml.safe_load(block)
    (job,) = document["scrape_configs"]
    (discovered,) = job.pop("kubernetes_sd_configs")
    assert discovered["role"] == "pod"
    job["scrape_interval"] = "1s"
    job["http_sd_configs"] = [{"url": discovery, "refresh_interval": "5s"}]
    return document


def target_groups(pods: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What Prometheus' discovery of pods tells of each of their ports.

    https://prometheus.io/docs/prometheus/latest/configuration/configuration/#pod
    """
    for one in pods:
        meta, ip = one["metadata"], one["status"].get("podIP", "")
        labels = {"namespace": meta["namespace"], "pod_name": meta["name"], "pod_ip": ip}
        for kind in ("label", "annotation"):
            found = meta.get(f"{kind}s") or {}
            labels |= {f"pod_{kind}_{_word(name)}": value for name, value in found.items()}
        for container in one["spec"]["containers"] if ip else ():
            for port in container.get("ports") or [{"containerPort": 80}]:
                yield {
                    "targets": [f"{ip}:{port['containerPort']}"],
                    "labels": {f"__meta_kubernetes_{name}": text for name, text in labels.items()},
                }


def _word(name: str) -> str:
    return re.sub(r"\W", "_", name)


@pytest.fixture
def discovery(lab: Lab, namespace: str) -> Iterator[str]:
    """The address where Prometheus learns the pods of the namespace."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            items = lab.get("pods", "--namespace", namespace)["items"]
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(list(target_groups(items))).encode())

        def log_message(self, *_: object) -> None:
            """Nothing: it is asked every few seconds."""

    server = http.server.ThreadingHTTPServer((HUB_IP, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HUB_IP}:{server.server_address[1]}/pods"
    server.shutdown()
    server.server_close()


@dataclass(frozen=True)
class Scraped:
    """A run that trains, and the Prometheus that scrapes it."""

    job: Job
    prometheus: Answers


@pytest.fixture
def prometheus(lab: Lab, create, namespace: str, discovery: str) -> Answers:
    """A pod of Prometheus."""
    if PROGRAM is None:
        absent(MISSING)
    config = {"prometheus.yml": yaml.safe_dump(configuration(discovery))}
    command = [PROGRAM, "--config.file=/config/prometheus.yml", "--storage.tsdb.path=/data"]
    server = pod(lab, "prometheus", command)
    server["spec"]["volumes"] += [
        {"name": "config", "configMap": {"name": "prometheus"}},
        {"name": "data", "emptyDir": {}},
    ]
    server["spec"]["containers"][0]["volumeMounts"] += [
        {"name": "config", "mountPath": "/config"},
        {"name": "data", "mountPath": "/data"},
    ]
    meta = {"name": "prometheus"}
    create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": config},
        server,
    )
    wait_until_running(lab, namespace, "prometheus")
    found = lab.get("pod", "prometheus", "--namespace", namespace)
    answers = Answers(f"{found['status']['podIP']}:{PORT}")
    wait_for(answers.is_ready, timeout_s=START_S, period_s=0.5, what="Prometheus is ready")
    return answers


@pytest.fixture
def scraped(runs, tmp_path, prometheus) -> Iterator[Scraped]:
    """A run with the annotations of the sample job."""
    sample = yaml.safe_load((DEPLOY / "job.yaml").read_text(encoding="utf-8"))
    changes = {
        "watch": sample["watch"] | {"sample_every_s": 1.0},
        "engine": {"annotations": sample["engine"]["annotations"]},
    }
    job = runs.job("scraped", steps=STEPS, **changes)
    supervisor = runs.supervise(job, tmp_path / "supervisor")
    try:
        wait_for(lambda: runs.kept(job) >= 5, timeout_s=START_S, period_s=0.5, what="5 steps")
        yield Scraped(job, prometheus)
    finally:
        supervisor.kill()
        supervisor.wait()


def test_the_metrics_of_a_run_arrive_with_its_name_and_those_of_its_nodes(scraped, runs, namespace):
    ask, job = scraped.prometheus.ask, scraped.job
    step = f'perdure_step{{run_id="{job.run_id}"}}'
    wait_for(
        lambda: (scraped.prometheus.value(step) or 0) > 5,
        timeout_s=ARRIVES_S, period_s=0.5, what="steps",
    )  # fmt: skip
    (series,) = ask(step)
    labels = series["metric"]
    first = runs.pod(job, 0)
    assert (labels["job"], labels["namespace"], labels["pod"]) == ("perdure", namespace, first)
    before = float(series["value"][1])
    wait_for(lambda: scraped.prometheus.value(step) > before, timeout_s=30, what="it trains on")

    placed = runs.history(job).placement
    assert placed is not None
    nodes = {member.node for member in placed.members}
    sampled = f'perdure_disk_free_bytes{{run_id="{job.run_id}"}}'
    wait_for(lambda: len(ask(sampled)) == 2, timeout_s=ARRIVES_S, period_s=0.5, what="samples")
    assert {one["metric"]["node"] for one in ask(sampled)} == nodes
    # All that is kept answers: no target is down, and the pod of Prometheus is none.
    (target,) = ask("up")
    assert (target["metric"]["pod"], target["value"][1]) == (first, "1")


def test_the_policy_for_prometheus_means_the_pod_and_the_port_that_it_scrapes(scraped, runs, lab):
    path = DEPLOY / "options" / "monitoring" / "agents.yaml"
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    (policy,) = (one for one in documents if one["kind"] == "NetworkPolicy")
    policy["metadata"]["namespace"] = runs.namespace
    lab.create(policy)
    labels = policy["spec"]["podSelector"]["matchLabels"]
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    found = lab.get("pods", "--namespace", runs.namespace, "--selector", selector)["items"]
    meant = {one["metadata"]["name"] for one in found}
    assert meant == {runs.pod(scraped.job, member) for member in (0, 1)}
    (target,) = scraped.prometheus.ask('up{job="perdure"}')
    assert target["metric"]["pod"] in meant
    (rule,) = policy["spec"]["ingress"]
    ports = [one["port"] for one in rule["ports"]]
    assert [target["metric"]["instance"].rpartition(":")[2]] == [str(port) for port in ports]
