"""The coordinator as a process: connections, clock and files around `Attempt`.

One per attempt, a child of the first node's agent, so that any rank may die. It also holds the
rendezvous store in which the process groups of each generation find each other. Times are
seconds since the epoch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import from_json

from perdure.storage.address import open_store
from perdure.storage.errors import NotFound, StorageError
from perdure.storage.unauthenticated import UnauthenticatedConnections
from perdure.training.config.job import Job
from perdure.training.coordinator.history_writer import HistoryWriter
from perdure.training.coordinator.metrics import AttemptNow, RunMetrics
from perdure.training.diagnosis.exits import fault_of_end
from perdure.training.files import write_whole
from perdure.training.journal.attempt_log import AttemptLog, Follower
from perdure.training.journal.events import CheckpointCommitted, StepRecord
from perdure.training.journal.steps import UnsavedSteps, metrics_prefix
from perdure.training.log import start_logging
from perdure.training.masking import secret_values
from perdure.training.recovery.actions import AbnormalNorm, Action, LogEvent, ToAgent, ToRank
from perdure.training.recovery.attempt import Attempt
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.invariants import CHECK_INVARIANTS_ENV, InvariantBroken
from perdure.training.recovery.ladder import InProcessDecider
from perdure.training.recovery.memory import AttemptSettings, Memory
from perdure.training.recovery.protocol import (
    ChipReported,
    Ending,
    Gathered,
    GenerationReport,
    LastSaved,
    NodeGone,
    NotReplaced,
    Paused,
    Plan,
    Reconnected,
    RecoveryBegan,
    ToMember,
    Trains,
    WorkerEnded,
    WorkerFault,
)
from perdure.training.recovery.ranks import Ranks
from perdure.training.recovery.stages import Stage
from perdure.training.recovery.stimuli import (
    AgentConnected,
    AgentDisconnected,
    ChipFailed,
    ConnectionsRestored,
    FaultReported,
    LastSaveReported,
    LoopEnded,
    NodeLost,
    NodeSlow,
    PauseWanted,
    ProcessEnded,
    RankConnected,
    RankDisconnected,
    RankPaused,
    RankTrains,
    RecoveryResumed,
    ReplacementFailed,
    StateReported,
    StepCommitted,
    StepRecorded,
    Stimulus,
    TimePassed,
)
from perdure.training.wire.coordinator import (
    FROM_MEMBER,
    AgentJoined,
    CoordinatorAddress,
    CoordinatorConfig,
    FromMember,
    Gather,
    MetricsAddress,
    NodeSampled,
    WorkerJoined,
    metrics_file,
)
from perdure.training.wire.node import NodeSample
from perdure.training.wire.rendezvous import serve_store
from perdure.training.wire.requests import read_control
from perdure.training.wire.transport import (
    dump_line,
    first_line,
    is_authentic,
    next_line,
    room_for,
)

_log = logging.getLogger("perdure.coordinator")

TICK_S = 0.02  # while something is to happen at its time
IDLE_S = 0.5
FOLLOW_S = 0.2
MAX_REPORT_BYTES = 1 << 20  # of memory for each authentic connection
MIN_UNAUTHENTICATED = 256  # or as many as the attempt has members: all may join at once
ACCEPT_PAUSE_S = 1.0
CONTROL_S = 2.0
ABNORMAL_NORMS = "abnormal_global_norm.json"
SAVE_LIMIT_S = 60.0  # for the end-of-life checkpoint, or the grace period where that is longer


class Coordinator:
    """Serves one attempt until its agent ends it."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._job = config.job
        self._path = Path(config.live_file)
        self._log = Follower.of_file(self._path)
        self._store = open_store(self._job.storage)
        self._records_are_kept = False
        self._woken = asyncio.Event()
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._agents: dict[str, asyncio.StreamWriter] = {}
        self._gathering: dict[int, dict[int, str]] = {}
        self._written: tuple[ToMember | None, bytes] = (None, b"")
        self._attempt = _new_attempt(config, self._job)
        folder = Path(config.address_file).parent
        self._history = HistoryWriter(folder, self._attempt, secret_values(os.environ))
        self._metrics = RunMetrics(
            (self._job.run_id, str(config.placement), str(config.attempt)),
            target_step=None if self._job.worker.is_command else self._job.steps,
            state=self._state,
            past=config.past,
        )

    async def serve(self) -> None:
        """Listen, and go on until the process is ended."""
        config, engine = self._config, self._job.engine
        members = engine.world_size + engine.nodes
        if (room := room_for(members)) < members:
            _log.warning(f"the limit of open files (ulimit -Hn) has room for {room} of {members}")
        store = serve_store(config.host, config.store_port)
        listener = _listen(config.host)
        address = CoordinatorAddress(
            host=config.host,
            port=listener.getsockname()[1],
            store_port=store.port,
            token=config.token,
        )
        if config.resumes is not None:
            self._handle(RecoveryResumed(config.resumes))
        write_whole(Path(config.address_file), address.model_dump_json(), private=True)
        unauthenticated = UnauthenticatedConnections(max(MIN_UNAUTHENTICATED, members))
        with listener:
            await asyncio.gather(
                self._accept(listener, unauthenticated),
                self._serve_metrics(),
                self._tick(),
                self._follow(),
                self._watch_control(),
            )

    async def _serve_metrics(self) -> None:
        """Open the Prometheus endpoint; training does without it where that is not possible."""
        config, port = self._config, self._job.watch.metrics_port
        try:
            # In a thread: the server asks for the name of its host, which may take its time.
            bound_port = await asyncio.to_thread(self._metrics.serve, config.host, port)
        except OSError as exc:
            _log.warning(f"no metrics at {config.host}:{port}: {exc}")
            return
        address = MetricsAddress(url=f"http://{config.host}:{bound_port}/metrics")
        _log.info(f"metrics at {address.url}")
        path = metrics_file(Path(config.address_file).parent)
        write_whole(path, address.model_dump_json(), private=True)

    def _state(self) -> AttemptNow:
        attempt = self._attempt
        return AttemptNow(attempt.stage, attempt.generation, attempt.rank_counts)

    async def _accept(
        self, listener: socket.socket, unauthenticated: UnauthenticatedConnections
    ) -> None:
        """Take connections, each with a task of its own."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as exc:  # out of descriptors, perhaps
                _log.error(f"no connection taken: {exc}")
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._meet(connection, unauthenticated))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(0)  # its first line may be there: one after the other

    async def _meet(
        self, connection: socket.socket, unauthenticated: UnauthenticatedConnections
    ) -> None:
        """Read the first line of a connection, and go on with one that has the token."""
        first, following = None, b""
        try:
            with unauthenticated.holding(connection):
                line, following = await first_line(connection)
            first = FROM_MEMBER.validate_json(line) if line else None
        except (OSError, ValueError) as exc:  # TimeoutError is an OSError
            _log.info(f"a connection ended: {exc}")
        if first is None or not is_authentic(getattr(first, "token", None), self._config.token):
            connection.close()
            return
        reader = asyncio.StreamReader(limit=MAX_REPORT_BYTES)
        reader.feed_data(following)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        await self._converse(first, reader, writer)

    async def _converse(
        self, first: FromMember, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        rank: int | None = None
        node: str | None = None
        try:
            if isinstance(first, WorkerJoined):
                rank = first.rank
                self._ranks[rank] = writer
                self._handle(RankConnected(rank, first.layout))
            elif isinstance(first, AgentJoined):
                node = first.node
                self._agents[node] = writer
                self._handle(AgentConnected(node, first.ranks))
            while (message := await _next(reader)) is not None:
                self._receive(rank, message)
        except (OSError, ValueError) as exc:  # TimeoutError is an OSError
            _log.info(f"a connection ended: {exc}")
        finally:
            writer.close()
            if node is not None and self._agents.get(node) is writer:
                self._metrics.forget(node)
                self._handle(AgentDisconnected(node))
            if rank is not None and self._ranks.get(rank) is writer:
                del self._ranks[rank]
                self._handle(RankDisconnected(rank))

    def _receive(self, rank: int | None, message: FromMember) -> None:
        if rank is None:
            self._receive_of_agent(message)
        else:
            self._receive_of_worker(rank, message)

    def _receive_of_agent(self, message: FromMember) -> None:
        attempt = self._attempt
        match message:
            case WorkerEnded():
                self._read_log()  # a death is reported at the newest step on record
                node = attempt.nodes.get(message.rank)
                fault = fault_of_end(message, node=node, step=attempt.step)
                self._handle(ProcessEnded(message.rank, fault))
            case NotReplaced():
                self._handle(ReplacementFailed(message.rank, message.why))
            case NodeGone():
                self._read_log()
                self._cut_off(message.fault.node)
                fault = replace(message.fault, step=attempt.step)
                is_slow = fault.fault_class is FaultClass.FAIL_SLOW
                self._handle((NodeSlow if is_slow else NodeLost)(fault, message.ranks))
            case ChipReported():
                self._read_log()
                self._handle(ChipFailed(message.fault, message.no_other_node))
            case NodeSampled():
                self._metrics.sampled(message.node, NodeSample.model_validate(message.sample))
            case _:
                raise _misplaced(message)

    def _cut_off(self, node: str | None) -> None:
        """Close what comes from a node that is left: it may live on, and takes no more part."""
        agent = self._agents.pop(node, None) if node is not None else None
        ranks = [rank for rank, name in self._attempt.nodes.items() if name == node]
        for writer in (agent, *(self._ranks.pop(rank, None) for rank in ranks)):
            if writer is not None:
                writer.close()

    def _receive_of_worker(self, rank: int, message: FromMember) -> None:
        match message:
            case WorkerFault():
                _log.info(f"rank {rank} at step {message.step}: {message.kind}: {message.text}")
                self._handle(FaultReported(rank, message))
            case Reconnected():
                self._handle(ConnectionsRestored(rank, message))
            case GenerationReport():
                self._handle(StateReported(message.generation, message.report))
            case Trains():
                self._handle(RankTrains(rank, message.generation, message.step, message.layout))
            case Paused():
                self._handle(RankPaused(rank, message.step, is_paused=message.is_paused))
            case LastSaved():
                self._handle(LastSaveReported(rank, message))
            case Ending():
                self._handle(LoopEnded(rank))
            case Gather():
                self._gather(rank, message)
            case _:
                raise _misplaced(message)

    def _gather(self, rank: int, message: Gather) -> None:
        """Keep a rank's document, and send those of all ranks once they are complete."""
        documents = self._gathering.setdefault(message.number, {})
        documents[rank] = message.document
        world_size = self._job.engine.world_size
        if len(documents) < world_size:
            return
        del self._gathering[message.number]
        in_order = tuple(documents[rank] for rank in range(world_size))
        answer = Gathered(number=message.number, documents=in_order)
        for writer in self._ranks.values():
            self._send(writer, answer)

    def _handle(self, stimulus: Stimulus) -> None:
        """Have the attempt take one stimulus in, and carry its orders out, in their sequence."""
        try:
            actions = self._history.handle(stimulus, now_s=time.time())
        except InvariantBroken as error:
            # Only where they are checked: a test that went on would not find what it looks for.
            _log.error(str(error))
            os._exit(1)
        for action in actions:
            self._carry_out(action)
        self._woken.set()

    def _carry_out(self, action: Action) -> None:
        match action:
            case LogEvent():
                text = action.event.model_dump_json()
                _log.info(text)
                self._metrics.record(action.event)
                with AttemptLog(self._path) as log:
                    log.append(action.event)
                if isinstance(action.event, RecoveryBegan) and action.event.moved:
                    self._cut_off(action.event.fault.node)
            case ToRank():
                if isinstance(action.message, Plan) and action.message.plan.savers:
                    self._keep_records()
                self._send(self._ranks.get(action.rank), action.message)
            case AbnormalNorm():
                self._record_norms(action)
            case ToAgent(rank=None):
                for writer in self._agents.values():
                    self._send(writer, action.message)
            case ToAgent():
                node = self._attempt.nodes.get(action.rank if action.rank is not None else -1, "")
                self._send(self._agents.get(node), action.message)

    def _send(self, writer: asyncio.StreamWriter | None, message: ToMember) -> None:
        # A member that is gone is noticed by its own means.
        if writer is None or writer.is_closing():
            return
        if message is not self._written[0]:  # the same to all ranks is made into a line once
            self._written = (message, dump_line(message))
        writer.write(self._written[1])

    def _record_norms(self, abnormal: AbnormalNorm) -> None:
        """Put an abnormal step on the run's list of them, named as MindFormers has it."""
        key = f"runs/{self._job.run_id}/{ABNORMAL_NORMS}"
        try:
            try:
                document = from_json(self._store.get(key))
            except NotFound:
                document = {}
            document[str(abnormal.step)] = list(abnormal.norms)
            self._store.put(key, json.dumps(document, indent=1).encode())
        except (StorageError, ValueError) as exc:
            _log.error(f"step {abnormal.step} is not in {key}: {exc}")

    def _keep_records(self) -> None:
        """Put the records of steps that no checkpoint has into the store, before one that has."""
        if self._records_are_kept:
            return
        self._records_are_kept = True
        config, job = self._config, self._job
        steps = UnsavedSteps(metrics_prefix(job.run_id, config.placement, config.attempt))
        steps.catch_up(Follower.of_file(self._path))
        try:
            for key, text in steps.take().items():
                self._store.put(key, text.encode())
        except StorageError as exc:
            _log.error(f"the last step records are not in the store: {exc}")

    async def _tick(self) -> None:
        parent = os.getppid()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), IDLE_S)
            if os.getppid() != parent:
                os._exit(1)  # the agent is gone, and its workers with it
            if self._attempt.is_due(time.time()):
                self._handle(TimePassed())
            if self._attempt.has_deadline:
                await asyncio.sleep(TICK_S)
            else:
                self._woken.clear()

    async def _follow(self) -> None:
        """Follow the attempt log: which steps there are, which checkpoints were committed."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            self._read_log()

    def _read_log(self) -> None:
        for event in self._log.read() or ():
            match event:
                case StepRecord():
                    self._handle(StepRecorded(event.step))
                    self._metrics.step(event)
                case CheckpointCommitted():
                    self._handle(StepCommitted(event.step))
                    self._metrics.committed(event.step, at_s=time.time())

    async def _watch_control(self) -> None:
        """Read from the store now and then whether the run is to pause."""
        while True:
            if self._attempt.stage is not Stage.STARTING:
                with suppress(StorageError):  # read again soon; training does not wait for it
                    control = await asyncio.to_thread(read_control, self._store, self._job.run_id)
                    if control.pause != self._attempt.memory.pauses.is_requested:
                        self._handle(PauseWanted(control.pause))
            await asyncio.sleep(CONTROL_S)


def _new_attempt(config: CoordinatorConfig, job: Job) -> Attempt:
    restart, groups = job.restart, job.layout.replica_groups()
    decider = InProcessDecider(
        restart.policy(operator_retry=job.comm.link_retry),
        frozenset(config.supported),
        list(config.past),
        job.engine.nodes,
    )
    settings = AttemptSettings(
        repair_limit_s=restart.start_timeout_s,
        save_limit_s=max(SAVE_LIMIT_S, job.engine.grace_s),
        reconnect_limit_s=job.comm.link_retry_s,
        checks_chips=restart.heal.check,
    )
    is_checked = CHECK_INVARIANTS_ENV in os.environ
    ranks = Ranks(node_notice_s=job.engine.node_notice_s)
    memory = Memory(job.engine.world_size, groups, ranks=ranks)
    return Attempt(memory, settings, decider, checks_invariants=is_checked)


def _misplaced(message: FromMember) -> ValueError:
    return ValueError(f"{message.op} is not for this connection")


def _listen(host: str) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=1024)
    listener.setblocking(False)
    return listener


async def _next(reader: asyncio.StreamReader) -> FromMember | None:
    line = await next_line(reader)
    return FROM_MEMBER.validate_json(line) if line else None


def main(arguments: list[str] | None = None, *, exit_now: Callable[[int], None] = os._exit) -> None:
    """Coordinate the attempt whose configuration file is the first argument."""
    # At the end of an allocation every process gets one: the ranks still need this one to save.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    start_logging()
    path = (arguments or sys.argv[1:])[0]
    try:
        config = CoordinatorConfig.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        _log.error(f"{path}: {error}")
        exit_now(2)
        return
    asyncio.run(Coordinator(config).serve())
