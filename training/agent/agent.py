"""The node agent: first process of a container, owner of everything that runs in it.

It starts and stops workers on a supervisor's orders, counts process starts, watches exits and
heartbeats, and keeps living when the supervisor does not: the attempt goes on, and its outcome
waits until it is queried. Without any supervisor for `orphan_timeout_s` it stops its workers and
ends (fencing). Times are seconds of CLOCK_MONOTONIC unless a name states otherwise.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

from perdure.storage.address import open_store
from perdure.storage.errors import StorageError
from perdure.training.agent.checkpoint_server import CheckpointServerProcess, disk_folder
from perdure.training.agent.control import (
    ADDRESS_FILE,
    WakeupSignal,
    control_server_of,
    publish_address,
)
from perdure.training.agent.coordinator_client import (
    AgentCoordinatorClient,
    address_file,
    metrics_url,
)
from perdure.training.agent.hang_check import HangCheck
from perdure.training.agent.healing import NodeHealing
from perdure.training.agent.launcher import Launcher
from perdure.training.agent.log_collection import (
    Collector,
    read_evidence,
    read_logs,
    read_worker_stacks,
)
from perdure.training.agent.preparation import DATA_FOLDER, NodeChecks, stage_data
from perdure.training.agent.sampler import Sampling
from perdure.training.agent.workers import WorkerGroup
from perdure.training.commands.checkpoint_watch import (
    answer_saved_query,
    fetch_resume_checkpoint,
    path_variables,
)
from perdure.training.config.secrets import values_on_node
from perdure.training.environment import interface_variables
from perdure.training.files import write_whole
from perdure.training.injection.outside import kill_in_container
from perdure.training.journal import attempt_log
from perdure.training.journal.events import ChipsHealed
from perdure.training.processes import (
    MARKER,
    become_subreaper,
    free_port,
    kill_container,
    oom_kills,
)
from perdure.training.recovery.protocol import ReplaceWorker
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
from perdure.training.wire.agent_status import AgentState, AgentStatus, CoordinatorEnd, HangReport
from perdure.training.wire.logs import CollectOrder, LogsQuery, ReadLogsQuery
from perdure.training.wire.node import DevicesQuery, HealOrder, NodeSample

TICK_S = 0.02
HANG_CHECK_S = 1.0
CONFIG_FILE = "agent.json"


class Agent:
    """One container's agent. `folder` is the container's scratch folder."""

    def __init__(self, config: AgentConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._marker = os.environ[MARKER]
        self._lock = threading.Lock()
        self._server = control_server_of(config, self.handle)
        self._epoch = config.epoch
        self._called_s = time.monotonic()
        self._proc_start_cnt = 0
        self._order: StartOrder | None = None
        self._group: WorkerGroup | None = None
        self._state = AgentState.IDLE
        self._hang_check: HangCheck | None = None
        self._hang: HangReport | None = None
        self._coordinator_end: CoordinatorEnd | None = None
        self._staging_error: str | None = None
        self._free_port_of: tuple[tuple[int, int], int] | None = None  # of a command's attempt
        self._launcher = Launcher(folder, config.host)
        self._coordinator: AgentCoordinatorClient | None = None
        self._ending = False
        self._waking = WakeupSignal()
        self._checkpoint_server = CheckpointServerProcess(folder, config.host)
        self._sampling = Sampling(folder, self._send_sample)
        self._oom_kills_before = oom_kills()
        self._become(config)

    def _become(self, config: AgentConfig) -> None:
        """Be the agent of the member that a configuration names."""
        self._config = config
        self._checks = NodeChecks(config, self._folder)
        self._healing = NodeHealing(config, self._folder, self._launcher.fork)
        self._collector = Collector(config, self._folder)

    def run(self) -> None:
        """Serve until a shutdown order, or until no supervisor has called for too long."""
        become_subreaper()
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._server.start()
        publish_address(self._folder, self._config.host, self._server.port)
        if self._config.variables is not None:
            self._launcher.warm(self._config.variables)
        with self._waking:
            self._watch()
        # Saves that are nowhere else first, then logs; only then is ended what is left.
        self._checkpoint_server.close(self._order.grace_s if self._order else 0.0)
        self._launcher.close()
        self._collector.close(self._order, self._group)
        kill_container(self._marker)
        self._server.close()
        (self._folder / ADDRESS_FILE).unlink(missing_ok=True)

    def _watch(self) -> None:
        checked_s = 0.0
        while not (self._ending and self._is_quiet()):
            self._waking.sleep(TICK_S if self._is_busy() else HANG_CHECK_S)
            with self._lock:
                self._tick()
                if time.monotonic() - checked_s > HANG_CHECK_S - TICK_S:
                    checked_s = time.monotonic()
                    self._check_hang()
                    self._check_orphaned()

    def _is_busy(self) -> bool:
        """Whether there is more to do than to wait for the next end of a process."""
        return not self._is_quiet() and self._group is not None and self._group.is_ending

    def handle(self, request: Request) -> AgentReply:
        """Answer one request of a supervisor."""
        # These run programs. Under the lock, status would wait, and a silent node counts as lost.
        epoch, order = request.epoch, request.order
        match order:
            case RendezvousOrder():
                reply = self._open_rendezvous(epoch, order)
            case EvidenceQuery() | StacksQuery() | ReadLogsQuery():
                reply = self._read(epoch, order)
            case CheckOrder():
                reply = self._check(epoch, order)
            case SavedQuery():
                reply = self._refuse(epoch) or answer_saved_query(
                    order, self._config.node, self._config.member
                )
            case DevicesQuery():
                reply = self._refuse(epoch) or devices_reply(order, self._config.node)
            case NoticeOrder() | RejoinOrder():
                reply = self._refuse(epoch) or self._relay_to_coordinator(order)
            case KillOrder():
                reply = self._refuse(epoch) or kill_in_container(order, self._config, self._marker)
            case _:
                with self._lock:
                    reply = self._refuse(epoch) or self._obey(order)
        return reply

    def status(self) -> AgentStatus:
        """The status of this node."""
        return AgentStatus(
            node=self._config.node,
            member=self._config.member,
            state=self._state,
            schedule_cnt=self._config.schedule_cnt,
            proc_start_cnt=self._proc_start_cnt,
            placement=self._order.placement if self._order else 0,
            attempt=self._order.attempt if self._order else 0,
            workers=self._group.statuses() if self._group else (),
            is_command=self._order.is_command if self._order else False,
            is_launcher=self._order.is_launcher if self._order else False,
            ranks=self._group.command_statuses() if self._group else (),
            hang=self._hang,
            staging_error=self._staging_error,
            oom_kills=oom_kills() - self._oom_kills_before,
            output_bytes=self._group.log_bytes() if self._group else 0,
            saved=self._group.saved.newest if self._group and self._group.saved else (),
            shown=self._group.shown.newest if self._group and self._group.shown else None,
            left_running=self._group.left.processes if self._group else (),
            mended_retries=self._group.mended_retries() if self._group else {},
            sample=self._sampling.newest,
            metrics_url=metrics_url(self._attempt_folder(self._order)) if self._order else None,
            coordinator_end=self._coordinator_end,
            is_warm=self._launcher.is_warm,
        )

    def _obey(self, order: Order) -> AgentReply:
        reply = AgentReply()
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
                reply = self._read_log(order.offset)
            case LogsQuery():
                logs = self._group.logs(order.tail_bytes) if self._group is not None else ()
                reply = AgentReply(logs=logs)
            case ClockQuery():
                reply = AgentReply(at_s=time.time(), port=free_port(self._config.host))
            case CollectOrder():
                collected = self._collector.collect(order, self._order, self._group)
                reply = AgentReply(collected=collected)
            case HealOrder():
                reply = self._heal(order)
        return reply

    def _relay_to_coordinator(self, order: NoticeOrder | RejoinOrder) -> AgentReply:
        """Pass a message on, or go over to another coordinator: not under the lock."""
        with self._lock:
            start, group, client = self._order, self._group, self._coordinator
        key = (order.placement, order.attempt)
        if (
            start is None
            or (start.placement, start.attempt) != key
            or group is None
            or client is None
        ):
            return AgentReply(error="the attempt has no coordinator here")
        if isinstance(order, NoticeOrder):
            sent = client.send(order.message)
            return AgentReply(error=None if sent else "the coordinator cannot be reached")
        try:
            client.rejoin(order.coordinator)
        except OSError as error:
            return AgentReply(error=f"the coordinator cannot be reached: {error}")
        with self._lock:  # nothing that was silent without a coordinator hangs
            group.rejoin(order.coordinator)
            self._hang = None
            self._hang_check = HangCheck(self._config, start.is_command, self._marker)
        return AgentReply()

    def _read_log(self, offset: int) -> AgentReply:
        if self._group is None:
            return AgentReply(text="", offset=offset)
        text, offset = attempt_log.read_lines(self._group.folder / attempt_log.FILE_NAME, offset)
        return AgentReply(text=text, offset=offset)

    def _assign(self, order: AssignOrder) -> AgentReply:
        wanted = {"member": order.member, "schedule_cnt": order.schedule_cnt}
        config = self._config.model_copy(update=wanted)
        if config == self._config:
            return AgentReply()  # a repeated order
        if self._config.member != NO_MEMBER:
            return AgentReply(error=f"it is the container of member {self._config.member}")
        self._checks.end()
        self._become(config)
        return AgentReply()

    def _start(self, order: StartOrder) -> AgentReply:
        if self._ending:
            return AgentReply(error="the agent is shutting down")
        if self._config.member == NO_MEMBER:
            return AgentReply(error="it stands by, and is no member's container yet")
        if self._order and (order.placement, order.attempt) == (
            self._order.placement,
            self._order.attempt,
        ):
            return AgentReply()  # a repeated order, after a lost reply
        if not self._is_quiet():
            return AgentReply(
                error=f"attempt {self._order and self._order.attempt} is still running"
            )
        self._checks.end()
        self._healing.end()
        self._order, self._group = order, None
        self._hang, self._staging_error, self._coordinator_end = None, None, None
        self._hang_check = HangCheck(self._config, order.is_command, self._marker)
        self._oom_kills_before = oom_kills()
        self._state = AgentState.STAGING
        threading.Thread(target=self._stage_and_launch, args=(order,), daemon=True).start()
        return AgentReply()

    def _stage_and_launch(self, order: StartOrder) -> None:
        """Bring the token shards here, then start the workers; runs in a thread of its own."""
        try:
            stage_data(order, self._folder)
            variables = path_variables(self._config.node, order.variables)
            fetch_resume_checkpoint(order, self._config.member, variables)
            if not order.is_command:
                self._launcher.prepare(order.variables)
            secrets = values_on_node(
                order.job.env_from, delivered=order.delivered, environment=os.environ
            )
        except (StorageError, OSError, ValueError) as error:
            with self._lock:
                self._give_up(order, error)
            return
        with self._lock:
            if not self._is_staging(order):
                return
            try:
                self._launch(order, secrets)
            except (OSError, ValueError) as error:
                # The checkpoint server has saves that are nowhere else.
                kill_container(self._marker, spare=self._spare())
                if self._group is not None:
                    self._group.close_output()
                self._give_up(order, error)

    def _spare(self) -> frozenset[int]:
        """Processes of the container that outlive an attempt, or its workers."""
        return self._checkpoint_server.pids | self._launcher.pids

    def _is_staging(self, order: StartOrder) -> bool:
        """Whether this order still waits for its start: it may have been stopped meanwhile."""
        return self._state is AgentState.STAGING and self._order is order

    def _give_up(self, order: StartOrder, error: Exception) -> None:
        if self._is_staging(order):
            self._staging_error = f"{type(error).__name__}: {error}"
            self._group = None
            self._state = AgentState.ENDED

    def _launch(self, order: StartOrder, secrets: dict[str, str]) -> None:
        folder = self._attempt_folder(order)
        folder.mkdir(parents=True, exist_ok=True)
        job_file = folder / "job.json"
        write_whole(job_file, order.job.model_dump_json(), private=True)
        logs = (
            Path(order.log_path) / self._config.run_id / folder.name if order.log_path else folder
        )
        fork = None if order.is_command else self._launcher.fork
        self._group = WorkerGroup(
            self._config, order, self._marker, folder, logs, fork=fork, secret_variables=secrets
        )
        self._group.oom_kills = oom_kills
        environment = {
            **interface_variables(self._config.host),
            **os.environ,
            "PERDURE_JOB": str(job_file),
            "PERDURE_DATA_FOLDER": str(self._folder / DATA_FOLDER),
            "PERDURE_DATA_MANIFEST": order.data_manifest_key or "",
            "PERDURE_METRICS": str(folder / attempt_log.FILE_NAME),
        }
        environment |= self._start_checkpoint_server(order, job_file)
        environment |= self._join_coordinator(order, folder, self._group)
        self._group.spare = self._spare()
        self._group.start(
            environment, proc_start_cnt=self._proc_start_cnt + 1, generation=order.generation
        )
        self._proc_start_cnt += 1
        self._state = AgentState.RUNNING
        job = order.job
        if self._group.shown is not None:
            self._group.shown.start(partial(open_store, job.storage))
        if self._group.saved is not None:
            self._group.saved.start(partial(open_store, job.storage))
        self._sampling.begin(order.slots_per_node, job.watch.sample_every_s)

    def _start_checkpoint_server(self, order: StartOrder, job_file: Path) -> dict[str, str]:
        """Start a checkpoint server for session programs; returns its workers' variables."""
        if order.is_command:
            return {}
        job = order.job
        if not job.checkpoint.host_memory:
            return {}
        node_folder = Path(self._config.node_folder) if self._config.node_folder else None
        disk = disk_folder(job, node_folder)
        first = self._config.schedule_cnt if self._config.member == 0 else None
        name = self._checkpoint_server.ensure(job, job_file, disk, first_container=first)
        return {"PERDURE_CHECKPOINT_SERVER": name, "PERDURE_DISK_TIER": str(disk) if disk else ""}

    def _attempt_folder(self, order: StartOrder | HealOrder) -> Path:
        return self._folder / "attempts" / f"p{order.placement:04d}-a{order.attempt:04d}"

    def _join_coordinator(
        self, order: StartOrder, folder: Path, group: WorkerGroup
    ) -> dict[str, str]:
        """Call the attempt's coordinator; what workers need to do so."""
        if order.coordinator is None:
            return {}
        path = address_file(folder)
        write_whole(path, order.coordinator.model_dump_json(), private=True)
        self._coordinator = group.coordinator = AgentCoordinatorClient(
            order.coordinator,
            node=self._config.node,
            ranks=group.planned_ranks,
            on_replace=self._on_replace,
            on_give_up=partial(self._on_give_up, group),
            rejoin_s=order.rejoin_s,
        )
        return {"PERDURE_COORDINATOR": str(path)}

    def _send_sample(self, sample: NodeSample) -> None:
        if self._coordinator is not None:
            self._coordinator.send_sample(sample)

    def _on_replace(self, order: ReplaceWorker) -> None:
        with self._lock:
            group, start = self._group, self._order
            if self._state is not AgentState.RUNNING or group is None or start is None:
                return
            is_free = group.vacate(order.rank, order.generation)
            if is_free and order.check is not None:  # takes its time: not under the lock
                self._healing.check(start, order.check, partial(self._on_checked, group, order))
            elif is_free:
                group.fill(order.rank, order.generation)

    def _on_checked(self, group: WorkerGroup, order: ReplaceWorker, healing: ChipsHealed) -> None:
        why_not = None if healing.succeeded else healing.text
        with self._lock:
            group.fill(order.rank, order.generation, why_not=why_not)

    def _on_give_up(self, group: WorkerGroup, _why: str) -> None:
        with self._lock:
            if self._group is group:  # else it is of an attempt that is over
                group.release()
                self._waking.wake()

    def _stop(self, grace_s: float) -> None:
        self._waking.wake()
        if self._state is AgentState.STAGING:
            self._state = AgentState.ENDED
        elif self._state in (AgentState.RUNNING, AgentState.STOPPING) and self._group is not None:
            self._group.stop(grace_s)
            self._state = AgentState.STOPPING

    def _tick(self) -> None:
        if self._group is None or self._state not in (AgentState.RUNNING, AgentState.STOPPING):
            return
        self._coordinator_end = self._coordinator_end or self._launcher.coordinator_end()
        if self._group.poll():
            self._state = AgentState.ENDED
            self._sampling.end()
            if self._coordinator is not None:
                self._coordinator.close()
            self._launcher.close_coordinator()
        elif self._group.is_stopping:
            self._state = AgentState.STOPPING
            self._healing.end()
        elif self._checkpoint_server.revive(now_s=time.monotonic()):
            self._group.spare = self._spare()

    def _check_hang(self) -> None:
        if not self._config.detect_hangs or self._state is not AgentState.RUNNING:
            return
        if self._hang is not None and self._hang.ends_attempt:
            return
        client = self._coordinator
        if client is not None and not (client.is_open or client.is_closed):
            return  # the ranks wait for another coordinator
        assert self._group is not None  # noqa: S101 RUNNING implies a group
        assert self._hang_check is not None  # noqa: S101 likewise
        self._hang = self._hang_check.check(self._group, sample=self._sampling.newest)
        if self._hang_check.awaits_coordinator:
            limit_s = self._hang_check.stopped_limit_s
            self._launcher.end_stopped_coordinator(limit_s, now_s=time.monotonic())

    def _check_orphaned(self) -> None:
        if time.monotonic() - self._called_s > self._config.orphan_timeout_s:
            self._stop(self._order.grace_s if self._order else 0.0)
            self._ending = True

    def _open_rendezvous(self, epoch: int, order: RendezvousOrder) -> AgentReply:
        """Starts processes, which takes its time: not under the lock."""
        with self._lock:
            refused = self._refuse(epoch)
        if refused is not None:
            return refused
        start = order.start
        if not start.is_command:
            try:
                address = self._launcher.open_coordinator(order, self._attempt_folder(start))
            except OSError as error:
                return AgentReply(error=f"rendezvous: {error}")
            return AgentReply(port=address.store_port, coordinator=address)
        key = (start.placement, start.attempt)
        if self._free_port_of is None or self._free_port_of[0] != key:
            # A process that does not die may hold the port of the attempt before.
            wanted = (order.port, 0) if order.port else (0,)
            self._free_port_of = (key, free_port(self._config.host, ports=wanted))
        return AgentReply(port=self._free_port_of[1])

    def _refuse(self, epoch: int) -> AgentReply | None:
        """Take note of a supervisor's call, unless a newer one has called before."""
        if epoch < self._epoch:
            return AgentReply(error=f"epoch {epoch} is superseded by {self._epoch}")
        self._epoch = epoch
        self._called_s = time.monotonic()
        return None

    def _read(self, epoch: int, query: EvidenceQuery | StacksQuery | ReadLogsQuery) -> AgentReply:
        """Reads files of any size and runs other programs: not under the lock."""
        with self._lock:
            refused, group, order = self._refuse(epoch), self._group, self._order
            is_over = self._is_quiet()
        if refused is not None or group is None or order is None:
            return refused or AgentReply()
        match query:
            case EvidenceQuery():
                return AgentReply(texts=read_evidence(group, query.tail_bytes))
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

    def _check(self, epoch: int, order: CheckOrder) -> AgentReply:
        """Runs a program that takes its time: not under the lock."""
        with self._lock:
            refused = self._refuse(epoch)
            if refused is None and not self._is_quiet():
                refused = AgentReply(error="an attempt is running")
        return refused or AgentReply(checks=self._checks.run(order))

    def _heal(self, order: HealOrder) -> AgentReply:
        if not self._is_quiet():
            return AgentReply(error="an attempt is running")
        return AgentReply(healing=self._healing.heal(order, self._attempt_folder(order)))

    def _is_quiet(self) -> bool:
        return self._state in (AgentState.IDLE, AgentState.ENDED)

    def _on_terminate(self, _number: int, _frame: object) -> None:
        # The signal may arrive while this thread holds the lock; the loop does the rest.
        threading.Thread(target=self._terminate, daemon=True).start()

    def _terminate(self) -> None:
        with self._lock:
            self._stop(self._order.grace_s if self._order else 0.0)
            self._ending = True
