"""Drills on a real cluster: as expected there as on one machine, whoever does the killing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from perdure.training.config.drill import Kill, Victim
from perdure.training.config.job import Job, parse_job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.driver import RunDriver, kill_hook
from perdure.training.drill.evaluation import differences, list_recoveries
from perdure.training.drill.job import drill_job
from perdure.training.drill.runner import make_runner, select_drills, target_sections
from perdure.training.drill.table import DRILLS
from perdure.training.engines.kubernetes.objects import RUN
from perdure.training.errors import EngineError
from perdure.training.injection.outside import KillInjector
from perdure.training.journal.history import RunHistory
from perdure.training.recovery.rungs import Rung
from perdure.training.supervisor.run_supervisor import RunSupervisor
from perdure.training.supervisor.watch import Progress
from tests.jobs import job_document
from tests.kubernetes.lab.kubectl import Cluster
from tests.kubernetes.runs import engine_section
from tests.kubernetes.store import Store

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(2700)]

ALL_S = 2400.0
STEPS = 40
PACE_S = 0.3
NEEDS_FOUR_NODES = "two-nodes-lost"  # and two spares; the cluster has three nodes


@pytest.fixture
def job(
    cluster: Cluster, store: Store, namespace: str, tmp_path: Path, monkeypatch
) -> Iterator[Job]:
    """A job on the cluster: two nodes of two ranks and a spare, with a store that both reach."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    engine = engine_section(cluster, namespace, place_timeout_s=300)
    document = job_document(
        tmp_path,
        run_id="drilled",
        storage={
            "address": store.below("drills"),
            "endpoint": store.environment["AWS_ENDPOINT_URL"],
            "region": "us-east-1",
        },
        batch={"global_batch_size": 8, "micro_batch_size": 1},
        engine=engine,
    )
    yield parse_job(document)
    left = cluster.get("pods,secrets,configmaps", "--namespace", namespace)["items"]
    ours = [one["metadata"] for one in left if RUN in one["metadata"].get("labels", {})]
    assert [one["name"] for one in ours] == []


def test_every_drill_ends_on_a_cluster_as_it_does_on_this_machine(job, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    command = ("drill", "all", "--job", str(file), "--json")
    with (tmp_path / "drills.err").open("w") as progress:
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *command],
            env={**os.environ, "PERDURE_HOME": str(tmp_path / "home")},
            stdout=subprocess.PIPE,
            stderr=progress,
            text=True,
            timeout=ALL_S,
            check=False,
        )
    outcomes = json.loads(done.stdout or "[]")
    problems = {one["name"]: one["problems"] for one in outcomes if not one["as_expected"]}
    assert (problems, done.returncode) == ({}, 0), (tmp_path / "drills.err").read_text()
    here = [drill.name for drill in DRILLS if drill.name != NEEDS_FOUR_NODES]
    assert [one["name"] for one in outcomes] == here
    assert all(one["curve_equal"] or one["differs_from"] is not None for one in outcomes)


def played(
    job: Job, tmp_path: Path, name: str, *kills: Kill
) -> tuple[RunHistory, dict[int, tuple[float, float]]]:
    """A run of the drills' job on the cluster that ends well, and leaves nothing."""
    own = drill_job(
        tmp_path, name, kind=ParallelKind.DDP, steps=STEPS, pace_s=PACE_S,
        changes={"restart": {"pod_retries": 8}, "drill": {"kills": bool(kills)}},
        target=target_sections(job, "kills", ParallelKind.DDP),
    )  # fmt: skip
    injector = KillInjector(kills)
    outcome = RunDriver(tmp_path, limit_s=1200).run(own, hook=kill_hook(injector))
    assert outcome.ended == "completed"
    assert outcome.leftovers == ()
    assert len(injector.fired_s) == len(kills), "every kill really hit"
    return outcome.history, dict(outcome.curve)


def test_whatever_is_killed_from_outside_of_a_pod_the_curve_stays(job, tmp_path):
    make_runner(
        job, select_drills("replace-rank"), ParallelKind.DDP, home=tmp_path
    )  # writes the corpus
    _, undisturbed = played(job, tmp_path, "whole")
    kills = (
        Kill(victim=Victim.RANK, index=3, step=5),
        Kill(victim=Victim.CHECKPOINT_SERVER, index=1, step=9),
        Kill(victim=Victim.COORDINATOR, step=13),
        Kill(victim=Victim.AGENT, index=1, step=21),
        Kill(victim=Victim.NODE, index=0, step=29),
    )
    history, curve = played(job, tmp_path, "killed", *kills)
    assert differences(curve, undisturbed) == []
    rungs = [one.rung for one in list_recoveries(history)]
    assert rungs == [
        *(Rung.PROCESS_REPLACE, Rung.IN_PLACE_RESTART),
        *(Rung.NODE_REPLACE, Rung.NODE_REPLACE),
    ]
    # A container that ended says nothing against its node; one that fell silent is left.
    assert len(history.isolated) == 1


def test_the_agents_of_a_run_that_is_no_drill_refuse_to_kill(job, tmp_path):
    make_runner(job, select_drills("replace-rank"), ParallelKind.DDP, home=tmp_path)
    refused: list[str] = []
    had: list[str] = []

    def attack(run: RunSupervisor, progress: Progress) -> None:
        if progress.last is not None and not refused:
            with pytest.raises(EngineError) as error:
                run.fleet.kill(Victim.NODE, 0)
            refused.append(str(error.value))
            had.extend(name.partition("/")[0] for name in run.list_leftovers())

    plain = drill_job(
        tmp_path, "no-drill", kind=ParallelKind.DDP, steps=10, changes={},
        target=target_sections(job, "kills", ParallelKind.DDP),
    )  # fmt: skip
    outcome = RunDriver(tmp_path, limit_s=1200).run(plain, hook=attack)
    assert outcome.ended == "completed"
    assert len(refused) == 1
    assert "the run is no drill" in refused[0]
    assert list_recoveries(outcome.history) == []
    # Of each pod its configuration, and one with the keys of the store.
    assert sorted(had) == ["configmaps", *["pods"] * 2, *["secrets"] * 3]
    assert outcome.leftovers == (), "nothing of it, now that it is over"
