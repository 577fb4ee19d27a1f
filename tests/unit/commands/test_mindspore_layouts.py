"""Checkpoints of MindSpore and MindSpore Transformers: which are complete, and at which step."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from perdure.training.commands import checkpoint_watch
from perdure.training.commands.checkpoint_layouts import (
    ProgramCheckpoint,
    find_checkpoints,
    find_torn,
    is_whole_file,
)
from perdure.training.commands.mindspore_layouts import read_step_num
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
from perdure.training.config.job import parse_job

NOW_S = 4_000_000_000.0  # after all that the tests write


def spec_of(kind: str, **fields: Any) -> ProgramCheckpointsSpec:
    return ProgramCheckpointsSpec(kind=CheckpointKind(kind), path="out", **fields)


def steps(kind: str, root: Path, *, is_over: bool = False, **fields: Any) -> list[int]:
    found = find_checkpoints(spec_of(kind, **fields), root, now_s=NOW_S, is_over=is_over)
    return [saved.step for saved in found]


def torn(kind: str, root: Path, **fields: Any) -> list[ProgramCheckpoint]:
    return find_torn(spec_of(kind, **fields), root, now_s=NOW_S, since_s=0.0)


def safetensors_bytes(step_num: int | None = None) -> bytes:
    data = struct.pack("<q", step_num or 0) + bytes(16)
    header: dict[str, Any] = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}
    name = "step_num" if step_num is not None else "other"
    header[name] = {"dtype": "I64", "shape": [], "data_offsets": [0, 8]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def ckpt_message(tag: bytes, kind: bytes, content: bytes) -> bytes:
    tensor = b"\x12" + bytes([len(kind)]) + kind + b"\x1a" + bytes([len(content)]) + content
    value = b"\x0a" + bytes([len(tag)]) + tag + b"\x12" + bytes([len(tensor)]) + tensor
    return b"\x0a" + bytes([len(value)]) + value


def ckpt_bytes(step_num: int) -> bytes:
    weights = ckpt_message(b"w", b"Float32", bytes(range(32)))
    return weights + ckpt_message(b"step_num", b"Int64", struct.pack("<q", step_num))


def save(
    root: Path, rank: int, place: str, *, step_num: int | None = None, meta: str | None = ""
) -> Path:
    """A rank's file as mindformers writes it; `meta`: what meta.json names, default: the file."""
    path = root / f"rank_{rank}" / f"tiny_rank_{rank}-{place}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(step_num))
    os.utime(path, (NOW_S - 60, NOW_S - 60))
    if meta is not None:
        epoch, step = map(int, (meta or place).split("_"))
        text = {"last_epoch": epoch, "last_step": step, "last_ckpt_file": path.name}
        (path.parent / "meta.json").write_text(json.dumps(text))
    return path


def test_a_checkpoint_is_complete_when_all_ranks_have_it_and_their_meta_names_it(tmp_path):
    save(tmp_path, 0, "1_5")
    assert steps("mindformers", tmp_path, ranks=2) == [], "rank 1 has no folder yet"
    save(tmp_path, 1, "1_5", meta=None)
    assert steps("mindformers", tmp_path, ranks=2) == [], "rank 1 has not written its meta.json"
    save(tmp_path, 1, "1_5")
    assert steps("mindformers", tmp_path, ranks=2) == [5]
    save(tmp_path, 0, "1_10")
    assert steps("mindformers", tmp_path, ranks=2) == [5], "of rank 0 alone"
    assert [saved.step for saved in torn("mindformers", tmp_path, ranks=2)] == [10]


def test_a_later_meta_names_the_checkpoints_before_it(tmp_path):
    for place in ("1_5", "1_10", "2_5"):
        save(tmp_path, 0, place, meta="2_5")
        save(tmp_path, 1, place, meta="2_5")
    assert steps("mindformers", tmp_path, ranks=2, steps_per_epoch=10) == [5, 10, 15]


def test_more_folders_than_the_job_has_ranks_are_all_needed(tmp_path):
    for rank in range(3):
        save(tmp_path, rank, "1_5")
    save(tmp_path, 0, "1_10")
    save(tmp_path, 1, "1_10")
    assert steps("mindformers", tmp_path, ranks=2) == [5]


@pytest.mark.parametrize(
    ("step_num", "step"), [(44, 44), (4, 24), (25, 24), (None, 24)],
    ids=["as the file says", "counted from a restart", "not of the name", "none"],
)  # fmt: skip
def test_the_step_is_that_of_the_run_and_not_of_the_epoch(step_num, step, tmp_path):
    save(tmp_path, 0, "1_10")
    save(tmp_path, 0, "3_4", step_num=step_num)
    assert steps("mindformers", tmp_path, ranks=1) == [10, step]
    assert steps("mindformers", tmp_path, ranks=1, steps_per_epoch=50) == [10, 104]


def test_a_file_that_is_cut_short_makes_the_checkpoint_of_all_ranks_torn(tmp_path):
    for place in ("1_5", "1_10"):
        save(tmp_path, 0, place)
        path = save(tmp_path, 1, place)
    path.write_bytes(path.read_bytes()[:-9])
    assert steps("mindformers", tmp_path, ranks=2) == [5]
    (remains,) = torn("mindformers", tmp_path, ranks=2)
    assert [remains.step, remains.path.parent.name, remains.more_files] == [10, "rank_0", (path,)]


def test_setting_aside_renames_the_files_of_all_ranks_and_meta_names_the_one_before(tmp_path):
    for place in ("1_5", "1_10"):
        save(tmp_path, 0, place)
        path = save(tmp_path, 1, place)
    path.write_bytes(b"")
    spec = spec_of("mindformers", ranks=2)
    checkpoint_watch._set_aside(torn("mindformers", tmp_path, ranks=2), spec, tmp_path)
    assert steps("mindformers", tmp_path, ranks=2, is_over=True) == [5]
    for rank in range(2):
        names = sorted(file.name for file in (tmp_path / f"rank_{rank}").glob("*.safetensors"))
        assert names == [f"tiny_rank_{rank}-1_5.safetensors"]
        meta = json.loads((tmp_path / f"rank_{rank}" / "meta.json").read_text())
        assert meta == {
            "last_epoch": 1, "last_step": 5, "last_ckpt_file": f"tiny_rank_{rank}-1_5.safetensors",
        }  # fmt: skip


def test_a_checkpoint_that_the_program_calls_unhealthy_is_not_offered(tmp_path):
    root = tmp_path / "checkpoint"
    for place in ("1_5", "1_10", "1_15"):
        save(root, 0, place)
    entries = [
        {"is_health": 0, "ckpt_name": "tiny_rank_0-1_5.safetensors"},
        {"is_health": 1, "ckpt_name": "tiny_rank_0-1_10.safetensors"},
        {"is_health": 1, "ckpt_name": "tiny_rank_0-1_15.safetensors"},
        {"is_health": 0, "ckpt_name": "tiny_rank_0-1_15.safetensors"},
    ]
    (tmp_path / "health_ckpts.json").write_text(json.dumps(entries))
    assert steps("mindformers", root, ranks=1) == [5, 15]
    (tmp_path / "health_ckpts.json").write_text("[{")
    assert steps("mindformers", root, ranks=1) == [5, 10, 15]


def test_the_newer_layout_has_a_tracker_as_megatron_has(tmp_path):
    for step in (10, 20):
        folder = tmp_path / f"iteration_{step:08d}"
        folder.mkdir()
        (folder / "common.json").write_text("{}")
    assert steps("mindformers", tmp_path) == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert steps("mindformers", tmp_path) == [10]


def test_an_end_of_life_checkpoint_of_some_ranks_counts(tmp_path):
    folder = tmp_path / "ttp_saved_checkpoints-step_7_tmp" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "ttp_rank_0-1_7.ckpt").write_bytes(ckpt_bytes(7))
    assert steps("mindspore", tmp_path) == [], "it is renamed when it is complete"
    folder.parent.rename(tmp_path / "ttp_saved_checkpoints-step_7")
    assert steps("mindspore", tmp_path) == steps("mindformers", tmp_path) == [7]


def test_a_survivors_file_without_meta_counts_where_the_job_asks_for_it(tmp_path):
    save(tmp_path, 0, "1_5")
    save(tmp_path, 1, "1_5")
    save(tmp_path, 1, "1_8", meta=None)
    assert steps("mindformers", tmp_path, ranks=2) == [5]
    assert steps("mindformers", tmp_path, ranks=2, end_of_life=True) == [5, 8]


def job(**env: str):
    checkpoints = {"kind": "mindformers", "path": "output/checkpoint"}
    worker = {"command": ["msrun"], "checkpoints": checkpoints}
    engine = {"nodes": 2, "slots_per_node": 4, "spares": 0}
    storage = {"address": "file:///tmp/none"}
    return parse_job(
        {"run_id": "m", "storage": storage, "worker": worker, "engine": engine, "env": env}
    )


@pytest.mark.parametrize(
    ("switches", "saves_at_end"), [("{TTP:1,UCE:0}", True), ("{TTP:0}", False), ("", False)]
)
def test_the_job_gives_the_number_of_ranks_and_the_end_of_life_save(switches, saves_at_end):
    spec = job(MS_ENABLE_TFT=switches).program_checkpoints
    assert (spec.ranks, spec.end_of_life) == (8, saves_at_end)


def test_plain_mindspore_needs_no_meta_and_no_folder_of_ranks(tmp_path):
    (tmp_path / "net-1_4.ckpt").write_bytes(ckpt_bytes(4))
    (tmp_path / "net-3_4.ckpt").write_bytes(ckpt_bytes(12))
    (tmp_path / "net-graph.meta").write_bytes(b"graph")
    (tmp_path / "net-4_4.ckpt.tmp").write_bytes(b"half")
    assert steps("mindspore", tmp_path) == [4, 12]


def test_the_files_of_a_restarted_program_have_another_prefix(tmp_path):
    for rank in (0, 1):
        save(tmp_path, rank, "1_5", meta=None)
        path = save(tmp_path, rank, "2_5", meta=None)
        path.rename(path.with_name("tiny_1-2_5.safetensors"))
    assert steps("mindspore", tmp_path) == [5, 10]


@pytest.mark.parametrize("cut", [1, 9, 40, 60])
def test_a_ckpt_file_without_its_end_is_torn(cut, tmp_path):
    path = tmp_path / "net-1_4.ckpt"
    path.write_bytes(ckpt_bytes(4))
    assert is_whole_file(path)
    path.write_bytes(ckpt_bytes(4)[:-cut])
    assert not is_whole_file(path)


def test_a_checksum_behind_a_ckpt_file_belongs_to_it(tmp_path):
    path = tmp_path / "net-1_4.ckpt"
    path.write_bytes(ckpt_bytes(4) + b"crc_num" + bytes(10))
    assert is_whole_file(path)
    assert read_step_num(path) == 4


@pytest.mark.parametrize(
    "damage", [b"", b"\x0a\xff", b"\x0a\xff\xff", struct.pack("<Q", 9) + b"{}"]
)
def test_no_step_is_read_from_a_damaged_file(damage, tmp_path):
    for name in ("a.ckpt", "a.safetensors"):
        (tmp_path / name).write_bytes(damage)
        assert read_step_num(tmp_path / name) is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kind": "mindformers", "upload": True}, "storage that all nodes have"),
        ({"kind": "mindspore", "ranks": 2}, "ranks is for kind=mindformers"),
        ({"kind": "megatron", "steps_per_epoch": 2}, "steps_per_epoch is for"),
        ({"kind": "glob", "path": "a-*", "end_of_life": True}, "end_of_life is for"),
    ],
)
def test_a_field_of_another_kind_is_refused(fields, problem):
    with pytest.raises(ValueError, match=problem):
        ProgramCheckpointsSpec.model_validate({"path": "out", **fields})
