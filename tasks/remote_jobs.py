"""The jobs of runs on a cluster, kept on the Prefect server for whoever supervises them next.

What a machine knows of its runs is in its home folder. In a cluster that folder ends with the pod,
so a supervisor also puts its run's job on the server, as the artifact `RUN-job`. A pod that needs
to know the runs takes them from there into its own home first, and goes on as on any machine.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey
from prefect.client.schemas.objects import ArtifactCollection
from prefect.client.schemas.sorting import ArtifactCollectionSort
from pydantic_core import from_json

from perdure.tasks.artifacts import Artifact, ArtifactKind
from perdure.training.config.job import Job, parse_job
from perdure.training.errors import InputError
from perdure.training.files import private_folder, write_whole
from perdure.training.supervisor.job_registry import job_path, remember_job

NAME = "job"
MOST = 200  # runs; older ones need neither a supervisor nor a look each hour
_DOCUMENT = re.compile(r"^```json\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def artifact_of(job: Job, epoch: int) -> Artifact:
    """Artifact that keeps a job on the server.

    Args:
        job: job of the run, as its supervisor took it.
        epoch: number of the supervisor: each new supervisor makes the artifact news.
    """
    document = json.dumps(job.model_dump(mode="json"), indent=1)
    return Artifact(
        NAME,
        ArtifactKind.MARKDOWN,
        f"As supervisor {epoch} of the run took it.\n\n```json\n{document}\n```\n",
        "the job of the run, for whoever supervises it next",
    )


def is_kept(job: Job) -> bool:
    """Whether any pod may have to supervise the run; the nodes of other runs are of one machine."""
    return not job.engine.on_this_machine


def is_in_pod() -> bool:
    """Whether this process is in a pod of Kubernetes, where a home folder begins empty."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def learn(client: SyncPrefectClient, home: Path, *, run_id: str | None = None) -> None:
    """Note in a home folder the jobs that the server keeps, as far as they are news there.

    Args:
        client: client of the Prefect server.
        home: Perdure's folder on this machine.
        run_id: the only run to fetch; None fetches the newest of all.

    Raises:
        Exception: the server did not answer.
    """
    key = ArtifactCollectionFilterKey(any_=[f"{run_id}-{NAME}"])
    if run_id is None:
        key = ArtifactCollectionFilterKey(like_=f"%-{NAME}")
    artifacts = client.read_latest_artifacts(
        artifact_filter=ArtifactCollectionFilter(key=key),
        sort=ArtifactCollectionSort.UPDATED_DESC,
        limit=MOST,
    )
    for artifact in artifacts:
        _note(home, artifact)


def _note(home: Path, artifact: ArtifactCollection) -> None:
    job = _job_in(artifact)
    if job is None or not is_kept(job) or artifact.key != f"{job.run_id}-{NAME}":
        return
    version_file = job_path(home, job.run_id).with_name("learned")
    version = f"{artifact.latest_id} {artifact.updated}"
    if version_file.exists() and version_file.read_text(encoding="utf-8") == version:
        return
    # Not before: it also says that the run goes on, until a look at its ledger says otherwise.
    remember_job(home, job)
    write_whole(private_folder(version_file.parent) / version_file.name, version)


def _job_in(artifact: ArtifactCollection) -> Job | None:
    """The job; None where an artifact of another kind has such a name, or of another version."""
    document = _DOCUMENT.search(artifact.data) if isinstance(artifact.data, str) else None
    if document is None:
        return None
    try:
        return parse_job(from_json(document[1]))
    except (InputError, ValueError):
        return None
