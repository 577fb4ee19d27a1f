"""Checks of a node beside its devices: disk, memory, ports, secrets, the store, and CANN's logs.

The diagnosis needs CANN's own logs (plog) to explain a fault, and an attempt's logs include them;
CANN documents their variables under "Log" (envref_07_0121 and following). Times are seconds,
sizes bytes.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from perdure.storage.address import open_store
from perdure.storage.errors import Corrupt, StorageError
from perdure.storage.objects import ObjectStore
from perdure.training.config.job import Job
from perdure.training.config.secrets import values_on_node
from perdure.training.environment import HOST_PORTS, variables_of
from perdure.training.wire.node import Check, CheckOutcome

_PROBE_BYTES = 4 << 20
_DISK_COPIES = 2  # the newest save, and the save in progress
RECORDS_BYTES = 32 << 20  # ledger, step records, heartbeats and logs of a run that goes well
_LITTLE_BYTES = 1 << 30  # too little free space on a disk of any size


@dataclass(frozen=True, slots=True)
class Room:
    """The free space that a file system must have.

    Attributes:
        needed_bytes: size of the files that the run writes for certain.
        low_bytes: free space below which it may soon be full.
        low_percent: the same as a share of its size.
        why: the parts of `needed_bytes`.
    """

    needed_bytes: int
    low_bytes: int = 0
    low_percent: float = 0.0
    why: str = ""


def check_disks(job: Job, folder: Path, state_bytes: int | None) -> Iterator[Check]:
    """Check the room for the run's files on the node's disk, and in a store that is a folder.

    Args:
        job: writes the checkpoints.
        folder: on the node's disk.
        state_bytes: model and optimizer state of the whole job; None where it is unknown.
    """
    path = job.storage.folder
    on_node = job.checkpoint.node_disk
    has_tier = path is None if on_node is None else on_node
    of_node = _required_room(
        job, state_bytes, copies=_DISK_COPIES if has_tier else 0, parts=job.engine.nodes
    )
    yield check_disk("disk", folder, of_node)
    if path is not None:
        # keep_last and one: the oldest goes when the newest is whole.
        copies = job.checkpoint.keep_last + 1
        if state_bytes:
            copies = max(1, copies - _measure_saves(path, job.run_id) // state_bytes)
        of_store = _required_room(job, state_bytes, copies=copies)
        yield check_disk("store_disk", _nearest_folder(path), of_store)


def _measure_saves(store: Path, run_id: str) -> int:
    """Measure the saves of an earlier start of the run in a store."""
    held = 0
    for folder, _, names in os.walk(store / "runs" / run_id / "checkpoints"):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                held += Path(folder, name).stat().st_size
    return held


def _required_room(job: Job, state_bytes: int | None, *, copies: int, parts: int = 1) -> Room:
    """Compute the room for so many copies of a run's state, or of a part of it."""
    is_known = state_bytes is not None and not job.worker.is_command
    saves = copies * (state_bytes or 0) // parts if is_known else 0
    low = job.watch.disk_free_low_percent
    if copies == 0:
        return Room(RECORDS_BYTES, _LITTLE_BYTES, low, "logs and records")
    if not is_known:
        return Room(
            RECORDS_BYTES, _LITTLE_BYTES, low, "records; the size of its saves is not known"
        )
    why = f"{copies} saves of {_format_size((state_bytes or 0) // parts)}, logs and records"
    return Room(saves + RECORDS_BYTES, saves + _LITTLE_BYTES, low, why)


def check_disk(name: str, folder: Path, room: Room) -> Check:
    """Check that a file system has room, and takes a file."""
    allowed = f"{_format_size(room.needed_bytes)} free" + (f": {room.why}" if room.why else "")
    try:
        disk = psutil.disk_usage(str(folder))
        _try_to_write(folder)
    except OSError as error:
        return Check(
            name=name, outcome=CheckOutcome.FAILED, seen=f"{folder}: {error}", allowed=allowed
        )
    free_percent = 100.0 * disk.free / disk.total if disk.total else 0.0
    outcome = CheckOutcome.OK
    if disk.free < room.needed_bytes:
        outcome = CheckOutcome.FAILED
    elif disk.free < room.low_bytes or free_percent < room.low_percent:
        outcome = CheckOutcome.WARNING
        allowed = (
            f"{_format_size(room.low_bytes)} and {room.low_percent:g} % free; at least {allowed}"
        )
    return Check(
        name=name,
        outcome=outcome,
        seen=f"{_format_size(disk.free)} free ({free_percent:.0f} %) on {folder}",
        allowed=allowed,
        figures={"free_bytes": float(disk.free)},
    )


def _try_to_write(folder: Path) -> None:
    """Write a file: a disk may have room by its numbers and be read-only, or out of inodes."""
    probe = folder / f".preflight-{uuid.uuid4().hex}"
    try:
        with probe.open("wb") as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _nearest_folder(path: Path) -> Path:
    """Return the folder, or the first of its parents that exists."""
    return next((folder for folder in (path, *path.parents) if folder.is_dir()), Path("/"))


def check_memory(job: Job, slots: int, state_bytes: int | None) -> Check:
    """Check the room for saves in host memory: the node's shares of the state, with copies."""
    available = psutil.virtual_memory().available
    text = f"{_format_size(available)} available"
    if state_bytes is None or not job.checkpoint.host_memory:
        return Check(name="memory", outcome=CheckOutcome.OK, seen=text)
    needed = job.checkpoint.shares_in_memory * state_bytes * slots // job.engine.world_size
    return Check(
        name="memory",
        outcome=CheckOutcome.OK if available >= needed else CheckOutcome.FAILED,
        seen=text,
        allowed=f"{_format_size(needed)} for saves in host memory",
    )


def check_ports(
    job: Job, *, is_first: bool, has_npus: bool, used: Callable[[], Collection[int]]
) -> Check:
    """Check that the ports on which the job will listen are free.

    Args:
        job: opens the ports.
        is_first: whether the node has the first rank, and its rendezvous.
        has_npus: whether HCCL will open its host ports here.
        used: lists the ports in use; called only where the job needs ports.
    """
    base = job.comm.if_base_port
    wanted = list(range(base, base + HOST_PORTS)) if has_npus else []
    wanted += [job.comm.master_port] if is_first and job.comm.master_port else []
    if not wanted:
        text = "any free port is taken: no NPUs, and comm.master_port=0"
        return Check(name="ports", outcome=CheckOutcome.SKIPPED, seen=text)
    busy = sorted(set(wanted) & set(used()))
    text = f"in use: {', '.join(map(str, busy))}" if busy else f"{len(wanted)} ports are free"
    allowed = f"{wanted[0]} to {wanted[-1]} free" if len(wanted) > 1 else f"{wanted[0]} free"
    outcome = CheckOutcome.FAILED if busy else CheckOutcome.OK
    return Check(name="ports", outcome=outcome, seen=text, allowed=allowed)


def listening_ports() -> frozenset[int]:
    """List the TCP ports of this machine on which a process listens."""
    return frozenset(
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr
    )


def check_job_store(job: Job) -> Check:
    """Check the job's store from this node."""
    try:
        store = open_store(job.storage)
    except (StorageError, ValueError) as error:
        return Check(name="store", outcome=CheckOutcome.FAILED, seen=f"cannot open: {error}")
    return check_store(store, f"runs/{job.run_id}/")


def check_secrets(job: Job, environment: Mapping[str, str]) -> Check:
    """Check that this node has the secrets of env_from that nodes provide."""
    kept_here = {name: source for name, source in job.env_from.items() if source.block is None}
    try:
        values_on_node(kept_here, delivered={}, environment=environment)
    except ValueError as error:
        return Check(name="secrets", outcome=CheckOutcome.FAILED, seen=str(error))
    text = f"{len(kept_here)} can be read"
    return Check(name="secrets", outcome=CheckOutcome.OK, seen=text)


def check_store(store: ObjectStore, prefix: str, *, size_bytes: int = _PROBE_BYTES) -> Check:
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
        return Check(name="store", outcome=CheckOutcome.FAILED, seen=f"cannot {action}: {error}")
    figures = {
        "write_mb_s": size_bytes / wrote_s / 1e6,
        "read_mb_s": size_bytes / read_s / 1e6,
    }
    text = f"write {figures['write_mb_s']:.0f} MB/s, read {figures['read_mb_s']:.0f} MB/s"
    return Check(name="store", outcome=CheckOutcome.OK, seen=text, figures=figures)


def _format_size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


NAME = "device_logs"
_LEVEL = "ASCEND_GLOBAL_LOG_LEVEL"
PRINTED = "ASCEND_SLOG_PRINT_TO_STDOUT"
FOLDER = "ASCEND_PROCESS_LOG_PATH"
_LEVELS = ("debug", "info", "warning", "error", "none")
_DETAILED = frozenset({"0", "1"})
_NONE = "4"


def check_logs(job: Job, environment: Mapping[str, str]) -> Check:
    """Check level, place and collection of the logs.

    Args:
        job: its variables come before those of the node.
        environment: variables of the node.
    """
    values = {**environment, **variables_of(job)}
    level = values[_LEVEL]
    problems = list(_find_problems(job, values))
    text = f"level {level} ({_LEVELS[int(level)]})"
    return Check(
        name=NAME,
        outcome=CheckOutcome.WARNING if problems else CheckOutcome.OK,
        seen="; ".join([text, *problems]) if problems else f"{text}, collected after each attempt",
        allowed="warnings or errors, into files, collected",
    )


def _find_problems(job: Job, values: Mapping[str, str]) -> Iterator[str]:
    if values[_LEVEL] == _NONE:
        yield f"{_LEVEL}={_NONE} writes no log: chip and HCCL faults lose their reason"
    if values[_LEVEL] in _DETAILED:
        yield f"{_LEVEL}={values[_LEVEL]} slows every step and fills the disk"
    if values.get(PRINTED) == "1":
        yield f"{PRINTED}=1 prints the logs and writes no file: they push out what ranks print"
    folder = values.get(FOLDER)
    if folder and not PurePosixPath(folder).is_absolute():
        yield f"{FOLDER}={folder} is not absolute: it depends on the folder a rank starts in"
    if job.watch.log_limit_bytes == 0:
        yield "watch.log_limit_bytes=0 collects none: they go with their container"
