"""A command's checkpoints in the store, and their return to a node that lacks them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from storage.local import LocalStore
from training.agent.saved_store import bring_back, store_saved, stored_steps
from training.health.program_checkpoints import Saved, find_saved
from training.specs.program_checkpoints import CheckpointKind, ProgramCheckpointsSpec

MEGATRON = ProgramCheckpointsSpec(kind=CheckpointKind.MEGATRON, path="/unused", upload=True)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def save(root: Path, step: int, data: bytes = b"weights") -> Saved:
    path = root / f"iter_{step:07d}" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    (found,) = (one for one in find_saved(MEGATRON, root, now_s=time.time()) if one.step == step)
    return found


def brought(store: LocalStore, root: Path, step: int, member: int = 0) -> bool:
    return bring_back(store, "run", member, step, spec=MEGATRON, root=root)


def test_a_node_that_lacks_a_checkpoint_gets_it_with_the_sign_that_it_is_whole(store, tmp_path):
    store_saved(store, "run", 0, save(tmp_path / "old", 10), keep=0)
    assert brought(store, tmp_path / "new", 10)
    (found,) = find_saved(MEGATRON, tmp_path / "new", now_s=time.time())
    assert (found.step, found.size_bytes) == (10, 7)
    assert not brought(store, tmp_path / "new", 10), "it is there"


def test_a_node_gets_what_its_own_member_saved_or_else_another_one(store, tmp_path):
    store_saved(store, "run", 0, save(tmp_path / "a", 10, b"first"), keep=0)
    store_saved(store, "run", 1, save(tmp_path / "b", 10, b"second"), keep=0)
    file = "iter_0000010/mp_rank_00/model_optim_rng.pt"
    for member, data in ((0, b"first"), (1, b"second"), (2, b"first")):
        root = tmp_path / f"new-{member}"
        assert brought(store, root, 10, member)
        assert (root / file).read_bytes() == data


def test_a_checkpoint_that_is_nowhere_is_not_brought(store, tmp_path):
    assert not brought(store, tmp_path / "new", 10)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("keep", "left"), [(0, [30, 40]), (3, [20, 30, 40])])
def test_the_store_keeps_the_newest_of_each_member(store, tmp_path, keep, left):
    store_saved(store, "run", 1, save(tmp_path / "b", 10), keep=keep)
    for step in (10, 20, 30, 40):
        assert store_saved(store, "run", 0, save(tmp_path / "a", step), keep=keep)
    assert stored_steps(store, "run") == {10: [1], **{step: [0] for step in left}}


def test_what_the_program_has_deleted_is_not_stored(store, tmp_path):
    saved = save(tmp_path / "a", 10)
    (saved.path / "mp_rank_00" / "model_optim_rng.pt").unlink()
    (saved.path / "mp_rank_00").rmdir()
    saved.path.rmdir()
    assert not store_saved(store, "run", 0, saved, keep=0)
    assert stored_steps(store, "run") == {}
