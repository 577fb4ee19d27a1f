"""One attempt on one node: from the order that starts it until none of its processes remains.

Staging, starting the workers, the connection to the coordinator, and the watch over hangs. Requests
and threads of the agent come in at the same time: methods expect the container's lock to be held
unless they say otherwise. Times are seconds of CLOCK_MONOTONIC unless a name states otherwise.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from perdure.storage.address import open_store
from perdure.storage.errors import StorageError
from perdure.storage.retry import Retry
from perdure.training.agent.checkpoint_server import CheckpointServerProcess
from perdure.training.agent.control import WakeupSignal
from perdure.training.agent.coordinator_client import (
    AgentCoordinatorClient,
    address_file,
    metrics_url,
)
from perdure.training.agent.hang_check import HangCheck
from perdure.training.agent.healing import NodeHealing
from perdure.training.agent.last_words import LastWordsCheck
from perdure.training.agent.launcher import Launcher
from perdure.training.agent.log_room import DiskRoom, give_up_logs, logs_of
from perdure.training.agent.obstacles import (
    SharedMemoryNames,
    describe_obstacles,
    remove_leftovers,
)
from perdure.training.agent.preparing import NodePreparation
from perdure.training.agent.sampler import PeriodicSampler
from perdure.training.agent.unmarked import UnmarkedRecord
from perdure.training.agent.workers import WorkerGroup
from perdure.training.commands.checkpoint_watch import (
    CommandCheckpointWatcher,
    fetch_resume_checkpoint,
    watch_checkpoints,
)
from perdure.training.config.job import Job
from perdure.training.config.secrets import values_on_node
from perdure.training.environment import interface_variables
from perdure.training.files import write_refusal, write_whole
from perdure.training.journal import attempt_log
from perdure.training.journal.events import ChipsHealed
from perdure.training.processes import kill_container, oom_kills
from perdure.training.recovery.protocol import ReplaceWorker
from perdure.training.trainer.data.manifest import load_manifest
from perdure.training.trainer.data.stage import stage
from perdure.training.wire.agent import (
    AgentConfig,
    AgentReply,
    NoticeOrder,
    RejoinOrder,
    StartOrder,
)
from perdure.training.wire.agent_status import (
    AgentState,
    AgentStatus,
    CoordinatorEnd,
    HangReport,
    Obstacle,
)
from perdure.training.wire.node import HealOrder, NodeSample
from perdure.training.wire.store_wait import StoreWaitNote, read_store_wait

DATA_FOLDER = "data"
OBSTACLES_TAIL_BYTES = 16 * 1024


@dataclass(slots=True)
class Container:
    """State and services that the attempts in a container share.

    Attributes:
        folder: the container's scratch folder.
        marker: mark of all of its processes, in their environment.
        lock: guards the state of the agent and its attempt.
        wakeup: wakes the agent's main thread.
        proc_start_cnt: highest MA_PROC_START_CNT that a process had here: starts of an attempt, and
            of processes that replaced others.
        unwritable: why the folder took no files when a start or a process failed last.
    """

    config: AgentConfig
    folder: Path
    marker: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    wakeup: WakeupSignal = field(default_factory=WakeupSignal)
    proc_start_cnt: int = 0
    unwritable: str = ""
    launcher: Launcher = field(init=False)
    checkpoint_server: CheckpointServerProcess = field(init=False)
    healing: NodeHealing = field(init=False)
    preparation: NodePreparation = field(init=False)
    sampler: PeriodicSampler = field(init=False)

    def __post_init__(self) -> None:
        """Prepare what outlives attempts; no process is started yet."""
        self.launcher = Launcher(self.folder, self.config.host)
        self.checkpoint_server = CheckpointServerProcess(self.folder, self.config.host)
        self.healing = NodeHealing(self.config, self.folder, self.launcher.fork)
        self.preparation = NodePreparation(self.folder, self.marker)
        self.sampler = PeriodicSampler(self.folder)

    def attempt_folder(self, order: StartOrder | HealOrder) -> Path:
        """Return the folder of an attempt."""
        return self.folder / "attempts" / f"p{order.placement:04d}-a{order.attempt:04d}"

    def make_room(self, job: Job, log_folder: Path | None, *, at_once: bool) -> None:
        """Give logs up where the disk is nearly full: that must not be the end of the run.

        Args:
            job: says how much of the disk is to be free.
            log_folder: where the newest attempt's logs lie; None: nothing has printed yet.
            at_once: else the sampler sees the disk first, so that an alert tells of it.
        """
        try:
            room = DiskRoom.of(self.folder)
        except OSError:
            return  # the next file that is written shows it
        low_percent = job.watch.disk_free_low_percent
        if not room.is_low(low_percent):
            return
        sample = self.sampler.newest
        seen_percent = sample.host.disk_free_percent if sample is not None else None
        is_seen = seen_percent is not None and seen_percent < low_percent
        if not (at_once or is_seen or room.is_critical(low_percent)):
            self.sampler.hasten()
            return
        with suppress(OSError):  # of a folder that is out of reach
            logs = logs_of(self.folder, log_folder)
            give_up_logs(logs, low_bytes=room.low_bytes(low_percent))

    def note_refusal(self, error: Exception | None, log_folder: Path | None = None) -> None:
        """Find out whether the node takes files, after a start or a process has failed.

        Args:
            error: ended the start; None: a process has failed.
            log_folder: where its logs lie.
        """
        folders = (self.folder, log_folder) if log_folder is not None else (self.folder,)
        self.unwritable = write_refusal(error, folders)

    @property
    def spare_pids(self) -> frozenset[int]:
        """Processes that outlive an attempt, or its workers."""
        return self.checkpoint_server.pids | self.launcher.pids


class NodeAttempt:
    """One attempt on this node, ordered by a supervisor."""

    def __init__(self, order: StartOrder, container: Container) -> None:
        self.order = order
        self.state = AgentState.STAGING
        self.group: WorkerGroup | None = None
        self._container = container
        self._config = container.config
        self._folder = container.attempt_folder(order)
        self._hang_check = self._new_hang_check()
        self._last_words = LastWordsCheck()
        self._hang: HangReport | None = None
        self._coordinator: AgentCoordinatorClient | None = None
        self._coordinator_end: CoordinatorEnd | None = None
        self._staging_error: str | None = None
        self._obstacles: tuple[Obstacle, ...] = ()
        self._shared_memory: SharedMemoryNames | None = None
        self._unmarked = UnmarkedRecord(container.folder, container.marker)
        self._oom_kills_before = oom_kills()

    def _new_hang_check(self) -> HangCheck:
        order = self.order
        return HangCheck(
            self._config,
            order.is_command,
            self._container.marker,
            start_factor=order.start_factor,
            ends_slow_start=order.ends_slow_start,
        )

    @property
    def key(self) -> tuple[int, int]:
        """Placement and attempt."""
        return self.order.placement, self.order.attempt

    @property
    def is_over(self) -> bool:
        """Whether none of its processes remains."""
        return self.state is AgentState.ENDED

    @property
    def is_ending(self) -> bool:
        """Whether some of its processes have ended, so that more is to be done soon."""
        return not self.is_over and self.group is not None and self.group.is_ending

    def start(self) -> None:
        """Begin to stage and launch; returns at once."""
        threading.Thread(target=self._stage_and_launch, daemon=True).start()

    def status(self) -> AgentStatus:
        """Return the status of the node."""
        config, order, container, group = self._config, self.order, self._container, self.group
        watcher = group.checkpoint_watcher if group is not None else None
        follower = group.step_follower if group is not None else None
        return AgentStatus(
            node=config.node,
            member=config.member,
            state=self.state,
            schedule_cnt=config.schedule_cnt,
            proc_start_cnt=container.proc_start_cnt,
            placement=order.placement,
            attempt=order.attempt,
            workers=group.statuses() if group else (),
            is_command=order.is_command,
            is_launcher=order.is_launcher,
            ranks=group.command_statuses() if group else (),
            world_size=group.world_size if group else 0,
            hang=self._hang,
            staging_error=self._staging_error,
            oom_kills=oom_kills() - self._oom_kills_before,
            output_bytes=group.output.size_bytes(group.ranks) if group else 0,
            saved=watcher.newest if watcher is not None else (),
            shown=follower.newest if follower is not None else None,
            left_running=group.leftovers.processes if group else (),
            former_ranks=group.former_ranks() if group else (),
            obstacles=self._obstacles,
            mended_retries=group.output.mended_retries(group.ranks) if group else {},
            sample=container.sampler.newest,
            metrics_url=metrics_url(self._folder),
            coordinator_end=self._coordinator_end,
            is_warm=container.launcher.is_warm,
            unwritable=container.unwritable,
            store_wait=read_store_wait(container.folder),
        )

    def read_steps(self, offset: int) -> AgentReply:
        """Read whole lines of the attempt's log from an offset."""
        if self.group is None:
            return AgentReply(text="", offset=offset)
        text, offset = attempt_log.read_lines(self._folder / attempt_log.FILE_NAME, offset)
        return AgentReply(text=text, offset=offset)

    def relay(self, order: NoticeOrder | RejoinOrder) -> AgentReply:
        """Pass a message to the coordinator, or connect to another; not under the lock."""
        with self._container.lock:
            group, client = self.group, self._coordinator
        if self.key != (order.placement, order.attempt) or group is None or client is None:
            return AgentReply(error="the attempt has no coordinator here")
        if isinstance(order, NoticeOrder):
            sent = client.send(order.message)
            return AgentReply(error=None if sent else "the coordinator cannot be reached")
        try:
            client.rejoin(order.coordinator)
        except OSError as error:
            return AgentReply(error=f"the coordinator cannot be reached: {error}")
        with self._container.lock:  # ranks that were silent without a coordinator do not hang
            group.rejoin(order.coordinator)
            self._hang = None
            self._hang_check = self._new_hang_check()
        return AgentReply()

    def stop(self, grace_s: float) -> None:
        """Ask the workers to end; `poll` ends them by force after the grace period."""
        if self.state is AgentState.STAGING:
            self.state = AgentState.ENDED
        elif self.state in (AgentState.RUNNING, AgentState.STOPPING) and self.group is not None:
            self.group.stop(grace_s)
            self.state = AgentState.STOPPING

    def poll(self) -> None:
        """Notice ends of processes and go on with stopping."""
        if self.order.is_command and not self.is_over:
            self._unmarked.update()
        if self.group is None or self.state not in (AgentState.RUNNING, AgentState.STOPPING):
            return
        container = self._container
        self._coordinator_end = self._coordinator_end or container.launcher.coordinator_end()
        if self.group.poll():
            self._clear_up(self.group)
            self.state = AgentState.ENDED
            container.sampler.end()
            if self._coordinator is not None:
                self._coordinator.close()
            container.launcher.close_coordinator()
        elif self.group.is_stopping:
            self.state = AgentState.STOPPING
            container.healing.end()
        elif container.checkpoint_server.revive(now_s=time.monotonic()):
            self.group.spare = container.spare_pids

    def check_last_words(self) -> None:
        """End workers that live on after an exception has ended their program."""
        if self.group is not None and self.state is AgentState.RUNNING:
            self._last_words.check(self.group)

    def _clear_up(self, group: WorkerGroup) -> None:
        """Remove what the processes left in shared memory, and find out what was in their way."""
        if self._shared_memory is not None:
            self._shared_memory.remove_new(group.known_pids)
        if group.has_failed:
            tails = (log.text for log in group.output.tails(group.ranks, OBSTACLES_TAIL_BYTES))
            self._obstacles = describe_obstacles(tails, since_s=self.order.created_s)
            self._container.note_refusal(None, group.output.log_folder)

    def make_room(self) -> None:
        """Give logs up where the disk is nearly full."""
        if self.group is not None and not self.is_over:
            self._container.make_room(self.order.job, self.group.output.log_folder, at_once=False)

    def check_hang(self) -> None:
        """Judge whether the workers make progress."""
        if not self._config.detect_hangs or self.state is not AgentState.RUNNING:
            return
        if self.group is None or (self._hang is not None and self._hang.ends_attempt):
            return
        client = self._coordinator
        if client is not None and not (client.is_open or client.is_closed):
            return  # the ranks wait for another coordinator
        container = self._container
        self._hang = self._hang_check.check(self.group, sample=container.sampler.newest)
        if self._hang_check.awaits_coordinator:
            limit_s = self._hang_check.stopped_limit_s
            container.launcher.end_stopped_coordinator(limit_s, now_s=time.monotonic())

    def _stage_and_launch(self) -> None:
        """Fetch data and checkpoint, then start the workers; runs in a thread of its own."""
        order, container = self.order, self._container
        container.make_room(order.job, None, at_once=True)
        try:
            self._stage_data()
            fetch_resume_checkpoint(order, self._config.node, self._config.member)
            watcher = watch_checkpoints(order, self._config.node, self._config.member)
            if not order.is_command:
                container.launcher.prepare(order.variables)
            remove_leftovers(order.leftovers, since_s=order.created_s)
            self._shared_memory = SharedMemoryNames()
            sources = order.job.env_from
            secrets = values_on_node(sources, delivered=order.delivered, environment=os.environ)
        except (StorageError, OSError, ValueError) as error:
            with container.lock:
                self._fail_staging(error)
            return
        with container.lock:
            if self.state is not AgentState.STAGING:
                return  # it was stopped meanwhile
            try:
                self._launch(secrets, watcher)
            except (OSError, ValueError) as error:
                # The checkpoint server may hold the only copy of a save.
                kill_container(container.marker, spare=container.spare_pids)
                if self.group is not None:
                    self.group.close_output()
                self._fail_staging(error)

    def _stage_data(self) -> None:
        """Fetch the token shards of a session program into the container's folder."""
        if self.order.data_manifest_key is not None:
            note = StoreWaitNote(self._container.folder, "agent")
            retry = Retry.patient(on_failure=note.failed, on_success=note.passed)
            store = open_store(self.order.job.storage, retry=retry)
            manifest = load_manifest(store, self.order.data_manifest_key)
            stage(manifest, store, self._container.folder / DATA_FOLDER)

    def _fail_staging(self, error: Exception) -> None:
        if self.state is AgentState.STAGING:
            self._staging_error = f"{type(error).__name__}: {error}"
            log_path = self.order.log_path
            self._container.note_refusal(error, Path(log_path) if log_path else None)
            self.group = None
            self.state = AgentState.ENDED

    def _launch(self, secrets: dict[str, str], watcher: CommandCheckpointWatcher | None) -> None:
        order, container, folder = self.order, self._container, self._folder
        folder.mkdir(parents=True, exist_ok=True)
        job_file = folder / "job.json"
        write_whole(job_file, order.job.model_dump_json(), private=True)
        base = Path(order.log_path) / self._config.run_id if order.log_path else None
        self.group = WorkerGroup(
            self._config,
            order,
            container.marker,
            folder,
            base / folder.name if base is not None else folder,
            fork=None if order.is_command else container.launcher.fork,
            secret_variables=secrets,
            oom_kills=oom_kills,
            checkpoint_watcher=watcher,
        )
        environment = {
            **interface_variables(self._config.host),
            **os.environ,
            "PERDURE_JOB": str(job_file),
            "PERDURE_DATA_FOLDER": str(container.folder / DATA_FOLDER),
            "PERDURE_DATA_MANIFEST": order.data_manifest_key or "",
            "PERDURE_METRICS": str(folder / attempt_log.FILE_NAME),
        }
        environment |= self._start_checkpoint_server(job_file)
        environment |= self._join_coordinator(self.group)
        self.group.spare = container.spare_pids
        self.group.start(
            environment,
            proc_start_cnt=container.proc_start_cnt + 1,
            generation=order.generation,
        )
        container.proc_start_cnt += 1
        container.unwritable = ""
        self.state = AgentState.RUNNING
        job = order.job
        for follower in (self.group.step_follower, self.group.checkpoint_watcher):
            if follower is not None:
                follower.start(partial(open_store, job.storage))
        container.sampler.begin(order.slots_per_node, job.watch.sample_every_s, self._send_sample)

    def _start_checkpoint_server(self, job_file: Path) -> dict[str, str]:
        """Start a checkpoint server for session programs. Returns its workers' variables."""
        job = self.order.job
        if self.order.is_command or not job.checkpoint.host_memory:
            return {}
        disk = _disk_folder(job, self._config)
        first = self._config.schedule_cnt if self._config.member == 0 else None
        server = self._container.checkpoint_server
        name = server.ensure(job, job_file, disk, first_container=first)
        return {"PERDURE_CHECKPOINT_SERVER": name, "PERDURE_DISK_TIER": str(disk) if disk else ""}

    def _join_coordinator(self, group: WorkerGroup) -> dict[str, str]:
        """Connect to the attempt's coordinator. Returns the variables that workers need for it."""
        if self.order.coordinator is None:
            return {}
        path = address_file(self._folder)
        write_whole(path, self.order.coordinator.model_dump_json(), private=True)
        self._coordinator = group.coordinator = AgentCoordinatorClient(
            self.order.coordinator,
            node=self._config.node,
            ranks=group.planned_ranks,
            on_replace=self._replace_worker,
            on_give_up=partial(self._release, group),
            rejoin_s=self.order.rejoin_s,
        )
        return {"PERDURE_COORDINATOR": str(path)}

    def _send_sample(self, sample: NodeSample) -> None:
        if self._coordinator is not None:
            self._coordinator.send_sample(sample)

    def _replace_worker(self, order: ReplaceWorker) -> None:
        with self._container.lock:
            group = self.group
            if self.state is not AgentState.RUNNING or group is None:
                return
            is_free = group.vacate(order.rank, order.generation)
            if is_free and order.check is not None:  # takes its time: not under the lock
                fill = partial(self._fill_after_check, group, order)
                self._container.healing.check(self.order, order.check, fill)
            elif is_free:
                self._fill(group, order)

    def _fill_after_check(
        self, group: WorkerGroup, order: ReplaceWorker, healing: ChipsHealed
    ) -> None:
        why_not = None if healing.succeeded else healing.text
        with self._container.lock:
            self._fill(group, order, why_not=why_not)

    def _fill(self, group: WorkerGroup, order: ReplaceWorker, why_not: str | None = None) -> None:
        group.fill(order.rank, order.generation, why_not=why_not)
        self._container.proc_start_cnt = max(self._container.proc_start_cnt, group.proc_start_cnt)

    def _release(self, group: WorkerGroup, _why: str) -> None:
        with self._container.lock:
            if self.group is group:
                group.release()
                self._container.wakeup.wake()


def _disk_folder(job: Job, config: AgentConfig) -> Path | None:
    """Return the folder of the node's disk tier, None when the job has none."""
    is_wanted = job.checkpoint.node_disk
    if is_wanted is None:
        is_wanted = job.storage.folder is None
    return Path(config.node_folder) / "checkpoints" if is_wanted and config.node_folder else None
