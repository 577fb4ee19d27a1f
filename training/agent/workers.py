"""The worker processes of one attempt on one node: start, watch, stop.

Each worker leads a session of its own. Stopping is SIGTERM to the workers, then to the processes
that outlive them, then SIGKILL after the grace period; `poll` drives it, so that the agent goes on
answering meanwhile. Times are seconds.
"""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from perdure.training.agent.coordinator_client import AgentCoordinatorClient, address_file
from perdure.training.agent.fork_server import Fork, ForkedProcess
from perdure.training.agent.preparation import (
    PROC_START_CNT,
    attempt_variables,
    platform_variables,
    rank_variables,
)
from perdure.training.agent.worker_output import ASCEND_PATH, STREAMS, WorkerOutput
from perdure.training.agent.worker_process import SessionActivity, Worker, read_error, start_command
from perdure.training.commands.arguments import fill_in_variables
from perdure.training.commands.checkpoint_watch import CommandCheckpointWatcher
from perdure.training.commands.leftovers import Leftovers
from perdure.training.commands.msrun import MsrunGang
from perdure.training.commands.progress import StepFollower
from perdure.training.commands.ranks import CommandRanks
from perdure.training.diagnosis.ending import explain_early_end
from perdure.training.diagnosis.exits import was_killed
from perdure.training.files import write_whole
from perdure.training.liveness.heartbeat import ANY_RANK, Heartbeat, HeartbeatReader
from perdure.training.masking import mask_text
from perdure.training.processes import (
    StacksTarget,
    container_processes,
    reap_adopted,
    signal_all,
)
from perdure.training.recovery.protocol import NotReplaced, WorkerEnded
from perdure.training.wire.agent import AgentConfig, StartOrder
from perdure.training.wire.agent_status import FormerRank, RankStatus, WorkerStatus
from perdure.training.wire.coordinator import CoordinatorAddress

_log = logging.getLogger("perdure.agent")

# After the first failure the other workers get this long to record what happened to them before
# they are stopped: the diagnosis separates the first cause from its consequences.
SETTLE_S = 1.0
WORKER_FUNCTION = "perdure.training.runtime.worker:run"
GENERATION = "PERDURE_GENERATION"  # set for a process that replaces another


@dataclass(slots=True)
class WorkerGroup:
    """The processes of one attempt on this node.

    Attributes:
        folder: where heartbeats, error files and, unless the job says otherwise, logs lie.
        started_s: CLOCK_MONOTONIC when the processes were started.
        spare: pids of the container that do not belong to the attempt.
        fork: starts session programs; None: they are started like commands.
        coordinator: connection that may order a replacement; None: every failure ends the attempt.
        secret_variables: variables from the job's env_from.
        oom_kills: counts the kernel's kills for lack of memory.
        leftovers: processes that a command left running when it exited with 0.
        activity: activity of processes that have completed no step, by pid; the hang check sets it.
        step_follower: steps in the output of a command; None: the job does not say how to read it.
        checkpoint_watcher: checkpoints of a command; None: the job does not say where they lie.
        msrun: what MindSpore's launcher has started, if the command runs it.
    """

    config: AgentConfig
    order: StartOrder
    marker: str
    folder: Path
    log_folder: InitVar[Path]
    started_s: float = 0.0
    spare: frozenset[int] = frozenset()
    fork: Callable[[Fork], ForkedProcess | subprocess.Popen[bytes]] | None = None
    coordinator: AgentCoordinatorClient | None = None
    secret_variables: Mapping[str, str] = field(default_factory=dict)
    oom_kills: Callable[[], int] = lambda: 0
    activity: Mapping[int, SessionActivity] = field(default_factory=dict)
    leftovers: Leftovers = field(default_factory=Leftovers)
    step_follower: StepFollower | None = None
    checkpoint_watcher: CommandCheckpointWatcher | None = None
    output: WorkerOutput = field(init=False)
    msrun: MsrunGang | None = None
    _environment: dict[str, str] = field(default_factory=dict)
    _command: CommandRanks | None = None
    _oom_kills_before: int = 0
    _workers: list[Worker] = field(default_factory=list)
    _start_counts: list[int] = field(default_factory=list)  # of each local rank's place
    _first_failure_s: float | None = None
    _kill_at_s: float | None = None
    _is_swept: bool = False
    _started_pids: set[int] = field(default_factory=set)

    def __post_init__(self, log_folder: Path) -> None:
        """Name the logs."""
        self.output = WorkerOutput(self.config, self.order, self.folder, log_folder)

    def start(
        self, environment: dict[str, str], *, proc_start_cnt: int, generation: int | None = None
    ) -> None:
        """Start one process per slot, or one per node for a launcher.

        Args:
            environment: variables of all processes.
            proc_start_cnt: starts of processes in this container, this one included.
            generation: generation that they join; None: they begin together with all others.
        """
        self.started_s = time.monotonic()
        self._oom_kills_before = self.oom_kills()
        self._environment = {
            **attempt_variables(environment, self.order, self.secret_variables),
            **platform_variables(self.config, self.order, self.folder, proc_start_cnt),
        }
        if self.order.rank_table is not None:
            file = self.folder / "hccl.json"
            write_whole(file, self.order.rank_table)
            self._environment["RANK_TABLE_FILE"] = str(file)
        self.output.open(self._environment, is_masked=bool(self.secret_variables))
        logs = [self.output.path(r, s) for s in reversed(STREAMS) for r in self.planned_ranks]
        self.step_follower = StepFollower.of(self.order, self.folder, tuple(logs))
        self.checkpoint_watcher = self.checkpoint_watcher or CommandCheckpointWatcher.of(
            self.order, self.config.member, self._environment
        )
        joins = {GENERATION: str(generation)} if generation is not None else {}
        for local_rank in range(len(self.planned_ranks)):
            self._workers.append(self._start(local_rank, **joins))
            self._start_counts.append(proc_start_cnt)
        if self.order.is_command:
            self._command = CommandRanks(list(self.pids().values()), self.folder)
        if self.order.is_launcher:
            self.msrun = MsrunGang(self.marker, logs)

    @property
    def proc_start_cnt(self) -> int:
        """The highest number of starts that a rank has seen in this container."""
        return max(self._start_counts, default=0)

    @property
    def planned_ranks(self) -> Sequence[int]:
        """Global ranks that run on this node once it is started."""
        count = 1 if self.order.is_launcher else self.order.slots_per_node
        return [self.config.member * count + local for local in range(count)]

    def _start(self, local_rank: int, **further: str) -> Worker:
        rank = self.planned_ranks[local_rank]
        error_file = self.folder / f"error-{local_rank}.json"
        beating = ANY_RANK if self.order.is_command else local_rank
        variables = {
            **self._environment,
            ASCEND_PATH: str(self.output.device_folder(rank)),
            **rank_variables(self.config, self.order, rank, local_rank),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "PERDURE_HEARTBEAT": str(self.folder / f"heartbeat-{beating}"),
            **further,
        }
        if self.order.is_command:
            variables = fill_in_variables(variables, self.order.job.env)
        process = self._spawn(rank, variables)
        self._started_pids.add(process.pid)
        named = rank if self.order.is_command else local_rank  # ranks of a command name the file
        reader = HeartbeatReader.of(self.folder, named)
        return Worker(rank, local_rank, process, error_file, reader)

    def rejoin(self, address: CoordinatorAddress) -> None:
        """Let the workers, and those that replace them, find a coordinator elsewhere."""
        port = str(address.store_port)
        self._environment |= {"MASTER_ADDR": address.host, "MASTER_PORT": port}
        write_whole(address_file(self.folder), address.model_dump_json(), private=True)
        for worker in self._workers:
            # The previous coordinator has not answered this end.
            if worker.awaits_answer and not self._report_end(worker):
                self._note_failure()

    def vacate(self, rank: int, generation: int) -> bool:
        """End a rank's process if it still lives, and keep its place for one of this generation.

        Returns whether a process may be started: none is once the attempt ends.
        """
        if self._kill_at_s is not None:
            return False
        worker = self._workers[self.ranks.index(rank)]
        # A living process causes no failure, should no other take its place.
        worker.stopped_by_agent = worker.stopped_by_agent or worker.process.poll() is None
        worker.kill()
        if worker.process.poll() is None:
            _log.error(f"rank {rank} is not replaced: its process does not end")
            self._note_failure()
            self.release()
            return False
        self._note_end(worker)
        worker.awaits_answer, worker.next_generation = True, generation
        return True

    def fill(self, rank: int, generation: int, *, why_not: str | None = None) -> None:
        """Start the process that a rank's place is kept for, if it still is.

        Args:
            rank: global rank.
            generation: generation that the process joins.
            why_not: why it cannot be started; None: it is.
        """
        local_rank = self.ranks.index(rank)
        previous = self._workers[local_rank]
        if not previous.awaits_answer or previous.next_generation != generation:
            return  # the attempt ends, or another order came
        try:
            if why_not is None:
                previous.error_file.unlink(missing_ok=True)
                count = str(self._start_counts[local_rank] + 1)
                variables = {GENERATION: str(generation), PROC_START_CNT: count}
                self._workers[local_rank] = self._start(local_rank, **variables)
                self._start_counts[local_rank] += 1
        except OSError as error:
            why_not = f"its process does not start: {error}"
        if why_not is not None:
            self._refuse_replacing(rank, why_not)

    def _refuse_replacing(self, rank: int, why: str) -> None:
        _log.error(f"rank {rank} is not replaced: {why}")
        is_sent = self.coordinator is not None and self.coordinator.send(
            NotReplaced(rank=rank, why=why)
        )
        if not is_sent:  # else the coordinator gives the attempt up once the others have saved
            self._note_failure()
            self.release()

    def release(self) -> None:
        """Fail the attempt at its ends: the coordinator answers them no more."""
        if self.coordinator is not None:
            self.coordinator.close()
        for worker in self._workers:
            if worker.awaits_answer:
                worker.awaits_answer = False
                self._note_failure()

    def _note_failure(self) -> None:
        self._first_failure_s = self._first_failure_s or time.monotonic()

    def _report_end(self, worker: Worker) -> bool:
        """Report an end to the coordinator. Returns whether it is there to answer."""
        exit_code = worker.exit_code
        if self.coordinator is None or not self.coordinator.is_open or self._kill_at_s is not None:
            return False
        assert exit_code is not None  # noqa: S101 it has ended
        error = self._error_of(worker).get("message")
        kills = self.oom_kills()
        # The kernel counts for the whole host, and a program's own error is no kill.
        is_oom = kills > self._oom_kills_before and was_killed(exit_code, error)
        self._oom_kills_before = kills if is_oom else self._oom_kills_before
        worker.awaits_answer = self.coordinator.send(
            WorkerEnded(
                rank=worker.rank,
                device=worker.local_rank,
                exit_code=exit_code,
                error=error,
                is_oom=is_oom,
                at_s=time.time(),
            )
        )
        return worker.awaits_answer

    def _spawn(
        self, rank: int, variables: dict[str, str]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        stdout, stderr = (self.output.sink(rank, stream) for stream in ("stdout", "stderr"))
        if self.fork is not None:
            return self.fork(
                Fork(
                    function=WORKER_FUNCTION,
                    name=f"rank-{rank}",
                    environment=variables,
                    cwd=self.order.cwd,
                    stdout=str(stdout),
                    stderr=str(stderr),
                )
            )
        order = self.order
        return start_command(order.command, order.cwd, variables, stdout=stdout, stderr=stderr)

    @property
    def ranks(self) -> list[int]:
        """Global ranks on this node."""
        return [worker.rank for worker in self._workers]

    def rank_of(self, key: int) -> int | None:
        """Return the global rank of a heartbeat, by its key in `heartbeats()`."""
        if self._command is not None:
            return next((rank.rank for rank in self._command.statuses() if rank.pid == key), None)
        return self._workers[key].rank

    def poll(self) -> bool:
        """Notice ends and go on with stopping. Returns whether no process remains."""
        now_s = time.monotonic()
        for worker in self._workers:
            if worker.ended_s is None and worker.process.poll() is not None:
                self._note_end(worker)
                failed = worker.process.returncode != 0 or self._ended_early(worker) is not None
                if failed and not self._report_end(worker) and self._first_failure_s is None:
                    self._first_failure_s = now_s
        exits = reap_adopted({*self.spare, *(worker.process.pid for worker in self._workers)})
        self._poll_msrun(exits)
        running = [w for w in self._workers if w.ended_s is None or w.awaits_answer]
        if self._kill_at_s is None:
            settled = self._first_failure_s is not None and now_s - self._first_failure_s > SETTLE_S
            well = self._command if self._first_failure_s is None else None
            left = (self.marker, self.spare, self.output.secrets)
            trains = self.msrun is not None and self.msrun.is_alive and well is not None
            if settled or not (running or trains or self.leftovers.is_awaited(well, *left)):
                self.stop(self.order.failover_grace_s if running else self.order.grace_s)
            return False
        remaining = container_processes(self.marker, spare=self.spare)
        if now_s >= self._kill_at_s:
            signal_all(remaining, signal.SIGKILL)
        elif not running and not self._is_swept:
            self._sweep(remaining)
        if running or remaining:
            return False
        self.close_output()
        return True

    def _poll_msrun(self, exits: Mapping[int, int]) -> None:
        """Look after what msrun has started, until the attempt ends."""
        if self.msrun is None or self._kill_at_s is not None:
            return
        is_joined = any(worker.ended_s is None for worker in self._workers)
        self.msrun.poll(exits, spare=self.spare, is_joined=is_joined)
        if self.step_follower is not None:
            for process in self.msrun.logs:
                self.step_follower.follow(process.log)
        self.output.msrun = self.msrun.logs
        if self.msrun.has_failed and self._first_failure_s is None:
            for worker in self._workers:
                worker.has_left_failure = True
            self._note_failure()

    def _note_end(self, worker: Worker) -> None:
        """Record that a worker's process has ended, which may be known already."""
        if worker.ended_s is None:
            worker.ended_s = time.time()
            self.output.scrub(worker.error_file)

    def _sweep(self, remaining: Iterable[psutil.Process]) -> None:
        """Ask the processes that have outlived the workers to end, once."""
        self._is_swept = True
        if self._kill_at_s == math.inf:
            # No worker needs these any more: they are ended even where workers never are by force.
            self._kill_at_s = time.monotonic() + self.order.grace_s
        signal_all(remaining, signal.SIGTERM)

    def close_output(self) -> None:
        """Read the output to its end: no process of the attempt prints any more."""
        self.output.close()
        for follower in (self.step_follower, self.checkpoint_watcher):
            if follower is not None:
                follower.finish()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to all workers, once; `poll` kills the rest after `grace_s`, if >= 0."""
        deadline_s = time.monotonic() + grace_s if grace_s >= 0 else math.inf
        if self._kill_at_s is not None:
            self._kill_at_s = min(self._kill_at_s, deadline_s)
            return
        self._kill_at_s = deadline_s
        self.release()
        # Checked now: a worker that ended by itself since the last poll was not stopped by us.
        leaders = [w for w in self._workers if w.process.poll() is None]
        # Only the leaders: torchrun forwards the signal, and a data loader that got it would
        # end under a trainer that is just saving. Processes that outlive them are swept up next.
        for worker in leaders:
            worker.stopped_by_agent = True
            worker.process.send_signal(signal.SIGTERM)

    @property
    def running_workers(self) -> Sequence[Worker]:
        """The workers whose processes have not ended."""
        return [worker for worker in self._workers if worker.ended_s is None]

    @property
    def is_ending(self) -> bool:
        """Whether a process has ended, so that more is to be done soon."""
        return self.is_stopping or any(worker.ended_s is not None for worker in self._workers)

    @property
    def is_stopping(self) -> bool:
        """Whether the processes were stopped, or have ended."""
        return self._kill_at_s is not None

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Read the newest heartbeat of each local rank that still runs and writes one.

        Heartbeats of a command are by the pids of their processes.
        """
        if self._command is not None:
            return self._command.heartbeats()
        beats = ((w.local_rank, w.beat()) for w in self._workers if w.ended_s is None)
        return {local_rank: beat for local_rank, beat in beats if beat is not None}

    def mute_ranks(self) -> dict[int, float]:
        """List local ranks that run but have written no heartbeat yet, and since when they run.

        A command has none: its processes need not write any.
        """
        if self.order.is_command:
            return {}
        return {w.local_rank: w.started_s for w in self.running_workers if w.beat() is None}

    def pids(self) -> dict[int, int]:
        """List the processes of workers that run, by local rank."""
        return {w.local_rank: w.process.pid for w in self._workers if w.ended_s is None}

    def stacks_targets(self) -> list[StacksTarget]:
        """List the workers that run, or all processes of a command, whose stacks can be read."""
        if self._command is not None:
            return self._command.stacks_targets()
        return [worker.stacks_target(self.folder) for worker in self.running_workers]

    @property
    def known_pids(self) -> frozenset[int]:
        """Pids of all processes that the attempt is known to have had."""
        below = self._command.known_pids if self._command is not None else set()
        return frozenset(self._started_pids | below)

    @property
    def has_failed(self) -> bool:
        """Whether a process has ended other than well, without being asked to."""
        ends = ((w.process.poll(), w.stopped_by_agent) for w in self._workers)
        return any(code not in (None, 0) and not stopped for code, stopped in ends)

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker."""
        return tuple(self._status(worker) for worker in self._workers)

    def command_statuses(self) -> tuple[RankStatus, ...]:
        """Return the status of each known rank of a command, whose workers are its launchers."""
        return tuple(self._command.statuses()) if self._command is not None else ()

    @property
    def world_size(self) -> int:
        """Number of ranks in the largest gang that a command has started; 0: not known."""
        return self._command.world_size if self._command is not None else 0

    def former_ranks(self) -> tuple[FormerRank, ...]:
        """List the ranks of a launcher that have ended, once they are known."""
        if self._command is None or not self.order.is_launcher:
            return ()
        return self._command.former(is_over=any(w.ended_s is not None for w in self._workers))

    def stopped_processes(self) -> list[str]:
        """List processes of a command that a signal has stopped and that belong to no rank."""
        processes = self._command.stopped() if self._command is not None else []
        return [process.text for process in processes if process.rank is None]

    def _ended_early(self, worker: Worker) -> str | None:
        """Explain why an exit with 0 of a session program came too early, as by `os._exit(0)`.

        Its loop writes the last step into the heartbeat, which outlives the process.
        """
        if self.order.is_command or worker.process.returncode != 0:
            return None
        beat = worker.beat()
        target_step = self.order.job.target_step or 0
        return explain_early_end(beat.step if beat is not None else 0, target_step)

    def _error_of(self, worker: Worker) -> dict[str, Any]:
        """Return what a program recorded about its end, with secrets masked."""
        error = read_error(worker.error_file)
        early = self._ended_early(worker) or worker.raised
        if early is not None:
            error["message"] = early
        if error.get("message"):
            error["message"] = mask_text(error["message"], self.output.secrets)
        return error

    def _status(self, worker: Worker) -> WorkerStatus:
        return worker.to_status(
            self._error_of(worker),
            self.activity.get(worker.process.pid, SessionActivity()),
            is_command=self.order.is_command,
            is_early=self._ended_early(worker) is not None,
        )
