"""A node replacement through the real coordinator, with simulated ranks on real connections.

The coordinator is a process as in an attempt. Ranks and agents are connections of one other
process, which answers for all of them at once and does no other work: no training, no process
groups, no transfer of state, no container. What remains is the protocol. Times are seconds.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, SecretStr

from benchmarks.scale.state_machine import BROKEN, LOST_NODE, STEP
from perdure.storage.address import StorageSpec, make_store
from perdure.training.config.job import parse_job
from perdure.training.files import write_whole
from perdure.training.journal.attempt_log import Follower
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.protocol import (
    GenerationReport,
    NodeGone,
    RecoveryEnded,
    Trains,
    WorkerFault,
    WorkerFaultKind,
)
from perdure.training.recovery.repair import RankReport, Vote
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.coordinator import (
    AgentJoined,
    CoordinatorAddress,
    CoordinatorConfig,
    WorkerJoined,
)
from perdure.training.wire.transport import dump_line

HOST = "127.0.0.1"
TOKEN = "scale"  # noqa: S105 of this benchmark's own processes
START_LIMIT_S = 60.0
LIMIT_S = 300.0
AT_ONCE = 256  # connections that are opened together
POLL_S = 0.01
SETTLE_S = 1.0  # for the coordinator to take in what is on its way
M = TypeVar("M", bound="_Member")
_MAIN = "from perdure.training.coordinator.server import main; main()"


@dataclass(frozen=True, slots=True)
class Served:
    """One replacement.

    Attributes:
        num_ranks: of the job.
        wall_s: from the loss of the node to the record that all ranks train again.
        coordinator_s: CPU time of the coordinator in between.
        ranks_s: CPU time of the process that answers for the ranks and agents.
        num_messages: that the ranks and agents sent and received.
        memory_bytes: resident, of the coordinator.
    """

    num_ranks: int
    wall_s: float
    coordinator_s: float
    ranks_s: float
    num_messages: int
    memory_bytes: int

    @property
    def message_s(self) -> float:
        """CPU time of the coordinator for one message."""
        return self.coordinator_s / self.num_messages


@dataclass(slots=True)
class _Counts:
    """What all members together have sent and received.

    Attributes:
        num_ranks: that there are.
        sent: messages of ranks and agents.
        received: messages to them.
        training: ranks that have reported that they train since `begin`.
        all_train: set when all have.
    """

    num_ranks: int
    sent: int = 0
    received: int = 0
    training: int = 0
    all_train: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def total(self) -> int:
        """In both directions."""
        return self.sent + self.received

    def begin(self) -> None:
        """Wait anew for all ranks to train."""
        self.training = 0
        self.all_train.clear()

    def trains(self) -> None:
        """One more rank does."""
        self.training += 1
        if self.training == self.num_ranks:
            self.all_train.set()


class _Member(asyncio.Protocol):
    """A connection of the attempt; what comes is counted and not looked at."""

    def __init__(self, counts: _Counts, joined: BaseModel) -> None:
        self.counts, self._joined, self._rest = counts, joined, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say who this is."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 of TCP
        self._transport = transport
        self.send(self._joined)

    def data_received(self, data: bytes) -> None:
        """Take lines in."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.counts.received += 1
            self.receive(line)

    def receive(self, line: bytes) -> None:
        """Take a line in."""

    def send(self, message: BaseModel) -> None:
        """Send a message."""
        assert self._transport is not None  # noqa: S101 connection_made comes first
        self._transport.write(dump_line(message))
        self.counts.sent += 1

    def close(self) -> None:
        """End the connection, as the kernel does for a process that was killed."""
        if self._transport is not None:
            self._transport.abort()


class _Rank(_Member):
    """A rank: it reports for each new generation, and trains as the plan comes.

    What it does with a line is found without a parser: this process is not what is measured.
    """

    def __init__(self, counts: _Counts, rank: int, *, is_fresh: bool) -> None:
        super().__init__(counts, WorkerJoined(token=SecretStr(TOKEN), rank=rank, pid=1))
        self._rank, self._is_fresh, self._generation = rank, is_fresh, 0

    def receive(self, line: bytes) -> None:
        """Follow the order."""
        if line.startswith(b'{"op": "generation"'):
            self._begin(int(json.loads(line)["number"]))
        elif line.startswith(b'{"op": "plan"'):
            self._train()

    def _begin(self, generation: int) -> None:
        self._generation = generation
        if generation == 1:
            self._train()
            return
        vote = Vote(step=STEP, loss=2.3456789, grad_norm=0.987654321, lr=3e-4)
        report = RankReport(
            rank=self._rank,
            step=0 if self._is_fresh else STEP,
            is_fresh=self._is_fresh,
            votes=() if self._is_fresh else (vote,),
        )
        self.send(GenerationReport(generation=generation, report=report))

    def _train(self) -> None:
        self.send(Trains(generation=self._generation, step=STEP))
        self.counts.trains()

    def fault(self) -> None:
        """Report a connection that broke."""
        kind = WorkerFaultKind.CONNECTION
        self.send(WorkerFault(generation=1, kind=kind, text=BROKEN, step=STEP, at_s=time.time()))


@dataclass(slots=True)
class _Gang:
    """All members of an attempt.

    Attributes:
        address: of the coordinator.
        counts: of their messages.
        ranks_on: ranks of each node.
    """

    address: CoordinatorAddress
    counts: _Counts
    ranks_on: Sequence[range]
    _ranks: list[_Rank] = field(default_factory=list)
    _agents: list[_Member] = field(default_factory=list)

    async def connect(self) -> None:
        """Connect everybody, and wait until all ranks train."""
        for index, own in enumerate(self.ranks_on):
            self._agents.append(await self._agent(index, own))
        size = self.counts.num_ranks
        for first in range(0, size, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, size))
            self._ranks += await asyncio.gather(*(self._rank(one) for one in numbers))
        await asyncio.wait_for(self.counts.all_train.wait(), LIMIT_S)
        await asyncio.sleep(SETTLE_S)

    async def replace(self) -> None:
        """Lose a node, have another one come, and wait until all ranks train again."""
        self.counts.begin()
        gone = self.ranks_on[LOST_NODE]
        self._agents[LOST_NODE].close()
        for one in gone:
            self._ranks[one].close()
        await asyncio.sleep(0)  # they are closed in the next round of the loop
        for number, rank in enumerate(self._ranks):
            if number not in gone:
                rank.fault()
        node = f"node-{LOST_NODE}"
        fault = Fault(FaultClass.NODE_LOST, time.time(), "killed", node=node, step=STEP)
        self._agents[0].send(NodeGone(fault=fault, ranks=tuple(gone)))
        await self._agent(len(self.ranks_on), gone)
        await asyncio.gather(*(self._rank(one, is_fresh=True) for one in gone))
        await asyncio.wait_for(self.counts.all_train.wait(), LIMIT_S)

    async def _rank(self, number: int, *, is_fresh: bool = False) -> _Rank:
        return await self._connected(_Rank(self.counts, number, is_fresh=is_fresh))

    async def _agent(self, index: int, ranks: Sequence[int]) -> _Member:
        node, token = f"node-{index}", SecretStr(TOKEN)
        joined = AgentJoined(token=token, node=node, ranks=tuple(ranks))
        return await self._connected(_Member(self.counts, joined))

    async def _connected(self, member: M) -> M:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: member, self.address.host, self.address.port)
        return member


def measure(num_ranks: int, *, ranks_per_node: int) -> Served:
    """Lose and replace one node of a job of so many ranks.

    Raises:
        RuntimeError: the coordinator did not start, or not all ranks trained again.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as text:
        folder = Path(text)
        config = _config(folder, num_ranks // ranks_per_node, ranks_per_node)
        path = folder / "coordinator.json"
        write_whole(path, config.model_dump_json(), private=True)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(path)], stdout=log, stderr=log
            )
        try:
            address = _await_address(process, folder)
            return asyncio.run(_replace(address, process, folder, num_ranks, ranks_per_node))
        finally:
            process.kill()
            process.wait()


def _config(folder: Path, num_nodes: int, ranks_per_node: int) -> CoordinatorConfig:
    store = f"file://{folder}/store"
    make_store(StorageSpec(address=store))
    document = {
        "run_id": "scale",
        "storage": {"address": store},
        "worker": {"recipe": "benchmarks.recovery.recipe:main"},
        "batch": {"global_batch_size": num_nodes * ranks_per_node, "micro_batch_size": 1},
        "engine": {"nodes": num_nodes, "slots_per_node": ranks_per_node},
    }
    return CoordinatorConfig(
        job=parse_job(document),
        host=HOST,
        store_port=0,
        token=TOKEN,
        placement=1,
        attempt=1,
        live_file=str(folder / "metrics.jsonl"),
        address_file=str(folder / "address.json"),
        supported=tuple(Rung),
    )


def _await_address(process: subprocess.Popen[bytes], folder: Path) -> CoordinatorAddress:
    path, until_s = folder / "address.json", time.monotonic() + START_LIMIT_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until_s:
            text = (folder / "log").read_text(errors="replace").strip()
            raise RuntimeError(f"the coordinator did not start: {text[-300:]}")
        time.sleep(POLL_S)
    return CoordinatorAddress.model_validate_json(path.read_text(encoding="utf-8"))


async def _replace(
    address: CoordinatorAddress,
    process: subprocess.Popen[bytes],
    folder: Path,
    num_ranks: int,
    ranks_per_node: int,
) -> Served:
    firsts = range(0, num_ranks, ranks_per_node)
    counts = _Counts(num_ranks)
    gang = _Gang(address, counts, [range(one, one + ranks_per_node) for one in firsts])
    await gang.connect()
    before, began_s = counts.total, time.time()
    used_s, own_s = _used_s(process.pid), time.process_time()
    await gang.replace()
    ended = await _await_end(folder / "metrics.jsonl")
    return Served(
        num_ranks=num_ranks,
        wall_s=ended.at_s - began_s,
        coordinator_s=_used_s(process.pid) - used_s,
        ranks_s=time.process_time() - own_s,
        num_messages=counts.total - before,
        memory_bytes=psutil.Process(process.pid).memory_info().rss,
    )


async def _await_end(path: Path) -> RecoveryEnded:
    """The record that the recovery is over, which the coordinator writes."""
    log, until_s = Follower.of_file(path), time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        for event in log.read() or ():
            if isinstance(event, RecoveryEnded):
                if not event.succeeded:
                    raise RuntimeError(f"the node was not replaced: {event.why}")
                return event
        await asyncio.sleep(POLL_S)
    raise RuntimeError("the recovery did not end")


def _used_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system
