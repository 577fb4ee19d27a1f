"""Recommended settings, and where a job departs from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.config.model import ParallelKind
from perdure.training.config.recovery import (
    RECOMMENDED_KEEP_LAST,
    CheckpointSpec,
    recommended_interval,
)

PLATFORM_HANG_TIMEOUT_S = 1800.0
_REMOTE_SHELLS = frozenset({"ssh", "rsh", "pdsh", "dsh", "clush", "pssh", "parallel-ssh"})
_HOST_LISTS = re.compile(r"--?(?:hostfile|machinefile|hosts?|default-hostfile|H)(?:=|$)")
_LAUNCHERS = frozenset({"mpirun", "mpiexec", "prterun", "deepspeed", "horovodrun"})
_WORD = re.compile(r"[^\s;&|()'\"`]+")
MAX_SCRIPT_BYTES = 64 * 1024
TEMPORARY_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 to warn of


def departures(job: Job, num_parameters: int | None) -> Iterator[str]:
    """Yield a line for each setting of a job that departs from the recommended one.

    Args:
        job: a valid job.
        num_parameters: size of its model; None: not known, so that no interval is recommended.
    """
    yield from _temporary_places(job)
    if job.worker.is_command:
        yield from _remote_processes(job)
        return
    if job.checkpoint.has_interval and num_parameters is not None:
        recommended = recommended_interval(num_parameters)
        for field, value in recommended.items():
            if not _within(getattr(job.checkpoint, field), value):
                yield (
                    f"checkpoint: {_interval_text(job.checkpoint)}; recommended for "
                    f"{num_parameters / 1e6:,.1f} M parameters: {field}={value}"
                )
    if job.checkpoint.keep_last < RECOMMENDED_KEEP_LAST:
        yield f"checkpoint.keep_last={job.checkpoint.keep_last}; recommended: 5"
    if not job.restart.hang:
        yield "restart.hang=false: a hang will not be noticed; recommended: true"
    limit_s = job.restart.hang_timeout_s
    if limit_s is not None and limit_s > PLATFORM_HANG_TIMEOUT_S:
        yield f"restart.hang_timeout_s={limit_s:g} is longer than the platform's 30 minutes"
    if job.parallelism.kind is ParallelKind.DATA_PARALLEL:
        yield "parallelism.kind=data_parallel: one process drives all cards; ddp is faster"


def _temporary_places(job: Job) -> Iterator[str]:
    address, folder = job.storage.address, job.storage.folder
    if folder is not None and is_temporary(folder):
        yield f"storage.address={address} is temporary: a reboot deletes the run"
    if job.log_path is not None and is_temporary(Path(job.log_path)):
        yield f"log_path={job.log_path} is temporary: logs are gone after a reboot"


def _remote_processes(job: Job) -> Iterator[str]:
    """Warn of a launcher that reaches other hosts, from where no process can be ended."""
    command = job.worker.command or ()
    texts = [(list(command), "worker.command")]
    if job.engine.on_this_machine:
        texts += ((_read_words(path), str(path)) for path in _scripts(job, command))
    for words, where in texts:
        launcher = _find_remote_launcher(words)
        if launcher is not None:
            yield (
                f"{where}: {launcher} starts processes on other hosts; Perdure can neither see nor "
                "end them, and they may live on beside the next attempt; let Perdure start the "
                "command on every node (engine.nodes) instead"
            )
            return


def _find_remote_launcher(words: Sequence[str]) -> str | None:
    """Find a remote shell, or a launcher with a list of hosts."""
    launchers = [word for word in words if Path(word).name in _LAUNCHERS]
    hosts = next((word for word in words if _HOST_LISTS.match(word)), None)
    if launchers and hosts is not None:
        return f"`{Path(launchers[0]).name} {hosts}`"
    shell = next((word for word in words if Path(word).name in _REMOTE_SHELLS), None)
    return f"`{Path(shell).name}`" if shell is not None else None


def _scripts(job: Job, command: Sequence[str]) -> Iterator[Path]:
    """List the shell scripts among the words of a command."""
    for word in command:
        path = Path(job.worker.cwd or ".") / word
        if path.suffix in (".sh", ".bash") and path.is_file():
            yield path


def _read_words(path: Path) -> list[str]:
    """Read the words of a script, without its comments."""
    try:
        with path.open(errors="replace") as file:
            lines = file.read(MAX_SCRIPT_BYTES).splitlines()
    except OSError:
        return []  # the start of the command says so
    return [word for line in lines for word in _WORD.findall(re.sub(r"(?:^|\s)#.*", "", line))]


def is_temporary(path: Path) -> bool:
    """Whether a reboot may delete the files there."""
    return any(map(path.is_relative_to, TEMPORARY_FOLDERS))


def _within(chosen: int | None, recommended: int) -> bool:
    # Over 10B parameters the recommendation is a range, 100 to 200 steps.
    low = 100 if recommended == 200 else recommended
    return chosen is not None and low <= chosen <= recommended


def _interval_text(spec: CheckpointSpec) -> str:
    fields = ("every_steps", "every_epochs", "every_s", "mtbf_s")
    return ", ".join(f"{f}={getattr(spec, f)}" for f in fields if getattr(spec, f) is not None)
