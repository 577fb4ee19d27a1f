"""Nodes of a run: checkpoint servers and ranks as real processes, and clients of them.

The processes are forked from a server that has torch loaded, or each would take seconds to
start. The code that runs in them is the code that runs in production.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perdure.storage.checkpoint import CheckpointStore, shard_name
from perdure.storage.checkpoint_server.client import CheckpointClient, ReservedSlot
from perdure.storage.collect import InUse, Rules, carry_out, decide, take_listing
from perdure.storage.local import LocalStore
from perdure.storage.manifest import Chunk, ShardRecord, digest
from perdure.storage.share import PartOfTensor, Share, WrittenShare
from perdure.training.agent import checkpoint_server
from perdure.training.config.job import Job
from perdure.training.injection.inside import CHECKPOINT_SERVER_DIES_AT
from tests.jobs import small_job

RUN_ID = "run"
# A forked process imports the test's module by its name, however pytest was started.
_ROOT = str(Path(__file__).parents[3])
if _ROOT not in sys.path:
    sys.path.append(_ROOT)

_FORKED = get_context("forkserver")
_PRELOADED = [
    "perdure.training.runtime.state.checkpointer",
    "perdure.training.agent.checkpoint_server",
    "torch.distributed.fsdp",
    "torch._dynamo",  # an optimizer's first step would import it in every rank
]


def share_of(
    step: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    owner: tuple[int, int] = (1, 1),
    size_bytes: int = 64,
    run_id: str = RUN_ID,
    attachments: dict[str, str] | None = None,
) -> Share:
    """A share of a tensor of one row of bytes for each rank; its file holds nothing else."""
    chunk = Chunk(
        offsets=(rank, 0), lengths=(1, size_bytes), shard=shard_name(*owner, rank), key="weight"
    )
    part = PartOfTensor(dtype="U8", shape=(world_size, size_bytes), chunks=(chunk,))
    return Share(
        run_id=run_id,
        placement=owner[0],
        attempt=owner[1],
        step=step,
        rank=rank,
        world_size=world_size,
        size_bytes=size_bytes,
        tensors={"weight": part},
        extra={"step": step},
        attachments=attachments or {},
    )


def bytes_of(share: Share) -> bytes:
    """What the file of a share holds: different for every step and rank."""
    return bytes([share.step % 251, share.rank]) * (share.size_bytes // 2)


def written(share: Share) -> WrittenShare:
    """The share with the hash of its bytes."""
    data = bytes_of(share)
    return WrittenShare(
        share=share, record=ShardRecord(size_bytes=len(data), xxh3_128=digest(data))
    )


def reserve(client: CheckpointClient, share: Share, *, timeout_s: float = 20) -> ReservedSlot:
    """A slot, once one is free."""
    deadline_s = time.monotonic() + timeout_s
    while (slot := client.reserve(share.rank, share.size_bytes)) is None:
        assert time.monotonic() < deadline_s, "no slot became free"
    return slot


def save(client: CheckpointClient, share: Share, *, announce: Path | None = None) -> None:
    """Save as a worker does: reserve, copy, hand over."""
    slot = reserve(client, share)
    slot.memory[: share.size_bytes] = bytes_of(share)
    client.ready(slot, share, announce=str(announce) if announce else None)


def settle(client: CheckpointClient, *, timeout_s: float = 20) -> None:
    """Wait until everything that was handed over is published."""
    deadline_s = time.monotonic() + timeout_s
    while client.is_busy():
        assert time.monotonic() < deadline_s, "saves are not in the store"


def save_steps(client: CheckpointClient, *steps: int, **fields: Any) -> None:
    """Save steps one after the other, and wait until they are published."""
    for step in steps:
        save(client, share_of(step, **fields))
    settle(client)


def _preload() -> None:
    """Preload what ranks and checkpoint servers import, unless the server is of data loaders."""
    server: Any = forkserver._forkserver
    if server._preload_modules != _PRELOADED:
        server._stop()  # torch, and no test's process any more
        _FORKED.set_forkserver_preload(_PRELOADED)


def forked(program: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process of its own that runs `program`."""
    _preload()
    process = _FORKED.Process(target=program, args=arguments, daemon=True)
    process.start()
    return process


def pipe() -> tuple[Any, Any]:
    """What a forked process may speak through."""
    return _FORKED.Pipe()


@dataclass(frozen=True, slots=True)
class Before:
    """A place between two writes, where a checkpoint server has no point with a name to die at.

    Attributes:
        pattern: is found in the operation and the URL, as in "delete file:///...".
        number: which of the writes and deletions that match it is not done any more.
    """

    pattern: str
    number: int = 1


def _die(before: Before) -> None:
    """Have this process die at that place; the operations before it are done as ever."""
    numbers = itertools.count(1)

    def deadly(operation: str) -> Callable[..., None]:
        done = getattr(LocalStore, operation)

        def perform(store: LocalStore, key: str, *arguments: Any, **more: Any) -> None:
            matches = re.search(before.pattern, f"{operation} {store.url(key)}")
            if matches and next(numbers) == before.number:
                os.kill(os.getpid(), signal.SIGKILL)
            done(store, key, *arguments, **more)

        return perform

    for operation in ("put", "delete"):
        setattr(LocalStore, operation, deadly(operation))


def _stay(
    job_file: Path, name: str, disk: Path | None, log: Path, dies_at: str | Before | None
) -> None:
    out = log.open("ab", buffering=0)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    if isinstance(dies_at, Before):
        _die(dies_at)
    elif dies_at is not None:
        os.environ[CHECKPOINT_SERVER_DIES_AT] = dies_at
    os.chdir(log.parent)
    where = [str(disk)] if disk else []
    sys.argv = ["checkpoint_server", str(job_file), name, "127.0.0.1", *where]
    checkpoint_server.main()


@dataclass
class Node:
    """One node: a disk, and a checkpoint server that may be killed and started again."""

    job_file: Path
    folder: Path
    disk: Path | None
    name: str = ""
    process: BaseProcess | None = None
    _clients: list[CheckpointClient] = field(default_factory=list)

    def start(self, *, dies_at: str | Before | None = None) -> Node:
        """Start the checkpoint server, whether or not one was there before."""
        self.kill()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = f"perdure-test-{uuid.uuid4().hex}"
        arguments = (
            self.job_file,
            self.name,
            self.disk,
            self.folder / "checkpoint-server.log",
            dies_at,
        )
        self.process = forked(_stay, *arguments)
        return self

    def client(self) -> CheckpointClient:
        """A connection of its own."""
        self._clients.append(CheckpointClient(self.name))
        return self._clients[-1]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the checkpoint server."""
        assert self.process is not None
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self, timeout_s: float = 20) -> int | None:
        """Wait for the checkpoint server's end. Returns its exit code."""
        assert self.process is not None
        self.process.join(timeout_s)
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL, and everything that it held is gone."""
        for client in self._clients:
            client.close()
        if self.process is not None:
            self.process.kill()
            self.process.join()

    @property
    def log(self) -> str:
        """What the checkpoint server logged."""
        return (self.folder / "checkpoint-server.log").read_text()

    def disk_tier(self) -> CheckpointStore:
        """What is on the node's disk."""
        assert self.disk is not None
        return CheckpointStore(LocalStore(self.disk), RUN_ID)


@dataclass
class Cluster:
    """The nodes of a run, and its store."""

    folder: Path
    job: Job
    nodes: list[Node] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def at(cls, folder: Path, **checkpoint: Any) -> Cluster:
        """A job whose store is a folder."""
        job = small_job(folder, worker={"recipe": "own:main"}, checkpoint=checkpoint)
        (folder / "job.json").write_text(job.model_dump_json())
        return cls(folder, job)

    @property
    def checkpoints(self) -> CheckpointStore:
        """In the store."""
        return CheckpointStore(LocalStore(self.folder / "store"), RUN_ID)

    def node(self, *, disk: bool = True, dies_at: str | Before | None = None) -> Node:
        """One more node, with its checkpoint server started."""
        folder = self.folder / f"node-{len(self.nodes)}"
        node = Node(self.folder / "job.json", folder, folder / "disk" if disk else None)
        self.nodes.append(node)
        return node.start(dies_at=dies_at)

    def run(self, program: Callable[..., Any], *arguments: Any, num_ranks: int) -> list[Any]:
        """Run `program(rank, *arguments)` on every rank of a gloo world; what each returns."""
        rendezvous = self.folder / f"rendezvous-{next(self._numbers)}"
        queue = _FORKED.SimpleQueue()
        ranks = [
            forked(_take_part, program, rank, num_ranks, str(rendezvous), queue, arguments)
            for rank in range(num_ranks)
        ]
        try:
            answers = _answers(ranks, queue)
        finally:
            for process in ranks:
                process.join(30)
                process.kill()
        failed = [
            f"rank {r}: {answers[r]}" for r in sorted(answers) if isinstance(answers[r], _Failed)
        ]
        assert not failed, "\n".join(failed)
        return [answers[rank] for rank in range(num_ranks)]

    def close(self) -> None:
        """End every checkpoint server."""
        for node in self.nodes:
            node.kill()


def _answers(ranks: list[BaseProcess], queue: Any) -> dict[int, Any]:
    """What each rank puts into the queue; one that ends without a word has failed."""
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        ended = [not process.is_alive() for process in ranks]
        if not queue.empty():
            rank, answer = queue.get()
            answers[rank] = answer
            continue
        silent = [r for r, gone in enumerate(ended) if gone and r not in answers]
        assert not silent, f"ranks {silent} ended without an answer"
        time.sleep(0.01)
    return answers


class _Failed(str):
    """The traceback of a rank."""

    __slots__ = ()


def _take_part(
    program: Callable[..., Any],
    rank: int,
    num_ranks: int,
    rendezvous: str,
    queue: Any,
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    try:
        answer = program(rank, *arguments)
    except BaseException:  # noqa: BLE001 handed to the test, whatever it is
        answer = _Failed(traceback.format_exc())
    queue.put((rank, answer))
    # torch 2.13: a gloo world may abort while the interpreter is torn down.
    os._exit(0)


def collect(checkpoints: CheckpointStore) -> None:
    """As gc does when no attempt lives, with everything old enough."""
    rules, dead = Rules(garbage_after_s=0.0), InUse(is_living=False)
    found = take_listing(checkpoints)
    carry_out(checkpoints, decide(found, rules=rules, in_use=dead, now_s=time.time() + 60.0))


def flip_bit(store: LocalStore, key: str, at: int) -> None:
    """Damage an object in one bit."""
    data = bytearray(store.get(key))
    data[at // 8] ^= 1 << (at % 8)
    store.put(key, bytes(data))


def offered(checkpoints: CheckpointStore) -> list[int]:
    """Steps that a restore may take, each of them read from end to end."""
    steps = checkpoints.steps()
    assert [step for step in steps if checkpoints.verify(step)] == []
    return steps
