"""What users see of the tiers of a run's checkpoints."""

from __future__ import annotations

import os

import psutil
import pytest

from perdure.storage.checkpoint import CheckpointStore, Tier
from perdure.storage.local import LocalStore
from perdure.storage.manifest import ShardRecord
from perdure.storage.share import SaveId, Share, WrittenShare, put_record
from perdure.training.agent.checkpoint_server import HELD_FILE, MemoryInventory
from perdure.training.supervisor.checkpoints import node_tiers

RUN = "run-1"


def save(step: int) -> SaveId:
    return SaveId(step=step, placement=1, attempt=1, world_size=2)


@pytest.fixture
def note(tmp_path):
    """What a checkpoint server of a node writes down about its memory."""

    def write(node: str, held: list[tuple[SaveId, int]], *, pid: int | None = None) -> None:
        folder = tmp_path / "runs" / RUN / "nodes" / node / "p0001-m0-s1"
        folder.mkdir(parents=True)
        reported = MemoryInventory(
            pid=os.getpid() if pid is None else pid,
            process_started_s=psutil.Process().create_time(),
            saves=tuple(held),
        )
        (folder / HELD_FILE).write_text(reported.model_dump_json())

    return write


def put_on_disk(home, node: str, save: SaveId, rank: int) -> None:
    disk = CheckpointStore(
        LocalStore(home / "runs" / RUN / "nodes" / node / "life-1" / "checkpoints"), RUN
    )
    share = Share(run_id=RUN, rank=rank, size_bytes=3, tensors={}, save_id=save)
    record = ShardRecord(size_bytes=3, xxh3_128="0" * 32)
    disk.store.put(disk.key(save.step, share.shard), b"123")
    put_record(disk, WrittenShare(share=share, record=record))


def test_a_run_that_never_saved_has_no_tiers(tmp_path):
    assert node_tiers(tmp_path, RUN) == {}


def test_a_step_lies_in_memory_once_the_nodes_hold_the_share_of_every_rank(tmp_path, note):
    note("node-0", [(save(10), 0), (save(20), 0)])
    note("node-1", [(save(10), 1)])
    assert node_tiers(tmp_path, RUN) == {10: [Tier.MEMORY]}


def test_the_memory_of_a_checkpoint_server_that_is_gone_holds_nothing(tmp_path, note):
    note("node-0", [(save(10), 0), (save(10), 1)], pid=2**22 - 1)
    assert node_tiers(tmp_path, RUN) == {}


def test_memory_and_disk_are_different_tiers(tmp_path, note):
    note("node-0", [(save(10), 0), (save(10), 1)])
    put_on_disk(tmp_path, "node-0", save(10), 0)
    put_on_disk(tmp_path, "node-1", save(10), 1)
    put_on_disk(tmp_path, "node-1", save(5), 1)
    assert node_tiers(tmp_path, RUN) == {10: [Tier.MEMORY, Tier.DISK]}


def test_a_note_that_is_just_being_replaced_is_passed_over(tmp_path, note):
    note("node-0", [(save(10), 0), (save(10), 1)])
    torn = tmp_path / "runs" / RUN / "nodes" / "node-1" / "p0001-m1-s1"
    torn.mkdir(parents=True)
    (torn / HELD_FILE).write_text("{")
    assert node_tiers(tmp_path, RUN) == {10: [Tier.MEMORY]}
