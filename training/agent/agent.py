"""The node agent: first process of a container, owner of everything that runs in it.

It starts and stops workers on a supervisor's orders, counts process starts, watches exits and
heartbeats, and keeps living when the supervisor does not: the attempt goes on, and its outcome
waits to be asked for. Without any supervisor for `orphan_timeout_s` it stops its workers and
ends (fencing). Times are seconds of CLOCK_MONOTONIC unless a name says otherwise.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from storage.address import open_store
from storage.errors import StorageError
from training.agent.control import ControlServer
from training.agent.evidence import device_health, device_logs, tail
from training.agent.processes import MARKER, become_subreaper, kill_container
from training.agent.protocol import (
    AgentAddress,
    AgentConfig,
    AgentState,
    AgentStatus,
    EvidenceQuery,
    HangReport,
    LogsQuery,
    MetricsQuery,
    Order,
    RendezvousOrder,
    Reply,
    Request,
    ShutdownOrder,
    StartOrder,
    StatusQuery,
    StopOrder,
    WorkerLog,
)
from training.agent.workers import WorkerGroup
from training.job import Job
from training.monitor.hang import Hang, HangDetector
from training.trainer.data.manifest import load_manifest
from training.trainer.data.stage import stage

TICK_S = 0.05
HANG_CHECK_S = 1.0
ADDRESS_FILE = "address.json"
CONFIG_FILE = "agent.json"
DATA_FOLDER = "data"


class Agent:
    """One container's agent. `folder` is the container's scratch folder."""

    def __init__(self, config: AgentConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._marker = os.environ[MARKER]
        self._lock = threading.Lock()
        self._server = ControlServer(config.host, config.token, self.handle)
        self._epoch = config.epoch
        self._heard_s = time.monotonic()
        self._proc_start_cnt = 0
        self._order: StartOrder | None = None
        self._group: WorkerGroup | None = None
        self._state = AgentState.IDLE
        self._detector = self._new_detector()
        self._hang: HangReport | None = None
        self._staging_error: str | None = None
        self._rendezvous: Any = None  # keeps the TCPStore server of the attempt alive
        self._rendezvous_of: tuple[int, int, int] | None = None  # placement, attempt, port
        self._ending = False
        self._oom_kills_before = _oom_kills()

    def run(self) -> None:
        """Serve until told to shut down, or until no supervisor has been heard for too long."""
        become_subreaper()
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._server.start()
        self._publish_address()
        checked_s = 0.0
        while not (self._ending and self._is_quiet()):
            time.sleep(TICK_S)
            with self._lock:
                self._tick()
                if time.monotonic() - checked_s > HANG_CHECK_S:
                    checked_s = time.monotonic()
                    self._check_hang()
                    self._check_orphaned()
        kill_container(self._marker)
        self._server.close()
        (self._folder / ADDRESS_FILE).unlink(missing_ok=True)

    def handle(self, request: Request) -> Reply:
        """Answer one request of a supervisor."""
        if isinstance(request.order, RendezvousOrder) and request.order.host_store:
            _tcp_store_class()  # imports torch: not under the lock, it takes seconds
        if isinstance(request.order, EvidenceQuery):
            return self._evidence(request.epoch, request.order.tail_bytes)
        with self._lock:
            if request.epoch < self._epoch:
                return Reply(error=f"epoch {request.epoch} is superseded by {self._epoch}")
            self._epoch = request.epoch
            self._heard_s = time.monotonic()
            return self._obey(request.order)

    def status(self) -> AgentStatus:
        """How this node stands."""
        return AgentStatus(
            node=self._config.node,
            member=self._config.member,
            state=self._state,
            schedule_cnt=self._config.schedule_cnt,
            proc_start_cnt=self._proc_start_cnt,
            placement=self._order.placement if self._order else 0,
            attempt=self._order.attempt if self._order else 0,
            workers=self._group.statuses() if self._group else (),
            hang=self._hang,
            staging_error=self._staging_error,
            oom_kills=_oom_kills() - self._oom_kills_before,
        )

    def _obey(self, order: Order) -> Reply:
        reply = Reply()
        match order:
            case StartOrder():
                reply = self._start(order)
            case StopOrder():
                self._stop(order.grace_s)
            case ShutdownOrder():
                self._stop(order.grace_s)
                self._ending = True
            case RendezvousOrder():
                reply = self._open_rendezvous(order)
            case StatusQuery():
                reply = Reply(status=self.status())
            case MetricsQuery():
                reply = self._metrics(order.offset)
            case LogsQuery():
                reply = Reply(logs=self._logs(order.tail_bytes))
        return reply

    def _start(self, order: StartOrder) -> Reply:
        if self._ending:
            return Reply(error="the agent is shutting down")
        if self._order and (order.placement, order.attempt) == (
            self._order.placement,
            self._order.attempt,
        ):
            return Reply()  # a repeated order, after a lost reply
        if not self._is_quiet():
            return Reply(error=f"attempt {self._order and self._order.attempt} is still running")
        self._order, self._group = order, None
        self._hang, self._staging_error = None, None
        self._detector = self._new_detector()
        self._oom_kills_before = _oom_kills()
        self._state = AgentState.STAGING
        threading.Thread(target=self._stage_and_launch, args=(order,), daemon=True).start()
        return Reply()

    def _stage_and_launch(self, order: StartOrder) -> None:
        """Bring the token shards here, then start the workers; runs in a thread of its own."""
        try:
            if order.data_manifest_key is not None:
                _stage_data(order, self._folder)
        except (StorageError, OSError, ValueError) as error:
            with self._lock:
                self._give_up(order, error)
            return
        with self._lock:
            if not self._is_staging(order):
                return
            try:
                self._launch(order)
            except (OSError, ValueError) as error:
                kill_container(self._marker)
                self._give_up(order, error)

    def _is_staging(self, order: StartOrder) -> bool:
        """Whether this order still waits for its start: it may have been stopped meanwhile."""
        return self._state is AgentState.STAGING and self._order is order

    def _give_up(self, order: StartOrder, error: Exception) -> None:
        if self._is_staging(order):
            self._staging_error = f"{type(error).__name__}: {error}"
            self._group = None
            self._state = AgentState.ENDED

    def _launch(self, order: StartOrder) -> None:
        name = f"p{order.placement:04d}-a{order.attempt:04d}"
        folder = self._folder / "attempts" / name
        folder.mkdir(parents=True, exist_ok=True)
        job_file = folder / "job.json"
        job_file.write_text(order.job, encoding="utf-8")
        logs = Path(order.log_path) / self._config.run_id / name if order.log_path else folder
        self._group = WorkerGroup(self._config, order, self._marker, folder, logs)
        environment = {
            **os.environ,
            "PERDURE_JOB": str(job_file),
            "PERDURE_DATA_FOLDER": str(self._folder / DATA_FOLDER),
            "PERDURE_DATA_MANIFEST": order.data_manifest_key or "",
            "PERDURE_METRICS": str(folder / "metrics.jsonl"),
        }
        self._group.start(environment, proc_start_cnt=self._proc_start_cnt + 1)
        self._proc_start_cnt += 1
        self._state = AgentState.RUNNING

    def _stop(self, grace_s: float) -> None:
        if self._state is AgentState.STAGING:
            self._state = AgentState.ENDED
        elif self._state in (AgentState.RUNNING, AgentState.STOPPING) and self._group is not None:
            self._group.stop(grace_s)
            self._state = AgentState.STOPPING

    def _tick(self) -> None:
        if self._group is None or self._state not in (AgentState.RUNNING, AgentState.STOPPING):
            return
        if self._group.poll():
            self._state = AgentState.ENDED
        elif self._group.is_stopping:
            self._state = AgentState.STOPPING

    def _check_hang(self) -> None:
        if not self._config.detect_hangs or self._state is not AgentState.RUNNING or self._hang:
            return
        group = self._group
        assert group is not None  # noqa: S101 RUNNING implies a group
        verdict = self._detector.judge(
            group.heartbeats(),
            mute=group.mute_ranks(),
            now_s=time.monotonic(),
            since_s=group.started_s,
        )
        if verdict is not None:
            self._hang = _report(verdict, group.rank_of(verdict.local_rank))

    def _check_orphaned(self) -> None:
        if time.monotonic() - self._heard_s > self._config.orphan_timeout_s:
            self._stop(self._order.grace_s if self._order else 0.0)
            self._ending = True

    def _open_rendezvous(self, order: RendezvousOrder) -> Reply:
        key = (order.placement, order.attempt)
        if self._rendezvous_of is not None and self._rendezvous_of[:2] == key:
            return Reply(port=self._rendezvous_of[2])
        self._rendezvous = None  # the port of the attempt before must be free again
        port = order.port or _free_port(self._config.host)
        if order.host_store:
            try:
                self._rendezvous = _tcp_store_class()(
                    self._config.host, order.port, is_master=True, wait_for_workers=False
                )
            except (OSError, RuntimeError) as error:
                return Reply(error=f"rendezvous port {order.port}: {error}")
            port = self._rendezvous.port
        self._rendezvous_of = (*key, port)
        return Reply(port=port)

    def _metrics(self, offset: int) -> Reply:
        path = self._group.folder / "metrics.jsonl" if self._group else None
        if path is None or not path.exists():
            return Reply(text="", offset=offset)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(1 << 20)
        whole = data[: data.rfind(b"\n") + 1]
        return Reply(text=whole.decode(), offset=offset + len(whole))

    def _logs(self, tail_bytes: int) -> tuple[WorkerLog, ...]:
        if self._group is None:
            return ()
        paths = [(r, self._group.log_path(r, s)) for r in self._group.ranks for s in _STREAMS]
        return tuple(
            WorkerLog(rank=rank, path=str(path), text=tail(path, tail_bytes))
            for rank, path in paths
            if path.exists()
        )

    def _evidence(self, epoch: int, tail_bytes: int) -> Reply:
        """Runs the driver's tools, which take their time: not under the lock."""
        with self._lock:
            if epoch < self._epoch:
                return Reply(error=f"epoch {epoch} is superseded by {self._epoch}")
            self._heard_s = time.monotonic()
            group = self._group
        if group is None:
            return Reply()
        devices = range(self._order.slots_per_node if self._order else 0)
        logs = device_logs(group.log_folder, group.ranks, tail_bytes)
        return Reply(texts=(*logs, *device_health(devices)))

    def _is_quiet(self) -> bool:
        return self._state in (AgentState.IDLE, AgentState.ENDED)

    def _on_terminate(self, _number: int, _frame: object) -> None:
        # The signal may arrive while this thread holds the lock; the loop does the rest.
        threading.Thread(target=self._terminate, daemon=True).start()

    def _terminate(self) -> None:
        with self._lock:
            self._stop(self._order.grace_s if self._order else 0.0)
            self._ending = True

    def _new_detector(self) -> HangDetector:
        return HangDetector(self._config.start_timeout_s, self._config.hang_timeout_s)

    def _publish_address(self) -> None:
        address = AgentAddress(
            pid=os.getpid(),
            process_started_s=psutil.Process().create_time(),
            host=self._config.host,
            port=self._server.port,
        )
        temporary = self._folder / f"{ADDRESS_FILE}.tmp"
        temporary.write_text(address.model_dump_json(), encoding="utf-8")
        temporary.replace(self._folder / ADDRESS_FILE)


_STREAMS = ("stderr", "stdout")


def _stage_data(order: StartOrder, folder: Path) -> None:
    assert order.data_manifest_key is not None  # noqa: S101 checked by the caller
    store = open_store(Job.model_validate_json(order.job).storage)
    stage(load_manifest(store, order.data_manifest_key), store, folder / DATA_FOLDER)


def _report(verdict: Hang, rank: int) -> HangReport:
    return HangReport(
        rank=rank,
        silent_s=verdict.silent_s,
        limit_s=verdict.limit_s,
        phase=verdict.phase.name.lower(),
        step=verdict.step,
    )


def _tcp_store_class() -> Any:
    """What hosts a rendezvous; the agent owns it, so that any rank may die."""
    # Only the first node's agent needs torch, and only for this.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    return TCPStore


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _oom_kills(
    read: Callable[[Path], str] = lambda path: path.read_text(encoding="ascii"),
) -> int:
    """How often the kernel killed for memory on this host, 0 where it does not say."""
    try:
        lines = read(Path("/proc/vmstat")).splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
