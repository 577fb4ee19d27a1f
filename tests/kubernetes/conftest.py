"""The cluster under test: that of KUBECONFIG, or the lab, in whose hub these tests run.

`make test-kubernetes` sets everything up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from perdure.training.drill.driver import RunOutcome
from perdure.training.engines.kubernetes.engine import KubernetesEngine
from perdure.training.errors import EngineError
from tests.jobs import small_job
from tests.kubernetes.accounts import NAME, NEEDED, kubeconfig_of, role
from tests.kubernetes.bare import PLACE_S
from tests.kubernetes.lab import life
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.kubectl import Cluster
from tests.kubernetes.lab.places import (
    HUB_IP,
    HUB_NAMESPACE,
    IMAGES,
    KUBECONFIG,
    NETWORK_NAMESPACES,
)
from tests.kubernetes.runs import ClusterRuns
from tests.kubernetes.store import Store, given_store, rgw_store
from tests.kubernetes.webhook import Webhook, serving
from tests.s3.rgw import Rgw
from tests.waiting import wait_for

ACCOUNT_S = 240.0
TO_AGENTS = ("OUTPUT", "-p", "tcp", "--dport", "8470", "-j", "DROP")

Create = Callable[..., None]


def absent(reason: str) -> NoReturn:
    """Skip on a person's machine; where CI is set, what cannot be tested has failed."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """A cluster whose nodes a test leaves alone."""
    given = os.environ.get("KUBECONFIG")
    if given and Path(given) != KUBECONFIG:
        image = os.environ.get("PERDURE_TEST_IMAGE")
        if not image:
            absent("name an image of Perdure that your cluster can pull: PERDURE_TEST_IMAGE")
        return Cluster(image, Path(given))
    if not life.is_up():
        absent("the lab is down: make test-kubernetes")
    if not Path("/proc/self/ns/net").samefile(NETWORK_NAMESPACES / HUB_NAMESPACE):
        absent("not in the lab's network: python -m tests.kubernetes.lab exec python -m pytest ...")
    return Lab()


@pytest.fixture
def lab(cluster: Cluster) -> Iterator[Lab]:
    """The lab, whose nodes may be broken; afterwards they are whole again."""
    if not isinstance(cluster, Lab):
        pytest.skip("breaks nodes, which is for the lab alone and not for your cluster")
    yield cluster
    cluster.restore()


@pytest.fixture(scope="session")
def store(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """An S3 store that pods reach: Ceph RGW in the hub, or a bucket that is given."""
    if not isinstance(cluster, Lab):
        given = given_store(os.environ)
        if given is None:
            absent("name a bucket for your cluster's runs: PERDURE_TEST_STORE=s3://... and AWS_*")
        yield given
        return
    if lacking := Rgw.missing():
        absent(lacking)
    running = Rgw(tmp_path_factory.mktemp("rgw"), HUB_IP)
    try:
        yield rgw_store(running)
    finally:
        running.end()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """An empty namespace for one test."""
    name = f"perdure-test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    try:
        found = ("get", "serviceaccount", "default", "--namespace", name)
        wait_for(
            lambda: cluster.try_kubectl(*found).returncode == 0,
            timeout_s=ACCOUNT_S,
            what=f"{name} has an account for pods",
        )
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def references() -> dict[tuple[int, ...], RunOutcome]:
    """Runs that nothing has happened to."""
    return {}


@pytest.fixture
def runs(tmp_path, cluster, namespace, store, references) -> ClusterRuns:
    """Runs of the engine in a namespace of their own."""
    return ClusterRuns(tmp_path, cluster, namespace, store, references)


@pytest.fixture
def engine(lab, namespace, tmp_path, monkeypatch):
    """Makes the engine of a job on the lab's nodes; afterwards nothing of it is left."""
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    made = []
    variables = [{"name": key, "value": value} for key, value in lab.environment().items()]
    agent = {"name": "agent", "env": variables, "volumeMounts": lab.mounts()}

    def make(
        *, run_id: str = "bare", store: str = "s3://bucket/runs", **section: Any
    ) -> KubernetesEngine:
        spec = {
            "kind": "kubernetes", "image": lab.image, "namespace": namespace, "nodes": 2,
            "python": sys.executable, "reach": "direct", "place_timeout_s": PLACE_S,
            "pod": {"spec": {"volumes": lab.volumes(), "containers": [agent]}}, **section,
        }  # fmt: skip
        job = small_job(tmp_path, run_id=run_id, engine=spec, storage={"address": store})
        made.append(KubernetesEngine(job, home=tmp_path, epoch=1))
        return made[-1]

    yield make
    for one in made:
        with suppress(EngineError):  # what another one made under its name
            one.end()


@pytest.fixture
def create(cluster: Cluster, namespace: str) -> Create:
    """Creates objects in the test's namespace."""

    def make(*documents: dict[str, Any]) -> None:
        for document in documents:
            document["metadata"].setdefault("namespace", namespace)
        cluster.create(*documents)

    return make


@pytest.fixture
def account(runs, create, tmp_path, monkeypatch) -> Callable[..., None]:
    """Has supervisors act with the rights of a plain job, none of them on nodes, or with fewer."""

    def act(*without: str) -> None:
        create(*role({name: verbs for name, verbs in NEEDED.items() if name not in without}))
        config = kubeconfig_of(runs.cluster, runs.namespace, tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(config))

    return act


@pytest.fixture
def bind(runs, create, account) -> Callable[[bool], None]:
    """Gives the supervisor its rights, or takes them away; it has them at first."""
    account()
    bound = role(NEEDED)[2]

    def bind(has_rights: bool) -> None:  # noqa: FBT001 a switch
        if has_rights:
            create(bound)
        else:
            runs.cluster.kubectl("delete", "rolebinding", NAME, "--namespace", runs.namespace)

    return bind


@pytest.fixture
def webhook(lab) -> Iterator[Webhook]:
    """Denies pods of runs; afterwards it is gone."""
    with serving(lab) as webhook:
        yield webhook


@pytest.fixture
def silence(lab) -> Iterator[Callable[[bool], None]]:
    """Lets nothing through to agents, as a default-deny policy would, or all; afterwards all."""

    def change(is_silent: bool) -> None:  # noqa: FBT001 a switch
        action = "-A" if is_silent else "-D"
        subprocess.run(["iptables", action, *TO_AGENTS], check=is_silent, capture_output=True)

    yield change
    change(False)


@pytest.fixture
def without_image(lab) -> Iterator[Callable[[str], None]]:
    """Takes the image from a node; afterwards it has it again."""
    nodes: list[str] = []

    def take(node: str) -> None:
        nodes.append(node)
        lab.remove_image(node, lab.image)

    yield take
    for node in nodes:
        for archive in IMAGES.glob("*.tar"):
            lab.import_image(node, archive)
