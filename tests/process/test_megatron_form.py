"""A program in Megatron-LM's launch form on two nodes: broken in every way, it loses no digit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import boto3
import pytest

from perdure.storage.address import open_store
from perdure.training.commands.checkpoint_store import list_stored_saves, list_whole_saves
from perdure.training.config.job import Job
from perdure.training.drill.driver import RunDriver, RunOutcome
from perdure.training.recovery.faults import FaultClass
from tests.local_run import LocalRun
from tests.process.program_jobs import (
    EXAMPLES,
    MEGATRON,
    AtStep,
    agent_logs,
    assert_recovered,
    broken,
    by_hand,
    example_job,
    fault_of,
    lines_with,
    output_of,
    printed,
    send,
    status_of,
)
from tests.s3.programs import HOST
from tests.s3.rgw import Rgw
from tests.s3.servers import ACCESS_KEY, SECRET_KEY
from tests.values import not_none

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 40
LOADED = "successfully loaded checkpoint"
IN_PARTS = "--use-layer-wise-distributed-optimizer"
TRACKER = "latest_checkpointed_iteration.txt"


def alone(folder: Path, *arguments: str) -> dict[int, str]:
    """What the program prints without Perdure."""
    own = ("--data-path", str(EXAMPLES.parent / "README.md"), "--save", str(folder), *arguments)
    found = printed(by_hand("pretrain_gpt.py", *own, f"--train-iters={STEPS}"), MEGATRON)
    assert list(found) == list(range(1, STEPS + 1))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, str]:
    return alone(tmp_path_factory.mktemp("by-hand"))


@pytest.fixture(scope="module")
def undisturbed_in_parts(tmp_path_factory) -> dict[int, str]:
    return alone(tmp_path_factory.mktemp("by-hand"), IN_PARTS)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """The `storage` section of a job on a real S3 server."""
    if Rgw.missing():
        pytest.skip(Rgw.missing())
    server = Rgw(tmp_path_factory.mktemp("rgw"))
    endpoint = f"http://{HOST}:{server.port}"
    boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
    ).create_bucket(Bucket="pretrain")  # fmt: skip
    yield {
        "address": "s3://pretrain/team", "endpoint": endpoint, "region": "us-east-1",
        "addressing_style": "path",
    }  # fmt: skip
    server.end()


def job_of(home: Path, name: str, *arguments: str, **changes: Any) -> Job:
    pace = (f"--train-iters={STEPS}", "--pause-s=0.2", *arguments)
    restart = {"hang_timeout_s": 20, "pod_retries": 1}
    return example_job(home, "megatron.yaml", name, *pace, steps=STEPS, restart=restart, **changes)


RESUMES: Any = {"losses": lambda lines: printed(lines, MEGATRON), "loaded": LOADED}


def test_a_rank_that_is_killed(home, undisturbed):
    job = job_of(home, "rank-killed")
    done = broken(home, job, send(1, signal.SIGKILL))
    assert_recovered(home, job, done, undisturbed, **RESUMES)
    assert len(done[0].history.placements) == 1


def test_a_rank_that_gets_sigterm(home, undisturbed):
    job = job_of(home, "rank-terminated")
    done = broken(home, job, send(0, signal.SIGTERM))
    assert_recovered(home, job, done, undisturbed, **RESUMES)


def test_a_rank_that_a_signal_stops(home, undisturbed):
    job = job_of(home, "rank-stopped")
    done = broken(home, job, send(0, signal.SIGSTOP))
    assert_recovered(home, job, done, undisturbed, **RESUMES)
    assert fault_of(done[0]).fault_class is FaultClass.HANG
    assert "stopped by a signal" in fault_of(done[0]).evidence


def test_a_node_that_is_lost(home, undisturbed):
    def lose(local: LocalRun) -> list[int]:
        return local.kill_node("node-0")

    job = job_of(home, "node-lost")
    done = broken(home, job, lose)
    assert_recovered(home, job, done, undisturbed, **RESUMES)
    assert fault_of(done[0]).fault_class is FaultClass.NODE_LOST
    assert len(done[0].history.placements) == 2


def job_in_parts(home: Path, name: str, **changes: Any) -> Job:
    """Two nodes and a spare, each with a disk of its own and a part of every checkpoint."""
    out = f"{home}/{name}/disks/${{PERDURE_NODE}}/megatron"
    own = (IN_PARTS, "--pause-s=0.8", "--save", out, "--load", out)
    worker = {"checkpoints": {"kind": "megatron", "path": out, "upload": True}}
    return job_of(home, name, *own, worker=worker, **changes)


def lose_disk(home: Path, job: Job, local: LocalRun, node: str) -> list[int]:
    killed = local.kill_node(node)
    shutil.rmtree(home / job.run_id / "disks" / node)
    return killed


def steps_stored(job: Job, num_members: int = 2) -> list[int]:
    """The steps of which every member has stored its part."""
    found = list_whole_saves(list_stored_saves(open_store(job.storage), job.run_id), num_members)
    return [one.step for one in found]


def assert_went_on(home: Path, job: Job, outcome: RunOutcome, curve: dict[int, str]) -> int:
    """That it did, from a step that it returns, with each node's own part, in every digit."""
    assert outcome.ended == "completed"
    (before, after) = outcome.history.attempts
    assert not_none(not_none(before.ended).fault).fault_class is FaultClass.NODE_LOST
    resumed_at = not_none(after.first_step).step - 1
    lines = output_of(home, job)
    loaded = lines_with(lines, LOADED)
    assert [one.rsplit(maxsplit=1)[1] for one in loaded] == [str(resumed_at)]
    assert printed(lines, MEGATRON) == curve
    disks = home / job.run_id / "disks"
    for member, one in enumerate(after.members):
        part = disks / one.node / "megatron" / f"iter_{STEPS:07d}" / "mp_rank_00"
        own = {f"layer_wise_optimizer_{member}.pt", *(["model_optim_rng.pt"] if not member else [])}
        assert {file.name for file in part.iterdir()} == own
    assert steps_stored(job)[-1] == STEPS, "the last one is stored, too"
    return resumed_at


@pytest.mark.parametrize("node", ["node-0", "node-1"])
def test_a_node_whose_part_is_lost_with_it_gets_it_from_the_store(home, undisturbed_in_parts, node):
    job, member = job_in_parts(home, f"part-lost-{node}"), int(node[-1])
    stored: list[int] = []

    def lose(local: LocalRun) -> list[int]:
        if not steps_stored(job):
            return []
        killed = lose_disk(home, job, local, node)
        saves = list_stored_saves(open_store(job.storage), job.run_id).items()
        stored.extend(save.step for save, members in saves if member in members)
        return killed

    lost = AtStep(home, 12, lose)
    outcome = RunDriver(home).run(job, hook=lost)
    assert lost.done, "the node was lost, and its disk"
    resumed_at = assert_went_on(home, job, outcome, undisturbed_in_parts)
    # The newest that it had stored, if the other one stored its part of that, now or later.
    assert resumed_at in stored[-2:]
    # The second member's has its share of the optimizer; the model is the first one's file.
    (found,) = (text for text in agent_logs(home, job) if "member 1 saved it" in text)
    assert "with files of others" in found


def test_all_go_on_from_the_step_before_where_one_node_has_not_stored_its_newest_part(
    home, undisturbed_in_parts
):
    job = job_in_parts(home, "part-behind")
    first = home / job.run_id / "disks" / "node-0" / "megatron"

    def lose(local: LocalRun) -> list[int]:
        stored, newest = steps_stored(job), int((first / TRACKER).read_text())
        if not stored or newest == stored[-1]:
            return []
        return lose_disk(home, job, local, "node-1")

    lost = AtStep(home, 12, lose)
    outcome = RunDriver(home).run(job, hook=lost)
    assert lost.done, "the node was lost before it had stored what all had saved"
    resumed_at = assert_went_on(home, job, outcome, undisturbed_in_parts)
    logs = agent_logs(home, job)
    led_back = f"names step {resumed_at} now, {resumed_at + 10} before"
    assert sum(led_back in text for text in logs) == 1, "the node that had the newer part"


def test_parts_come_back_from_a_real_object_store(home, bucket, undisturbed_in_parts, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    job = job_in_parts(home, "part-on-s3", storage=bucket)

    def lose(local: LocalRun) -> list[int]:
        return lose_disk(home, job, local, "node-1") if steps_stored(job) else []

    lost = AtStep(home, 12, lose)
    outcome = RunDriver(home).run(job, hook=lost)
    assert lost.done, "the node was lost, and its disk"
    assert assert_went_on(home, job, outcome, undisturbed_in_parts) >= 10


def test_a_wrong_argument_is_named_and_stops_the_run(home):
    job = job_of(home, "wrong-argument", "--learning-rate=1")
    outcome = RunDriver(home).run(job)
    assert len(outcome.history.attempts) == 1
    fault = fault_of(outcome)
    assert fault.user_fault
    assert "unrecognized arguments: --learning-rate=1" in fault.evidence
    assert outcome.ended == "launch_misconfigured is for the user to fix"
    assert status_of(home, job)["step"] is None
