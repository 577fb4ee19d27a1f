"""Saves of a checkpoint server to a real gateway, and what can be restored after faults."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from perdure.storage.checkpoint import CheckpointStore, StepState
from perdure.storage.checkpoint_server.client import CheckpointClient
from perdure.storage.collect import abort_uploads
from perdure.storage.s3 import S3Store
from perdure.storage.s3_options import PART_SIZE_BYTES
from perdure.training.agent.checkpoint_server import CheckpointServerProcess
from tests.jobs import small_job
from tests.s3.conftest import BUCKET, RGW, Opener
from tests.s3.programs import HOST
from tests.s3.proxy import Answer, FaultProxy, InUpload, LostAnswer, LostRequest
from tests.s3.servers import ACCESS_KEY, SECRET_KEY
from tests.unit.storage.nodes import RUN_ID, collect, offered, save, settle, share_of
from tests.waiting import wait_for

pytestmark = pytest.mark.parametrize("server", [RGW], indirect=True)

MIB = 2**20
TWO_PARTS_BYTES = PART_SIZE_BYTES + MIB
READ_TIMEOUT_S = 5.0
SETTLES_S = 240.0
OLD, NEW, NEXT = 10, 20, 30


@dataclass
class Run:
    """A run whose checkpoints go to the gateway by way of the proxy; we look past the proxy."""

    folder: Path
    store: S3Store  # beside the proxy
    proxy: FaultProxy
    _checkpoint_servers: list[CheckpointServerProcess] = field(default_factory=list)
    _clients: list[CheckpointClient] = field(default_factory=list)

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.store, RUN_ID)

    def checkpoint_server(self) -> CheckpointClient:
        """A connection to a checkpoint server that has just been started, as an agent starts it."""
        storage = {
            "address": f"s3://{BUCKET}/{self.store._prefix}",
            "endpoint": f"http://{HOST}:{self.proxy.server_port}",
            "region": "us-east-1",
            "addressing_style": "path",
            "read_timeout_s": READ_TIMEOUT_S,
        }
        checkpoint = {"keep_last": 2, "node_disk": False}
        job = small_job(storage=storage, worker={"recipe": "own:main"}, checkpoint=checkpoint)
        file = self.folder / "job.json"
        file.write_text(job.model_dump_json())
        self._checkpoint_servers.append(CheckpointServerProcess(self.folder))
        name = self._checkpoint_servers[-1].ensure(job, file, None, first_container=None)
        self._clients.append(CheckpointClient(name))
        return self._clients[-1]

    def kill_checkpoint_server(self, number: int = -1) -> None:
        """As a power cut would; the newest one by default."""
        (pid,) = self._checkpoint_servers[number].pids
        os.kill(pid, signal.SIGKILL)

    def died(self, number: int = -1) -> bool:
        """Whether a checkpoint server was really killed, after a wait for it."""
        process = self._checkpoint_servers[number]._process
        assert process is not None
        return process.wait(240) == -signal.SIGKILL

    def save(self, *clients: CheckpointClient, step: int, attempt: int = 1, large: bool = False):
        """Hand over a step of as many ranks; the share of a large one goes in two parts."""
        size_bytes, world_size = TWO_PARTS_BYTES if large else 64, len(clients)
        for rank, client in enumerate(clients):
            share = share_of(
                step, rank=rank, world_size=world_size, owner=(1, attempt), size_bytes=size_bytes
            )
            save(client, share, announce=self.folder / "metrics.jsonl")

    def settle(self, *clients: CheckpointClient) -> None:
        for client in clients:
            settle(client, timeout_s=SETTLES_S)

    def offered(self) -> list[int]:
        return offered(self.checkpoints)

    def announced(self) -> list[int]:
        """Steps that were announced as committed, in order."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def uploads(self) -> list[str]:
        """Keys of unfinished uploads."""
        answer = self.store._client().list_multipart_uploads(
            Bucket=BUCKET, Prefix=self.store._prefix
        )
        return [one["Key"].rpartition("/")[2] for one in answer.get("Uploads", [])]

    def count(self, method: str, path: str) -> int:
        """Requests that came by."""
        return sum(method == m and path in p for m, p in self.proxy.requests)

    def is_tried_again(self, method: str, path: str) -> bool:
        """Whether any request for what the first such one was about came after it.

        A manifest may be looked for before it is sent once more: its first try may have succeeded.
        """
        first, *later = [one for one in self.proxy.requests if path in one[1]] or [("", "")]
        while later and first[0] != method:
            first, *later = later
        return bool(later)

    def end(self) -> None:
        for client in self._clients:
            client.close()
        for checkpoint_server in self._checkpoint_servers:
            checkpoint_server.close(0.0)


@pytest.fixture
def run(proxy: FaultProxy, open_store: Opener, tmp_path: Path, monkeypatch) -> Iterator[Run]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    (tmp_path / "metrics.jsonl").touch()
    run = Run(tmp_path, open_store(direct=True), proxy)
    yield run
    run.end()


@pytest.fixture
def saving(run: Run) -> CheckpointClient:
    """A checkpoint server that has committed one step."""
    client = run.checkpoint_server()
    run.save(client, step=OLD)
    run.settle(client)
    assert run.offered() == [OLD]
    return client


def collect_all(run: Run) -> None:
    """As gc does when no attempt lives, with everything old enough; one upload is left to drop."""
    dropped: list[int] = []

    def gc() -> bool:  # the age of uploads counts in whole seconds
        collect(run.checkpoints)
        dropped.append(abort_uploads(run.checkpoints, 0.0))
        return sum(dropped) == 1

    wait_for(gc, what="the upload is dropped")
    assert run.uploads() == []


def saves_on(run: Run, client: CheckpointClient, *, attempt: int = 1) -> None:
    """The new step is published, and what is left is not in the way of the next save."""
    assert run.offered() == [OLD, NEW]
    assert run.announced() == [OLD, NEW], "announced once each"
    run.save(client, step=NEXT, attempt=attempt)
    run.settle(client)
    assert run.checkpoints.verify(NEXT) == []
    assert run.checkpoints.states() == {NEW: StepState.COMMITTED, NEXT: StepState.COMMITTED}
    assert run.uploads() == []


@pytest.mark.parametrize(("path", "after_bytes"), [("partNumber=1", 8 * MIB), ("manifest.json", 1)])
def test_a_gateway_killed_and_restarted_in_the_middle_of_a_save_is_outlasted(
    server, run, saving, path, after_bytes
):
    fault = InUpload(server.kill_gateway, after_bytes)
    run.proxy.requests.clear()
    run.proxy.inject(fault, method="PUT", path=path)
    run.save(saving, step=NEW, large=True)
    try:
        wait_for(lambda: run.proxy.struck, what="the gateway is killed")
        # Not from now on: the pauses between the tries become longer.
        wait_for(lambda: run.is_tried_again("PUT", path), what="it is tried again")
        assert run.announced() == [OLD]
    finally:
        server.start_gateway()
    assert run.offered()[0] == OLD, "the old one, and the new one only whole"
    run.settle(saving)
    assert run.proxy.struck == [fault]
    saves_on(run, saving)


def test_a_storm_of_throttling_through_a_whole_save_is_waited_out(run, saving):
    run.proxy.requests.clear()
    run.proxy.inject_each(Answer(503, "SlowDown"))
    run.save(saving, step=NEW, large=True)
    run.settle(saving)
    tries = Counter(run.proxy.requests)
    assert len(run.proxy.struck) == len(tries) > 10
    assert min(tries.values()) >= 2, "no request of the save was spared"
    for method, path in (
        ("POST", "?uploads"),
        ("PUT", "partNumber=1"),
        ("PUT", "partNumber=2"),
        ("POST", "?uploadId"),
        ("PUT", ".json"),
        ("PUT", "manifest.json"),
        ("DELETE", ".json"),
    ):
        assert run.count(method, path) >= 2, (method, path)
    run.proxy.reset()
    saves_on(run, saving)


def test_a_connection_that_stalls_at_the_manifest_costs_its_time_out(run, saving):
    fault = LostRequest()
    run.proxy.inject(fault, method="PUT", path="manifest.json")
    began_s = time.monotonic()
    run.save(saving, step=NEW)
    wait_for(lambda: run.proxy.struck, what="it stalls")
    assert run.offered() == [OLD], "every shard is there, and yet nothing is offered"
    run.settle(saving)
    assert time.monotonic() - began_s > READ_TIMEOUT_S
    assert run.count("PUT", "manifest.json") == 3, "of the old one, stalled, and again"
    saves_on(run, saving)


def test_a_manifest_whose_answer_was_lost_is_committed_once(run, saving):
    fault = LostAnswer()
    run.proxy.inject(fault, method="PUT", path="manifest.json")
    run.save(saving, step=NEW)
    run.settle(saving)
    assert run.proxy.struck == [fault]
    assert run.count("PUT", "manifest.json") == 3, "of the old one, unanswered, and again"
    names = {info.key.rpartition("/")[2] for info in run.store.list("runs/")}
    assert names == {"manifest.json", share_of(NEW).shard}, "tidied up after the commit"
    saves_on(run, saving)


def test_of_a_checkpoint_server_killed_in_the_middle_of_an_upload_gc_leaves_nothing(run, saving):
    fault = InUpload(run.kill_checkpoint_server, after_bytes=8 * MIB)
    run.proxy.inject(fault, method="PUT", path="partNumber=1")
    run.save(saving, step=NEW, large=True)
    assert run.died()
    assert run.proxy.struck == [fault]
    assert run.offered() == [OLD]
    assert run.uploads() == [share_of(NEW).shard]

    collect_all(run)
    assert run.checkpoints.states() == {OLD: StepState.COMMITTED}
    assert run.offered() == [OLD]

    client = run.checkpoint_server()
    run.save(client, step=NEW, attempt=2, large=True)
    run.settle(client)
    saves_on(run, client, attempt=2)


@pytest.mark.parametrize("victim", [0, 1])
def test_of_two_checkpoint_servers_either_may_be_killed_in_the_middle_of_its_upload(run, victim):
    clients = [run.checkpoint_server(), run.checkpoint_server()]
    run.save(*clients, step=OLD)
    run.settle(*clients)
    assert run.offered() == [OLD]
    shard = share_of(NEW, rank=victim).shard
    fault = InUpload(
        partial(run.kill_checkpoint_server, victim), after_bytes=MIB // 2
    )  # of either part
    run.proxy.inject(fault, method="PUT", path=f"{shard}?uploadId")
    run.save(*clients, step=NEW, large=True)
    assert run.died(victim)
    assert run.proxy.struck == [fault]
    wait_for(
        lambda: run.count("PUT", f"rank{1 - victim:05d}.json") == 2,
        what="the other one's record of the new step is under way",
    )
    assert run.offered() == [OLD]
    assert run.uploads() == [shard]
    collect_all(run)

    run.checkpoints.fence(1, 2)
    clients[victim] = run.checkpoint_server()
    run.save(*clients, step=NEXT, attempt=2)
    run.settle(*clients)
    assert run.offered() == [OLD, NEXT]
    assert run.checkpoints.states() == {OLD: StepState.COMMITTED, NEXT: StepState.COMMITTED}
