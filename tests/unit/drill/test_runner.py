"""The table of drills, the names that the command line knows, and drills on the nodes of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.storage.address import make_store, open_store
from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.drill.job import NUM_RANKS
from perdure.training.drill.runner import (
    KINDS,
    DrillRunner,
    make_runner,
    parallel_kind,
    select_drills,
    select_runnable,
    target_sections,
)
from perdure.training.drill.table import DRILLS, STEPS
from perdure.training.errors import InputError
from perdure.training.recovery.rungs import ISOLATES, Rung
from tests.jobs import small_job


def test_names_are_unlike_and_all_means_every_one():
    names = [drill.name for drill in DRILLS]
    assert len(set(names)) == len(names)
    assert select_drills("all") == DRILLS
    assert [drill.name for drill in select_drills("tre")] == ["tre"]


def test_every_rung_has_a_drill_but_the_one_for_unexplained_faults():
    drilled = {rung for drill in DRILLS for rung in drill.expected.rungs}
    assert set(Rung) - drilled == {Rung.JOB_RESCHEDULE}


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_a_drill_breaks_something_within_the_run(drill):
    steps = [fault.step for fault in drill.faults]
    assert steps or drill.pauses_at
    assert all(1 < step < STEPS for step in steps)
    assert all(fault.rank < NUM_RANKS for fault in drill.faults)


def test_the_drill_of_a_state_that_is_lost_hits_every_rank_that_holds_it(tmp_path):
    (drill,) = select_drills("replica-holder-dies")
    hit = {
        kind: sorted(fault.rank for fault in DrillRunner(tmp_path, kind).job(drill).drill.faults)
        for kind in KINDS
    }
    assert [hit[kind] for kind in KINDS] == [[0, 1, 2, 3], [0, 2], [0]]


def test_a_name_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InputError, match=r"name: 'nope': no such drill; there are all, .*, pause"):
        select_drills("nope")
    with pytest.raises(InputError, match=r"parallelism: 'tp': must be one of ddp, hsdp, fsdp2"):
        parallel_kind("tp")


def test_the_docs_have_every_drill_with_what_it_does():
    text = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text(encoding="utf-8")
    for drill in DRILLS:
        assert f"| `{drill.name}` | {drill.injected} |" in text


FOLDER = "perdure-drill-1"


def job_of(tmp_path, **sections: Any) -> Job:
    own = {
        "run_id": "weeks-long",
        "storage": {"address": f"file://{tmp_path}/store/"},
        "data": {"sources": ["/corpus"]},
        "engine": {"nodes": 4, "slots_per_node": 4, "spares": 2, "grace_s": 33},
        "batch": {"global_batch_size": 960, "micro_batch_size": 2},
    }
    return small_job(**{**own, **sections})


def runner(tmp_path, job: Job, kind: ParallelKind = ParallelKind.DDP) -> DrillRunner:
    return DrillRunner(tmp_path, kind, target_sections(job, FOLDER, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_a_drill_is_a_job_with_each_kind_of_parallelism_and_on_more_nodes(tmp_path, drill, kind):
    job = DrillRunner(tmp_path, kind).job(drill)
    assert job.run_id == f"{drill.name}-{kind}"
    assert job.parallelism.kind is kind
    wide = runner(tmp_path, job_of(tmp_path), kind).job(drill)
    assert (wide.world_size, wide.batch.global_batch_size) == (16, 32)


@pytest.mark.parametrize("is_wide", [False, True])
def test_faults_that_are_on_nodes_of_their_own_are_so_on_more_ranks_too(tmp_path, is_wide):
    drill_runner = (
        runner(tmp_path, job_of(tmp_path)) if is_wide else DrillRunner(tmp_path, KINDS[0])
    )
    job = drill_runner.job(*select_drills("two-nodes-lost"))
    nodes = [fault.rank // job.engine.slots_per_node for fault in job.drill.faults]
    assert (job.engine.nodes, nodes) == (4, [2, 3])


def test_a_drill_has_the_engine_and_the_environment_of_the_job_and_a_folder_in_its_store(tmp_path):
    job = job_of(
        tmp_path,
        env={"HCCL_DETERMINISTIC": "true"},
        comm={"master_port": 29_500, "timeout_s": 90},
        preflight={"nodes": True, "timeout_s": 77},
        restart={"start_timeout_s": 1234, "process_replace": False},
        worker={"cwd": str(tmp_path)},
    )
    drill = runner(tmp_path, job).job(None)
    assert drill.engine == job.engine.model_copy(update={"warm_spares": 0})
    assert runner(tmp_path, job).job(*select_drills("node-lost")).engine.warm_spares == 1
    assert drill.storage.address == f"file://{tmp_path}/store/{FOLDER}"
    assert drill.env["HCCL_DETERMINISTIC"] == "true"
    assert (drill.comm.master_port, drill.comm.timeout_s) == (29_500, 90)
    assert drill.preflight == job.preflight
    assert drill.restart.start_timeout_s == 1234
    assert drill.worker.cwd == str(tmp_path)


def test_what_is_expected_of_a_drill_does_not_depend_on_the_policies_of_the_job(tmp_path):
    job = job_of(
        tmp_path,
        steps=90_000,
        comm={"link_retry": True},
        restart={"process_replace": False},
        checkpoint={"every_steps": 500},
        watch={"isolate_fail_slow": True},
    )
    local_job, remote_job = (
        DrillRunner(tmp_path, ParallelKind.DDP).job(None),
        runner(tmp_path, job).job(None),
    )
    for section in ("model", "optimizer", "checkpoint", "restart", "watch", "steps", "seed"):
        assert getattr(remote_job, section) == getattr(local_job, section), section
    assert not remote_job.comm.link_retry
    (retry,) = select_drills("operator-retry")
    assert runner(tmp_path, job).job(retry).comm.link_retry


@pytest.mark.parametrize(
    "engine", [{"nodes": 1, "slots_per_node": 8}, {"nodes": 3, "slots_per_node": 1}]
)
def test_too_few_nodes_or_ranks_are_refused(tmp_path, engine):
    with pytest.raises(InputError, match=r"tre: engine.nodes=.* 2 nodes and 4 ranks at least"):
        select_runnable(select_drills("tre"), job_of(tmp_path, engine=engine))


def test_drills_that_leave_a_node_are_left_out_where_there_is_no_other_one(tmp_path):
    bare = job_of(tmp_path, engine={"nodes": 2, "slots_per_node": 4, "spares": 0})
    without = {drill.name for drill in DRILLS} - {
        drill.name for drill in select_runnable(DRILLS, bare)
    }
    leave = {drill.name for drill in DRILLS if ISOLATES & set(drill.expected.rungs)}
    assert {"node-lost", "two-nodes-lost", "node-isolated"} < without == leave
    with pytest.raises(InputError, match=r"node-lost: engine\.spares=0: it leaves a node"):
        select_runnable(select_drills("node-lost"), bare)
    assert select_runnable(DRILLS, job_of(tmp_path)) == select_runnable(DRILLS, None) == DRILLS
    for engine in ({"nodes": 3, "spares": 2}, {"nodes": 4, "spares": 1}):
        few = job_of(tmp_path, engine={"slots_per_node": 4, **engine})
        assert {drill.name for drill in DRILLS if drill not in select_runnable(DRILLS, few)} == {
            "two-nodes-lost"
        }


def test_a_store_that_does_not_answer_is_refused_before_anything_is_started(tmp_path):
    (tmp_path / "store").write_text("a file")
    home = tmp_path / "home"
    with pytest.raises(InputError, match="storage"):
        make_runner(job_of(tmp_path), select_drills("tre"), ParallelKind.DDP, home=home)
    assert not home.exists()


def test_drills_clear_what_is_theirs_in_the_store_alone(tmp_path):
    job = job_of(tmp_path)
    make_store(job.storage)
    store = open_store(job.storage)
    store.put("runs/weeks-long/ledger", b"kept")
    mine = runner(tmp_path / "home", job)
    mine.home.mkdir()
    make_store(mine.job(None).storage)
    open_store(mine.job(None).storage).put("runs/tre-ddp/ledger", b"x")
    assert mine.places == (str(mine.home), f"file://{tmp_path}/store/{FOLDER}")
    mine.clear()
    assert [info.key for info in store.list("")] == ["runs/weeks-long/ledger"]
    assert not tmp_path.joinpath("home").exists()
    assert not (tmp_path / "store" / FOLDER).exists()


def test_an_hsdp_job_has_its_replicas_drilled(tmp_path):
    engine = {"nodes": 3, "slots_per_node": 3, "spares": 1}
    batch = {"global_batch_size": 9, "micro_batch_size": 1}
    three = {"kind": "hsdp", "replicas": 3}
    job = job_of(tmp_path, engine=engine, batch=batch, parallelism=three)
    assert runner(tmp_path, job, ParallelKind.HSDP).job(None).parallelism.replicas == 3
    plain = runner(tmp_path, job_of(tmp_path, engine=engine, batch=batch), ParallelKind.HSDP)
    with pytest.raises(InputError, match="replicas=2 must divide data x context"):
        plain.job(None)


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        ({"kind": "hsdp", "replicas": 2}, ParallelKind.HSDP),
        ({"kind": "fsdp2"}, ParallelKind.FSDP2),
        ({"kind": "ddp"}, ParallelKind.DDP),
    ],
)
def test_the_parallelism_is_that_of_the_job_unless_another_is_named(tmp_path, own, kind):
    job = job_of(tmp_path, parallelism=own)
    assert parallel_kind(None, job) is kind
    assert parallel_kind("ddp", job) is ParallelKind.DDP
    assert parallel_kind(None) is ParallelKind.DDP


def test_drills_on_the_nodes_of_a_job_get_its_variables_and_none_of_its_secrets(tmp_path):
    job = job_of(tmp_path, env={"A": "1"}, env_from={"HF_TOKEN": {"block": "b"}})
    drill = runner(tmp_path, job).job(None)
    assert drill.env["A"] == "1"
    assert drill.env_from == {}
