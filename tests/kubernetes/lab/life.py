"""Start and end of the lab. Times are seconds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.kubernetes.lab import network
from tests.kubernetes.lab.cluster import Lab, keeper
from tests.kubernetes.lab.images import make_images
from tests.kubernetes.lab.keys import make_keys
from tests.kubernetes.lab.network import inside
from tests.kubernetes.lab.places import (
    HUB_NAMESPACE,
    KEEPER_PID,
    LOGS,
    NODES,
    OFF,
    OWN_NAME,
    REPO,
    ROOT,
    STATE,
    VOLUMES,
)
from tests.kubernetes.lab.programs import APART, python
from tests.waiting import wait_for

CRDS = REPO / "tests" / "kubernetes" / "crds"
LOADED = ("acjob", "volcano-1.9.0")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
CONTAINERS = "k8s.io"  # the control group of containerd's containers
PROCESSES = 12  # of a run's four ranks, their agents and servers
NODES_S = 300.0
END_S = 120.0
# What StatefulSets get their volumes from; the folders are on this machine.
STORAGE_CLASS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {
        "name": "standard",
        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
    },
    "provisioner": "kubernetes.io/host-path",
}


def up() -> Lab:
    """Have a lab without faults: start one, or mend the one that runs."""
    with _alone():
        lab = Lab()
        if keeper() is not None and _complete().exists():
            lab.restore()
            return lab
        _down()
        _start(lab)
        return lab


def down() -> None:
    """End all processes of the lab, and remove what it made but for the built programs."""
    with _alone():
        _down()


def is_up() -> bool:
    """Whether there is a lab that was started completely and has not been ended."""
    return keeper() is not None and _complete().exists()


def _complete() -> Path:
    return STATE / "complete"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two that start a lab at once would end each other's."""
    ROOT.mkdir(parents=True, exist_ok=True)
    with (ROOT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(lab: Lab) -> None:
    if not any((CONTROL_GROUPS).iterdir()):
        raise RuntimeError(f"{CONTROL_GROUPS} is empty: start the lab outside of `ip netns exec`")
    for folder in (LOGS, OFF, *(node.folder for node in NODES)):
        folder.mkdir(parents=True)
    _weigh_containers()
    make_keys()
    make_images()
    network.make_network()
    _start_keeper()
    lab.wait_for_api()
    lab.create(STORAGE_CLASS)
    # Those of newer clusters (a default of "" for a key of a list) are refused by this one.
    for group in LOADED:
        lab.kubectl("create", "-R", "-f", str(CRDS / group))
    wait_for(
        lambda: len(lab.ready_nodes()) == len(NODES),
        timeout_s=NODES_S,
        period_s=0.2,
        what=f"all nodes are Ready; see {LOGS}",
    )
    for node in NODES:
        lab.offer_npus(node)
    lab.wait_for_npus()
    _complete().touch()


def _weigh_containers() -> None:
    """Let the pods of all nodes weigh as many processes: on a busy machine they starve as one."""
    folder = CONTROL_GROUPS / "cpu" / CONTAINERS
    if folder.parent.exists():  # of version 1
        folder.mkdir(exist_ok=True)
        (folder / "cpu.shares").write_text(str(PROCESSES * 1024))


def _start_keeper() -> None:
    with (LOGS / "keeper.log").open("ab") as log:
        process = subprocess.Popen(
            inside(HUB_NAMESPACE, *APART, *python("keeper")),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )
    KEEPER_PID.write_text(str(process.pid))


def _down() -> None:
    first = keeper()
    if first is not None:
        first.kill()
    _end_processes()
    network.remove_network()
    _remove_control_groups()
    _remove_folders()


def _end_processes() -> None:
    """Kill what is in the lab's network namespaces: tests, too, that were left there."""
    own = psutil.Process()
    spared = {own.pid, *(parent.pid for parent in own.parents())}
    namespaces = [HUB_NAMESPACE, *(node.namespace for node in NODES)]

    def none_left() -> bool:
        found = {pid for name in namespaces for pid in network.processes(name)} - spared
        for pid in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        return not found

    wait_for(none_left, timeout_s=END_S, what="the end of the lab's processes")


def _remove_control_groups() -> None:
    """Groups of containers that ended with their node, which nobody removed."""
    for top in CONTROL_GROUPS.rglob(CONTAINERS):
        for folder in sorted((one for one in top.rglob("*") if one.is_dir()), reverse=True):
            with contextlib.suppress(OSError):  # of containers that are not the lab's
                folder.rmdir()


def _remove_folders() -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    assert not [path for path in mounted if path.startswith(f"{STATE}/")], "the lab is mounted"
    # A process namespace that is being ended may still write.
    deadline_s = time.monotonic() + END_S
    while STATE.exists() and time.monotonic() < deadline_s:
        shutil.rmtree(STATE, ignore_errors=True)
    assert not STATE.exists(), f"{STATE} cannot be removed"
    if not OWN_NAME:  # it may be in use by the lab without a name
        with contextlib.suppress(OSError):  # not made, or not ours
            VOLUMES.rmdir()
