"""A node's own parts of checkpoints: whose they are, and what it has before the command starts."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.storage.errors import NotFound
from perdure.storage.local import LocalStore
from perdure.storage.objects import ObjectInfo
from perdure.training.commands import checkpoint_watch as saved_checkpoints
from perdure.training.commands import megatron as saved_parts
from perdure.training.commands.checkpoint_layouts import ProgramCheckpoint, find_parts
from perdure.training.commands.checkpoint_store import MemberCheckpoints, Save, list_stored_saves
from perdure.training.commands.checkpoint_watch import CommandCheckpointWatcher, answer_saved_query
from perdure.training.commands.megatron import prepare_parts
from perdure.training.config.command import CheckpointKind, ProgramCheckpointsSpec
from perdure.training.wire.agent import SavedQuery, StartOrder
from tests.jobs import small_job
from tests.unit.agent.conftest import start_order
from tests.values import not_none
from tests.waiting import BEYOND_A_TEST_S, wait_for

SPEC = ProgramCheckpointsSpec(kind=CheckpointKind.MEGATRON, path="/unused", upload=True)
FIRST, SECOND, THIRD = (1, 1), (1, 2), (2, 1)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


class Node:
    """A disk, and what its agent and its ranks do."""

    def __init__(self, root: Path, store: LocalStore, member: int) -> None:
        self.root = root
        self.store = store
        self.member = member
        self.file = f"mp_rank_0{member}/model_optim_rng.pt"

    def start(self, attempt: tuple[int, int], resumed: Save | None = None) -> None:
        resume = {} if resumed is None else {
            "resume_step": resumed.step, "resume_attempt": resumed.attempt,
        }  # fmt: skip
        placement, number = attempt
        order = start_order(
            self.root, "true", is_command=True, placement=placement, attempt=number, **resume
        )
        prepare_parts(self.store, order, "run", self.member, self.root)

    def save(self, step: int, data: str, *, signed: bool = True) -> None:
        path = self.root / f"iter_{step:07d}" / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data)
        if signed and self.member == 0:
            (self.root / TRACKER).write_text(str(step))

    def put(self, step: int, attempt: tuple[int, int]) -> None:
        (saved,) = (part for part in find_parts(self.root) if part.step == step)
        checkpoints = MemberCheckpoints(self.store, "run", self.member)
        assert checkpoints.put(saved, attempt=attempt, keep=9, num_members=2)

    def reported(self, member: int | None = None) -> set[Save]:
        query = SavedQuery(
            spec=SPEC.model_copy(update={"path": str(self.root)}),
            cwd="/", variables={}, run_id="run", since_s=0.0, until_s=time.time(),
            is_in_parts=True,
        )  # fmt: skip
        reply = answer_saved_query(query, "node-0", self.member if member is None else member)
        assert reply.error is None
        return {Save(checkpoint.step, not_none(checkpoint.saved_in)) for checkpoint in reply.saved}

    def at(self, step: int) -> str:
        return (self.root / f"iter_{step:07d}" / self.file).read_text()

    @property
    def sign(self) -> str | None:
        path = self.root / TRACKER
        return path.read_text() if path.exists() else None


@pytest.fixture
def first(tmp_path, store) -> Node:
    return Node(tmp_path / "a", store, 0)


@pytest.fixture
def second(tmp_path, store) -> Node:
    return Node(tmp_path / "b", store, 1)


def test_of_the_first_member_those_count_that_its_sign_names(first, second):
    for node in (first, second):
        node.start(FIRST)
        node.save(10, "10")
        node.save(20, "half", signed=False)
    assert first.reported() == {Save(10, FIRST)}
    assert second.reported() == {Save(10, FIRST), Save(20, FIRST)}, (
        "the first one knows which count"
    )


def test_what_was_there_before_the_run_is_none_of_it(first):
    first.save(1000, "of another run")
    first.start(FIRST)
    assert first.reported() == set()
    first.save(1010, "1010")
    assert first.reported() == {Save(1010, FIRST)}


def test_a_part_is_of_the_attempt_that_has_saved_it_last(second):
    second.start(FIRST)
    second.save(10, "10")
    second.save(20, "20")
    second.start(SECOND, Save(10, FIRST))
    assert second.reported() == {Save(10, FIRST), Save(20, FIRST)}
    second.save(20, "20 again")
    assert second.reported() == {Save(10, FIRST), Save(20, SECOND)}


def test_half_of_a_save_that_a_later_sign_passes_by_counts_never(first):
    first.start(FIRST)
    first.save(10, "10")
    first.save(15, "half, as it was killed", signed=False)
    first.start(SECOND, Save(10, FIRST))
    first.save(20, "20")
    assert first.reported() == {Save(10, FIRST), Save(20, SECOND)}


def test_a_disk_with_the_parts_of_another_member_has_none(first, second):
    first.start(FIRST)
    first.save(10, "10")
    assert first.reported(member=1) == set()
    second.start(FIRST)
    second.save(10, "the second one's")
    second.put(10, FIRST)
    first.member, first.file = 1, second.file
    first.start(SECOND, Save(10, FIRST))
    assert first.at(10) == "the second one's"
    assert not (first.root / "iter_0000010" / "mp_rank_00").exists()
    assert first.reported() == {Save(10, FIRST)}


def test_a_new_node_has_its_members_part_and_the_sign_before_the_command_starts(
    tmp_path, store, second
):
    second.start(FIRST)
    second.save(10, "10")
    second.put(10, FIRST)
    new = Node(tmp_path / "new", store, 1)
    new.start(THIRD, Save(10, FIRST))
    assert (new.at(10), new.sign) == ("10", "10")
    assert new.reported() == {Save(10, FIRST)}
    assert second.sign is None
    second.start(THIRD, Save(10, FIRST))
    assert second.sign == "10", "the program's first rank alone had it"


def test_a_node_with_a_newer_part_is_led_back_and_says_so(first, caplog):
    caplog.set_level(logging.INFO, "perdure.agent")
    first.start(FIRST)
    first.save(10, "10")
    first.save(20, "20")
    first.start(SECOND, Save(10, FIRST))
    assert (first.sign, first.at(20)) == ("10", "20")
    assert (
        f"{TRACKER} in {first.root} names step 10 now, 20 before: all nodes resume from step 10"
    ) in caplog.text
    assert first.reported() == {Save(10, FIRST), Save(20, FIRST)}, "it was complete, and still is"


def test_where_all_begin_anew_the_sign_is_what_it_was_before_the_run(first, caplog):
    caplog.set_level(logging.INFO, "perdure.agent")
    first.start(FIRST)
    first.save(10, "10")
    first.start(SECOND)
    assert first.sign is None
    assert "is deleted, it named step 10: all nodes start over" in caplog.text
    first.save(10, "10 again")
    assert first.reported() == {Save(10, SECOND)}


def test_a_part_of_another_attempt_is_replaced_by_the_one_that_all_go_on_from(second):
    second.start(FIRST)
    second.save(10, "10")
    second.put(10, FIRST)
    second.start(SECOND)
    second.save(10, "10 again")
    second.start(THIRD, Save(10, FIRST))
    assert second.at(10) == "10"
    assert second.reported() == {Save(10, FIRST)}


def test_files_of_others_that_were_brought_are_gone_before_the_step_is_saved_anew(first, second):
    share = "mp_rank_00/layer_wise_optimizer_1.pt"
    first.start(FIRST)
    second.start(FIRST)
    first.save(10, "10")
    first.put(10, FIRST)
    second.file = share
    second.save(10, "share")
    second.put(10, FIRST)
    second.start(SECOND, Save(10, FIRST))
    model = second.root / "iter_0000010" / first.file
    assert model.read_text() == "10"
    second.start(THIRD)
    assert not model.parent.exists()
    second.save(10, "share again")
    second.put(10, THIRD)
    assert second.reported() == set(), "it cannot go on with its share alone"


def test_an_agent_that_ends_while_it_brings_a_part_puts_no_wrong_attempt_on_record(
    second, monkeypatch
):
    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    second.start(FIRST)
    second.save(10, "10")
    second.put(10, FIRST)
    second.start(SECOND)
    second.save(10, "10 again, and longer")
    with monkeypatch.context() as patch:
        patch.setattr(saved_parts, "_fetched_part", end)
        with pytest.raises(KeyboardInterrupt):
            second.start(THIRD, Save(10, FIRST))
    assert second.at(10) == "10", "it had come, and the record says nothing of it yet"
    assert second.reported() == set()
    second.start((2, 2), Save(10, FIRST))
    assert second.reported() == {Save(10, FIRST)}


def test_a_part_that_could_not_be_replaced_stays_what_it_was(second):
    second.start(FIRST)
    second.save(10, "10")
    with pytest.raises(NotFound):
        second.start(THIRD, Save(10, SECOND))
    assert second.reported() == {Save(10, FIRST)}


def test_a_part_that_is_nowhere_starts_nothing(second):
    second.start(FIRST)
    with pytest.raises(NotFound, match="the part of member 1"):
        second.start(SECOND, Save(10, FIRST))


def test_a_step_of_which_nobody_has_stored_a_file_is_named_with_its_run_and_places(
    store, first, second
):
    for node in (first, second):
        node.start(FIRST)
        nothing = ProgramCheckpoint(10, node.root / "iter_0000010", 0, time.time())
        checkpoints = MemberCheckpoints(store, "run", node.member)
        assert checkpoints.put(nothing, attempt=FIRST, keep=9, num_members=2)
    with pytest.raises(NotFound) as caught:
        second.start(SECOND, Save(10, FIRST))
    where = store.url("runs/run/program/step-00000010/p0001-a0001")
    assert str(caught.value) == (
        f"run run: step 10 of the command has no files in any member's part below {where}, "
        f"nothing is fetched to {second.root}/iter_0000010"
    )


def test_two_members_in_one_folder_are_refused(first):
    first.start(FIRST)
    first.member = 1
    with pytest.raises(ValueError, match=r"the same folder for members 0 and 1.*PERDURE_NODE"):
        first.start(FIRST)


def test_of_two_members_that_come_into_one_folder_at_once_one_is_refused(tmp_path, store):
    for number in range(1, 21):
        root = tmp_path / f"common-{number}"
        refused: list[str] = []
        are_ready = threading.Barrier(2)

        def start(
            member: int,
            root: Path = root,
            refused: list[str] = refused,
            are_ready: threading.Barrier = are_ready,
        ) -> None:
            node = Node(root, store, member)
            are_ready.wait(240)
            try:
                node.start(FIRST)
            except ValueError as error:
                refused.append(str(error))

        starting = [threading.Thread(target=start, args=(member,)) for member in (0, 1)]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join(240)
        assert refused


def test_who_is_refused_a_folder_has_changed_nothing_in_it(store, first, second):
    for node in (first, second):
        node.start(FIRST)
        node.save(10, f"{node.member}")
        node.put(10, FIRST)
    first.start(SECOND, Save(10, FIRST))
    intruder = Node(first.root, store, 1)
    with pytest.raises(ValueError, match="the same folder"):
        intruder.start(SECOND, Save(10, FIRST))
    assert (first.at(10), first.sign) == ("0", "10")
    assert first.reported() == {Save(10, FIRST)}


def test_a_node_may_be_another_member_in_a_later_attempt(first, second):
    first.start(FIRST)
    second.start(FIRST)
    first.member = 1
    first.start(SECOND)


def test_a_node_alone_cannot_go_on_from_a_distributed_checkpoint(second):
    second.start(FIRST)
    second.file = "__1_0.distcp"
    second.save(10, "10")
    assert second.reported() == set()


def watch(node: Node, attempt: tuple[int, int] = FIRST, **spec: Any) -> CommandCheckpointWatcher:
    where = {"kind": "megatron", "path": str(node.root), "upload": True, **spec}
    job = small_job(
        worker={"command": ["true"], "checkpoints": {**where, "path": f"{node.root}$PERDURE_NODE"}},
        engine={"nodes": 2},
    )
    placement, number = attempt
    order: StartOrder = start_order(
        node.root, "true", is_command=True, job=job,
        placement=placement, attempt=number,
    )  # fmt: skip
    watched = not_none(CommandCheckpointWatcher.of(order, node.member, {"PERDURE_NODE": ""}))
    watched.poll()
    return watched


def test_a_part_is_stored_once_the_first_member_has_stored_its_own(store, first, second):
    watches = [watch(first), watch(second)]
    for node in (first, second):
        node.save(10, "10", signed=False)
    for watcher in (watches[1], watches[0]):
        watcher.poll()
        watcher.upload(store)
    assert list_stored_saves(store, "run") == {}, "nothing says yet that all are done"
    second.save(10, "10, whole now")
    first.save(10, "10")
    watches[1].upload(store)
    assert list_stored_saves(store, "run") == {}
    for watcher in (watches[0], watches[1]):
        watcher.poll()
        watcher.upload(store)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0, 1]}
    second.start(SECOND, Save(10, FIRST))
    assert second.at(10) == "10, whole now"
    assert [checkpoint.step for checkpoint in watches[0].newest] == [10]
    assert watches[1].newest == (), "the first member tells of the run's checkpoints"


def test_what_an_earlier_attempt_has_stored_is_no_sign_for_this_one(store, first, second):
    for node in (first, second):
        node.start(FIRST)
        node.save(10, "10")
        node.put(10, FIRST)
    following = watch(second, SECOND)
    second.save(10, "half of it")
    following.upload(store)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0, 1]}


def test_a_node_that_saves_nothing_stores_that(store, first, second):
    second.start(FIRST)
    watches = [watch(first), watch(second)]
    first.save(10, "10")
    (second.root / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    for watcher in watches:
        watcher.poll()
        watcher.upload(store)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0, 1]}
    second.file = "mp_rank_00/model_optim_rng.pt"
    second.start(SECOND, Save(10, FIRST))
    assert second.at(10) == "10", "a replica of the first one"


def test_a_node_whose_disk_is_gone_stores_nothing(store, first, second):
    second.start(FIRST)
    watches = [watch(first), watch(second)]
    first.save(10, "10")
    shutil.rmtree(second.root)
    for watcher in watches:
        watcher.poll()
        watcher.upload(store)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0]}


def test_a_node_whose_record_cannot_be_read_warns_and_goes_on(
    store, first, second, caplog, monkeypatch
):
    monkeypatch.setattr(saved_checkpoints, "POLL_S", 0.05)
    monkeypatch.setattr(saved_checkpoints, "EMPTY_ASK_S", 0.0)
    second.start(FIRST)
    record = second.root / ".perdure-parts.json"
    text = record.read_bytes()
    record.unlink()
    record.mkdir()  # as where a disk has errors: it cannot be read
    first.save(10, "10")
    first.put(10, FIRST)
    watched = watch(second)
    watched.start(lambda: store)
    wait_for(lambda: "a checkpoint is put into the store later" in caplog.text)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0]}
    record.rmdir()
    record.write_bytes(text)
    wait_for(lambda: list_stored_saves(store, "run") == {Save(10, FIRST): [0, 1]})
    watched.finish()


def test_a_record_that_is_none_counts_as_none_and_is_named(first, caplog):
    first.start(FIRST)
    first.save(10, "10")
    (first.root / ".perdure-parts.json").write_bytes(b"\xff\x00")
    assert first.reported() == set()
    assert f"{first.root}/.perdure-parts.json is not a record" in caplog.text


def test_a_part_that_the_program_has_deleted_is_not_taken_for_none(store, first, second):
    watches = [watch(first), watch(second)]
    for node in (first, second):
        node.save(10, "10")
    for watcher in watches:
        watcher.poll()
    (second.root / "iter_0000010" / second.file).unlink()
    for watcher in watches:
        watcher.upload(store)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0]}


def test_a_part_that_the_next_attempt_writes_anew_is_not_stored_as_the_last_ones(
    store, first, second
):
    watches = [watch(first), watch(second)]
    for node in (first, second):
        node.save(10, "10")
    for watcher in watches:
        watcher.poll()
        watcher.finish()
    second.save(10, "by the next attempt")
    for watcher in watches:
        watcher.upload(store)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0]}


class CountedStore(LocalStore):
    """Counts how often it is asked what it has."""

    num_lists = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.num_lists += 1
        return super().list(prefix)


def test_a_node_asks_the_store_only_while_it_has_a_part_to_store(tmp_path, first, second):
    store = CountedStore(tmp_path / "store")
    watches = [watch(first), watch(second)]
    for step in (10, 20):
        for node in (first, second):
            node.save(step, str(step))
        for watcher in watches:
            watcher.poll()
            watcher.upload(store)
        store.num_lists = 0
        watches[1].upload(store)
        assert store.num_lists == 0, "all that it has is stored"
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0, 1], Save(20, FIRST): [0, 1]}


def test_a_node_without_files_asks_the_store_rarely(tmp_path, first, second, monkeypatch):
    store = CountedStore(tmp_path / "store")
    second.start(FIRST)
    watched = watch(second)
    for _ in range(3):
        watched.upload(store)
    assert store.num_lists == 1
    monkeypatch.setattr(saved_checkpoints, "EMPTY_ASK_S", 0.0)
    watched.upload(store)
    assert store.num_lists == 2


def test_a_part_that_was_never_seen_is_not_none_where_others_of_the_attempt_were(
    store, first, second
):
    second.start(FIRST)
    watches = [watch(first), watch(second)]
    first.save(20, "20")
    second.save(10, "10, and 20 is deleted before it is seen")
    for watcher in watches:
        watcher.poll()
        watcher.upload(store)
    assert list_stored_saves(store, "run") == {Save(20, FIRST): [0]}


def at_the_end(watched: CommandCheckpointWatcher, store: LocalStore) -> threading.Thread:
    """Its node puts what it has saved last into the store, as the attempt has ended."""
    watched.finish()
    ending = threading.Thread(target=watched.upload_last, args=(store,))
    ending.start()
    return ending


@pytest.mark.parametrize("has_files", [False, True])
def test_at_the_end_a_node_waits_for_the_first_ones_last_save(store, first, second, has_files):
    second.start(FIRST)
    watches = [watch(first), watch(second)]
    first.save(10, "10")
    if has_files:
        second.save(10, "10")
    ending = at_the_end(watches[1], store)
    ending.join(0.5)
    assert ending.is_alive(), "the first member has stored nothing yet"
    assert list_stored_saves(store, "run") == {}
    at_the_end(watches[0], store).join(240)
    ending.join(240)
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0, 1]}


def test_nobody_waits_for_more_once_the_first_member_has_stored_its_last(
    store, first, second, monkeypatch
):
    monkeypatch.setattr(saved_checkpoints, "SIGN_WAIT_S", BEYOND_A_TEST_S)
    second.start(FIRST)
    watches = [watch(first), watch(second)]
    first.save(10, "10")
    for watcher in watches:
        watcher.poll()
        watcher.upload(store)
    at_the_end(watches[0], store).join(240)
    ending = at_the_end(watches[1], store)
    ending.join(240)
    assert not ending.is_alive()
    assert list_stored_saves(store, "run") == {Save(10, FIRST): [0, 1]}


def test_a_save_that_was_broken_off_is_not_waited_for_once_the_first_member_is_done(
    store, first, second, monkeypatch
):
    monkeypatch.setattr(saved_checkpoints, "SIGN_WAIT_S", BEYOND_A_TEST_S)
    watches = [watch(first), watch(second)]
    for node in (first, second):
        node.save(10, "half", signed=False)
    at_the_end(watches[0], store).join(240)
    ending = at_the_end(watches[1], store)
    ending.join(240)
    assert not ending.is_alive()
    assert list_stored_saves(store, "run") == {}


def test_a_first_member_that_is_gone_is_not_waited_for_without_end(
    store, first, second, monkeypatch
):
    monkeypatch.setattr(saved_checkpoints, "SIGN_WAIT_S", 1.5)
    second.start(FIRST)
    at_the_end(watch(first), store).join(240)
    began_s = time.monotonic()
    ending = at_the_end(watch(second, SECOND), store)
    ending.join(240)
    assert not ending.is_alive()
    assert time.monotonic() - began_s >= 1.5, "the end of the attempt before is none"


def test_old_parts_are_deleted_up_to_the_newest_that_is_complete(store, first, second):
    watches = [watch(first, keep=2), watch(second, keep=2)]
    for step in (10, 20, 30):
        for node in (first, second):
            node.save(step, str(step))
            os.utime(node.root / f"iter_{step:07d}" / node.file, (time.time() - 9,) * 2)
    second.save(40, "half")
    for watcher in watches:
        watcher.poll()
        watcher.upload(store)
        watcher.poll()
    left = [
        sorted(int(path.name[5:]) for path in node.root.glob("iter*")) for node in (first, second)
    ]
    assert left == [[20, 30], [20, 30, 40]]
