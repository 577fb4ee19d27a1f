"""The programs of the lab and how they are started: command lines and their configuration files."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.kubernetes.lab.network import inside
from tests.kubernetes.lab.places import (
    CNI_PLUGINS,
    DOMAIN,
    HUB_IP,
    KEYS,
    NODES,
    PAUSE_IMAGE,
    POD_NETWORK,
    PROGRAMS,
    SERVICE_NETWORK,
    STATE,
    Node,
    kubeconfig_of,
)

API_SERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
# Own mounts, processes and host name for what follows; it all ends with the first process.
APART = (
    *("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"),
    *("--propagation", "private"),
)
CONTAINERD_SOCKET = Path("/run/containerd.sock")  # on a node, whose /run is its own
DNS_HOSTS = STATE / "dns.hosts"
DNS_PID = STATE / "dnsmasq.pid"
ETCD = "http://127.0.0.1:2379"


@dataclass(frozen=True, slots=True)
class Program:
    """Something that runs until it is killed."""

    name: str
    command: tuple[str, ...]


def python(module: str, *arguments: str) -> tuple[str, ...]:
    """A module of the lab in an interpreter of its own."""
    return (sys.executable, "-m", f"tests.kubernetes.lab.{module}", *arguments)


def hub_programs() -> list[Program]:
    """The control plane, the names of services, and the nodes."""
    nodes = [
        Program(node.name, tuple(inside(node.namespace, *APART, *python("node", node.name))))
        for node in NODES
    ]
    return [
        _etcd(),
        _api_server(),
        _controller_manager(),
        Program(SCHEDULER, (_own(SCHEDULER), *_client("scheduler"), "--bind-address=127.0.0.1")),
        _proxy("hub", STATE),  # so that tests in the hub reach services as pods do
        Program("dnsmasq", _dnsmasq()),
        Program("dns", python("dns")),
        *nodes,
    ]


def _own(program: str) -> str:
    return str(PROGRAMS / program)


def _client(user: str) -> tuple[str, ...]:
    return (f"--kubeconfig={kubeconfig_of(user)}", "--leader-elect=false")


def _etcd() -> Program:
    peers = "http://127.0.0.1:2380"
    return Program(
        "etcd",
        (
            *(_own("etcd"), f"--data-dir={STATE / 'etcd'}", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}"),
            f"--listen-peer-urls={peers}",
        ),
    )


def _api_server() -> Program:
    return Program(
        API_SERVER,
        (
            *(_own(API_SERVER), f"--etcd-servers={ETCD}", f"--advertise-address={HUB_IP}"),
            *("--secure-port=6443", f"--client-ca-file={KEYS / 'ca.crt'}"),
            f"--tls-cert-file={KEYS / 'apiserver.crt'}",
            f"--tls-private-key-file={KEYS / 'apiserver.key'}",
            f"--token-auth-file={KEYS / 'tokens.csv'}",
            *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
            *("--allow-privileged=true", f"--service-cluster-ip-range={SERVICE_NETWORK}"),
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={KEYS / 'service-accounts.pub'}",
            f"--service-account-signing-key-file={KEYS / 'service-accounts.key'}",
            f"--kubelet-client-certificate={KEYS / 'kubelet-client.crt'}",
            f"--kubelet-client-key={KEYS / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",
        ),
    )


def _controller_manager() -> Program:
    return Program(
        CONTROLLER_MANAGER,
        (
            *(_own(CONTROLLER_MANAGER), *_client("controller-manager")),
            f"--service-account-private-key-file={KEYS / 'service-accounts.key'}",
            *(f"--root-ca-file={KEYS / 'ca.crt'}", "--bind-address=127.0.0.1"),
            # A silent node is noticed in 12 s, not in 40: tests wait for it.
            *("--node-monitor-period=2s", "--node-monitor-grace-period=12s"),
            "--enable-hostpath-provisioner=true",
        ),
    )


def _dnsmasq() -> tuple[str, ...]:
    return (
        *("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--user=root"),
        *(f"--listen-address={HUB_IP}", "--bind-interfaces", f"--pid-file={DNS_PID}"),
        # Nothing but the cluster's own names is known, and every other does not exist.
        *("--no-resolv", "--no-hosts", f"--addn-hosts={DNS_HOSTS}", "--local=/#/"),
        "--log-facility=-",
    )


def _proxy(host: str, folder: Path) -> Program:
    """kube-proxy, which makes the addresses of services reach their pods."""
    path = folder / "kube-proxy.json"
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": host,
        "clusterCIDR": POD_NETWORK,
        "clientConnection": {"kubeconfig": str(kubeconfig_of("proxy"))},
        "iptables": {"minSyncPeriod": "0s"},
        # These are settings of the whole machine, which a network namespace may not change.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    path.write_text(json.dumps(document, indent=1))
    return Program("kube-proxy", (_own("kube-proxy"), f"--config={path}"))


def containerd(node: Node) -> Program:
    """The node's containers; its folder outlives a loss of power, its sockets do not."""
    path = node.folder / "containerd.toml"
    path.write_text(_containerd_configuration(node))
    networks = node.folder / "cni"
    networks.mkdir(exist_ok=True)
    (networks / "10-lab.conflist").write_text(json.dumps(_pod_network(node), indent=1))
    return Program("containerd", (_own("containerd"), f"--config={path}"))


def _containerd_configuration(node: Node) -> str:
    skipped = ", ".join(
        f'"io.containerd.snapshotter.v1.{name}"' for name in ("aufs", "btrfs", "zfs", "devmapper")
    )
    # The snapshotter that copies: images are empty, and it works on any file system.
    return f"""\
version = 2
root = "{node.folder / "containerd"}"
state = "/run/containerd"
disabled_plugins = [{skipped}]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  disable_tcp_service = true
  stream_server_address = "{node.ip}"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{CNI_PLUGINS}"
  conf_dir = "{node.folder / "cni"}"
"""


def _pod_network(node: Node) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,  # a pod may reach itself through a service
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pods}]],
            "dataDir": "/run/ipam",  # with the power, all addresses are free again
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "lab", "plugins": [bridge, ports]}


def kubelet(node: Node) -> Program:
    """The node's agent of Kubernetes."""
    path = node.folder / "kubelet.json"
    path.write_text(json.dumps(_kubelet_configuration(node), indent=1))
    return Program(
        "kubelet",
        (
            *(_own("kubelet"), f"--config={path}", f"--kubeconfig={kubeconfig_of(node.name)}"),
            *(f"--hostname-override={node.name}", f"--node-ip={node.ip}"),
            *(f"--root-dir={node.folder / 'kubelet'}", f"--cert-dir={node.folder / 'keys'}"),
            *("--container-runtime=remote", "--runtime-cgroups=/", "--kubelet-cgroups=/"),
            f"--container-runtime-endpoint=unix://{CONTAINERD_SOCKET}",
            "--node-labels=accelerator-type=module-910b-8",
        ),
    )


def _kubelet_configuration(node: Node) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": node.ip,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "clusterDNS": [HUB_IP],
        "clusterDomain": DOMAIN,
        "resolvConf": "",
        # The control groups are the machine's, which all nodes share.
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        # A third of what Kubernetes takes by default: tests wait for it.
        "nodeStatusUpdateFrequency": "3s",
        "nodeStatusReportFrequency": "6s",
        "nodeLeaseDurationSeconds": 10,
        "syncFrequency": "10s",
        # The disk is the machine's, and its fullness is no business of the lab.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "maxPods": 60,
    }


def node_proxy(node: Node) -> Program:
    """kube-proxy of a node."""
    return _proxy(node.name, node.folder)
