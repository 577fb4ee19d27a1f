"""Checkpoints of programs: which are complete, by the signs of their frameworks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from perdure.storage.safetensors_file import plan_layout
from perdure.training.commands.checkpoint_layouts import (
    NO_STEP,
    find_checkpoints,
    find_torn,
    is_whole_file,
    read_number,
    set_aside,
)
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
from tests.values import not_none

NOW_S = 1_000_000.0


def steps(kind: str, root: Path, *, now_s: float = NOW_S, since_s: float = 0.0) -> list[int]:
    spec = ProgramCheckpointsSpec(kind=CheckpointKind(kind), path=str(root), settle_s=30.0)
    return [saved.step for saved in find_checkpoints(spec, root, now_s=now_s, since_s=since_s)]


def write(path: Path, data: bytes = b"weights", *, age_s: float = 600.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def torch_file(path: Path, step: int) -> Path:
    """A file as nanoGPT saves it, with the step between other things."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": {"w": torch.ones(64)}, "model_args": {"n_layer": 2, "bias": False}}
    torch.save({**state, "iter_num": step, "best_val_loss": torch.tensor(1.0)}, path)
    return write(path, path.read_bytes())


@pytest.mark.parametrize("kind", list(CheckpointKind))
def test_where_nothing_was_saved_there_is_none(kind, tmp_path):
    assert steps(kind, tmp_path / "none" / "*") == []


def test_megatrons_tracker_says_which_iterations_are_whole(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt")
    assert steps("megatron", tmp_path) == [], "the first save has not come to its end"
    write(tmp_path / "latest_checkpointed_iteration.txt", b"20")
    assert steps("megatron", tmp_path) == [10, 20]
    write(tmp_path / "latest_checkpointed_iteration.txt", b"release")
    assert steps("megatron", tmp_path) == []


def trainer_folder(root: Path, step: int, *, age_s: float = 600.0) -> Path:
    folder = root / f"checkpoint-{step}"
    write(folder / "model.safetensors", age_s=age_s)
    state = json.dumps({"global_step": step}).encode()
    return write(folder / "trainer_state.json", state, age_s=age_s)


def test_the_trainers_state_is_the_last_thing_that_it_writes(tmp_path):
    trainer_folder(tmp_path, 5)
    trainer_folder(tmp_path, 10)
    trainer_folder(tmp_path, 15).unlink()
    write(tmp_path / "checkpoint-20" / "trainer_state.json", b'{"global_step": 20')
    trainer_folder(tmp_path, 25, age_s=1.0)  # other ranks may still write
    assert steps("transformers", tmp_path) == [5, 10]
    assert steps("transformers", tmp_path, now_s=NOW_S + 10) == [5, 10, 25]


def test_a_lightning_file_has_its_step_in_its_name_and_its_end(tmp_path):
    whole = torch_file(tmp_path / "epoch=0-step=50.ckpt", 50)
    write(tmp_path / "epoch=1-step=100.ckpt", whole.read_bytes()[:-100])
    write(tmp_path / "epoch=2-step=150.ckpt" / "meta.pt")
    write(tmp_path / "epoch=3-step=200.ckpt" / "__0_0.distcp")
    write(tmp_path / "last.ckpt")
    assert steps("lightning", tmp_path) == [50, 150]


def test_nanogpts_one_file_says_its_step_itself(tmp_path):
    path = torch_file(tmp_path / "ckpt.pt", 12_345)
    assert steps("nanogpt", tmp_path) == [12_345]
    write(path, path.read_bytes()[:-100])
    assert steps("nanogpt", tmp_path) == [], "its writer was killed"


def test_torchtitan_goes_on_from_a_folder_that_has_its_metadata(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path / f"step-{step}" / "__0_0.distcp")
    assert steps("torchtitan", tmp_path) == [], "the first save has not come to its end"
    write(tmp_path / "step-10" / ".metadata")
    write(tmp_path / "step-20" / ".metadata.tmp")
    write(tmp_path / "step-30" / "model.safetensors.index.json")
    write(tmp_path / "step-40-copy" / ".metadata")
    assert steps("torchtitan", tmp_path) == [10, 30]


@pytest.mark.parametrize("step", [0, 255, 65_535, 2**31, 2**40])
def test_a_number_of_any_size_is_read_without_unpickling(tmp_path, step):
    path = torch_file(tmp_path / "ckpt.pt", step)
    assert read_number(path, "iter_num") == step
    assert read_number(path, "model_args") is None
    assert read_number(path, "n_layer") == 2


class Malicious:
    """Runs something when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("unpickled",))


def test_a_file_that_would_run_something_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"own": Malicious(), "iter_num": 7}, tmp_path / "ckpt.pt")
    assert read_number(tmp_path / "ckpt.pt", "iter_num") == 7
    assert not (tmp_path / "unpickled").exists()


def test_a_pattern_finds_what_has_stood_still(tmp_path):
    write(tmp_path / "run" / "step-10.bin")
    write(tmp_path / "run" / "step-20.bin", age_s=5.0)
    write(tmp_path / "run" / "step-30" / "part", age_s=40.0)
    write(tmp_path / "run" / "readme.bin")
    assert steps("glob", tmp_path / "*" / "step-*") == [10, 30]
    whole = torch_file(tmp_path / "run" / "step-40.pt", 40)
    write(tmp_path / "run" / "step-50.pt", whole.read_bytes()[:-100])
    assert steps("glob", tmp_path / "run" / "step-*.pt") == [40]
    assert is_whole_file(whole)


def test_what_was_saved_before_the_run_is_none_of_it(tmp_path):
    trainer_folder(tmp_path, 5, age_s=600.0)
    trainer_folder(tmp_path, 10, age_s=60.0)
    assert steps("transformers", tmp_path, since_s=NOW_S - 100) == [10]


def test_the_size_is_that_of_all_files(tmp_path):
    folder = trainer_folder(tmp_path, 5).parent
    spec = ProgramCheckpointsSpec(kind=CheckpointKind.TRANSFORMERS, path=str(tmp_path))
    (saved,) = find_checkpoints(spec, tmp_path, now_s=NOW_S)
    assert saved.path == folder
    assert saved.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert saved.written_s == NOW_S - 600.0


def torn_steps(kind: str, root: Path, *, since_s: float = 0.0) -> list[int]:
    spec = ProgramCheckpointsSpec(kind=CheckpointKind(kind), path=str(root), settle_s=30.0)
    return [saved.step for saved in find_torn(spec, root, now_s=NOW_S, since_s=since_s)]


def steps_at_end(kind: str, root: Path) -> list[int]:
    spec = ProgramCheckpointsSpec(kind=CheckpointKind(kind), path=str(root), settle_s=30.0)
    return [saved.step for saved in find_checkpoints(spec, root, now_s=NOW_S, is_over=True)]


def test_once_the_program_has_ended_its_last_save_counts_at_once(tmp_path):
    trainer_folder(tmp_path / "hf", 25, age_s=1.0)
    assert steps("transformers", tmp_path / "hf") == []
    assert steps_at_end("transformers", tmp_path / "hf") == [25]
    write(tmp_path / "glob" / "step-25.bin", age_s=0.0)
    assert steps("glob", tmp_path / "glob" / "step-*") == []
    assert steps_at_end("glob", tmp_path / "glob" / "step-*") == [25]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("megatron", "iter_0000040/mp_rank_00/model_optim_rng.pt"),
        ("transformers", "checkpoint-40/model.safetensors"),
        ("lightning", "epoch=0-step=40.ckpt/__0_0.distcp"),
        ("torchtitan", "step-40/__0_0.distcp"),
        ("nanogpt", "ckpt.pt"),
    ],
)
def test_a_save_without_its_sign_is_torn_once_the_program_has_ended(kind, name, tmp_path):
    write(tmp_path / name, b"PK\x03\x04 half")
    assert steps_at_end(kind, tmp_path) == []
    assert torn_steps(kind, tmp_path) == [NO_STEP if kind == "nanogpt" else 40]
    assert torn_steps(kind, tmp_path, since_s=NOW_S) == [], "it is of an earlier run"


def test_a_lightning_checkpoint_of_deepspeed_has_its_own_sign_and_an_unknown_folder_is_left_alone(
    tmp_path,
):
    for step in (10, 20):
        write(tmp_path / f"epoch=0-step={step}.ckpt" / "checkpoint" / "states.txt")
    write(tmp_path / "epoch=0-step=10.ckpt" / "latest", b"checkpoint")
    write(tmp_path / "epoch=0-step=30.ckpt" / "of-a-plugin", b"x")
    assert steps_at_end("lightning", tmp_path) == [10]
    assert torn_steps("lightning", tmp_path) == [20]


def test_a_folder_in_which_nothing_was_written_yet_is_torn(tmp_path):
    trainer_folder(tmp_path, 20)
    (tmp_path / "checkpoint-40").mkdir()
    assert steps_at_end("transformers", tmp_path) == [20]
    assert torn_steps("transformers", tmp_path) == [40]


def safetensors_file(*, cut_bytes: int = 0) -> bytes:
    layout = plan_layout([("w", "F32", (256,)), ("b", "F32", (8,))])
    data = layout.header + bytes(layout.size_bytes - len(layout.header))
    return data[: len(data) - cut_bytes]


@pytest.mark.parametrize("cut_bytes", [1, 512, 1_050, 1_160])
def test_a_safetensors_file_must_be_as_long_as_its_header_says(tmp_path, cut_bytes):
    folder = trainer_folder(tmp_path, 20).parent
    write(folder / "model.safetensors", safetensors_file())
    assert steps_at_end("transformers", tmp_path) == [20]
    write(folder / "model.safetensors", safetensors_file(cut_bytes=cut_bytes), age_s=500.0)
    assert steps_at_end("transformers", tmp_path) == []
    assert torn_steps("transformers", tmp_path) == [20]


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin", "model.safetensors"])
def test_a_file_of_a_signed_checkpoint_that_lost_its_bytes_makes_it_torn(tmp_path, name):
    folder = trainer_folder(tmp_path, 20).parent
    write(folder / name, b"")
    assert steps_at_end("transformers", tmp_path) == []


def test_a_rank_file_that_was_cut_off_makes_its_folder_torn(tmp_path):
    whole = torch_file(tmp_path / "whole.pt", 20).read_bytes()
    write(tmp_path / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt", whole)
    write(tmp_path / "iter_0000020" / "mp_rank_01" / "model_optim_rng.pt", whole[:-100])
    write(tmp_path / "latest_checkpointed_iteration.txt", b"20")
    assert steps_at_end("megatron", tmp_path) == []


def test_without_a_sign_the_last_save_is_compared_with_the_one_before(tmp_path):
    write(tmp_path / "step-20.bin", b"x" * 1000, age_s=20.0)
    write(tmp_path / "step-40.bin", b"x" * 500, age_s=0.0)
    assert steps_at_end("glob", tmp_path / "step-*.bin") == [20]
    assert torn_steps("glob", tmp_path / "step-*.bin") == [40]
    write(tmp_path / "step-40.bin", b"x" * 990, age_s=0.0)
    assert steps_at_end("glob", tmp_path / "step-*.bin") == [20, 40]
    write(tmp_path / "step-40.bin", b"x" * 500, age_s=60.0)
    assert steps_at_end("glob", tmp_path / "step-*.bin") == [20, 40], "training went on after it"


def test_a_folder_that_lacks_a_file_of_the_one_before_was_cut_short(tmp_path):
    for name in ("rank-0", "rank-1", "done"):
        write(tmp_path / "global_step20" / name, b"x" * 1000, age_s=20.0)
    for name in ("rank-0", "rank-1"):
        write(tmp_path / "global_step40" / name, b"x" * 1500, age_s=0.0)
    assert steps_at_end("glob", tmp_path / "global_step*") == [20]
    write(tmp_path / "global_step40" / "done", b"", age_s=0.0)
    assert steps_at_end("glob", tmp_path / "global_step*") == [20, 40]


def test_files_of_different_names_are_not_compared(tmp_path):
    write(tmp_path / "model-40.bin", b"x" * 1000, age_s=1.0)
    write(tmp_path / "loader-40.bin", b"x" * 10, age_s=0.0)
    assert steps_at_end("glob", tmp_path / "*-40.bin") == [40, 40]


@pytest.mark.parametrize(
    ("kind", "name", "pattern"),
    [
        ("transformers", "checkpoint-40", ""),
        ("megatron", "iter_0000040", ""),
        ("torchtitan", "step-40", ""),
        ("lightning", "epoch=0-step=40.ckpt", ""),
        ("glob", "step-40", "step-*"),
        ("glob", "model-40.pt", "*-*"),
    ],
)
def test_what_is_set_aside_is_kept_and_found_no_more(tmp_path, kind, name, pattern):
    for number in range(2):  # the same step may be torn again
        (tmp_path / name).mkdir()
        write(tmp_path / name / "part", b"half")
        kept = not_none(set_aside(tmp_path / name))
        assert (kept / "part").read_bytes() == b"half"
        assert re.search(r"(step|checkpoint)[-=]\d", kept.name) is None, "programs search names"
        assert torn_steps(kind, tmp_path / pattern) == []
        assert steps_at_end(kind, tmp_path / pattern) == []
        assert len(list(tmp_path.iterdir())) == number + 1
    assert set_aside(tmp_path / name) is None, "another node has done it"
