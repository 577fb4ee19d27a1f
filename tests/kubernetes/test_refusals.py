"""A refusal of the API server is no fault of a node, and a lost Secret costs its pod alone."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from perdure.training.engines.kubernetes.objects import RUN
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.accounts import NAME, NEEDED, kubeconfig_of, role
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.places import KEYS
from tests.kubernetes.runs import (
    LIMIT_S,
    START_S,
    STEPS,
    ClusterRuns,
    Deed,
    Played,
    assert_as_undisturbed,
    await_wait,
    deletes_pod,
    file_of,
    perdure,
    play,
)
from tests.waiting import wait_for

REFUSED_S = 10.0  # for which every request is refused
ALONE = {"node_replace": False, "pod_retries": 1}  # the lost pod is the answer
FEW = 60
COST_CENTER = "cost-center.lab.local"

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1500)]


def assert_nobody_is_blamed(played: Played) -> None:
    """One pod was replaced, on one record, and neither a node nor a rung has paid for it."""
    assert played.answers == [("container_lost", "pod_reschedule")]
    assert played.history.isolated == ()
    assert [placed.placement for placed in played.history.placements] == [1, 2]
    assert not any(view.failed_rungs for view in played.history.attempts)


@pytest.fixture
def binding(runs, create, tmp_path, monkeypatch) -> Iterator[Callable[[bool], None]]:
    """Gives the supervisor its rights, or takes them away; it has them at first."""
    *others, bound, token = role(NEEDED)
    create(*others, bound, token)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of(runs.cluster, runs.namespace, tmp_path)))

    def bind(has_rights: bool) -> None:  # noqa: FBT001 a fixture's one argument
        if has_rights:
            create(bound)
        else:
            runs.cluster.kubectl("delete", "rolebinding", NAME, "--namespace", runs.namespace)

    return bind


def test_a_run_that_may_take_nothing_down_has_its_end_on_record_and_is_taken_down_later(
    runs, binding, tmp_path
):
    job = runs.job("ended", steps=STEPS)
    supervisor = runs.supervise(job, tmp_path / "supervisor")
    wait_for(lambda: runs.kept(job) >= 10, timeout_s=START_S, period_s=0.5, what="10 steps")
    binding(False)
    supervisor.wait(timeout=LIMIT_S)
    ended = runs.history(job).ended
    assert ended is not None
    assert ended.outcome == "completed"
    assert "forbidden" in ended.leftovers
    assert len([name for name in runs.leftovers(job) if name.startswith("Pod ")]) == 2
    binding(True)
    assert "was left over is taken down" in perdure(runs, file_of(runs, job), "cancel")
    assert_as_undisturbed(runs.played(job), runs.undisturbed(job))


class Denial(BaseHTTPRequestHandler):
    """The answer of an admission webhook that says no to everything."""

    def do_POST(self) -> None:
        """Deny what is asked."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = {"message": "pods need a cost center"}
        answer = {"uid": asked["request"]["uid"], "allowed": False, "status": status}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        kind = {name: asked[name] for name in ("apiVersion", "kind")}
        self.wfile.write(json.dumps({**kind, "response": answer}).encode())


@dataclass(frozen=True)
class Webhook:
    """An admission webhook for the pods of a run, on this machine as the API server is."""

    lab: Lab
    port: int

    def deny(self, run_id: str) -> None:
        """Have it deny each pod of a run."""
        self._register(run_id, self.port)

    def fail(self, run_id: str) -> None:
        """Have nobody answer where it should be."""
        self._register(run_id, 1)

    def end(self) -> None:
        """Have the API server ask nobody."""
        self.lab.kubectl(
            "delete", "validatingwebhookconfiguration", COST_CENTER, "--ignore-not-found"
        )

    def _register(self, run_id: str, port: int) -> None:
        authority = base64.b64encode((KEYS / "ca.crt").read_bytes()).decode()
        pods = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
        rule = {
            "name": COST_CENTER,
            "clientConfig": {"url": f"https://127.0.0.1:{port}/", "caBundle": authority},
            "rules": [{**pods, "operations": ["CREATE"]}],
            "objectSelector": {"matchLabels": {RUN: run_id}},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        }
        kind = "ValidatingWebhookConfiguration"
        self.lab.create(
            {
                "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
                "metadata": {"name": COST_CENTER}, "webhooks": [rule],
            }
        )  # fmt: skip


@pytest.fixture
def webhook(lab) -> Iterator[Webhook]:
    """Refuses pods of runs; afterwards it is gone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(KEYS / "apiserver.crt", KEYS / "apiserver.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Denial) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        webhook = Webhook(lab, server.server_port)
        try:
            yield webhook
        finally:
            webhook.end()
            server.shutdown()


def refused(runs: ClusterRuns, begin: Callable[[str], None], end: Callable[[], None], words: str):
    """A pod is lost while the API server refuses another, in these words."""

    def refuse(run: RunSupervisor) -> None:
        begin(run.job.run_id)
        deletes_pod(runs, 1, "--grace-period=1").what(run)
        await_wait(run, words)
        time.sleep(REFUSED_S)
        status = perdure(runs, file_of(runs, run.job), "status")
        assert "waiting for the platform" in status
        assert words in status
        end()

    return Deed(refuse)


def test_a_refusal_by_the_api_server_is_waited_for_and_is_no_fault_of_a_node(
    runs, binding, webhook
):
    deeds = (
        refused(runs, lambda _run_id: binding(False), lambda: binding(True), "forbidden"),
        refused(runs, webhook.deny, webhook.end, "pods need a cost center"),
        refused(runs, webhook.fail, webhook.end, "failed calling webhook"),
    )
    played = play(runs, "refused", *deeds, steps=FEW, restart={**ALONE, "pod_retries": 3})
    assert played.answers == [("container_lost", "pod_reschedule")] * 3
    assert played.history.isolated == ()
    assert [placed.placement for placed in played.history.placements] == [1, 2, 3, 4]
    assert not any(view.failed_rungs for view in played.history.attempts)


def lose_secret(runs: ClusterRuns, name: str, folder) -> tuple[object, str]:
    """Have a run train that lost the Secret of a member, and its supervisor."""
    job = runs.job(name, steps=STEPS, restart=ALONE)
    first = runs.supervise(job, folder / "first")
    wait_for(lambda: runs.kept(job) >= 20, timeout_s=START_S, period_s=0.5, what="20 steps")
    secret = runs.pod(job, 1)
    runs.cluster.kubectl("delete", "secret", secret, "--namespace", runs.namespace)
    first.kill()
    first.wait()
    return job, secret


def test_a_member_whose_secret_is_lost_is_replaced_by_the_next_supervisor(runs, tmp_path):
    job, secret = lose_secret(runs, "secret", tmp_path)
    second = runs.supervise(job, tmp_path / "second")
    assert second.wait(timeout=LIMIT_S) == 0
    played = runs.played(job)
    assert_as_undisturbed(played, runs.undisturbed(job))
    assert_nobody_is_blamed(played)
    assert f"Secret {secret}" in played.evidence[0]


def test_a_run_that_has_lost_a_secret_is_cancelled(runs, tmp_path):
    job, _ = lose_secret(runs, "no-order", tmp_path)
    perdure(runs, file_of(runs, job), "cancel")
    ended = runs.history(job).ended
    assert ended is not None
    assert (ended.outcome, ended.leftovers) == ("cancelled", "")
    assert runs.leftovers(job) == []
