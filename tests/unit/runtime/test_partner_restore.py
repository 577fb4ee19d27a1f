"""A new node's ranks restore from the copies on its partner, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.local import LocalStore
from perdure.storage.node_saves import NodeShares
from perdure.storage.partner_copies import CopyState
from perdure.storage.restorable import RestorableSave
from perdure.storage.restoring import NodeRestore
from perdure.storage.saving import TieredSaver
from perdure.storage.share import SaveId
from perdure.storage.staging import GroupRanks
from perdure.training.config.job import parse_job
from perdure.training.journal.attempt_log import parse_lines
from perdure.training.journal.events import CheckpointRestored
from perdure.training.runtime.state.checkpointer import Checkpointer
from perdure.training.runtime.state.restore import joined, places_of
from tests.unit.runtime.test_checkpointing import Bench, agree
from tests.unit.runtime.trainees import Place, Trainee
from tests.unit.storage.nodes import RUN_ID, Cluster, save, share_of
from tests.waiting import wait_for

# A second one would not be copied while the copies of the first one are on their way.
ONE = (4,)


def copying(folder: Any, **checkpoint: Any) -> Cluster:
    """Two nodes of two ranks, with copies of each other's saves."""
    cluster = Cluster.at(folder, keep_last=5)
    document = cluster.job.model_dump(mode="json")
    document["checkpoint"] |= {"partner_copies": 1, **checkpoint}
    document["restart"] |= {"pod_retries": 1}
    cluster.job = parse_job(document)
    (folder / "job.json").write_text(cluster.job.model_dump_json())
    return cluster


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    cluster = copying(tmp_path)
    cluster.node(disk=False)
    cluster.node(disk=False)
    yield Bench(cluster)
    cluster.close()


def held(bench: Bench, node: int) -> set[tuple[int, int]]:
    """Step and rank of what the memory of a node holds."""
    with bench.nodes[node].client() as client:
        return {(one.written.share.step, one.written.share.rank) for one in client.shares()}


def await_copies(bench: Bench, node: int, *copies: tuple[int, int]) -> None:
    def are_there() -> bool:
        return set(copies) <= held(bench, node)

    wait_for(are_there, period_s=0.05, what=f"copies {copies}")


def restored(bench: Bench) -> CheckpointRestored:
    text = (bench.cluster.folder / f"metrics-{bench.attempt}.jsonl").read_text()
    (found,) = [one for one in parse_lines(text) if isinstance(one, CheckpointRestored)]
    return found


def lose(bench: Bench, node: int) -> None:
    bench.nodes[node].kill()
    bench.nodes[node].start()
    assert held(bench, node) == set()


@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_new_node_holds_its_own_shares_and_its_partners_copies_again(bench, sharded):
    before = bench.train(saves=ONE, sharded=sharded)
    await_copies(bench, 0, (4, 2), (4, 3))
    bench.make_store_unreadable()
    lose(bench, 1)
    results = bench.train(until=5, saves=(), sharded=sharded)
    assert agree(results, before, 4)
    place = restored(bench)
    assert (place.shares, place.num_fetched) == ({"memory": 2, "memory of a partner": 2}, 0)
    assert place.partners == {"node-1": "node-0"}
    await_copies(bench, 1, (4, 0), (4, 1), (4, 2), (4, 3))
    lose(bench, 0)
    assert agree(bench.train(until=5, saves=(), sharded=sharded), before, 4)
    assert restored(bench).partners == {"node-0": "node-1"}


def test_a_save_that_only_a_partner_has_is_published_by_the_attempt_that_restores_it(bench):
    before = bench.train(saves=ONE)
    await_copies(bench, 0, (4, 2), (4, 3))
    bench.uncommit(4)
    lose(bench, 1)
    assert agree(bench.train(until=5, saves=()), before, 4)
    assert bench.checkpoints.manifest(4).attempt == 2
    assert bench.checkpoints.verify(4) == []


def test_while_a_copy_is_on_its_way_the_next_save_is_not_copied_and_the_one_before_is_used(
    tmp_path,
):
    # A share takes about half a second, and the second save comes at once.
    cluster = copying(tmp_path, partner_mb_per_s=0.05)
    cluster.node(disk=False)
    cluster.node(disk=False)
    bench = Bench(cluster)
    before = bench.train()
    await_copies(bench, 0, (2, 2), (2, 3))
    await_copies(bench, 1, (2, 0), (2, 1))
    assert held(bench, 0) >= {(2, 0), (2, 1), (4, 0), (4, 1)}, "what is copied stays"
    assert not held(bench, 0) & {(4, 2), (4, 3)}
    bench.uncommit(4)
    bench.make_store_unreadable()
    lose(bench, 1)
    assert agree(bench.train(until=2, saves=()), before, 2)
    place = restored(bench)
    assert (place.step, place.num_fetched) == (2, 0)
    assert place.why == "of step 4 the nodes lack the shares of ranks 2, 3"
    cluster.close()


def test_without_a_whole_save_on_the_nodes_the_store_is_read_and_the_record_says_why(bench):
    before = bench.train(saves=ONE)
    await_copies(bench, 0, (4, 2), (4, 3))
    lose(bench, 0)
    lose(bench, 1)
    assert agree(bench.train(saves=()), before, 4)
    place = restored(bench)
    assert (place.shares, place.why) == ({"store": 4}, "no node holds a save")
    assert place.num_fetched >= 4


def bring_half(rank: int, names: tuple[str, str], folder: Path) -> bool:
    """The copy of rank 1's share is brought while the share of rank 0 goes."""
    client = CheckpointClient(names[rank])
    store = CheckpointStore(LocalStore(folder / "store"), RUN_ID)
    node = NodeRestore(NodeShares(client, None), store, (1, 2), GroupRanks(), f"node-{rank}")
    if rank == 0:
        save(client, share_of(10, rank=0, world_size=2))
        save(client, share_of(10, rank=1, world_size=2))
    dist.barrier()
    (chosen,) = node.candidates()
    if rank == 0:
        for step in (20, 30):  # into both slots of the rank
            save(client, share_of(step, rank=0, world_size=2))
    dist.barrier()
    return node.bring(chosen) is None


def test_a_save_that_is_lost_while_its_shares_are_brought_is_given_up_by_all_ranks(bench):
    names = tuple(node.name for node in bench.nodes)
    is_given_up = bench.cluster.run(bring_half, names, bench.cluster.folder, num_ranks=2)
    assert is_given_up == [True, True]
    assert held(bench, 1) == {(10, 1)}, "it was brought"


def await_own_copies(checkpointer: Checkpointer, rank: int) -> None:
    """Wait, on all ranks, until the copies of the newest save are whole."""
    saver = checkpointer._saver
    assert isinstance(saver, TieredSaver)
    begun = saver.copies.begun
    assert begun is not None

    def is_copied() -> bool:
        return saver.client.copy_state(begun, rank) is CopyState.COPIED

    wait_for(is_copied, period_s=0.05, what="the copies")
    dist.barrier()


def save_before_and_after_a_recovery(rank: int, place: Place) -> None:
    """One copied save, then the recovery with another process for rank 3, and three saves more."""
    trainee = Trainee(rank)
    checkpointer = place.checkpointer(trainee, rank, 4)
    checkpointer.restore()
    trainee.step()
    checkpointer.save(2, data={"samples": 2})
    await_own_copies(checkpointer, rank)
    checkpointer.save(4, data={"samples": 4})  # the ranks find out that it was
    if rank == 3:
        checkpointer = place.checkpointer(trainee, rank, 4)
    checkpointer.forget(1)
    for step in (6, 8, 10):
        checkpointer.save(step, data={"samples": step})
    dist.barrier()


def test_the_save_that_is_whole_on_partners_outlasts_a_recovery_until_the_next_one_is(tmp_path):
    # A share takes about a second, and all saves after the first one come at once.
    cluster = copying(tmp_path, partner_mb_per_s=0.025)
    cluster.node(disk=False)
    cluster.node(disk=False)
    bench = Bench(cluster)
    cluster.run(save_before_and_after_a_recovery, bench.place(), num_ranks=4)
    on_both = held(bench, 0) & held(bench, 1)
    steps = {step for step, _ in on_both}
    assert any({(step, rank) for rank in range(4)} <= on_both for step in steps)
    cluster.close()


def test_a_copy_that_came_over_the_process_group_counts_as_the_partners():
    of = SaveId(step=4, placement=1, attempt=1, world_size=2)
    both = {0: Tier.MEMORY, 1: Tier.MEMORY}
    chosen = RestorableSave(of, holders={0: 0, 1: 0}, local={0: both})
    assert places_of(chosen, {}, has_partners=True) == {"memory": 1, "memory of a partner": 1}
    assert places_of(chosen, {}, has_partners=False) == {"memory": 2}
    again = RestorableSave(of, holders={0: 0, 1: 0}, local={0: both, 1: both})
    assert places_of(again, {1: "node-0"}, has_partners=True) == {
        "memory": 1,
        "memory of a partner": 1,
    }
    assert joined("", "one", "two") == "one; two"


def save_last(rank: int, place: Place) -> None:
    """Two copied saves, then rank 2 alone writes the end-of-life checkpoint, as number 0 of one."""
    trainee = Trainee(rank)
    checkpointer = place.checkpointer(trainee, rank, 4)
    checkpointer.restore()
    trainee.step()
    for step in (2, 4):
        checkpointer.save(step, data={"samples": step})
        await_own_copies(checkpointer, rank)
    checkpointer.settle(240)
    checkpointer.forget(1)
    if rank == 2:
        checkpointer.last_save(6, [2], data={"samples": 6}, timeout_s=240)
    dist.barrier()


def test_an_end_of_life_checkpoint_takes_the_place_of_no_other_ranks_copies(bench):
    bench.cluster.run(save_last, bench.place(), num_ranks=4)
    assert bench.checkpoints.verify(6) == []
    copied = {(step, rank) for step in (2, 4) for rank in range(4)}
    assert held(bench, 1) == copied | {(6, 0)}
