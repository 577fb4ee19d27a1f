"""A node beside its devices: disk, memory, ports, and the way to the store.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil

from storage.address import open_store
from storage.errors import Corrupt, StorageError
from storage.objects import ObjectStore
from training.environment import HOST_PORTS
from training.job import Job
from training.trainer.data.tokenizer import open_tokenizer
from training.wire.check import Check, Outcome

PROBE_BYTES = 4 << 20
FILE_SCHEME = "file://"
# Weights, and both moments of AdamW, in fp32.
STATE_BYTES_PER_PARAMETER = 12
DISK_COPIES = 2  # the newest save, and the one being written


def state_bytes(job: Job) -> int | None:
    """Model and optimizer state of the whole job; None for programs of the user's own."""
    if job.worker.is_command or job.worker.recipe is not None:
        return None
    try:
        vocab_size = open_tokenizer(job.tokenizer).vocab_size
    except (ValueError, OSError):
        return None  # the file need not be on every node
    return job.model.num_parameters(vocab_size) * STATE_BYTES_PER_PARAMETER


def check_disks(job: Job, folder: Path) -> Iterator[Check]:
    """Room for what checkpoints need: on the node's own disk, and in a store that is a folder."""
    state = state_bytes(job)
    is_folder = job.storage.address.startswith(FILE_SCHEME)
    on_node = job.checkpoint.node_disk
    has_tier = not is_folder if on_node is None else on_node
    share = DISK_COPIES * state // job.engine.nodes if state is not None and has_tier else 0
    low = job.watch.disk_free_low_percent
    yield check_disk("disk", folder, needed_bytes=share, low_percent=low)
    if is_folder:
        path = Path(job.storage.address.removeprefix(FILE_SCHEME))
        needed = (job.checkpoint.keep_last + 1) * (state or 0)
        yield check_disk("store_disk", _nearest(path), needed_bytes=needed, low_percent=low)


def check_disk(name: str, folder: Path, *, needed_bytes: int, low_percent: float) -> Check:
    """Whether a file system has room, and takes a file."""
    allowed = f"{_size(needed_bytes)} free" if needed_bytes else f"{low_percent:g} % free"
    try:
        disk = psutil.disk_usage(str(folder))
        _try_to_write(folder)
    except OSError as error:
        return Check(name=name, outcome=Outcome.FAILED, seen=f"{folder}: {error}", allowed=allowed)
    free_percent = 100.0 * disk.free / disk.total if disk.total else 0.0
    outcome = Outcome.OK
    if disk.free < needed_bytes:
        outcome = Outcome.FAILED
    elif free_percent < low_percent:
        outcome = Outcome.WARNING
    return Check(
        name=name,
        outcome=outcome,
        seen=f"{_size(disk.free)} free ({free_percent:.0f} %) on {folder}",
        allowed=allowed,
        figures={"free_bytes": float(disk.free)},
    )


def _try_to_write(folder: Path) -> None:
    """A disk may have room by its numbers and be read-only, or out of inodes."""
    probe = folder / f".preflight-{uuid.uuid4().hex}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _nearest(path: Path) -> Path:
    """The folder itself, or the first of its parents that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def check_memory(job: Job, slots: int) -> Check:
    """Room for the saves in host memory: twice the node's share of the state."""
    state = state_bytes(job) if job.checkpoint.host_memory else None
    available = psutil.virtual_memory().available
    seen = f"{_size(available)} available"
    if state is None:
        return Check(name="memory", outcome=Outcome.OK, seen=seen)
    needed = 2 * state * slots // job.engine.world_size
    return Check(
        name="memory",
        outcome=Outcome.OK if available >= needed else Outcome.FAILED,
        seen=seen,
        allowed=f"{_size(needed)} for saves in host memory",
    )


def check_ports(
    job: Job, *, is_first: bool, has_npus: bool, used: Callable[[], Collection[int]]
) -> Check:
    """Whether nobody listens where the job will.

    Args:
        job: whose ports are meant.
        is_first: whether the node has the first rank, and its rendezvous.
        has_npus: whether HCCL will open its host ports here.
        used: tells the ports that somebody listens on; asked when that matters.
    """
    base = job.comm.if_base_port
    wanted = list(range(base, base + HOST_PORTS)) if has_npus else []
    wanted += [job.comm.master_port] if is_first and job.comm.master_port else []
    if not wanted:
        seen = "any free port is taken: no NPUs, and comm.master_port=0"
        return Check(name="ports", outcome=Outcome.SKIPPED, seen=seen)
    taken = sorted(set(wanted) & set(used()))
    told = f"in use: {', '.join(map(str, taken))}" if taken else f"{len(wanted)} ports are free"
    allowed = f"{wanted[0]} to {wanted[-1]} free" if len(wanted) > 1 else f"{wanted[0]} free"
    outcome = Outcome.FAILED if taken else Outcome.OK
    return Check(name="ports", outcome=outcome, seen=told, allowed=allowed)


def listening_ports() -> frozenset[int]:
    """TCP ports of this machine that somebody listens on."""
    return frozenset(
        one.laddr.port
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr
    )


def check_store_of(job: Job) -> Check:
    """The job's store, as this node reaches it."""
    try:
        store = open_store(job.storage)
    except (StorageError, ValueError) as error:
        return Check(name="store", outcome=Outcome.FAILED, seen=f"cannot open: {error}")
    return check_store(store, f"runs/{job.run_id}/")


def check_store(store: ObjectStore, prefix: str, *, size_bytes: int = PROBE_BYTES) -> Check:
    """Write, read and delete an object, as saves and restores will."""
    key = f"{prefix.rstrip('/')}/preflight-{uuid.uuid4().hex}"
    data = os.urandom(size_bytes)
    action = "write"
    try:
        began_s = time.perf_counter()
        store.put(key, data)
        wrote_s = time.perf_counter() - began_s
        action = "read"
        began_s = time.perf_counter()
        if store.get(key) != data:
            raise Corrupt(f"{store.url(key)}: other bytes came back than were written")
        read_s = time.perf_counter() - began_s
        action = "delete"
        store.delete(key)
    except StorageError as error:
        return Check(name="store", outcome=Outcome.FAILED, seen=f"cannot {action}: {error}")
    figures = {
        "write_mb_s": size_bytes / wrote_s / 1e6,
        "read_mb_s": size_bytes / read_s / 1e6,
    }
    seen = f"write {figures['write_mb_s']:.0f} MB/s, read {figures['read_mb_s']:.0f} MB/s"
    return Check(name="store", outcome=Outcome.OK, seen=seen, figures=figures)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"
