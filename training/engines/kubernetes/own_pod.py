"""The pod of the supervisor itself: people find it by the run's label, as they find the others."""

from __future__ import annotations

import logging
import os

from perdure.training.config.job import Job
from perdure.training.engines.kubernetes import objects
from perdure.training.engines.kubernetes.api import PODS, Api, ApiError

ROLE = "perdure.io/role"  # of the pods that Prefect's worker creates

_log = logging.getLogger("perdure.engine")


def label_supervisor(api: Api, job: Job) -> None:
    """Give the run's label to the pod that this process is in, if it is a supervisor's."""
    name = os.environ.get("HOSTNAME")
    if not name:
        return
    try:
        labels = api.get(PODS, name, patience_s=0.0)["metadata"].get("labels") or {}
        is_supervisor = labels.get(ROLE) == "supervisor"
        if is_supervisor and labels.get(objects.RUN) != job.run_id:
            api.patch(PODS, name, {"metadata": {"labels": {objects.RUN: job.run_id}}})
    except ApiError as error:
        _log.info("pod %s does not get the label of its run: %s", name, error)
