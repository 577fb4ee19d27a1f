"""Checkpoints of a command, as its agent watches them come."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.local import LocalStore
from perdure.training.commands.checkpoint_store import Save, list_stored_saves
from perdure.training.commands.checkpoint_watch import (
    CommandCheckpointWatcher,
    answer_saved_query,
    fetch_resume_checkpoint,
)
from perdure.training.wire.agent import SavedQuery
from tests.jobs import small_job
from tests.unit.agent.conftest import start_order
from tests.values import not_none


def watch(folder: Path, **spec: Any) -> CommandCheckpointWatcher:
    where = {"kind": "glob", "path": "${OUT}/step-*.bin", "settle_s": 10.0, **spec}
    job = small_job(worker={"command": ["true"], "checkpoints": where})
    order = start_order(folder, "true", is_command=True, job=job)
    watched = not_none(CommandCheckpointWatcher.of(order, 0, {"OUT": str(folder)}))
    watched.poll()
    return watched


def save(folder: Path, step: int, *, age_s: float = 60.0) -> Path:
    path = folder / f"step-{step}.bin"
    path.write_bytes(b"weights")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def reported_steps(watched: CommandCheckpointWatcher) -> list[int]:
    watched.poll()
    return [checkpoint.step for checkpoint in watched.newest]


def test_what_was_there_before_is_not_of_this_attempt(tmp_path):
    save(tmp_path, 10)
    watched = watch(tmp_path)
    assert reported_steps(watched) == []
    save(tmp_path, 20)
    assert reported_steps(watched) == [20]
    save(tmp_path, 10, age_s=30.0)
    assert reported_steps(watched) == [10, 20], "saved again"


def test_what_is_still_being_written_is_reported_later(tmp_path):
    watched = watch(tmp_path)
    path = save(tmp_path, 10, age_s=0.0)
    assert reported_steps(watched) == []
    os.utime(path, (time.time() - 11.0,) * 2)
    assert reported_steps(watched) == [10]


def test_what_the_program_deletes_again_stays_reported(tmp_path):
    watched = watch(tmp_path)
    path = save(tmp_path, 10)
    assert reported_steps(watched) == [10]
    path.unlink()
    assert reported_steps(watched) == [10]


def test_the_last_look_is_at_the_end(tmp_path):
    watched = watch(tmp_path)
    save(tmp_path, 10)
    watched.finish()
    assert [checkpoint.step for checkpoint in watched.newest] == [10]


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_oldest_are_deleted_where_the_job_says_how_many_are_kept(tmp_path, is_folder):
    watched = watch(tmp_path, keep=2, path="${OUT}/step-*")
    for step in (10, 20, 30, 40):
        if is_folder:
            (tmp_path / f"step-{step}").mkdir()
        path = tmp_path / f"step-{step}" / "part" if is_folder else tmp_path / f"step-{step}"
        path.write_bytes(b"weights")
        os.utime(path, (time.time() - 60.0,) * 2)
    (tmp_path / "step-50").write_bytes(b"half")
    assert reported_steps(watched) == [10, 20, 30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-30", "step-40", "step-50"]


def test_without_a_number_nothing_is_deleted(tmp_path):
    watched = watch(tmp_path)
    for step in range(10, 100, 10):
        save(tmp_path, step)
    assert reported_steps(watched) == [50, 60, 70, 80, 90]
    assert len(list(tmp_path.iterdir())) == 9


def test_an_upload_waits_for_a_look_that_adds_to_what_it_reads(tmp_path):
    store = LocalStore(tmp_path / "store")
    watched = watch(tmp_path, upload=True)
    save(tmp_path, 10)
    assert reported_steps(watched) == [10]
    uploading = threading.Thread(target=watched.upload, args=(store,))
    with watched._lock:
        uploading.start()
        uploading.join(0.2)
        assert list_stored_saves(store, watched.run_id) == {}
    uploading.join(240)
    assert list_stored_saves(store, watched.run_id) == {Save(10, (1, 1)): [0]}


@pytest.mark.parametrize("name", ["__0_0.distcp", "mp_rank_00/model_optim_rng.pt"])
def test_the_only_node_of_a_job_has_whole_checkpoints_and_no_parts(tmp_path, name):
    where = {"kind": "megatron", "path": str(tmp_path / "out"), "upload": True}
    job = small_job(
        tmp_path, worker={"command": ["true"], "checkpoints": where}, engine={"nodes": 1}
    )
    spec = not_none(job.worker.checkpoints)
    file = tmp_path / "out" / "iter_0000010" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").write_text("10")
    query = SavedQuery(
        spec=spec, cwd="/", variables={}, run_id="run", since_s=0.0, until_s=time.time(),
        is_in_parts=job.saves_in_parts,
    )  # fmt: skip
    assert [checkpoint.step for checkpoint in answer_saved_query(query, "node-0", 0).saved] == [10]
    order = start_order(
        tmp_path, "true", is_command=True, job=job, num_nodes=1, attempt=2,
        resume_step=10, resume_attempt=(1, 1),
    )  # fmt: skip
    fetch_resume_checkpoint(order, "node-0", 0)
    assert file.read_bytes() == b"weights", "it is there, and nothing is fetched"
