"""The checkpoint server as a process: killed at every point of a save, and its workers too."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest
import torch

from perdure.storage.checkpoint import CheckpointStore, StepState
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.errors import NotFound, StaleAttempt, StorageError, TimedOut
from perdure.storage.local import MARKER, LocalStore
from perdure.storage.manifest import digest
from perdure.storage.saving import SaveHooks, TieredSaver
from perdure.storage.staging import SavePlans
from perdure.training.agent.checkpoint_server import FIRST_CONTAINER_ENV
from tests.unit.storage.nodes import (
    Cluster,
    bytes_of,
    forked,
    offered,
    pipe,
    reserve,
    save,
    save_steps,
    settle,
    share_of,
)

MIB = 2**20


def held(client: CheckpointClient) -> list[tuple[int, str]]:
    return [(one.written.share.step, one.tier.value) for one in client.shares()]


@pytest.mark.parametrize("point", ["shard_on_disk", "record_in_store", "before_manifest"])
def test_what_a_killed_checkpoint_server_had_on_disk_is_published_by_the_next(cluster, point):
    node = cluster.node(dies_at=point)
    with suppress(TimedOut):
        save(node.client(), share_of(20))
    assert node.ended() == -signal.SIGKILL
    client = node.start().client()
    assert held(client) == [(20, "disk")]
    cluster.checkpoints.fence(1, 2)
    client.republish(share_of(20).save_id, owner=(1, 2), commit=True, announce=None)
    settle(client)
    assert offered(cluster.checkpoints) == [20]
    assert cluster.checkpoints.manifest(20).attempt == 2


def copy_and_stall(name: str, ready: Connection) -> None:
    """A worker that is in the middle of a copy, and stays there."""
    client = CheckpointClient(name)
    slot = reserve(client, share_of(10))
    slot.memory[:32] = bytes(32)
    ready.send("copying")
    signal.pause()


def test_a_worker_killed_in_the_middle_of_a_copy_loses_nothing_that_was_ready(cluster):
    node = cluster.node()
    client = node.client()
    save_steps(client, 10, 20)
    ours, theirs = pipe()
    worker = forked(copy_and_stall, node.name, theirs)
    assert ours.recv() == "copying"
    worker.kill()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL

    assert (20, "memory") in held(client)
    assert bytes(client.open(share_of(20).save_id, 0)[:64]) == bytes_of(share_of(20))
    client.close()
    save_steps(client, 30)
    assert [step for step, tier in held(client) if tier == "memory"] == [30, 20]
    assert offered(cluster.checkpoints) == [20, 30]


def test_of_two_attempts_that_save_a_step_the_stale_one_cannot_publish(cluster):
    stale, new = cluster.node(disk=False).client(), cluster.node(disk=False).client()
    save(stale, share_of(10, world_size=2))
    cluster.checkpoints.fence(2, 1)
    save_steps(stale, 10, rank=1, world_size=2)
    assert offered(cluster.checkpoints) == []
    assert StaleAttempt.__name__ not in cluster.nodes[0].log
    assert "placement 1 attempt 1 is older than placement 2 attempt 1" in cluster.nodes[0].log
    save_steps(new, 10, owner=(2, 1))
    assert offered(cluster.checkpoints) == [10]
    manifest = cluster.checkpoints.manifest(10)
    assert (manifest.placement, manifest.world_size) == (2, 1)


def test_sigterm_finishes_what_was_handed_over_and_then_ends(cluster):
    node = cluster.node()
    client = node.client()
    shares = [share_of(10, rank=rank, world_size=4, size_bytes=MIB) for rank in range(4)]
    for share in shares:
        save(client, share)
    assert node.process is not None
    pid = node.process.pid
    # The first thread waits for it.
    others = [one for one in Path(f"/proc/{pid}/task").iterdir() if one.name != str(pid)]
    masks = [re.search(r"SigBlk:\s*(\w+)", (one / "status").read_text()) for one in others]
    sigterm = 1 << (signal.SIGTERM - 1)
    assert masks
    assert all(mask and int(mask[1], 16) & sigterm for mask in masks), "one may swallow it"
    node.signal(signal.SIGTERM)
    assert node.ended() == 0
    assert offered(cluster.checkpoints) == [10]
    assert cluster.checkpoints.states() == {10: StepState.COMMITTED}


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
            check=False,
            capture_output=True,
        ).returncode
    ):
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_node_disk_that_is_full_is_logged_and_the_store_gets_every_save(cluster, small_disk):
    node = cluster.node()
    node.disk = small_disk / "disk"
    client = node.start().client()
    for step in (10, 20, 30):
        save_steps(client, step, size_bytes=900 * 1024)
    assert offered(cluster.checkpoints) == [20, 30]
    assert "is not on the node's disk" in node.log
    assert "the disk is full" in node.log
    on_disk = [one for one in client.shares() if one.tier.value == "disk"]
    for one in on_disk:
        file = node.disk_tier().store.get(
            node.disk_tier().key(one.written.share.step, one.written.share.shard)
        )
        assert digest(file) == one.written.record.xxh3_128


def test_a_store_that_is_full_is_reported_to_the_worker_once(tmp_path, small_disk):
    (small_disk / "run").mkdir()
    cluster = Cluster.at(small_disk / "run", keep_last=1)
    node = cluster.node(disk=False)
    try:
        client = node.client()
        save_steps(client, 10, size_bytes=MIB)
        save(client, share_of(20, size_bytes=MIB))
        with pytest.raises(StorageError, match="the disk is full"):
            settle(client)
        settle(client)
        assert offered(cluster.checkpoints) == [10]
        assert {20} <= {step for step, _ in held(client)}, "memory has it still"
        save_steps(client, 30, size_bytes=2)
        assert offered(cluster.checkpoints) == [30]
    finally:
        cluster.close()


def test_a_wall_clock_that_goes_backwards_changes_nothing(cluster, tmp_path):
    node = cluster.node()
    client = node.client()
    save_steps(client, 10)
    ahead = time.time() + 10 * 365 * 86400
    for path in [*(tmp_path / "store").rglob("*"), *(tmp_path / "node-0" / "disk").rglob("*")]:
        os.utime(path, (ahead, ahead))
    save_steps(client, 20, 30)
    assert offered(cluster.checkpoints) == [20, 30]
    assert sorted(held(client)) == [(20, "disk"), (20, "memory"), (30, "disk"), (30, "memory")]


def started(script: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A checkpoint server by a script of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder / "job.json"), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_checkpoint_server_starts_as_a_command_and_never_loads_torch(cluster, tmp_path):
    name = f"perdure-test-{uuid.uuid4().hex}"
    script = (
        "import sys, json\n"
        "from perdure.training.agent import checkpoint_server\n"
        "checkpoint_server.serve()\n"
        "print(json.dumps(sorted({*sys.modules})))\n"
    )
    process = started(script, tmp_path, name, str(tmp_path / "disk"))
    with CheckpointClient(name) as client:
        save_steps(client, 10)
    process.terminate()
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert out.splitlines()[0] == "perdure: checkpoint server is ready"
    modules = json.loads(out.splitlines()[-1])
    assert "perdure.storage" in modules
    assert not {"torch", "numpy", "prefect"} & set(modules)


def test_sigterm_to_all_leaves_the_server_of_an_agent_until_the_agent_closes_its_pipe(
    cluster, tmp_path
):
    name = f"perdure-test-{uuid.uuid4().hex}"
    command = "from perdure.training.agent import checkpoint_server as c; c.main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, str(tmp_path / "job.json"), name],
        cwd=tmp_path,
        env={**os.environ, FIRST_CONTAINER_ENV: ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert b"ready" in process.stdout.readline()
    with CheckpointClient(name) as client:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        save_steps(client, 10)  # after the signal: the ranks save last
        assert process.poll() is None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(240) == 0
    assert offered(cluster.checkpoints) == [10]


def test_the_checkpoint_server_ends_in_time_though_an_upload_hangs(cluster, tmp_path):
    name = f"perdure-test-{uuid.uuid4().hex}"
    script = (
        "import time\n"
        "from perdure.training.agent import checkpoint_server\n"
        "checkpoint_server.CLOSE_TIMEOUT_S = 0.2\n"
        "checkpoint_server.Publisher.upload = lambda *_: print('hangs', flush=True)"
        " or time.sleep(600)\n"
        "checkpoint_server.main()\n"
    )
    process = started(script, tmp_path, name)
    with CheckpointClient(name) as client:
        save(client, share_of(10))
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)][-1] == "hangs"
    process.terminate()
    process.communicate(timeout=240)
    assert process.returncode == 0


def test_two_hundred_saves_while_the_newest_is_read_over_and_over(cluster, tmp_path):
    node = cluster.node(disk=False)
    announced = tmp_path / "metrics.jsonl"
    announced.touch()
    client = node.client()
    assert node.process is not None
    checkpoint_server = psutil.Process(node.process.pid)
    done = Event()
    reads: list[int] = []
    failures: list[int] = []

    def read() -> None:
        checkpoints = CheckpointStore(LocalStore(tmp_path / "store"), "run")
        while not done.is_set():
            step = checkpoints.latest()
            if step is None:
                continue
            try:
                manifest = checkpoints.manifest(step)
                (shard,) = manifest.shards
                data = checkpoints.store.get(checkpoints.key(step, shard))
            except NotFound:
                continue  # given up meanwhile: two newer ones are there
            whole = data == bytes_of(share_of(step, size_bytes=50_000))
            (reads if whole else failures).append(step)

    reader = Thread(target=read)
    reader.start()
    sizes: list[int] = []
    try:
        for step in range(1, 201):
            save(client, share_of(step, size_bytes=50_000), announce=announced)
            if step % 20 == 0:
                sizes.append(checkpoint_server.memory_info().rss)
        settle(client)
    finally:
        done.set()
        reader.join()
    assert failures == []
    assert len(set(reads)) > 5
    assert cluster.checkpoints.states() == {199: StepState.COMMITTED, 200: StepState.COMMITTED}
    assert offered(cluster.checkpoints) == [199, 200]
    assert sizes[-1] - sizes[1] < 8 * MIB
    steps = [json.loads(line)["step"] for line in announced.read_text().splitlines()]
    assert sorted(steps) == list(range(1, 201))
    left = {path.name for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert left == {MARKER, "manifest.json", "p0001-a0001-rank00000.safetensors"}


def test_waiting_for_a_slow_store_shows_that_the_worker_is_alive(cluster):
    client = cluster.node(disk=False).client()
    turns: list[float] = []
    saver = TieredSaver(
        client=client,
        plans=SavePlans(),
        run_id="run",
        placement=1,
        attempt=1,
        world_size=2,
        hooks=SaveHooks(on_wait=lambda: turns.append(time.monotonic())),
    )
    state = {"weight": torch.zeros(4)}
    saver.save(state, 10, {})
    with pytest.raises(StorageError, match="TimedOut: saves are not in the store yet"):
        saver.settle(timeout_s=1)
    assert len(turns) >= 1
