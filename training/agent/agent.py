"""The node agent: first process of a container, owner of everything that runs in it.

It starts and stops workers on a supervisor's orders, counts process starts, watches exits and
heartbeats, and lives on when the supervisor does not: the attempt continues, and its outcome waits
until it is queried. If no supervisor calls for `orphan_timeout_s`, the agent stops its workers and
ends (fencing). Times are seconds of CLOCK_MONOTONIC unless a name states otherwise.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from perdure.training.agent.attempt import Container, NodeAttempt
from perdure.training.agent.control import ADDRESS_FILE, TERMINATED_FILE, ControlServer
from perdure.training.agent.evidence import read_evidence, read_worker_stacks
from perdure.training.agent.log_collection import Collector, read_logs
from perdure.training.agent.preparation import LAST_SAVE_S, NodeChecks, leaving_grace_s
from perdure.training.agent.workers import WorkerGroup
from perdure.training.commands.checkpoint_watch import answer_saved_query
from perdure.training.injection.outside import kill_in_container
from perdure.training.processes import (
    MARKER,
    become_subreaper,
    free_port,
    kill_container,
    oom_kills,
)
from perdure.training.telemetry.device_addresses import devices_reply
from perdure.training.wire.agent import (
    NO_MEMBER,
    AgentConfig,
    AgentReply,
    AssignOrder,
    CheckOrder,
    ClockQuery,
    EvidenceQuery,
    KillOrder,
    MetricsQuery,
    NoticeOrder,
    Order,
    RejoinOrder,
    RendezvousOrder,
    Request,
    SavedQuery,
    ShutdownOrder,
    StacksQuery,
    StartOrder,
    StatusQuery,
    StopOrder,
)
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.logs import CollectOrder, LogsQuery, ReadLogsQuery
from perdure.training.wire.node import DevicesQuery, HealOrder
from perdure.training.wire.preparation import PrepareOrder
from perdure.training.wire.version import PERDURE_VERSION

TICK_S = 0.02
HANG_CHECK_S = 1.0
CONFIG_FILE = "agent.json"
IDLE_ORPHAN_S = 3600.0  # a container in which nothing runs holds its node for nobody


def is_orphaned(limit_s: float, *, uncalled_s: float, idle_s: float) -> bool:
    """Whether a container is given up for want of a supervisor.

    Args:
        limit_s: the job's.
        uncalled_s: since the last call of a supervisor.
        idle_s: since that call, or since the last process ended, where that was later.
    """
    return uncalled_s > limit_s or idle_s > min(limit_s, IDLE_ORPHAN_S)


class Agent:
    """One container's agent. `folder` is the container's scratch folder."""

    def __init__(self, config: AgentConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._container = Container(config, folder, os.environ[MARKER])
        self._lock = self._container.lock
        self._checks = NodeChecks(config, folder)
        self._collector = Collector(config, folder)
        self._server = ControlServer.of(config, self.handle)
        self._epoch = config.epoch
        self._called_s = self._ran_s = time.monotonic()
        self._attempt: NodeAttempt | None = None
        self._command_port: tuple[tuple[int, int], int] | None = None
        self._ending = False
        self._terminated_s: float | None = None
        self._oom_kills_before = oom_kills()

    def run(self) -> None:
        """Serve until a shutdown order, or until no supervisor has called for too long."""
        become_subreaper()
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        container = self._container
        self._server.start()
        self._server.publish_address(self._folder, self._config.host)
        if self._config.variables is not None:
            container.launcher.warm(self._config.variables)
        with container.wakeup:
            self._watch()
        # Saves that are nowhere else first, then logs; only then do the remaining processes end.
        container.checkpoint_server.close(self._save_limit_s)
        container.launcher.close()
        self._collector.close(*self._newest)
        kill_container(container.marker)
        self._server.close()
        (self._folder / ADDRESS_FILE).unlink(missing_ok=True)

    @property
    def _save_limit_s(self) -> float:
        """Time for the saves that only the checkpoint server has; the platform's grace runs out."""
        grace_s = self._leaving_grace_s
        if self._terminated_s is None or grace_s <= LAST_SAVE_S:
            return grace_s
        return max(LAST_SAVE_S, grace_s - (time.monotonic() - self._terminated_s))

    @property
    def _leaving_grace_s(self) -> float:
        """Time for the processes to end, where the container may go away with its volumes."""
        if self._attempt is None:
            return 0.0
        order = self._attempt.order
        is_terminated = self._terminated_s is not None
        return leaving_grace_s(order.job, order.grace_s) if is_terminated else order.grace_s

    def _watch(self) -> None:
        checked_s = 0.0
        while not (self._ending and self._is_quiet):
            self._container.wakeup.sleep(TICK_S if self._is_busy else HANG_CHECK_S)
            with self._lock:
                if self._attempt is not None:
                    self._attempt.poll()
                if time.monotonic() - checked_s > HANG_CHECK_S - TICK_S:
                    checked_s = time.monotonic()
                    if self._attempt is not None:
                        self._attempt.check_last_words()
                        self._attempt.check_hang()
                        self._attempt.make_room()
                    self._check_orphaned()

    @property
    def _is_quiet(self) -> bool:
        """Whether no attempt is staged or runs."""
        return self._attempt is None or self._attempt.is_over

    @property
    def _is_busy(self) -> bool:
        """Whether there is more to do than to wait for the next end of a process."""
        return self._attempt is not None and self._attempt.is_ending

    def handle(self, request: Request) -> AgentReply:
        """Answer one request of a supervisor."""
        with self._lock:
            reply = self._refuse(request.epoch) or self._obey(request.order)
        # Under the lock, status would wait for the rest, and a silent node counts as lost.
        return reply if reply is not None else self._carry_out(request.order)

    def _refuse(self, epoch: int) -> AgentReply | None:
        """Take note of a supervisor's call, unless a newer supervisor has called before."""
        if epoch < self._epoch:
            return AgentReply(error=f"epoch {epoch} is superseded by {self._epoch}")
        self._epoch = epoch
        self._called_s = time.monotonic()
        return None

    def _obey(self, order: Order) -> AgentReply | None:
        """Carry out an order that takes no time; None for one that does."""
        attempt, reply = self._attempt, AgentReply()
        match order:
            case StartOrder():
                reply = self._start(order)
            case AssignOrder():
                reply = self._assign(order)
            case StopOrder() | ShutdownOrder():
                self._stop(order.grace_s)
                self._ending = self._ending or isinstance(order, ShutdownOrder)
            case StatusQuery():
                reply = AgentReply(status=self.status())
            case MetricsQuery():
                idle = AgentReply(text="", offset=order.offset)
                is_asked = attempt is not None and order.of_attempt in (None, attempt.key)
                reply = attempt.read_steps(order.offset) if attempt and is_asked else idle
            case LogsQuery():
                group = attempt.group if attempt is not None else None
                logs = group.output.tails(group.ranks, order.tail_bytes) if group else ()
                reply = AgentReply(logs=logs)
            case ClockQuery():
                reply = AgentReply(at_s=time.time(), port=free_port(self._config.host))
            case CollectOrder():
                reply = AgentReply(collected=self._collector.collect(order, *self._newest))
            case HealOrder():
                reply = self._heal(order)
            case _:
                return None
        return reply

    def _carry_out(self, order: Order) -> AgentReply:
        """Carry out an order that takes its time, because it runs programs or reads much."""
        config, attempt, reply = self._config, self._attempt, AgentReply()
        match order:
            case RendezvousOrder():
                reply = self._open_rendezvous(order)
            case EvidenceQuery() | StacksQuery() | ReadLogsQuery():
                reply = self._read(order)
            case CheckOrder():
                reply = self._check(order)
            case SavedQuery():
                reply = answer_saved_query(order, config.node, config.member)
            case DevicesQuery():
                reply = devices_reply(order, config.node)
            case NoticeOrder() | RejoinOrder():
                no_attempt = AgentReply(error="the attempt has no coordinator here")
                reply = attempt.relay(order) if attempt is not None else no_attempt
            case PrepareOrder():
                preparation = self._container.preparation.prepare(order, config)
                reply = AgentReply(preparation=preparation)
            case KillOrder():
                reply = kill_in_container(order, config, self._container.marker)
        return reply

    @property
    def _newest(self) -> tuple[StartOrder | None, WorkerGroup | None]:
        """Order and processes of the newest attempt."""
        attempt = self._attempt
        return (attempt.order, attempt.group) if attempt is not None else (None, None)

    def status(self) -> AgentStatus:
        """Return the status of this node."""
        is_terminated = self._terminated_s is not None
        if self._attempt is not None:
            common = {"is_terminated": is_terminated, "version": PERDURE_VERSION}
            return self._attempt.status().model_copy(update=common)
        return AgentStatus(
            node=self._config.node,
            member=self._config.member,
            state=AgentState.IDLE,
            schedule_cnt=self._config.schedule_cnt,
            proc_start_cnt=0,
            placement=0,
            attempt=0,
            oom_kills=oom_kills() - self._oom_kills_before,
            is_warm=self._container.launcher.is_warm,
            unwritable=self._container.unwritable,
            is_terminated=is_terminated,
            version=PERDURE_VERSION,
        )

    def _assign(self, order: AssignOrder) -> AgentReply:
        wanted = {"member": order.member, "schedule_cnt": order.schedule_cnt}
        config = self._config.model_copy(update=wanted)
        if config == self._config:
            return AgentReply()  # a repeated order
        if self._config.member != NO_MEMBER:
            return AgentReply(error=f"it is the container of member {self._config.member}")
        self._checks.end()
        self._checks = NodeChecks(config, self._folder)
        self._collector = Collector(config, self._folder)  # collects from now on
        self._config = self._container.config = config
        return AgentReply()

    def _start(self, order: StartOrder) -> AgentReply:
        previous = self._attempt
        if self._ending:
            return AgentReply(error="the agent is shutting down")
        if self._config.member == NO_MEMBER:
            return AgentReply(error="it is a warm spare, and no member's container yet")
        if previous is not None and previous.key == (order.placement, order.attempt):
            return AgentReply()  # a repeated order, after a lost reply
        if previous is not None and not previous.is_over:
            return AgentReply(error=f"attempt {previous.order.attempt} is still running")
        self._checks.end()
        self._container.healing.end()
        self._attempt = NodeAttempt(order, self._container)
        self._attempt.start()
        return AgentReply()

    def _stop(self, grace_s: float | None = None) -> None:
        """Stop the attempt, after its own grace period unless another is given."""
        self._container.wakeup.wake()
        if self._attempt is not None:
            self._attempt.stop(self._attempt.order.grace_s if grace_s is None else grace_s)

    def _check_orphaned(self) -> None:
        now_s = time.monotonic()
        if not self._is_quiet:
            self._ran_s = now_s
        if is_orphaned(
            self._config.orphan_timeout_s,
            uncalled_s=now_s - self._called_s,
            idle_s=now_s - max(self._called_s, self._ran_s),
        ):
            self._stop()
            self._ending = True

    def _open_rendezvous(self, order: RendezvousOrder) -> AgentReply:
        start = order.start
        if not start.is_command:
            container = self._container
            container.make_room(start.job, None, at_once=True)
            try:
                address = container.launcher.open_coordinator(
                    order, container.attempt_folder(start)
                )
            except OSError as error:
                container.note_refusal(error)
                return AgentReply(error=f"rendezvous: {container.unwritable or error}")
            return AgentReply(port=address.store_port, coordinator=address)
        key = (start.placement, start.attempt)
        if self._command_port is None or self._command_port[0] != key:
            # A process that does not die may hold the port of the previous attempt.
            wanted = (order.port, 0) if order.port else (0,)
            self._command_port = (key, free_port(self._config.host, ports=wanted))
        return AgentReply(port=self._command_port[1])

    def _read(self, query: EvidenceQuery | StacksQuery | ReadLogsQuery) -> AgentReply:
        with self._lock:
            (order, group), is_over = self._newest, self._is_quiet
        if group is None or order is None:
            return AgentReply()
        match query:
            case EvidenceQuery():
                is_asked = query.of_attempt in (None, (order.placement, order.attempt))
                return AgentReply(texts=read_evidence(group, query.tail_bytes) if is_asked else ())
            case StacksQuery():
                return AgentReply(texts=read_worker_stacks(group))
        pieces = read_logs(
            query,
            config=self._config,
            folder=self._folder,
            started=order,
            group=group,
            is_over=is_over,
        )
        return AgentReply(pieces=pieces)

    def _check(self, order: CheckOrder) -> AgentReply:
        with self._lock:
            if not self._is_quiet:
                return AgentReply(error="an attempt is running")
        try:
            return AgentReply(checks=self._checks.run(order))
        except OSError as error:  # of a disk that takes no files; silence would say nothing
            return AgentReply(error=str(error))

    def _heal(self, order: HealOrder) -> AgentReply:
        if not self._is_quiet:
            return AgentReply(error="an attempt is running")
        folder = self._container.attempt_folder(order)
        return AgentReply(healing=self._container.healing.heal(order, folder))

    def _on_terminate(self, _number: int, _frame: object) -> None:
        # The signal may arrive while this thread holds the lock; the loop does the rest.
        threading.Thread(target=self._terminate, daemon=True).start()

    def _terminate(self) -> None:
        # First: a supervisor that comes too late to ask still learns why this agent ended.
        with suppress(OSError):
            (self._folder / TERMINATED_FILE).touch()
        with self._lock:
            self._terminated_s = self._terminated_s or time.monotonic()
            self._stop(self._leaving_grace_s)
            self._ending = True
