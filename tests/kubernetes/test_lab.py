"""The lab is a cluster, and what breaks in it is really broken."""

from __future__ import annotations

import sys

import httpx
import psutil
import pytest

from tests.kubernetes.lab.places import NPU_RESOURCE, NPUS_PER_NODE
from tests.kubernetes.pods import pod, wait_until_running
from tests.waiting import wait_for

PORT = 8000
NOTICED_S = 240.0
READ_S = 60.0
START_S = 240.0
# Answers with the name of its pod, and when asked for a URL, with what the pod gets from there.
SERVE = """
import http.server, socket, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        url = self.path.removeprefix("/")
        answer = urllib.request.urlopen(url, timeout=5).read() if url else b""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer or socket.gethostname().encode())
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""


def server(lab, namespace, name, node):
    return pod(lab, name, [sys.executable, "-c", SERVE, namespace], node=node)


def read(lab, namespace, name, url):
    """What a pod gets from a URL; "" if it gets nothing."""
    try:
        answer = httpx.get(f"http://{address(lab, namespace, name)}:{PORT}/{url}", timeout=READ_S)
    except httpx.TransportError:  # it could not be read, and the pod's server closed the connection
        return ""
    return answer.text


def address(lab, namespace, name):
    return lab.get("pod", name, "--namespace", namespace)["status"]["podIP"]


def servers_of(lab, namespace, node):
    """The processes of a test's pods on a node."""

    def serves(process):
        try:
            return process.cmdline()[-1:] == [namespace]
        except psutil.Error:
            return False

    return [process for process in lab.processes_in(node) if serves(process)]


@pytest.fixture
def pair(lab, create, namespace):
    """Pods `one` on n1 and `two` on n2, and what the test's namespace is called."""
    create(server(lab, namespace, "one", "n1"), server(lab, namespace, "two", "n2"))
    wait_until_running(lab, namespace, "one", "two")

    def answer():  # running is not listening yet
        return [read(lab, namespace, name, "") for name in ("one", "two")] == ["one", "two"]

    wait_for(answer, timeout_s=START_S, what="both answer")
    return namespace


def test_three_nodes_are_ready_and_offer_npus(lab):
    assert lab.ready_nodes() == ["n1", "n2", "n3"]
    offered = [node["status"]["allocatable"][NPU_RESOURCE] for node in lab.get("nodes")["items"]]
    assert offered == [str(NPUS_PER_NODE)] * 3


def test_pods_reach_each_other_and_a_service_by_name(lab, create, pair):
    service = {"selector": {"name": "two"}, "ports": [{"port": 80, "targetPort": PORT}]}
    for name, spec in (("near", service), ("direct", {**service, "clusterIP": "None"})):
        create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
    urls = (
        f"http://{address(lab, pair, 'two')}:{PORT}",
        "http://near",
        f"http://near.{pair}.svc.cluster.local",
        f"http://direct:{PORT}",
    )

    def all_answer():
        return {read(lab, pair, "one", url) for url in urls} == {"two"}

    wait_for(all_answer, what=f"{urls} answer")
    assert read(lab, pair, "one", "http://nobody") == ""


@pytest.mark.long
def test_a_node_without_power_is_lost_and_comes_back(lab, pair):
    assert len(servers_of(lab, pair, "n2")) == 1
    lab.power_off("n2")
    assert lab.processes_in("n2") == []
    assert read(lab, pair, "one", f"http://{address(lab, pair, 'two')}:{PORT}") == ""
    wait_for(lambda: lab.ready_nodes() == ["n1", "n3"], timeout_s=NOTICED_S, what="n2 is missed")
    lab.power_on("n2")
    assert lab.ready_nodes() == ["n1", "n2", "n3"]
    assert servers_of(lab, pair, "n2") == []
    lab.wait_for_npus()


@pytest.mark.long
def test_on_a_node_that_is_cut_off_all_lives_on_unreachable(lab, pair):
    url = f"http://{address(lab, pair, 'two')}:{PORT}"
    (before,) = servers_of(lab, pair, "n2")
    lab.cut("n2")
    assert read(lab, pair, "one", url) == ""
    wait_for(lambda: lab.ready_nodes() == ["n1", "n3"], timeout_s=NOTICED_S, what="n2 is missed")
    assert servers_of(lab, pair, "n2") == [before]
    lab.mend("n2")
    wait_for(lambda: read(lab, pair, "one", url) == "two", what="n2 is back")


@pytest.mark.long
def test_pods_live_on_while_the_api_server_is_away(lab, pair):
    before = servers_of(lab, pair, "n1")
    lab.api_server_down()
    assert lab.try_kubectl("get", "nodes").returncode != 0
    assert servers_of(lab, pair, "n1") == before
    lab.api_server_up()
    assert read(lab, pair, "one", "") == "one"


def test_a_process_of_a_pod_can_be_killed(lab, pair):
    assert len(lab.kill_process("n1", lambda process: process.cmdline()[-1:] == [pair])) == 1

    def phase():
        return lab.get("pod", "one", "--namespace", pair)["status"]["phase"]

    wait_for(lambda: phase() == "Failed", what="the pod is Failed")


def test_a_deleted_pod_leaves_nothing_on_its_node(lab, pair):
    assert len(servers_of(lab, pair, "n1")) == 1
    uid = lab.get("pod", "one", "--namespace", pair)["metadata"]["uid"]
    lab.kubectl("delete", "pod", "one", "--namespace", pair)
    assert servers_of(lab, pair, "n1") == []
    disk = lab.disk_of("n1") / "kubelet" / "pods"
    wait_for(lambda: not (disk / uid).exists(), what=f"{disk} is empty")
