"""The lab from outside: start it, break it, mend it, take it down. Times are seconds.

Faults last until they are undone, `Lab.restore` undoes all. Calls need root, and work from the
machine as well as from the hub.
"""

from __future__ import annotations

import datetime as dt
import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.kubernetes.lab import host_files, network
from tests.kubernetes.lab.kubectl import KUBECTL_S, Cluster, ready_condition
from tests.kubernetes.lab.network import inside
from tests.kubernetes.lab.places import (
    HUB_NAMESPACE,
    IMAGE,
    KEEPER_PID,
    KUBECONFIG,
    NODES,
    NPU_RESOURCE,
    NPUS_PER_NODE,
    OFF,
    PROGRAMS,
    Node,
    node_named,
)
from tests.kubernetes.lab.programs import (
    API_SERVER,
    CONTAINERD_SOCKET,
    CONTROLLER_MANAGER,
    SCHEDULER,
)
from tests.waiting import wait_for

API_S = 240.0
NODE_S = 300.0
KILL_S = 120.0
IMPORT_S = 600.0


class Lab(Cluster):
    """The running lab."""

    nodes = tuple(node.name for node in NODES)

    def __init__(self) -> None:
        kubectl = tuple(inside(HUB_NAMESPACE, str(PROGRAMS / "kubectl")))
        super().__init__(IMAGE, KUBECONFIG, kubectl)

    def volumes(self) -> list[dict[str, object]]:
        """For `spec.volumes` of a pod: what it runs of this machine."""
        return host_files.volumes()

    def mounts(self) -> list[dict[str, object]]:
        """For `volumeMounts` of a container, at the paths of this machine."""
        return host_files.mounts()

    def environment(self) -> dict[str, str]:
        """Variables that such a container needs."""
        return host_files.environment()

    def power_off(self, node: str) -> None:
        """End all that runs on a node at once, as without power."""
        one = node_named(node)
        doomed = self.processes_in(node)
        (OFF / one.name).touch()

        def gone() -> bool:  # those of pods are in networks of their own
            return not network.processes(one.namespace) and not _living(doomed)

        wait_for(gone, timeout_s=KILL_S, what=f"{node} off")
        network.forget_pods(one)

    def power_on(self, node: str) -> None:
        """Boot a node, and wait until its kubelet reports."""
        one = node_named(node)
        # Kubernetes' stamps are whole seconds.
        asked = dt.datetime.now(dt.UTC).replace(microsecond=0)
        (OFF / one.name).unlink(missing_ok=True)
        self._wait_for_report(one, since=asked)
        self.offer_npus(one)

    def delete_node(self, node: str) -> None:
        """Take a node out of the cluster; what runs there runs on, until the cluster ends it."""
        self.kubectl("delete", "node", node)

    def _register(self, node: Node) -> None:
        """Have the node of a living kubelet in the cluster again: it registers when it starts."""
        asked = dt.datetime.now(dt.UTC).replace(microsecond=0)
        kubelet = PROGRAMS / "kubelet"
        self.kill_process(node.name, lambda process: Path(process.exe()) == kubelet)
        self._wait_for_report(node, since=asked)
        self.offer_npus(node)

    def disk_of(self, node: str) -> Path:
        """The folder of what a node keeps without power."""
        return node_named(node).folder

    def import_image(self, node: str, archive: Path) -> None:
        """Let a node have the image of an archive, as if it had pulled it."""
        self._ctr(node, "images", "import", "--snapshotter=native", str(archive))

    def remove_image(self, node: str, image: str) -> None:
        """Take an image from a node."""
        self._ctr(node, "images", "remove", "--sync", image)

    def cut(self, node: str) -> None:
        """Let nothing pass to or from a node and its pods; what runs there runs on."""
        network.cut(node_named(node))

    def mend(self, node: str) -> None:
        """Undo `cut`."""
        network.mend(node_named(node))

    def api_server_down(self) -> None:
        """Kill the API server, and keep it from coming back."""
        (OFF / API_SERVER).touch()
        wait_for(lambda: not self._running(API_SERVER), timeout_s=KILL_S, what="API server ended")

    def api_server_up(self) -> None:
        """Start it again, and wait until it answers."""
        (OFF / API_SERVER).unlink(missing_ok=True)
        self.wait_for_api()

    def scheduler_down(self) -> None:
        """Kill the scheduler, and keep it from coming back."""
        (OFF / SCHEDULER).touch()
        wait_for(lambda: not self._running(SCHEDULER), timeout_s=KILL_S, what="scheduler ended")

    def scheduler_up(self) -> None:
        """Start it again."""
        (OFF / SCHEDULER).unlink(missing_ok=True)
        wait_for(lambda: self._running(SCHEDULER), timeout_s=KILL_S, what="scheduler started")

    def restart_controller_manager(self) -> None:
        """Kill the controller manager; another is started."""
        killed = self._running(CONTROLLER_MANAGER)
        for process in killed:
            process.kill()
        wait_for(
            lambda: set(self._running(CONTROLLER_MANAGER)) - set(killed),
            timeout_s=KILL_S,
            what="another controller manager",
        )

    def processes_in(self, node: str) -> list[psutil.Process]:
        """All processes of a node, those of its pods with them."""
        try:
            return [
                process
                for first in self._first_processes(node_named(node))
                for process in (first, *first.children(recursive=True))
            ]
        except psutil.NoSuchProcess:  # its first one, without which no other lives
            return []

    def kill_process(
        self,
        node: str,
        chosen: Callable[[psutil.Process], bool],
        *,
        number: signal.Signals = signal.SIGKILL,
    ) -> list[psutil.Process]:
        """Send a signal to the processes of a node that are chosen.

        Raises:
            AssertionError: there is none, and so no fault.
        """
        found = [process for process in self.processes_in(node) if _is(process, chosen)]
        assert found, f"no process of {node} is meant"
        for process in found:
            process.send_signal(number)
        return found

    def restore(self) -> None:
        """Undo all faults, deletions and cordons, and wait until all nodes are Ready."""
        for node in NODES:
            network.mend(node)
        off = {path.name for path in OFF.iterdir()}
        for name in off - set(self.nodes):
            (OFF / name).unlink()
        self.wait_for_api()
        for node in NODES:
            if node.name in off:
                self.power_on(node.name)
        known = {item["metadata"]["name"] for item in self.get("nodes")["items"]}
        for node in NODES:
            if node.name not in known:
                self._register(node)
        self.kubectl("uncordon", *self.nodes)
        wait_for(
            lambda: len(self.ready_nodes()) == len(NODES),
            timeout_s=NODE_S,
            period_s=0.2,
            what="all nodes Ready",
        )
        self.wait_for_npus()

    def wait_for_api(self) -> None:
        """Return when the API server answers and has started completely."""
        wait_for(
            lambda: self.try_kubectl("get", "--raw", "/readyz", timeout_s=API_S).stdout == "ok",
            timeout_s=API_S,
            period_s=0.2,
            what="the API server is ready",
        )

    def _wait_for_report(self, node: Node, *, since: dt.datetime) -> None:
        def reported() -> bool:
            found = self.try_kubectl("get", "node", node.name, "-o", "json")
            if found.returncode != 0:
                return False
            ready = ready_condition(json.loads(found.stdout))
            at = dt.datetime.fromisoformat(ready.get("lastHeartbeatTime", since.isoformat()))
            return ready.get("status") == "True" and at > since

        wait_for(reported, timeout_s=NODE_S, period_s=0.2, what=f"{node.name} is Ready")

    def offer_npus(self, node: Node) -> None:
        """Let a node have NPUs, as a device plugin would; each boot of a node forgets them."""
        path = f"/status/capacity/{NPU_RESOURCE.replace('/', '~1')}"
        patch = [{"op": "add", "path": path, "value": str(NPUS_PER_NODE)}]
        self._api_patch(f"/api/v1/nodes/{node.name}/status", json.dumps(patch))

    def wait_for_npus(self) -> None:
        """Return when pods can ask for the NPUs of all nodes: kubelets take them up in seconds."""

        def offered() -> bool:
            items = self.get("nodes")["items"]
            npus = [item["status"]["allocatable"].get(NPU_RESOURCE) for item in items]
            return npus == [str(NPUS_PER_NODE)] * len(NODES)

        wait_for(offered, timeout_s=NODE_S, period_s=0.2, what="NPUs of all nodes")

    def _api_patch(self, path: str, body: str) -> None:
        # kubectl of this version cannot patch a status.
        config = json.loads(self.kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        command = [
            *("curl", "--silent", "--show-error", "--fail", "--request", "PATCH"),
            *("--cacert", cluster["certificate-authority"], "--data", body),
            *("--header", "Content-Type: application/json-patch+json"),
            *("--header", f"Authorization: Bearer {user['token']}", cluster["server"] + path),
        ]
        done = subprocess.run(
            inside(HUB_NAMESPACE, *command),
            capture_output=True,
            text=True,
            timeout=KUBECTL_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"PATCH {path}: {done.stderr.strip()}")

    def _ctr(self, node: str, *arguments: str) -> None:
        (first,) = self._first_processes(node_named(node))
        ctr = (str(PROGRAMS / "ctr"), f"--address={CONTAINERD_SOCKET}", "--namespace=k8s.io")
        command = ["nsenter", f"--target={first.pid}", "--mount", "--", *ctr, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_S, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{node}: ctr {' '.join(arguments)}: {done.stderr.strip()}")

    def _running(self, program: str) -> list[psutil.Process]:
        """Processes of one of the lab's own programs in the hub."""
        path = PROGRAMS / program
        return [
            one
            for one in keeper_processes()
            if _is(one, lambda process: Path(process.exe()) == path)
        ]

    def _first_processes(self, node: Node) -> Sequence[psutil.Process]:
        """The init of a node, as a list of one, or none where it has no power."""
        there = set(network.processes(node.namespace))
        for launcher in keeper_processes():
            if launcher.pid in there and launcher.ppid() not in there:
                return launcher.children()
        return []


def _living(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if _lives(one)]


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and _is(process, lambda it: it.status() != psutil.STATUS_ZOMBIE)


def _is(process: psutil.Process, chosen: Callable[[psutil.Process], bool]) -> bool:
    try:
        return chosen(process)
    except psutil.Error:  # it has ended meanwhile
        return False


def keeper() -> psutil.Process | None:
    """The process that started the hub and whose end is the lab's, None: there is no lab."""
    try:
        pid = int(KEEPER_PID.read_text())
        process = psutil.Process(pid)
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    return process if pid in network.processes(HUB_NAMESPACE) else None


def keeper_processes() -> list[psutil.Process]:
    """All processes that the lab started, in the hub and on nodes; none where it is down."""
    first = keeper()
    return first.children(recursive=True) if first is not None else []
