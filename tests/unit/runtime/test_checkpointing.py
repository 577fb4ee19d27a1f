"""Restoring from the nearest place that has a whole checkpoint, bit by bit."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perdure.storage import staging
from perdure.storage.checkpoint import CheckpointStore, StepState
from perdure.storage.checkpoint_server.publish import prune_disk
from perdure.storage.errors import Corrupt
from perdure.storage.local import LocalStore
from perdure.storage.safetensors_file import header_size_bytes
from perdure.training.journal.attempt_log import parse_lines
from perdure.training.journal.events import (
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointRestored,
)
from perdure.training.runtime.state.checkpointer import Checkpointer
from tests.unit.runtime.trainees import (
    Place,
    Trainee,
    loss_at,
    train,
    train_and_fail,
    train_and_save_again,
    train_without_room,
)
from tests.unit.storage.nodes import Cluster, Node, flip_bit

SAVES = (2, 4)


@dataclass
class Bench:
    """Four ranks on two nodes with a checkpoint server and a disk each, and attempts of them."""

    cluster: Cluster
    attempt: int = 0

    @property
    def nodes(self) -> tuple[Node, Node]:
        first, second = self.cluster.nodes
        return first, second

    @property
    def checkpoints(self) -> CheckpointStore:
        return self.cluster.checkpoints

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.cluster.folder / "store")

    def place(self, *, keeps: bool = True, sharded: bool = False) -> Place:
        """Of the next attempt."""
        self.attempt += 1
        self.checkpoints.fence(1, self.attempt)
        names = tuple(node.name if keeps else None for node in self.nodes)
        disks = tuple(node.disk for node in self.nodes)
        return Place(self.cluster.folder, self.attempt, names, disks, sharded)

    def train(
        self,
        until: int = 4,
        saves: tuple[int, ...] = SAVES,
        *,
        num_ranks: int = 4,
        **place: bool,
    ) -> list[dict[Any, Any]]:
        """One attempt to its end."""
        return self.cluster.run(train, self.place(**place), until, saves, num_ranks=num_ranks)

    def restart(self, *numbers: int) -> None:
        """Kill checkpoint servers and start others: their memory is gone."""
        for number in numbers:
            self.nodes[number].start()

    def replace(self, *numbers: int) -> None:
        """Replace nodes by others: memory and disk are gone."""
        for number in numbers:
            node = self.nodes[number]
            node.kill()
            assert node.disk is not None
            node.disk = node.disk.with_name("another-disk")
            node.start()

    def uncommit(self, step: int) -> None:
        """As if the store had never got a step."""
        self.checkpoints.delete(step)

    def shard(self, step: int, rank: int) -> str:
        """Key of a shard of a committed step, in the store."""
        return self.checkpoints.key(step, sorted(self.checkpoints.manifest(step).shards)[rank])

    def make_store_unreadable(self) -> None:
        """Spoil all shards of the store: what is restored was read elsewhere."""
        for info in list(self.store.list("runs/run/checkpoints/")):
            if info.key.endswith(".safetensors"):
                self.store.put(info.key, b"not a shard")


@pytest.fixture
def bench(cluster) -> Bench:
    cluster.node()
    cluster.node()
    return Bench(cluster)


def agree(results: list[dict[Any, Any]], before: list[dict[Any, Any]], step: int) -> bool:
    """Whether every rank restored `step`, as it was."""
    return [one["restored"] for one in results] == [step] * len(results) and all(
        one[step] == before[0][step] for one in results
    )


def test_a_restart_in_place_reads_memory_alone_and_resumes_as_if_never_stopped(bench):
    never_stopped = bench.train(until=7)
    assert [bench.checkpoints.manifest(step).loss for step in SAVES] == [*map(loss_at, SAVES)]
    bench.make_store_unreadable()
    bench.nodes[0].disk_tier().delete(4)
    bench.nodes[1].disk_tier().delete(4)
    results = bench.train(until=7, saves=())
    assert agree(results, never_stopped, 4)
    for rank in range(4):
        for step in (5, 6, 7):
            assert results[rank][step] == never_stopped[rank][step]
    assert len({one["random"] for one in results}) == 4, "each rank has its own random state"


@pytest.mark.parametrize(
    ("restarted", "num_ranks", "sharded"),
    [
        pytest.param((), 4, True, id="sharded, over the process group and from memory"),
        pytest.param(
            *((0, 1), 4, False),
            id="from both disks, the servers lost their memory",
            marks=pytest.mark.long,
        ),
        pytest.param((1,), 4, False, id="from the memory of one node and the disk of the other"),
        pytest.param((), 2, False, id="by another world size", marks=pytest.mark.long),
    ],
)
def test_what_the_nodes_hold_makes_a_whole(bench, restarted, num_ranks, sharded):
    before = bench.train(sharded=sharded)
    bench.make_store_unreadable()
    bench.restart(*restarted)
    results = bench.train(until=4 + sharded, saves=(), num_ranks=num_ranks, sharded=sharded)
    assert agree(results, before, 4)


def count_exchanges(rank: int, place: Place) -> tuple[int, int]:
    """Restore; the step, and how often the ranks exchanged JSON for it."""
    exchange, times = staging.gather_json, itertools.count()

    def counted(*arguments: Any) -> list[Any]:
        next(times)
        return exchange(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "gather_json", counted)
        return _restore(rank, place), next(times)


def _restore(rank: int, place: Place) -> int:
    trainee = Trainee(rank, seed=place.attempt)
    return place.checkpointer(trainee, rank, dist.get_world_size()).restore()


def test_shares_of_many_ranks_take_no_more_exchanges_than_those_of_few(bench):
    counts = []
    for num_ranks in (2, 4):
        bench.train(until=2 * num_ranks, saves=(2 * num_ranks,), num_ranks=num_ranks)
        counts += bench.cluster.run(count_exchanges, bench.place(), num_ranks=2)
    steps, exchanges = zip(*counts, strict=True)
    assert steps == (4, 4, 8, 8)
    assert len(set(exchanges)) == 1


def test_a_damaged_share_on_a_disk_falls_back_to_what_is_whole(bench):
    before = bench.train()
    bench.restart(0, 1)
    disk = bench.nodes[1].disk_tier()
    flip_bit(disk.store, disk.key(4, "p0001-a0001-rank00002.safetensors"), 5000)
    bench.uncommit(4)
    assert agree(bench.train(until=2, saves=()), before, 2)


def test_a_new_node_is_given_what_the_store_has_and_the_other_node_its_own(bench):
    before = bench.train()
    bench.replace(1)
    for rank in (0, 1):
        key = bench.shard(4, rank)
        bench.store.put(key, bench.store.get(key))
    assert agree(bench.train(saves=()), before, 4)


def test_a_save_that_was_never_committed_is_published_by_the_attempt_that_restores_it(bench):
    before = bench.train()
    bench.uncommit(4)
    results = bench.train(until=5, saves=())
    assert agree(results, before, 4)
    manifest = bench.checkpoints.manifest(4)
    assert (manifest.attempt, manifest.world_size) == (2, 4)
    assert bench.checkpoints.verify(4) == []
    announced = (bench.cluster.folder / "metrics-2.jsonl").read_text()
    place, *commits = parse_lines(announced)
    assert isinstance(place, CheckpointRestored)
    assert (place.step, place.shares, place.num_fetched) == (4, {"memory": 4}, 0)
    assert commits == [CheckpointCommitted(step=4)]
    assert bench.store.get("runs/run/metrics/1-4") == b"x"


def test_what_is_republished_from_disks_restores_from_the_store(bench):
    before = bench.train()
    bench.uncommit(4)
    bench.restart(0, 1)
    assert agree(bench.train(saves=()), before, 4)
    assert bench.checkpoints.verify(4) == []
    assert agree(bench.train(saves=(), keeps=False), before, 4)


def test_a_newer_committed_step_is_better_than_an_older_one_in_memory(bench):
    bench.train()
    before = bench.train(until=6, saves=(6,), keeps=False)
    assert agree(bench.train(until=6, saves=()), before, 6)


def flip_weight(bench: Bench, key: str) -> None:
    """A rank that reads the shard unhashed goes on with a wrong model."""
    data = header_size_bytes(bench.store.get(key, length=8), url="")
    flip_bit(bench.store, key, 8 * (data + 40))


DAMAGES: dict[str, Callable[[Bench, str], None]] = {
    "flipped": lambda bench, key: flip_bit(bench.store, key, 4000),
    "cut off": lambda bench, key: bench.store.put(key, bench.store.get(key)[:-100]),
    "empty": lambda bench, key: bench.store.put(key, b""),
    "deleted": lambda bench, key: bench.store.delete(key),
}


def damages_logged(bench: Bench) -> list[CheckpointDamaged]:
    """What the newest attempt has logged of damaged checkpoints."""
    live = bench.cluster.folder / f"metrics-{bench.attempt}.jsonl"
    return [one for one in parse_lines(live.read_text()) if isinstance(one, CheckpointDamaged)]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shard_that_no_node_holds_sets_the_step_aside(bench, damage):
    before = bench.train()
    bench.replace(1)
    shard = bench.shard(4, 3)
    damage(bench, shard)
    assert agree(bench.train(until=2, saves=()), before, 2)
    assert bench.checkpoints.states() == {2: StepState.COMMITTED, 4: StepState.SET_ASIDE}
    (event,) = damages_logged(bench)
    assert (event.step, event.is_repaired) == (4, False)
    assert shard.rpartition("/")[2] in event.text


@pytest.mark.parametrize(
    ("damage", "rank"),
    [
        (flip_weight, 0),
        pytest.param(flip_weight, 1, marks=pytest.mark.long),
        *(pytest.param(one, 1, marks=pytest.mark.long) for one in DAMAGES.values()),
    ],
)
def test_a_damaged_shard_in_the_store_is_replaced_from_the_node_that_holds_it(bench, damage, rank):
    before = bench.train()
    bench.replace(1)
    damage(bench, bench.shard(4, rank))
    assert agree(bench.train(saves=()), before, 4)
    assert bench.checkpoints.verify(4) == []
    assert bench.checkpoints.states() == {2: StepState.COMMITTED, 4: StepState.COMMITTED}
    assert [(event.step, event.is_repaired) for event in damages_logged(bench)] == [(4, True)]


def test_a_manifest_that_is_damaged_by_one_bit_sets_the_step_aside(bench):
    before = bench.train(keeps=False)
    flip_bit(bench.store, bench.checkpoints.key(4, "manifest.json"), 4001)
    assert agree(bench.train(until=2, saves=(), keeps=False), before, 2)
    assert bench.checkpoints.states() == {2: StepState.COMMITTED, 4: StepState.SET_ASIDE}
    (event,) = damages_logged(bench)
    assert "xxh3_128" in event.text


def test_a_step_that_was_set_aside_can_be_saved_again(bench):
    before = bench.train()
    bench.replace(1)
    flip_bit(bench.store, bench.shard(4, 3), 4000)
    results = bench.train(saves=(4,))
    assert agree(results, before, 2)
    assert results[0][4] == before[0][4]
    assert bench.checkpoints.states() == {2: StepState.COMMITTED, 4: StepState.COMMITTED}
    assert bench.checkpoints.verify(4) == []


def test_when_every_checkpoint_is_damaged_new_processes_start_from_nothing(bench):
    bench.train()
    bench.replace(0, 1)
    for step in SAVES:
        flip_bit(bench.store, bench.shard(step, 3), 4000)
    errors = bench.cluster.run(train_and_fail, bench.place(), 4, (), num_ranks=4)
    assert {e.partition(":")[0] for e in errors} == {"Corrupt"}
    assert all("new processes start from step 0" in error for error in errors)
    assert [one["restored"] for one in bench.train(until=1, saves=())] == [0] * 4


def test_a_store_that_fails_is_known_on_every_rank_at_the_end(bench):
    (bench.cluster.folder / "store/runs/run").mkdir(parents=True, exist_ok=True)
    (bench.cluster.folder / "store/runs/run/checkpoints").write_text("in the way")
    errors = bench.cluster.run(train_and_fail, bench.place(), 2, (2,), num_ranks=4)
    assert len(set(errors)) == 1


@pytest.fixture
def alone(cluster, group) -> Callable[[int], Place]:
    """One rank with a checkpoint server, in this process."""
    node = cluster.node()
    return lambda attempt: Place(cluster.folder, attempt, (node.name,), (node.disk,))


def begun(place: Place) -> tuple[Trainee, Checkpointer]:
    """A training on one rank, ready to save its first step."""
    trainee = Trainee()
    checkpointer = place.checkpointer(trainee, 0, 1)
    assert checkpointer.restore() == 0
    trainee.step()
    checkpointer.prepare()
    return trainee, checkpointer


def restored(place: Place, step: int) -> Trainee:
    """Another training, which has restored this step."""
    other = Trainee(seed=5)
    assert place.checkpointer(other, 0, 1).restore() == step
    return other


def test_all_state_comes_back_from_memory_as_it_was(alone):
    trainee, checkpointer = begun(alone(1))
    for _ in range(5):
        trainee.step()
    assert checkpointer.is_behind
    assert checkpointer.save(6, data=trainee.data.state_dict()) is True
    saved = trainee.state()
    expected = [trainee.step() for _ in range(4)]

    other = restored(alone(2), 6)
    assert other.state() == saved
    assert [other.step() for _ in range(4)] == expected
    assert other.state() == trainee.state()


def test_a_step_is_saved_once(alone, tmp_path):
    trainee, checkpointer = begun(alone(1))
    assert checkpointer.save(1, data=trainee.data.state_dict()) is True
    assert checkpointer.save(1, data=trainee.data.state_dict()) is False
    checkpointer.settle(240)
    other = alone(2).checkpointer(Trainee(), 0, 1)
    assert other.restore() == 1
    assert other.save(1, data={}) is False


def test_what_follows_a_save_does_not_reach_into_it(alone, tmp_path):
    trainee, checkpointer = begun(alone(1))
    checkpointer.save(1, data=trainee.data.state_dict())
    saved = trainee.state()
    with torch.no_grad():
        for parameter in trainee.model.parameters():
            parameter.fill_(9.0)
    checkpointer.settle(240)
    assert restored(alone(2), 1).state() == saved


@pytest.mark.parametrize("server", [None, f"absent-{uuid.uuid4().hex}"], ids=["none", "silent"])
def test_without_a_checkpoint_server_saves_wait_for_the_store_and_restore_from_it(
    tmp_path, group, monkeypatch, server
):
    monkeypatch.setattr("perdure.storage.checkpoint_server.client.START_TIMEOUT_S", 0.1)
    cluster = Cluster.at(tmp_path)
    place = Place(tmp_path, 1, (server,), (None,))
    trainee, checkpointer = begun(place)
    assert checkpointer.is_behind is False
    data, attachments = trainee.data.state_dict(), {"runs/run/metrics/a": "text"}
    assert checkpointer.save(1, data=data, attachments=attachments) is True
    assert checkpointer.save(1, data=data) is False
    assert cluster.checkpoints.steps() == [1]
    assert restored(place, 1).state() == trainee.state()


def test_a_damaged_checkpoint_alone_is_set_aside_and_the_one_before_taken(tmp_path, group):
    cluster = Cluster.at(tmp_path)
    bare = Place(tmp_path, 1, (None,), (None,))
    trainee = Trainee()
    checkpointer = bare.checkpointer(trainee, 0, 1)
    states = {}
    for step in (1, 2):
        trainee.step()
        checkpointer.save(step, data=trainee.data.state_dict())
        states[step] = trainee.state()
    store, checkpoints = LocalStore(tmp_path / "store"), cluster.checkpoints
    (shard,) = checkpoints.manifest(2).shards
    flip_bit(store, checkpoints.key(2, shard), 8 * 3000)
    other = restored(bare, 1)
    assert other.state() == states[1]
    flip_bit(store, checkpoints.key(1, shard), 8 * 3000)
    with pytest.raises(Corrupt, match="new processes start from step 0"):
        bare.checkpointer(other, 0, 1).restore()
    assert bare.checkpointer(Trainee(), 0, 1).restore() == 0


def save_twice(bench: Bench, *, between: str):
    """What the ranks had at both saves."""
    return bench.cluster.run(train_and_save_again, bench.place(), 4, between, num_ranks=4)


def test_what_is_committed_stays_as_it_is_when_its_step_is_saved_again(bench):
    results = save_twice(bench, between="settle")
    first, second = results[0]
    assert first != second
    assert bench.checkpoints.verify(4) == []
    assert set(bench.checkpoints.manifest(4).shards) == {
        info.key.rpartition("/")[2]
        for info in bench.store.list("runs/run/checkpoints/step-00000004/")
        if info.key.endswith(".safetensors")
    }, "nothing was uploaded a second time"
    results = bench.train(saves=(), keeps=False)
    assert agree(results, [{4: first}], 4)


@pytest.mark.parametrize(
    "source", ["store", *(pytest.param(one, marks=pytest.mark.long) for one in ("memory", "disk"))]
)
def test_two_saves_of_a_step_on_their_way_at_once_are_never_mixed(bench, source):
    results = save_twice(bench, between="")
    if source == "store":
        assert bench.checkpoints.verify(4) == []
    else:
        bench.uncommit(4)
    if source == "disk":
        bench.restart(0, 1)
    restored = bench.train(saves=(), keeps=source != "store")
    assert any(agree(restored, [{4: weights}], 4) for weights in results[0])


def test_a_disk_gives_up_both_saves_of_an_old_step(bench):
    save_twice(bench, between="")
    bench.train(until=6, saves=(5, 6))
    for node in bench.nodes:
        disk = node.disk_tier()
        prune_disk(disk, keep_saves=2)
        assert set(disk.states()) == {5, 6}


@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_saves_go_to_memory_again_once_there_is_room(bench, refusals):
    results = bench.cluster.run(train_without_room, bench.place(), refusals, num_ranks=4)
    assert results == [[save >= refusals for save in range(3)]] * 4
    assert bench.checkpoints.steps() == [1, 2, 3]
