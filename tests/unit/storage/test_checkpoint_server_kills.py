"""Checkpoint servers killed between any two writes of a save leave the old or the new one.

The points of a save that have names are those of storage/checkpoint_server/publish.py; between them
a checkpoint server is ended before a write that is named by its key. Uploads in parts, which a
folder has not, are broken off in tests/s3/test_checkpoints.py.
"""

from __future__ import annotations

import re
import signal
from contextlib import suppress

import pytest

from perdure.storage.checkpoint import CheckpointStore, StepState
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.checkpoint_server.publish import shares_on_disk
from perdure.storage.errors import TimedOut
from perdure.storage.manifest import digest
from perdure.storage.share import parse_record
from tests.unit.storage.nodes import (
    Before,
    Cluster,
    Node,
    collect,
    offered,
    save,
    save_steps,
    settle,
    share_of,
)

OLDER, OLD, NEW, NEXT = 10, 20, 30, 40
# The writes of one checkpoint server's save in their order, and how each of them is recognised.
WRITES = {
    "shard onto the disk": r"put .*/disk/.*\.safetensors$",
    "record onto the disk": r"put .*/disk/.*\.json$",
    "older record off the disk": r"delete .*/disk/.*\.json$",
    "older shard off the disk": r"delete .*/disk/.*\.safetensors$",
    "shard into the store": r"put .*/store/.*\.safetensors$",
    "record into the store": r"put .*/store/.*rank\d+\.json$",
    "manifest": r"put .*/store/.*manifest\.json$",
    "record out of the store": r"delete .*/store/.*rank\d+\.json$",
    "older manifest out of the store": r"delete .*/store/.*manifest\.json$",
    "older shard out of the store": r"delete .*/store/.*\.safetensors$",
}
ORDER = list(WRITES)
RECORD = re.compile(r"rank\d+\.json$")


def readable(checkpoints: CheckpointStore) -> list[int]:
    """Steps that a restore may take.

    Every shard that a record vouches for is read, too: the other checkpoint server may commit it
    at any moment.
    """
    for info in checkpoints.store.list("runs/run/checkpoints/"):
        if RECORD.search(info.key):
            written = parse_record(checkpoints.store.get(info.key), url=info.key)
            shards = {written.share.shard: written.record}
            assert checkpoints.verify_shards(written.share.step, shards) == []
    return offered(checkpoints)


def on_disk(node: Node) -> list[int]:
    """Steps of which the node's disk offers a share, each of them read from end to end."""
    disk = node.disk_tier()
    shares = shares_on_disk(disk)
    for one in shares:
        data = disk.store.get(disk.key(one.share.step, one.share.shard))
        assert digest(data) == one.record.xxh3_128
    return sorted(one.share.step for one in shares)


def save_all(clients: list[CheckpointClient], step: int, attempt: int) -> None:
    """One share from each rank; checkpoint servers may be gone before they answer."""
    for rank, client in enumerate(clients):
        with suppress(TimedOut):
            save(client, share_of(step, rank=rank, world_size=len(clients), owner=(1, attempt)))


def next_attempt_saves(cluster: Cluster, *, was_committed: bool) -> None:
    """With every checkpoint server there again, whatever is left is no obstacle."""
    checkpoints = cluster.checkpoints
    checkpoints.fence(1, 3)
    clients = [node.client() for node in cluster.nodes]
    save_all(clients, NEW, attempt=3)
    save_all(clients, NEXT, attempt=3)
    for client in clients:
        settle(client)
    assert readable(checkpoints) == [NEW, NEXT]
    assert checkpoints.manifest(NEW).attempt == (2 if was_committed else 3)
    for node in cluster.nodes:
        assert NEXT in on_disk(node)
    collect(checkpoints)
    assert checkpoints.states() == {NEW: StepState.COMMITTED, NEXT: StepState.COMMITTED}
    assert readable(checkpoints) == [NEW, NEXT]
    named = {
        checkpoints.key(step, name)
        for step in (NEW, NEXT)
        for name in ("manifest.json", *checkpoints.manifest(step).shards)
    }
    left = {info.key for info in checkpoints.store.list("runs/run/checkpoints/")}
    assert left == named, "gc finds everything that was left"


@pytest.fixture
def saved(cluster: Cluster) -> Cluster:
    """One node, which has saved two steps."""
    client = cluster.node().client()
    save_steps(client, OLDER, OLD)
    assert readable(cluster.checkpoints) == [OLDER, OLD]
    return cluster


@pytest.mark.parametrize("write", WRITES)
def test_a_server_killed_before_any_of_its_writes_leaves_the_old_checkpoint_or_the_new_one(
    saved, write
):
    (node,) = saved.nodes
    node.start(dies_at=Before(WRITES[write]))
    save_all([node.client()], NEW, attempt=2)
    assert node.ended() == -signal.SIGKILL, "it really died there"
    number = ORDER.index(write)
    done = {one: ORDER.index(one) < number for one in ORDER}
    expected = [OLD, NEW] if done["manifest"] else [OLDER, OLD]
    if done["manifest"] and not done["older manifest out of the store"]:
        expected = [OLDER, OLD, NEW]
    assert readable(saved.checkpoints) == expected
    assert (NEW in on_disk(node)) == done["record onto the disk"]
    assert OLD in on_disk(node)
    node.start()
    next_attempt_saves(saved, was_committed=done["manifest"])


def test_a_save_has_no_other_writes(saved):
    (node,) = saved.nodes
    node.start(dies_at=Before("", len(WRITES) + 1))
    client = node.client()
    save_steps(client, NEW, owner=(1, 2))
    assert node.process is not None
    assert node.process.is_alive()
    assert readable(saved.checkpoints) == [OLD, NEW]
    save_all([client], NEXT, attempt=2)
    assert node.ended() == -signal.SIGKILL, "the first write of the save after it is one more"


@pytest.fixture
def pair(cluster: Cluster) -> Cluster:
    """Two nodes with one rank each, which have saved two steps together."""
    clients = [cluster.node().client() for _ in range(2)]
    for step in (OLDER, OLD):
        save_all(clients, step, attempt=1)
    for client in clients:
        settle(client)
    assert readable(cluster.checkpoints) == [OLDER, OLD]
    return cluster


def name_of(point: str | Before) -> str:
    """For the test's name."""
    if isinstance(point, str):
        return point
    (write,) = (name for name, pattern in WRITES.items() if pattern == point.pattern)
    return f"{write} {point.number}"


OLD_ONES, ALL, NEW_ONES = [OLDER, OLD], [OLDER, OLD, NEW], [OLD, NEW]
OF_EVERY_CHECKPOINT_SERVER: dict[str | Before, list[int]] = {
    "before_shard": OLD_ONES,
    Before(WRITES["record onto the disk"]): OLD_ONES,
    "shard_on_disk": OLD_ONES,
    Before(WRITES["shard into the store"]): OLD_ONES,
    "shard_in_store": OLD_ONES,
}
CASES = [
    *((0, point, steps) for point, steps in OF_EVERY_CHECKPOINT_SERVER.items()),
    *((1, point, steps) for point, steps in OF_EVERY_CHECKPOINT_SERVER.items()),
    (0, "record_in_store", OLD_ONES),
    (1, "record_in_store", NEW_ONES),  # all that the other one needs to commit
    (0, "before_manifest", OLD_ONES),
    (0, "committed", ALL),
    (0, Before(WRITES["record out of the store"], 2), ALL),  # of the second rank
    (0, "records_deleted", ALL),
    (0, Before(WRITES["older shard out of the store"]), NEW_ONES),
    (0, Before(WRITES["older shard out of the store"], 2), NEW_ONES),
]


@pytest.mark.parametrize(
    ("victim", "point", "steps"),
    CASES,
    ids=[f"checkpoint server {victim} at {name_of(point)}" for victim, point, _ in CASES],
)
def test_of_two_checkpoint_servers_either_may_be_killed_anywhere_in_a_save_of_both(
    pair, victim, point, steps
):
    node, other = pair.nodes[victim], pair.nodes[1 - victim]
    node.start(dies_at=point)
    clients = [node.client() for node in pair.nodes]
    save_all(clients, NEW, attempt=2)
    assert node.ended() == -signal.SIGKILL, "it really died there"
    if victim == 0 or steps == NEW_ONES:
        settle(clients[1 - victim])
    assert readable(pair.checkpoints) == steps
    assert other.process is not None
    assert other.process.is_alive(), "and takes part in the next attempt as it is"
    node.start()
    next_attempt_saves(pair, was_committed=NEW in steps)
