"""A step that is saved twice by one attempt: after going back, training comes by it again."""

from __future__ import annotations

import pytest

from storage.checkpoint_server.publish import prune_disk
from tests.unit.runtime.test_checkpointing import Bench, agree, bench
from tests.unit.runtime.trainees import train_and_save_again

__all__ = ["bench"]


def save_twice(bench: Bench, *, between: str):
    """What the ranks had at both saves."""
    return bench.cluster.run(train_and_save_again, bench.place(), 4, between, num_ranks=4)


def test_what_is_committed_stays_as_it_is_when_its_step_is_saved_again(bench):
    told = save_twice(bench, between="settle")
    first, second = told[0]
    assert first != second
    assert bench.checkpoints.verify(4) == []
    assert set(bench.checkpoints.manifest(4).shards) == {
        info.key.rpartition("/")[2]
        for info in bench.store.list("runs/run/checkpoints/step-00000004/")
        if info.key.endswith(".safetensors")
    }, "nothing was uploaded a second time"
    told = bench.train(saves=(), keeps=False)
    assert agree(told, [{4: first}], 4)


def test_two_saves_of_a_step_on_their_way_at_once_are_never_mixed(bench):
    told = save_twice(bench, between="")
    assert bench.checkpoints.verify(4) == []
    restored = bench.train(saves=(), keeps=False)
    assert any(agree(restored, [{4: weights}], 4) for weights in told[0])


@pytest.mark.parametrize("has_memory", [True, False])
def test_nodes_that_hold_both_saves_of_a_step_restore_one_of_them_whole(bench, has_memory):
    told = save_twice(bench, between="")
    bench.uncommit(4)
    if not has_memory:
        bench.restarted(0, 1)
    restored = bench.train(saves=())
    assert any(agree(restored, [{4: weights}], 4) for weights in told[0])


def test_a_disk_gives_up_both_saves_of_an_old_step(bench):
    save_twice(bench, between="")
    bench.train(until=6, saves=(5, 6))
    for node in bench.nodes:
        disk = node.disk_tier()
        prune_disk(disk, keep_saves=2)
        assert {step for step, _ in disk.states().items()} == {5, 6}
