"""A torchrun script from a ConfigMap, with its checkpoints on a claim, as the page has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.training.config.job import Job, parse_job
from perdure.training.journal.steps import read_kept_steps
from perdure.training.supervisor.run_handle import RunHandle
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.lab.places import REPO
from tests.kubernetes.overlay import DEPLOY
from tests.kubernetes.runs import KEYS, LIMIT_S, ClusterRuns, Deed, engine_section, powers_off
from tests.waiting import wait_for

STEPS = 120
PAUSE_S = 0.2
FOLDER = DEPLOY / "program"

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(1500)]


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


def _undisturbed(folder: Path) -> dict[int, str]:
    """Loss by completed steps, as the program prints it where nothing happens to its four ranks."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4",
            str(REPO / "examples/nanogpt_train.py"), f"--out_dir={folder}",
            f"--dataset={REPO}/docs/programs.md", f"--max_iters={STEPS}",
        ],
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("iter ")]
    return {int(words[1].rstrip(":")) + 1: words[3].rstrip(",") for words in lines}


def test_a_torchrun_script_of_a_config_map_outlasts_the_loss_of_a_node(runs, lab, tmp_path):
    folder = tmp_path / "checkpoints"
    _create_objects(runs, folder)
    job = _job(runs)

    def await_checkpoint(_: RunSupervisor) -> None:
        wait_for(lambda: any(folder.glob("*/ckpt.pt")), timeout_s=LIMIT_S, what="a checkpoint")

    played = runs.run(job, Deed(await_checkpoint, ends_attempt=False), powers_off(lab, 1))
    assert played.outcome.ended == "completed"
    assert played.answers == [("node_lost", "pod_reschedule")]
    assert played.leftovers == []
    # A command prints losses and no gradient norms, so that the outcome has no curve of it.
    steps = read_kept_steps(RunHandle(job, home=runs.home, credentials=KEYS).store, job.run_id)
    losses = {s: record.loss_text.removeprefix("loss ") for s, record in steps.items()}
    assert losses == _undisturbed(tmp_path / "alone")
