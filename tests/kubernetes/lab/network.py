"""The lab's network: a switch in the hub, and one cable from it to each node.

Pods have addresses of their node's subnet and are reached from every node and from the hub. All
calls need root. The namespaces stay while nodes are powered off and on.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil

from tests.kubernetes.lab.places import (
    HUB_IP,
    HUB_NAMESPACE,
    NETWORK_NAMESPACES,
    NODES,
    SERVICE_NETWORK,
    Node,
)

SWITCH = "br0"
POD_BRIDGE = "cni0"  # made by the bridge plugin on a node
COMMAND_S = 120.0


def make_network() -> None:
    """Make namespaces, switch and cables. None of them may exist."""
    for namespace in (HUB_NAMESPACE, *(node.namespace for node in NODES)):
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _forward(namespace)
    hub = ("-n", HUB_NAMESPACE)
    _ip(*hub, "link", "add", SWITCH, "type", "bridge")
    _ip(*hub, "addr", "add", f"{HUB_IP}/24", "dev", SWITCH)
    _ip(*hub, "link", "set", SWITCH, "up")
    # Some route there must be before kube-proxy's rules come to rewrite the address.
    _ip(*hub, "route", "add", SERVICE_NETWORK, "dev", SWITCH)
    for node in NODES:
        _connect(node)


def _connect(node: Node) -> None:
    hub, inside = ("-n", HUB_NAMESPACE), ("-n", node.namespace)
    peer = ("peer", "name", "eth0", "netns", node.namespace)
    _ip(*hub, "link", "add", node.port, "type", "veth", *peer)
    _ip(*hub, "link", "set", node.port, "master", SWITCH, "up")
    _ip(*hub, "route", "add", node.pods, "via", node.ip)
    _ip(*inside, "addr", "add", f"{node.ip}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "route", "add", "default", "via", HUB_IP)
    for other in NODES:
        if other != node:
            _ip(*inside, "route", "add", other.pods, "via", other.ip)


def remove_network() -> None:
    """Remove what there is of it; processes in the namespaces must have ended."""
    for namespace in (*(node.namespace for node in NODES), HUB_NAMESPACE):
        if (NETWORK_NAMESPACES / namespace).exists():
            _ip("netns", "del", namespace)


def is_made() -> bool:
    """Whether the namespaces are there."""
    namespaces = (HUB_NAMESPACE, *(node.namespace for node in NODES))
    return all((NETWORK_NAMESPACES / namespace).exists() for namespace in namespaces)


def cut(node: Node) -> None:
    """Let nothing pass between a node, its pods and the rest; its link stays up, as on a switch."""
    _ip("-n", HUB_NAMESPACE, "link", "set", node.port, "nomaster")


def mend(node: Node) -> None:
    """Undo `cut`."""
    _ip("-n", HUB_NAMESPACE, "link", "set", node.port, "master", SWITCH)


def forget_pods(node: Node) -> None:
    """Remove the bridge of a node that has no power; its pods' ends went with their namespaces."""
    shown = _run(["ip", "-n", node.namespace, "link", "show", "type", "bridge"]).stdout
    if f"{POD_BRIDGE}:" in shown:
        _ip("-n", node.namespace, "link", "del", POD_BRIDGE)


def processes(namespace: str) -> list[int]:
    """Pids of the processes in a network namespace, none where it does not exist."""
    if not (NETWORK_NAMESPACES / namespace).exists():
        return []
    return [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).stdout.split()]


def inside(namespace: str, *command: str) -> list[str]:
    """The command line that runs a command in the network of a namespace.

    `ip netns exec` would put a new /sys over the one with the control groups.
    """
    return ["nsenter", f"--net={NETWORK_NAMESPACES / namespace}", "--", *command]


def outside(*command: str) -> list[str]:
    """The command line that runs a command in the machine's own network, from in the hub, too.

    Raises:
        RuntimeError: this process is in the hub, and none of its parents is outside.
    """
    hub = NETWORK_NAMESPACES / HUB_NAMESPACE
    for process in (psutil.Process(), *psutil.Process().parents()):
        own = Path(f"/proc/{process.pid}/ns/net")
        if not (hub.exists() and own.samefile(hub)):
            return ["nsenter", f"--net={own}", "--", *command]
    raise RuntimeError("no parent of this process is outside of the lab's network")


def _forward(namespace: str) -> None:
    _run(inside(namespace, "sysctl", "-qw", "net.ipv4.ip_forward=1"))


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done
