"""The output of an attempt's processes on one node: their logs, and the device logs beside them.

A process prints into its log or, if the job has secrets, into a pipe from which the agent fills the
log. CANN writes a log of its own per process. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perdure.training.agent.masked_output import MaskedOutput, scrub
from perdure.training.commands.msrun import MsrunProcess
from perdure.training.masking import mask_text, secret_values
from perdure.training.telemetry.hccl_retries import RetryLogs
from perdure.training.wire.agent import AgentConfig, StartOrder
from perdure.training.wire.logs import WorkerLog

ASCEND_PATH = "ASCEND_PROCESS_LOG_PATH"
STREAMS = ("stderr", "stdout")


@dataclass(slots=True)
class WorkerOutput:
    """The logs of one attempt on one node.

    Attributes:
        folder: the attempt's folder, where pipes get their names.
        log_folder: where logs lie.
        secrets: values that must not leave the node.
        msrun: processes of MindSpore's launcher, whose logs are their own.
    """

    config: AgentConfig
    order: StartOrder
    folder: Path
    log_folder: Path
    secrets: frozenset[str] = frozenset()
    msrun: Sequence[MsrunProcess] = ()
    _ascend_base: str | None = None
    _masked: MaskedOutput | None = None
    _retries: RetryLogs = field(default_factory=RetryLogs)

    def open(self, environment: Mapping[str, str], *, is_masked: bool) -> None:
        """Prepare the output of processes that get these variables.

        Args:
            environment: variables of all processes.
            is_masked: whether secrets are masked before they reach a log.
        """
        self.secrets = secret_values(environment)
        self._ascend_base = environment.get(ASCEND_PATH)
        if is_masked:
            self._masked = MaskedOutput(self.folder, self.secrets)

    def sink(self, rank: int, stream: str) -> Path:
        """Return the file a process writes to: its log, or the pipe that keeps secrets out."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        log = self.path(rank, stream)
        return log if self._masked is None else self._masked.pipe_of(log)

    def path(self, rank: int, stream: str) -> Path:
        """Return the log of a rank's stdout or stderr, or of this node's launcher."""
        return self.log_folder / f"{self.name(rank)}.{stream}.log"

    def name(self, rank: int) -> str:
        """Return how a rank's logs begin; a launcher has one log for all of its ranks."""
        return f"{'command' if self.order.is_launcher else 'rank'}-{rank:05d}"

    def device_folder(self, rank: int) -> Path:
        """Return the folder in which CANN writes the logs of a rank (ASCEND_PROCESS_LOG_PATH)."""
        key = f"p{self.order.placement:04d}-a{self.order.attempt:04d}"
        subfolder = f"{self.config.run_id}/{self.config.node}/{key}"
        return ascend_folder(
            self.log_folder, self.name(rank), base=self._ascend_base, subfolder=subfolder
        )

    def flush(self) -> None:
        """Write into the logs what the processes have printed by now."""
        if self._masked is not None:
            self._masked.flush()

    def scrub(self, path: Path) -> None:
        """Mask secrets in a small file that a program wrote by itself."""
        if self._masked is not None:
            scrub(path, self.secrets)

    def close(self) -> None:
        """Write the rest into the logs: no process of the attempt prints any more."""
        if self._masked is not None:
            self._masked.close()

    def tails(self, ranks: Iterable[int], tail_bytes: int) -> tuple[WorkerLog, ...]:
        """Read the end of each log, with secrets masked."""
        self.flush()
        ranks = list(ranks)
        paths = [(rank, self.path(rank, stream), "") for rank in ranks for stream in STREAMS]
        # The diagnosis learns from their first lines which process is which worker.
        paths += [
            (ranks[0], process.log, f"{process.line}\n")
            for process in self.msrun
            if process.log is not None
        ]
        return tuple(
            WorkerLog(
                rank=rank,
                path=str(path),
                text=title + mask_text(tail(path, tail_bytes), self.secrets),
                written_s=path.stat().st_mtime,
            )
            for rank, path, title in paths
            if path.exists()
        )

    def mended_retries(self, ranks: Iterable[int]) -> dict[int, int]:
        """Count how often HCCL sent again and succeeded, by rank."""
        counts = {rank: self._retries.count_mended(self.device_folder(rank)) for rank in ranks}
        return {rank: count for rank, count in counts.items() if count}

    def size_bytes(self, ranks: Iterable[int]) -> int:
        """Measure what the processes have printed."""
        paths = (self.path(rank, stream) for rank in ranks for stream in STREAMS)
        return sum(path.stat().st_size for path in paths if path.exists())


def ascend_folder(
    log_folder: Path, log_name: str, *, base: str | None = None, subfolder: str = ""
) -> Path:
    """Return the folder in which CANN writes the logs of a rank or a command.

    Args:
        log_folder: folder of the attempt's logs.
        log_name: how the logs of the rank begin.
        base: folder that the job or the container sets instead; the logs lie below it.
        subfolder: run, node and attempt, so that no two ranks below `base` share a folder.
    """
    return Path(base, subfolder, log_name) if base else log_folder / f"{log_name}.ascend"


def tail(path: Path, tail_bytes: int) -> str:
    """Read the end of a file; bytes that are not text are replaced."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        return file.read(tail_bytes).decode(errors="replace")
