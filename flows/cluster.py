"""Set a Prefect server up for Kubernetes: `python -m perdure.flows.cluster TEMPLATE`.

Two work pools, and the deployments of `prefect.yaml` with the name `cluster`. As often as one
likes: the worker's pod does it each time it starts, so a new image brings its own deployments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from kubernetes import client, config
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.workers.process import ProcessWorker

from perdure.storage.proxies import bypass_proxies
from perdure.tasks.prefect_client import client_without_retries

POD_ENV, NAMESPACE_ENV = "PERDURE_POD", "PERDURE_NAMESPACE"
RUNS_POOL, KEEPER_POOL = "perdure-cluster", "perdure-keeper"
SERVER_TIMEOUT_S = 300.0  # PostgreSQL makes its database, the server its tables
POLL_S = 2.0

Template = dict[str, Any]


def filled_in(template: Template, *, image: str, namespace: str) -> Template:
    """A base job template whose Jobs have this image, in this namespace, unless asked otherwise."""
    properties = template["variables"]["properties"]
    filled = {
        name: {**properties[name], "default": value}
        for name, value in (("image", image), ("namespace", namespace))
    }
    variables = {**template["variables"], "properties": {**properties, **filled}}
    return {**template, "variables": variables}


def own_image(pod: str, namespace: str) -> str:
    """The image of this process's pod, as its document has it.

    Raises:
        ApiException: the pod cannot be read.
    """
    config.load_incluster_config()
    document = client.CoreV1Api().read_namespaced_pod(pod, namespace)
    return str(document.spec.containers[0].image)


def await_server(
    *, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> None:
    """Return when the server answers.

    Raises:
        httpx.HTTPError: it did not within `SERVER_TIMEOUT_S`.
    """
    until_s = clock() + SERVER_TIMEOUT_S
    while True:
        try:
            with client_without_retries() as server:
                server.hello().raise_for_status()
                return
        except httpx.HTTPError:
            if clock() > until_s:
                raise
            sleep(POLL_S)


def ensure_pool(server: SyncPrefectClient, name: str, kind: str, template: Template) -> None:
    """Create a work pool, or give the one that is there this template."""
    try:
        server.read_work_pool(name)
    except ObjectNotFound:
        pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
        server.create_work_pool(pool)
    else:
        server.update_work_pool(name, WorkPoolUpdate(base_job_template=template))


def main(arguments: Sequence[str] | None = None) -> int:
    """Set everything up; the exit code is that of `prefect deploy`."""
    argv = sys.argv[1:] if arguments is None else arguments
    if len(argv) != 1 or not {POD_ENV, NAMESPACE_ENV} <= os.environ.keys():
        sys.stderr.write(f"perdure.flows.cluster: wants TEMPLATE, {POD_ENV} and {NAMESPACE_ENV}\n")
        return 2
    template = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    namespace = os.environ[NAMESPACE_ENV]
    cluster = f"https://{os.environ.get('KUBERNETES_SERVICE_HOST', '')}"
    bypass_proxies(os.environ, (cluster, PREFECT_API_URL.value() or ""))
    image = own_image(os.environ[POD_ENV], namespace)
    await_server()
    with get_client(sync_client=True) as server:
        filled = filled_in(template, image=image, namespace=namespace)
        ensure_pool(server, RUNS_POOL, "kubernetes", filled)
        keeper = ProcessWorker.get_default_base_job_template()
        ensure_pool(server, KEEPER_POOL, "process", keeper)
    command = ["prefect", "--no-prompt", "deploy", "--name", "cluster"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
