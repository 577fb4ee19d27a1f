"""The worker processes of one attempt on one node: start, watch, stop.

Workers are leaders of sessions of their own and write to log files of their own. Stopping is
SIGTERM to the workers, then to what outlives them, then SIGKILL after the grace period; it is
driven by `poll`, so that the agent goes on answering meanwhile. Times are seconds.
"""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from perdure.training.agent.coordinator_client import AgentCoordinatorClient, address_file
from perdure.training.agent.evidence import ASCEND_PATH, ascend_folder, tail
from perdure.training.agent.fork_server import Fork, ForkedProcess, end_now
from perdure.training.agent.masked_output import MaskedOutput, scrub
from perdure.training.agent.preparation import platform_variables, rank_variables
from perdure.training.agent.worker_process import (
    SessionActivity,
    Worker,
    read_error,
    status_of_rank,
)
from perdure.training.commands.arguments import argument_variables, fill_in
from perdure.training.commands.checkpoint_watch import CommandCheckpointWatcher
from perdure.training.commands.leftovers import Leftovers
from perdure.training.commands.progress import StepFollower
from perdure.training.commands.ranks import CommandRanks
from perdure.training.config.job import RESERVED_NAMES
from perdure.training.diagnosis.ending import explain_early_end
from perdure.training.diagnosis.exits import was_killed
from perdure.training.files import write_whole
from perdure.training.liveness.heartbeat import ANY_RANK, Heartbeat, HeartbeatReader, stacks_file
from perdure.training.masking import SECRETS_ENV, mask_text, secret_values
from perdure.training.processes import (
    RANK_VARIABLES,
    StacksTarget,
    container_processes,
    reap_adopted,
    signal_all,
)
from perdure.training.recovery.protocol import NotReplaced, WorkerEnded
from perdure.training.telemetry.hccl_retries import RetryLogs
from perdure.training.wire.agent import AgentConfig, StartOrder
from perdure.training.wire.agent_status import RankStatus, WorkerStatus
from perdure.training.wire.coordinator import CoordinatorAddress
from perdure.training.wire.logs import WorkerLog

_log = logging.getLogger("perdure.agent")

STREAMS = ("stderr", "stdout")

# After the first failure the others get this long to record what they saw before they are
# stopped: the diagnosis separates the first cause from its consequences.
SETTLE_S = 1.0
WORKER_FUNCTION = "perdure.training.runtime.worker:run"
GENERATION = "PERDURE_GENERATION"  # of a process that takes the place of another


@dataclass(slots=True)
class WorkerGroup:
    """The processes of one attempt on this node.

    Attributes:
        folder: where heartbeats, error files and, unless the job says otherwise, logs lie.
        started_s: CLOCK_MONOTONIC when they were started.
        spare: pids of the container that are not the attempt's.
        fork: starts session programs; None: they are started like commands.
        coordinator: connection to it; it may have a process replaced; None: every failure ends
            the attempt.
        secret_variables: of the workers, from the job's env_from.
        oom_kills: how often the kernel killed for memory, by now.
        left: what a command that exited with 0 has left running.
        activity: of processes that have completed no step, by pid; the hang check sets it.
        shown: steps in the output of a command; None: nobody said how to read them.
        saved: checkpoints that a command keeps itself; None: nobody said where.
    """

    config: AgentConfig
    order: StartOrder
    marker: str
    folder: Path
    log_folder: Path
    started_s: float = 0.0
    spare: frozenset[int] = frozenset()
    fork: Callable[[Fork], ForkedProcess | subprocess.Popen[bytes]] | None = None
    coordinator: AgentCoordinatorClient | None = None
    secret_variables: Mapping[str, str] = field(default_factory=dict)
    oom_kills: Callable[[], int] = lambda: 0
    activity: Mapping[int, SessionActivity] = field(default_factory=dict)
    retries: RetryLogs = field(default_factory=RetryLogs)
    left: Leftovers = field(default_factory=Leftovers)
    shown: StepFollower | None = None
    saved: CommandCheckpointWatcher | None = None
    _environment: dict[str, str] = field(default_factory=dict)
    _output: MaskedOutput | None = None
    _command: CommandRanks | None = None
    _oom_kills_before: int = 0
    _workers: list[Worker] = field(default_factory=list)
    _first_failure_s: float | None = None
    _kill_at_s: float | None = None
    _is_swept: bool = False
    _target_step: int = 0

    def start(
        self, environment: dict[str, str], *, proc_start_cnt: int, generation: int | None = None
    ) -> None:
        """Start one process per slot, or one per node for a launcher.

        Args:
            environment: of all of them.
            proc_start_cnt: how often processes were started in this container, with these.
            generation: that they join; None: they begin together with all others.
        """
        self.started_s = time.monotonic()
        self._oom_kills_before = self.oom_kills()
        self._target_step = self.order.job.target_step or 0
        # The supervisor may itself run as a rank of another program.
        foreign = RESERVED_NAMES | RANK_VARIABLES
        inherited = {k: v for k, v in environment.items() if k not in foreign}
        self._environment = {
            **inherited,
            **self.order.variables,
            **self.secret_variables,
            **({SECRETS_ENV: ",".join(self.secret_variables)} if self.secret_variables else {}),
            **platform_variables(self.config, self.order, self.folder, proc_start_cnt),
        }
        if self.order.rank_table is not None:
            file = self.folder / "hccl.json"
            write_whole(file, self.order.rank_table)
            self._environment["RANK_TABLE_FILE"] = str(file)
        if self.secret_variables:
            self._output = MaskedOutput(self.folder, self.secrets)
        streams = (self.log_path(r, s) for s in reversed(STREAMS) for r in self.planned_ranks)
        self.shown = StepFollower.of(self.order, self.folder, tuple(streams))
        self.saved = CommandCheckpointWatcher.of(self.order, self.config.member, self._environment)
        joins = {GENERATION: str(generation)} if generation is not None else {}
        for local_rank in range(len(self.planned_ranks)):
            self._workers.append(self._start(local_rank, **joins))
        if self.order.is_command:
            self._command = CommandRanks(list(self.pids().values()), self.folder)

    @property
    def planned_ranks(self) -> Sequence[int]:
        """Global ranks that run on this node once it is started."""
        count = 1 if self.order.is_launcher else self.order.slots_per_node
        return [self.config.member * count + local for local in range(count)]

    def _start(self, local_rank: int, **further: str) -> Worker:
        rank = self.planned_ranks[local_rank]
        error_file = self.folder / f"error-{local_rank}.json"
        variables = {
            **self._environment,
            ASCEND_PATH: str(self.device_folder(rank)),
            **rank_variables(self.config, self.order, rank, local_rank),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
            "PERDURE_HEARTBEAT": str(
                self.folder / f"heartbeat-{ANY_RANK if self.order.is_command else local_rank}"
            ),
            **further,
        }
        process = self._spawn(rank, variables)
        named = rank if self.order.is_command else local_rank  # ranks of a command name the file
        reader = HeartbeatReader.of(self.folder, named)
        return Worker(rank, local_rank, process, error_file, reader)

    def rejoin(self, address: CoordinatorAddress) -> None:
        """Let the workers, and those that come after them, find a coordinator elsewhere."""
        self._environment |= {
            "MASTER_ADDR": address.host,
            "MASTER_PORT": str(address.store_port),
        }
        write_whole(address_file(self.folder), address.model_dump_json(), private=True)
        for worker in self._workers:
            if worker.awaits_answer and not self._hold(
                worker
            ):  # the one before has not answered it
                self._first_failure_s = self._first_failure_s or time.monotonic()

    def replace(self, rank: int, generation: int) -> None:
        """Start a new process for a rank; the one before is ended if it still lives."""
        if self.vacate(rank, generation):
            self.fill(rank, generation)

    def vacate(self, rank: int, generation: int) -> bool:
        """End a rank's process if it still lives, and keep its place for one of this generation.

        Returns whether one may be started: none is once the attempt ends.
        """
        if self._kill_at_s is not None:
            return False
        worker = self._workers[self.ranks.index(rank)]
        # One that lives is no cause of anything, should no other take its place.
        worker.stopped_by_agent = worker.stopped_by_agent or worker.process.poll() is None
        end_now(worker.process)
        if worker.process.poll() is None:
            _log.error(f"rank {rank} is not replaced: its process does not end")
            self._first_failure_s = self._first_failure_s or time.monotonic()
            self.release()
            return False
        self._note_end(worker)
        worker.awaits_answer, worker.next_generation = True, generation
        return True

    def fill(self, rank: int, generation: int, *, why_not: str | None = None) -> None:
        """Start the process that a rank's place is kept for, if it still is.

        Args:
            rank: global.
            generation: that it joins.
            why_not: why it cannot be started; None: it is.
        """
        local_rank = self.ranks.index(rank)
        previous = self._workers[local_rank]
        if not previous.awaits_answer or previous.next_generation != generation:
            return  # the attempt ends, or another order came
        try:
            if why_not is None:
                previous.error_file.unlink(missing_ok=True)
                process = self._start(local_rank, **{GENERATION: str(generation)})
                self._workers[local_rank] = process
        except OSError as error:
            why_not = f"its process does not start: {error}"
        if why_not is not None:
            self._cannot_replace(rank, why_not)

    def _cannot_replace(self, rank: int, why: str) -> None:
        _log.error(f"rank {rank} is not replaced: {why}")
        is_told = self.coordinator is not None and self.coordinator.send(
            NotReplaced(rank=rank, why=why)
        )
        if not is_told:  # else it answers, and gives the attempt up once the others have saved
            self._first_failure_s = self._first_failure_s or time.monotonic()
            self.release()

    def release(self) -> None:
        """The coordinator answers no end any more: the attempt has failed."""
        if self.coordinator is not None:
            self.coordinator.close()
        for worker in self._workers:
            if worker.awaits_answer:
                worker.awaits_answer = False
                self._first_failure_s = self._first_failure_s or time.monotonic()

    def _hold(self, worker: Worker) -> bool:
        """Report an end to the coordinator; whether it is there to answer it."""
        if self.coordinator is None or not self.coordinator.is_open or self._kill_at_s is not None:
            return False
        assert worker.process.returncode is not None  # noqa: S101 it has ended
        error = self._error_of(worker).get("message")
        kills = self.oom_kills()
        # The kernel counts for the whole host, and a program's own error is no kill.
        is_oom = kills > self._oom_kills_before and was_killed(worker.process.returncode, error)
        self._oom_kills_before = kills if is_oom else self._oom_kills_before
        worker.awaits_answer = self.coordinator.send(
            WorkerEnded(
                rank=worker.rank,
                device=worker.local_rank,
                exit_code=worker.process.returncode,
                error=error,
                is_oom=is_oom,
                at_s=time.time(),
            )
        )
        return worker.awaits_answer

    def _spawn(
        self, rank: int, variables: dict[str, str]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        if self.fork is not None:
            return self.fork(
                Fork(
                    function=WORKER_FUNCTION,
                    name=f"rank-{rank}",
                    environment=variables,
                    cwd=self.order.cwd,
                    stdout=str(self._sink(rank, "stdout")),
                    stderr=str(self._sink(rank, "stderr")),
                )
            )
        with self._open_log(rank, "stdout") as out, self._open_log(rank, "stderr") as err:
            try:
                return subprocess.Popen(
                    fill_in(self.order.command, argument_variables(variables)),
                    cwd=self.order.cwd,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                err.write(f"perdure: cannot start {self.order.command[0]!r}: {why}\n".encode())
                # A process that exits as a shell would keeps one path for failures.
                return subprocess.Popen(["/bin/sh", "-c", "exit 127"], stdout=out, stderr=err)

    def _open_log(self, rank: int, stream: str) -> IO[bytes]:
        return self._sink(rank, stream).open("ab")

    def _sink(self, rank: int, stream: str) -> Path:
        """Where a process writes: its log, or the pipe to it that keeps secrets out."""
        log = self.log_path(rank, stream)
        return log if self._output is None else self._output.pipe_of(log)

    def log_path(self, rank: int, stream: str) -> Path:
        """Where a rank's stdout or stderr goes, or that of a launcher on this node."""
        return self.log_folder / f"{self.log_name(rank)}.{stream}.log"

    def log_name(self, rank: int) -> str:
        """How the logs of a rank begin; those of a launcher, with all its ranks, by its node."""
        return f"{'command' if self.order.is_launcher else 'rank'}-{rank:05d}"

    def device_folder(self, rank: int) -> Path:
        """Where CANN writes the logs of a rank (ASCEND_PROCESS_LOG_PATH)."""
        order, base = self.order, self._environment.get(ASCEND_PATH)
        of = f"{self.config.run_id}/{self.config.node}/p{order.placement:04d}-a{order.attempt:04d}"
        return ascend_folder(self.log_folder, self.log_name(rank), base=base, of=of)

    def mended_retries(self) -> dict[int, int]:
        """How often HCCL sent again and succeeded, by rank."""
        counts = {rank: self.retries.count_mended(self.device_folder(rank)) for rank in self.ranks}
        return {rank: count for rank, count in counts.items() if count}

    def logs(self, tail_bytes: int) -> tuple[WorkerLog, ...]:
        """The end of each worker's output, without secrets."""
        self.flush_output()
        paths = [(rank, self.log_path(rank, stream)) for rank in self.ranks for stream in STREAMS]
        return tuple(
            WorkerLog(
                rank=rank,
                path=str(path),
                text=mask_text(tail(path, tail_bytes), self.secrets),
                written_s=path.stat().st_mtime,
            )
            for rank, path in paths
            if path.exists()
        )

    def flush_output(self) -> None:
        """Have the logs hold what the workers have printed by now."""
        if self._output is not None:
            self._output.flush()

    @property
    def ranks(self) -> list[int]:
        """Global ranks on this node."""
        return [worker.rank for worker in self._workers]

    def rank_of(self, key: int) -> int | None:
        """Global rank of a heartbeat, by its key in `heartbeats()`."""
        if self._command is not None:
            return next(
                (reading.rank for reading in self._command.ranks() if reading.pid == key), None
            )
        return self._workers[key].rank

    def poll(self) -> bool:
        """Notice ends, go on with stopping. Returns whether nothing of the attempt is left."""
        now_s = time.monotonic()
        for worker in self._workers:
            if worker.ended_s is None and worker.process.poll() is not None:
                self._note_end(worker)
                failed = worker.process.returncode != 0 or self._ended_early(worker) is not None
                if failed and not self._hold(worker) and self._first_failure_s is None:
                    self._first_failure_s = now_s
        reap_adopted({*self.spare, *(worker.process.pid for worker in self._workers)})
        running = [w for w in self._workers if w.ended_s is None or w.awaits_answer]
        if self._kill_at_s is None:
            settled = self._first_failure_s is not None and now_s - self._first_failure_s > SETTLE_S
            well = self._command if self._first_failure_s is None else None
            if settled or not (running or self.left.is_awaited(well, self)):
                self.stop(self.order.failover_grace_s if running else self.order.grace_s)
            return False
        left = container_processes(self.marker, spare=self.spare)
        if now_s >= self._kill_at_s:
            signal_all(left, signal.SIGKILL)
        elif not running and not self._is_swept:
            self._sweep(left)
        if running or left:
            return False
        self.close_output()
        return True

    def _note_end(self, worker: Worker) -> None:
        """Its process has ended, which may be known already."""
        if worker.ended_s is None:
            worker.ended_s = time.time()
            if self._output is not None:
                scrub(worker.error_file, self.secrets)

    def _sweep(self, left: Iterable[psutil.Process]) -> None:
        """Ask what has outlived the workers to end, once."""
        self._is_swept = True
        if self._kill_at_s == math.inf:
            # Nobody works with these any more: without a forced end, too, they are ended.
            self._kill_at_s = time.monotonic() + self.order.grace_s
        signal_all(left, signal.SIGTERM)

    def close_output(self) -> None:
        """Nothing of the attempt prints any more."""
        if self._output is not None:
            self._output.close()
        for follower in (self.shown, self.saved):
            if follower is not None:
                follower.finish()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to everything, once; `poll` kills what is left after `grace_s`, if >= 0."""
        deadline_s = time.monotonic() + grace_s if grace_s >= 0 else math.inf
        if self._kill_at_s is not None:
            self._kill_at_s = min(self._kill_at_s, deadline_s)
            return
        self._kill_at_s = deadline_s
        self.release()
        # Checked now: one that ended by itself since the last poll was not stopped by us.
        leaders = [w for w in self._workers if w.process.poll() is None]
        # Only the leaders: torchrun forwards the signal, and a data loader that got it would
        # end under a trainer that is just saving. What outlives its leader is swept up next.
        for worker in leaders:
            worker.stopped_by_agent = True
            worker.process.send_signal(signal.SIGTERM)

    @property
    def is_ending(self) -> bool:
        """Whether something has ended, so that more is to be done soon."""
        return self.is_stopping or any(worker.ended_s is not None for worker in self._workers)

    @property
    def is_stopping(self) -> bool:
        """Whether the processes were stopped, or have ended."""
        return self._kill_at_s is not None

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Newest heartbeat of each local rank that still runs and writes one.

        Those of a command are by their pids.
        """
        if self._command is not None:
            return self._command.heartbeats()
        beats = ((w.local_rank, w.beat()) for w in self._workers if w.ended_s is None)
        return {local_rank: beat for local_rank, beat in beats if beat is not None}

    def mute_ranks(self) -> dict[int, float]:
        """Local ranks that run but have written no heartbeat yet, and since when they run.

        None of a command, whose processes may write none.
        """
        if self.order.is_command:
            return {}
        running = (w for w in self._workers if w.ended_s is None)
        return {w.local_rank: w.started_s for w in running if w.beat() is None}

    def pids(self) -> dict[int, int]:
        """Processes of the workers that run, by local rank."""
        return {w.local_rank: w.process.pid for w in self._workers if w.ended_s is None}

    def stacks_targets(self) -> list[StacksTarget]:
        """The workers that run, or all processes of a command, for queries of their stacks."""
        if self._command is not None:
            return self._command.stacks_targets()
        return [
            StacksTarget(
                rank=worker.rank,
                device=worker.local_rank,
                pid=worker.process.pid,
                own_file=stacks_file(self.folder, worker.local_rank),
            )
            for worker in self._workers
            if worker.ended_s is None
        ]

    @property
    def secrets(self) -> frozenset[str]:
        """Values of the workers' variables that must not leave the node."""
        return secret_values(self._environment)

    def log_bytes(self) -> int:
        """Length of what the workers have printed."""
        paths = (self.log_path(w.rank, s) for w in self._workers for s in ("stdout", "stderr"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """The status of each worker."""
        return tuple(self._status(worker) for worker in self._workers)

    def command_statuses(self) -> tuple[RankStatus, ...]:
        """Of a command the status of each rank that is known; its `workers` are its launchers."""
        ranks = self._command.ranks() if self._command is not None else []
        return tuple(status_of_rank(reading) for reading in ranks)

    def stopped_processes(self) -> list[str]:
        """Processes of a command that a signal has stopped and that no rank stands for."""
        processes = self._command.stopped() if self._command is not None else []
        return [process.text for process in processes if process.rank is None]

    def _ended_early(self, worker: Worker) -> str | None:
        """What is wrong with a session program that exited with 0, such as by `os._exit(0)`.

        Its loop writes the last step into the heartbeat, which outlives the process.
        """
        if self.order.is_command or worker.process.returncode != 0:
            return None
        beat = worker.beat()
        return explain_early_end(beat.step if beat is not None else 0, self._target_step)

    def _error_of(self, worker: Worker) -> dict[str, Any]:
        """What its program left about its end, without secrets."""
        error = read_error(worker.error_file)
        early = self._ended_early(worker)
        if early is not None:
            error["message"] = early
        if error.get("message"):
            error["message"] = mask_text(error["message"], self.secrets)
        return error

    def _status(self, worker: Worker) -> WorkerStatus:
        beat = worker.beat()
        error = self._error_of(worker)
        activity = self.activity.get(worker.process.pid, SessionActivity())
        return WorkerStatus(
            rank=worker.rank,
            local_rank=worker.local_rank,
            pid=worker.process.pid,
            exit_code=None if worker.awaits_answer else worker.process.returncode,
            ended_s=None if worker.awaits_answer else worker.ended_s,
            error=error.get("message"),
            error_s=error.get("at_s"),
            step=beat.step if beat is not None else None,
            phase=beat.phase.name.lower() if beat is not None else None,
            stopped_by_agent=worker.stopped_by_agent,
            ended_early=self._ended_early(worker) is not None,
            is_recovering=worker.awaits_answer,
            generation=beat.generation if beat is not None else None,
            pulse=worker.pulse(activity, is_command=self.order.is_command),
        )
