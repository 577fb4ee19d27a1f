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
    watch_checkpoints,
)
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
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


def test_the_last_save_of_a_life_counts_at_its_end(tmp_path):
    watched = watch(tmp_path)
    save(tmp_path, 10, age_s=0.0)
    assert reported_steps(watched) == []
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


def megatron_save(root: Path, step: int, *, signed: bool = True) -> None:
    file = root / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    if signed:
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_later_sign_does_not_complete_a_save_that_was_cut_short(tmp_path):
    megatron_save(tmp_path, 20)
    megatron_save(tmp_path, 40, signed=False)
    watched = watch(tmp_path, kind="megatron", path="${OUT}", keep=2)
    megatron_save(tmp_path, 30)
    megatron_save(tmp_path, 60)
    assert reported_steps(watched) == [30, 60]
    kept = sorted(path.name for path in tmp_path.glob("iter_*"))
    assert kept == ["iter_0000030", "iter_0000040", "iter_0000060"], "20 is older than two others"


def test_a_life_that_saves_at_once_has_its_save_on_record(tmp_path):
    job = small_job(
        worker={"command": ["true"], "checkpoints": {"kind": "glob", "path": f"{tmp_path}/s-*"}}
    )
    order = start_order(tmp_path, "true", is_command=True, job=job)
    watched = not_none(watch_checkpoints(order, "node-0", 0))
    (tmp_path / "s-10").write_bytes(b"weights")
    watched.finish()
    assert [checkpoint.step for checkpoint in watched.newest] == [10]


def query(tmp_path: Path, kind: str, **fields: Any) -> SavedQuery:
    spec = ProgramCheckpointsSpec(kind=CheckpointKind(kind), path=str(tmp_path))
    return SavedQuery(
        spec=spec, cwd="/", variables={}, run_id="run", since_s=0.0, until_s=time.time(),
        is_over=True, **fields,
    )  # fmt: skip


def test_a_torn_save_is_listed_as_such_and_renamed_on_order(tmp_path):
    megatron_save(tmp_path, 20)
    megatron_save(tmp_path, 40, signed=False)
    torn = tmp_path / "iter_0000040"
    listed = answer_saved_query(query(tmp_path, "megatron"), "node-0", 0).saved
    assert [(saved.step, saved.is_whole) for saved in listed] == [(20, True), (40, False)]
    whole = tmp_path / "iter_0000020"
    order = query(tmp_path, "megatron", torn=(str(torn), str(whole), "/etc/passwd"))
    answer_saved_query(order, "node-0", 0)
    assert not torn.exists()
    (kept,) = tmp_path.glob("set-aside-*")
    assert (kept / "mp_rank_00" / "model_optim_rng.pt").read_bytes() == b"weights"
    assert Path("/etc/passwd").exists(), "only checkpoints are renamed"
    assert whole.exists(), "it is torn on another node's disk"


@pytest.mark.parametrize("saved", [(20, 40), (40,)])
def test_megatrons_sign_names_the_checkpoint_before_the_one_that_is_set_aside(tmp_path, saved):
    for step in saved:
        megatron_save(tmp_path, step)
    order = query(tmp_path, "megatron", unreadable=(str(tmp_path / "iter_0000040"),))
    answer_saved_query(order, "node-0", 0)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert (tracker.read_text() if tracker.exists() else None) == ("20" if 20 in saved else None)
