"""Limits of a machine that end processes without a word: open files, shared memory, its name.

The need is an upper bound of what the processes of a small job were seen to open, with what grows
with ranks and loader workers. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.config.pod_rules import MEMORY_FOLDER
from perdure.training.processes import await_address
from perdure.training.wire.node import Check, CheckOutcome

OTHER_FILES = 64  # twice the most that was seen in a small job: 28, of the Prefect server
FILES_PER_RANK = 4  # sockets to another rank, for each process group
FILES_PER_LOADER = 24  # pipes of a loader worker, and tensors that it hands over
SHARED_BYTES = 64 << 20  # default of Docker and Kubernetes


def files_needed(job: Job) -> int:
    """Count the files that a process of a job may have open."""
    loaders = job.data.num_workers if job.data is not None else 0
    return OTHER_FILES + FILES_PER_RANK * job.engine.world_size + FILES_PER_LOADER * loaders


def explain_few_files(job: Job, *, hard_limit: int) -> str | None:
    """Say that the hard limit of open files is too low for a job; None: it is not."""
    needed = files_needed(job)
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= needed:
        return None
    return (
        f"the hard limit of open files is {hard_limit}, and this job needs {needed}; raise it with "
        f"`ulimit -Hn`, LimitNOFILE= of systemd or `docker run --ulimit nofile={needed}`"
    )


def check_open_files(job: Job) -> Check:
    """Check the limit of open files; Perdure raises the soft one itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = explain_few_files(job, hard_limit=hard)
    return Check(
        name="open_files",
        outcome=CheckOutcome.OK if problem is None else CheckOutcome.FAILED,
        seen=problem or ("no limit" if hard == resource.RLIM_INFINITY else f"{hard} at most"),
        allowed=f"at least {files_needed(job)}",
    )


def explain_small_memory(folder: Path = Path(MEMORY_FOLDER)) -> str | None:
    """Say that shared memory has little room; None: it has enough, or there is none."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if free >= SHARED_BYTES or free == size >= SHARED_BYTES:
        return None
    return (
        f"{folder} has {free / 2**20:.4g} of {size / 2**20:.4g} MiB free; loader workers and "
        f"collectives need {SHARED_BYTES >> 20} MiB (docker run --shm-size, engine.shm_size); "
        "saves do not use it"
    )


def check_shared_memory(folder: Path = Path(MEMORY_FOLDER)) -> Check:
    """Check the room in shared memory; a program without loader workers may do without."""
    problem = explain_small_memory(folder)
    return Check(
        name="shared_memory",
        outcome=CheckOutcome.OK if problem is None else CheckOutcome.WARNING,
        seen=problem or f"{folder} has room",
        allowed=f"{SHARED_BYTES >> 20} MiB free",
    )


def check_address(host: str | None, *, on_this_machine: bool, timeout_s: float) -> Check:
    """Check that the names have an address by which ranks find each other.

    Args:
        host: name or address of the first node; None: not known.
        on_this_machine: whether all ranks are here, where loopback is right.
        timeout_s: limit of the wait for the address of a new node.
    """
    missing = await_address(host, timeout_s=timeout_s) if host is not None else None
    if missing is not None:
        return Check(name="hostname", outcome=CheckOutcome.FAILED, seen=missing)
    name = socket.gethostname()
    if await_address(name, timeout_s=0.0 if on_this_machine else timeout_s) is None:
        return Check(name="hostname", outcome=CheckOutcome.OK, seen=f"{name} has an address")
    if on_this_machine:
        text = f"{name} has no address; ranks use {host or 'loopback'}"
        return Check(name="hostname", outcome=CheckOutcome.OK, seen=text)
    text = f"{name} has no address: a launcher that passes this name on finds no master"
    allowed = "a line in /etc/hosts, or addresses in the command (torchrun --local_addr)"
    return Check(name="hostname", outcome=CheckOutcome.WARNING, seen=text, allowed=allowed)
