"""A torchrun script from a ConfigMap, its checkpoints on a claim: the job of the page on Kubernetes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.training.config.job import Job, parse_job
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.lab.places import REPO
from tests.kubernetes.overlay import DEPLOY
from tests.kubernetes.runs import ClusterRuns, engine_section, powers_off

STEPS = 120
PAUSE_S = 0.2
FOLDER = DEPLOY / "program"

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(900)]


def _job(runs: ClusterRuns) -> Job:
    """The job of the page, with the lab's image and store, and a corpus that the lab has."""
    document: dict[str, Any] = yaml.safe_load((FOLDER / "job.yaml").read_text(encoding="utf-8"))
    worker = document["worker"]
    command = [*worker["command"], f"--max_iters={STEPS}", f"--pause_s={PAUSE_S}"]
    corpus = {"--dataset=/opt/perdure/docs/programs.md": f"--dataset={REPO}/docs/programs.md"}
    worker["command"] = [corpus.get(argument, argument) for argument in command]
    section = engine_section(runs.cluster, runs.namespace)
    volumes = [*section["volumes"], *document["engine"]["volumes"]]
    storage = {
        "address": runs.store.below(document["run_id"]),
        "endpoint": runs.store.environment["AWS_ENDPOINT_URL"],
        "region": "us-east-1",
    }
    changes = section | {"volumes": volumes}
    return parse_job(document | {"storage": storage, "engine": changes})


def _create_objects(runs: ClusterRuns, folder: Path) -> None:
    """The claim, on a folder of this machine that all nodes have, and the ConfigMap."""
    folder.mkdir()
    folder.chmod(0o777)
    claim = yaml.safe_load((FOLDER / "claim.yaml").read_text(encoding="utf-8"))
    claim["metadata"]["namespace"] = runs.namespace
    name = f"checkpoints-{runs.namespace}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": claim["spec"]["accessModes"],
            "capacity": claim["spec"]["resources"]["requests"],
            "storageClassName": name,
            "hostPath": {"path": str(folder)},
        },
    }
    claim["spec"]["storageClassName"] = name
    runs.cluster.create(volume, claim)
    runs.cluster.kubectl(
        *("create", "configmap", "first-program", "--namespace", runs.namespace),
        f"--from-file=train.py={REPO / 'examples/nanogpt_train.py'}",
    )


def _losses(text: str) -> dict[int, str]:
    """Loss by iteration, as the program printed it last."""
    lines = [line.split() for line in text.splitlines() if line.startswith("iter ")]
    return {int(words[1].rstrip(":")): words[3].rstrip(",") for words in lines}


def test_a_torchrun_script_of_a_config_map_outlasts_the_loss_of_a_node(runs, lab, tmp_path):
    _create_objects(runs, tmp_path / "checkpoints")
    job = _job(runs)
    played = runs.run(job, powers_off(lab, 1))
    assert played.outcome.ended == "completed"
    assert played.answers == [("node_lost", "pod_reschedule")]
    assert played.leftovers == []
    print(json.dumps({str(k): str(v) for k, v in sorted(played.outcome.curve.items())})[:400])
    assert sorted(played.outcome.curve) == list(range(1, STEPS + 1))
    undisturbed = runs.run(_job(runs).model_copy(update={"run_id": "undisturbed"}))
    assert undisturbed.outcome.curve == played.outcome.curve
