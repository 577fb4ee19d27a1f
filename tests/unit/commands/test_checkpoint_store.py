"""A command's checkpoints in the store, and their return to a node that lacks them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.errors import NotFound
from perdure.storage.local import LocalStore
from perdure.training.commands.checkpoint_layouts import (
    ProgramCheckpoint,
    find_checkpoints,
    find_parts,
)
from perdure.training.commands.checkpoint_store import (
    NUM_AHEAD,
    MemberCheckpoints,
    Save,
    find_surplus,
    list_stored_saves,
    list_whole_saves,
)
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec

GLOB = ProgramCheckpointsSpec(
    kind=CheckpointKind.GLOB, path="/unused/step-*", settle_s=0.0, upload=True
)
FIRST, SECOND = (1, 1), (1, 2)
MODEL = "mp_rank_00/model_optim_rng.pt"


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def save(root: Path, step: int, data: bytes = b"weights") -> ProgramCheckpoint:
    """A checkpoint that any node's is, as other programs save it."""
    path = root / f"step-{step}" / "model.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    (saved,) = (checkpoint for checkpoint in all_in(root) if checkpoint.step == step)
    return saved


def all_in(root: Path) -> list[ProgramCheckpoint]:
    return find_checkpoints(GLOB, root / "step-*", now_s=time.time() + 1)


def part(root: Path, step: int, *names: str) -> ProgramCheckpoint:
    """A node's part in Megatron's layout; what ends with a slash is an empty folder."""
    path = root / f"iter_{step:07d}"
    for name in names:
        file = path / name
        (file if name.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            file.write_bytes(f"{root.name} {name}".encode())
    parts = [part for part in find_parts(root) if part.step == step]
    return parts[0] if parts else ProgramCheckpoint(step, path, 0, time.time())


def stored(store: LocalStore, saved: ProgramCheckpoint, member: int, **changes: Any) -> bool:
    settings: dict[str, Any] = {"attempt": FIRST, "keep": 0, **changes}
    return MemberCheckpoints(store, "run", member).put(saved, **settings)


def by_step(store: LocalStore) -> dict[int, list[int]]:
    return {save.step: members for save, members in list_stored_saves(store, "run").items()}


def brought(store: LocalStore, root: Path, step: int, member: int = 0) -> bool:
    return MemberCheckpoints(store, "run", member).fetch(step, spec=GLOB, root=root / "step-*")


def files(path: Path) -> dict[str, str]:
    paths = (file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_text() for file in paths}


def test_a_node_that_lacks_a_checkpoint_gets_it_where_the_program_looks(store, tmp_path):
    stored(store, save(tmp_path / "old", 10), 0)
    assert brought(store, tmp_path / "new", 10)
    (saved,) = all_in(tmp_path / "new")
    assert (saved.step, saved.size_bytes) == (10, 7)
    assert not brought(store, tmp_path / "new", 10), "it is there"


def test_a_node_gets_what_its_own_member_saved_or_else_another_one(store, tmp_path):
    stored(store, save(tmp_path / "a", 10, b"first"), 0)
    stored(store, save(tmp_path / "b", 10, b"second"), 1)
    for member, data in ((0, b"first"), (1, b"second"), (2, b"first")):
        root = tmp_path / f"new-{member}"
        assert brought(store, root, 10, member)
        assert (root / "step-10" / "model.bin").read_bytes() == data


def test_of_a_step_that_was_saved_twice_the_later_one_comes_back(store, tmp_path):
    stored(store, save(tmp_path / "a", 10, b"first"), 0)
    stored(store, save(tmp_path / "b", 10, b"second"), 0, attempt=SECOND)
    assert brought(store, tmp_path / "new", 10)
    assert (tmp_path / "new" / "step-10" / "model.bin").read_bytes() == b"second"


def test_a_checkpoint_that_is_nowhere_is_not_brought(store, tmp_path):
    assert not brought(store, tmp_path / "new", 10)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("keep", "left"), [(0, [30, 40]), (3, [20, 30, 40])])
def test_the_store_keeps_the_newest_of_each_member(store, tmp_path, keep, left):
    stored(store, save(tmp_path / "b", 10), 1, keep=keep)
    for step in (10, 20, 30, 40):
        assert stored(store, save(tmp_path / "a", step), 0, keep=keep)
    assert by_step(store) == {10: [1], **{step: [0] for step in left}}


def test_what_the_program_has_deleted_or_written_anew_is_not_stored(store, tmp_path):
    saved = save(tmp_path / "a", 10)
    (saved.path / "model.bin").write_bytes(b"of a later attempt")
    assert not stored(store, saved, 0)
    (saved.path / "model.bin").unlink()
    saved.path.rmdir()
    assert not stored(store, saved, 0)
    assert list_stored_saves(store, "run") == {}


def test_a_member_gets_its_own_part_and_no_other(store, tmp_path):
    stored(store, part(tmp_path / "a", 10, "mp_rank_00/model_optim_rng.pt"), 0)
    stored(store, part(tmp_path / "b", 10, "mp_rank_01/model_optim_rng.pt"), 1)
    MemberCheckpoints(store, "run", 1).fetch_part(
        Save(10, FIRST), tmp_path / "new" / "iter_0000010"
    )
    assert files(tmp_path / "new" / "iter_0000010") == {
        "mp_rank_01/model_optim_rng.pt": "b mp_rank_01/model_optim_rng.pt"
    }


def test_a_part_that_its_member_has_not_stored_in_that_attempt_is_not_replaced(store, tmp_path):
    stored(store, part(tmp_path / "a", 10, MODEL), 0)
    stored(store, part(tmp_path / "b", 10, MODEL), 1, attempt=SECOND)
    with pytest.raises(NotFound, match="the part of member 1 is not there"):
        MemberCheckpoints(store, "run", 1).fetch_part(
            Save(10, FIRST), tmp_path / "new" / "iter_0000010"
        )
    assert not (tmp_path / "new").exists()


def test_a_share_of_the_optimizer_comes_with_the_model_that_another_rank_has_saved(store, tmp_path):
    share = "mp_rank_00/layer_wise_optimizer_1.pt"
    stored(store, part(tmp_path / "a", 10, MODEL, "mp_rank_01/model_optim_rng.pt"), 0)
    stored(store, part(tmp_path / "b", 10, share), 1)
    MemberCheckpoints(store, "run", 1).fetch_part(
        Save(10, FIRST), tmp_path / "new" / "iter_0000010"
    )
    saved = files(tmp_path / "new" / "iter_0000010")
    assert saved == {share: f"b {share}", MODEL: f"a {MODEL}"}, "and not that of mp_rank_01"


@pytest.mark.parametrize("folders", [(), ("mp_rank_01/",)])
def test_replicas_that_save_nothing_get_the_files_of_the_ranks_that_they_replicate(
    store, tmp_path, folders
):
    names = (MODEL, "mp_rank_01/model_optim_rng.pt", "mp_rank_01/distrib_optim.pt")
    stored(store, part(tmp_path / "a", 10, *names), 0)
    stored(store, part(tmp_path / "b", 10, *folders), 1)
    MemberCheckpoints(store, "run", 1).fetch_part(
        Save(10, FIRST), tmp_path / "new" / "iter_0000010"
    )
    saved = files(tmp_path / "new" / "iter_0000010")
    # A distributed optimizer makes the folders of its ranks also where it saves nothing.
    wanted = names[1:] if folders else names
    assert saved == {name: f"a {name}" for name in wanted}


def test_of_a_distributed_checkpoint_every_node_gets_all_files(store, tmp_path):
    stored(store, part(tmp_path / "a", 10, ".metadata", "common.pt", "__0_0.distcp"), 0)
    stored(store, part(tmp_path / "b", 10, "__1_0.distcp"), 1)
    for member in (0, 1):
        path = tmp_path / f"new-{member}" / "iter_0000010"
        MemberCheckpoints(store, "run", member).fetch_part(Save(10, FIRST), path)
        assert set(files(path)) == {".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp"}


def of_first(**members: int) -> dict[Save, list[int]]:
    """By steps, `at_10=2`: how many members have stored them."""
    steps = {int(name.removeprefix("at_")): count for name, count in members.items()}
    return {Save(step, FIRST): list(range(count)) for step, count in steps.items()}


def test_a_step_is_whole_when_every_member_has_stored_it_in_the_same_attempt():
    saves = {Save(10, FIRST): [0, 1], Save(20, FIRST): [0], Save(20, SECOND): [1]}
    assert list_whole_saves(saves, 2) == [Save(10, FIRST)]


def test_the_newest_step_that_all_have_is_never_deleted():
    saves = of_first(at_10=2, at_20=2, at_30=1, at_40=1, at_50=1)
    deleted = find_surplus(saves, 0, max(saves), keep=2, num_members=2)
    assert deleted == [Save(10, FIRST)], "20 is what all have, and one behind it becomes so next"
    assert find_surplus(saves, 0, max(saves), keep=2, num_members=None) == [
        Save(10, FIRST), Save(20, FIRST), Save(30, FIRST),
    ]  # fmt: skip


def test_a_member_that_is_far_ahead_of_the_others_keeps_a_few():
    ahead = {f"at_{step}": 1 for step in range(20, 100, 10)}
    saves = of_first(at_10=2, **ahead)
    left = set(saves) - set(find_surplus(saves, 0, max(saves), keep=2, num_members=2))
    assert left == {Save(10, FIRST), *(Save(step, FIRST) for step in (60, 70, 80, 90))}
    assert len(left) - 1 == NUM_AHEAD


@pytest.mark.parametrize("num_members", [None, 2])
def test_later_steps_of_a_dead_attempt_do_not_displace_what_was_just_stored(num_members):
    stale = of_first(at_10=2, at_20=2, **{f"at_{step}": 1 for step in range(60, 120, 10)})
    put = Save(30, SECOND)
    deleted = find_surplus({**stale, put: [0]}, 0, put, keep=2, num_members=num_members)
    assert put not in deleted
    assert Save(110, FIRST) not in deleted, "there are two"
    second = Save(40, SECOND)
    saves = {**stale, put: [0, 1], second: [0]}
    left = set(saves) - set(find_surplus(saves, 0, second, keep=2, num_members=num_members))
    assert left == {put, second}, "those of the current attempt come first"


def test_what_is_stored_of_parts_is_thinned_out_as_the_others_follow(store, tmp_path):
    def put(member: int, step: int) -> None:
        saved = part(tmp_path / str(member), step, f"mp_rank_0{member}/model_optim_rng.pt")
        assert stored(store, saved, member, num_members=2)

    for member, step in [(0, 10), (1, 10), (0, 20), (0, 30), (0, 40), (1, 40), (0, 50), (1, 50)]:
        put(member, step)
    assert by_step(store) == {40: [0, 1], 50: [0, 1]}
