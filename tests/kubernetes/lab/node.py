"""The first process of a node: makes its own mounts, then keeps containerd and kubelet running.

To power a node off is to kill this process. What a node has on its disk is there again when it is
powered on. Kubelets that share /var/log/pods delete each other's logs, so that is apart as well.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.kubernetes.lab.places import HUB_IP, IMAGES, LOGS, PROGRAMS, Node, node_named
from tests.kubernetes.lab.programs import CONTAINERD_SOCKET, containerd, kubelet, node_proxy
from tests.kubernetes.lab.supervise import Supervisor

API_S = 240.0
CONTAINERD_S = 120.0
PERIOD_S = 0.1


def main() -> None:
    """Boot, and stay on."""
    node = node_named(sys.argv[1])
    socket.sethostname(node.name)
    os.environ["PATH"] = f"{PROGRAMS}:{os.environ['PATH']}"  # containerd looks for runc there
    _mount(node)
    supervisor = Supervisor(LOGS / node.name)
    supervisor.add(containerd(node))
    if not _within(CONTAINERD_S, CONTAINERD_SOCKET.exists):
        raise TimeoutError(f"containerd of {node.name} did not start")
    _import_images()
    # A kubelet that finds no API server waits longer and longer, so rather we wait; a node that is
    # powered on while the API server is away has to start all the same.
    _within(API_S, _api_answers)
    supervisor.add(kubelet(node))
    supervisor.add(node_proxy(node))
    supervisor.run()


def _mount(node: Node) -> None:
    for name in ("pods", "containers"):
        own, common = node.folder / "log" / name, Path("/var/log") / name
        own.mkdir(parents=True, exist_ok=True)
        common.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", str(own), str(common)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)


def _import_images() -> None:
    ctr = [str(PROGRAMS / "ctr"), f"--address={CONTAINERD_SOCKET}", "--namespace=k8s.io"]
    archives = [str(path) for path in sorted(IMAGES.glob("*.tar"))]
    commands = [[*ctr, "images", "import", "--snapshotter=native", one] for one in archives]

    def imported() -> bool:  # its socket is there before it takes images
        done = [subprocess.run(command, check=False).returncode for command in commands]
        return not any(done)

    if not _within(CONTAINERD_S, imported):
        raise TimeoutError(f"{archives} could not be imported")


def _api_answers() -> bool:
    try:
        with socket.create_connection((HUB_IP, 6443), timeout=1.0):
            return True
    except OSError:
        return False


def _within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(PERIOD_S)
    return True


if __name__ == "__main__":
    main()
