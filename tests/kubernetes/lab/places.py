"""Names, addresses and folders of the lab: what all its parts agree on.

There is one lab to a machine, whichever checkout started it: network namespaces have names. Whoever
wants one apart gives it a name in PERDURE_LAB.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
VERSION = "1.20.2"
OWN_NAME = os.environ.get("PERDURE_LAB", "")
PREFIX = f"{OWN_NAME or 'perdure'}-"  # of network namespaces
NETWORK_NAMESPACES = Path("/run/netns")

HUB_IP = "10.77.0.1"
API_URL = f"https://{HUB_IP}:6443"
POD_NETWORK = "10.88.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"  # the first of the services' network, as Kubernetes has it
DOMAIN = "cluster.local"
PAUSE_IMAGE = "lab.local/pause:1"
IMAGE = "lab.local/perdure:1"
NPU_RESOURCE = "huawei.com/Ascend910"
NPUS_PER_NODE = 8
# Where the controller manager of 1.20 makes the folders of hostPath volumes; it has no option.
VOLUMES = Path("/tmp/hostpath_pv")  # noqa: S108


@dataclass(frozen=True, slots=True)
class Node:
    """A worker node."""

    number: int  # from 1

    @property
    def name(self) -> str:
        """Its host name, and its name in Kubernetes."""
        return f"n{self.number}"

    @property
    def namespace(self) -> str:
        """Its network namespace."""
        return f"{PREFIX}{self.name}"

    @property
    def ip(self) -> str:
        """Its address."""
        return f"10.77.0.{10 + self.number}"

    @property
    def pods(self) -> str:
        """The network of its pods."""
        return f"10.88.{self.number}.0/24"

    @property
    def port(self) -> str:
        """The hub's end of its network cable."""
        return f"v{self.number}"

    @property
    def folder(self) -> Path:
        """Its disk: what survives a loss of power."""
        return STATE / self.name


HUB_NAMESPACE = f"{PREFIX}hub"
NODES = tuple(Node(number) for number in (1, 2, 3))


def _root() -> Path:
    given = os.environ.get("PERDURE_CLUSTER")
    base = Path(given) if given else Path.home() / ".cache" / "perdure"
    return base.absolute() / f"kubernetes-{VERSION}"


ROOT = _root()
PROGRAMS = ROOT / "bin"
CNI_PLUGINS = ROOT / "cni"
# All of one life of the lab; made by `up`, removed by `down`.
STATE = ROOT / (f"lab-{OWN_NAME}" if OWN_NAME else "lab")
LOGS = STATE / "log"
KEYS = STATE / "keys"
IMAGES = STATE / "images"
OFF = STATE / "off"  # a file here keeps the program or node of its name from running
KUBECONFIG = STATE / "admin.kubeconfig"
KEEPER_PID = STATE / "keeper.pid"


def kubeconfig_of(user: str) -> Path:
    """The credentials of a part of the cluster."""
    return KEYS / f"{user}.kubeconfig"


def node_named(name: str) -> Node:
    """The node of that name.

    Raises:
        ValueError: there is none.
    """
    for node in NODES:
        if node.name == name:
            return node
    raise ValueError(f"{name}: the lab's nodes are {', '.join(node.name for node in NODES)}")
