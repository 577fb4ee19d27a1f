"""Checks of the links by all-reduces: among a node's devices, and among all ranks of the gang.

CANN's own program tests the devices of a node without torch, and the gang tests the same links
with torch: both together show whether a failure is the software's or the links'. HCCL, "HCCL
Performance Tester": the user builds it below `$ASCEND_HOME_PATH/tools/hccl_test`, and an mpirun of
MPICH or Open MPI starts it.

The ranks of the gang meet in a store before any collective starts, so that the ranks that came
name the ranks that did not. The sums are of whole numbers and therefore exact. Times are seconds,
sizes bytes.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from perdure.training.device import backend_of, synchronize
from perdure.training.node_checks.verdict import ALL_REDUCE, JOIN
from perdure.training.telemetry.vendor_tools import NoAnswer, find_tool, run_tool
from perdure.training.wire.node import Check, CheckOutcome
from perdure.training.wire.rendezvous import serve_store

NAME = "hccl_test"
_MPIRUN = "mpirun"
HOME = "ASCEND_HOME_PATH"
_PROGRAM = Path("tools/hccl_test/bin/all_reduce_test")
# Open MPI refuses root without these two, and a container's user is root; MPICH ignores them.
_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
# Powers of two from 8 B to 128 MiB, as guides have them (`-b 8 -e 128M -f 2`): latency, too. HCCL's
# own page on the program has 8 KiB to 64 MiB, which are among them.
_SIZES = ("-b", "8", "-e", "128M", "-f", "2")
_ROW = re.compile(r"^\s*(\d+)\s*\|\s*([\d.]+)\s*\|\s*([\d.]+)\s*\|\s*(\w+)", re.MULTILINE)
_ERROR = re.compile(r"^.*interface return err.*retcode: *-?\d+", re.MULTILINE)


class _AskWithLimit(Protocol):
    """A function that runs a tool."""

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> str:
        """Return the tool's output."""


@dataclass(frozen=True, slots=True)
class _LinkMeasurement:
    """A line of the program's table; `result` is success, failed or NULL (not checked)."""

    size_bytes: int
    bandwidth_gb_s: float
    result: str


def _parse_rows(text: str) -> tuple[_LinkMeasurement, ...]:
    """Parse the table: size (bytes), time (us), bandwidth (GB/s), result of the comparison."""
    return tuple(
        _LinkMeasurement(int(size), float(bandwidth), result)
        for size, _, bandwidth, result in _ROW.findall(text)
    )


def check_links(
    slots: int,
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    ask_tool: _AskWithLimit = run_tool,
) -> tuple[Check, ...]:
    """Run the program on all slots of this node; no check without CANN, or for one device.

    Args:
        slots: number of devices that the job uses on the node.
        environment: variables of the node.
        timeout_s: limit of the whole program.
        ask_tool: runs a tool.
    """
    home = environment.get(HOME)
    if not home or slots < 2:
        return ()
    program = Path(home) / _PROGRAM
    if not program.is_file():
        return (_link_check(CheckOutcome.SKIPPED, f"not built: there is no {program}"),)
    if find_tool(_MPIRUN) is None:
        return (_link_check(CheckOutcome.SKIPPED, f"{_MPIRUN} is not in PATH"),)
    count = str(slots)
    command = ("env", *_AS_ROOT, _MPIRUN, "-n", count, str(program), *_SIZES)
    try:
        text = ask_tool((*command, "-d", "fp32", "-o", "sum", "-p", count), timeout_s=timeout_s)
    except NoAnswer:
        reason = f"{slots} devices: no result within {timeout_s:g} s"
        return (_link_check(CheckOutcome.FAILED, reason),)
    return (judge_links(text, slots),)


def judge_links(text: str, slots: int) -> Check:
    """Judge the output: wrong sums and errors of HCCL fail, a program in trouble warns."""
    rows = _parse_rows(text)
    wrong = [f"{row.size_bytes} B" for row in rows if row.result == "failed"]
    error = _ERROR.search(text)
    if wrong:
        return _link_check(
            CheckOutcome.FAILED, f"wrong sums over {slots} devices of {', '.join(wrong)}"
        )
    if error is not None:
        return _link_check(CheckOutcome.FAILED, error.group().strip())
    if not rows:
        # mpirun and the program may not fit each other: that shows nothing about the devices.
        last = (text.strip().splitlines() or ["nothing was printed"])[-1]
        return _link_check(CheckOutcome.WARNING, f"no result: {last[:300]}")
    best = max(row.bandwidth_gb_s for row in rows)
    summary = f"{slots} devices, {best:.1f} GB/s for up to {rows[-1].size_bytes >> 20} MiB"
    check = _link_check(CheckOutcome.OK, summary)
    return check.model_copy(update={"figures": {"algorithm_bandwidth_gb_s": best}})


def _link_check(outcome: CheckOutcome, text: str) -> Check:
    return Check(name=NAME, outcome=outcome, seen=text, allowed="every sum right")


POLL_S = 0.1
_LEAVE_S = 5.0  # for the other ranks to finish with the store before its owner leaves
SMALL_REPEATS, LARGE_REPEATS = 10, 3
_LARGE_BYTES = {"cpu": 4 << 20}
_DEVICE_LARGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a rank in the gang.

    Attributes:
        host: address where rank 0 listens.
        join_s: limit for all ranks to come.
        timeout_s: limit of a collective.
    """

    rank: int
    world_size: int
    host: str
    port: int
    join_s: float
    timeout_s: float


def check_gang(seat: Seat, device: torch.device) -> tuple[Check, ...]:
    """Join, then all-reduce; a failure is a failed check, not an error."""
    if seat.world_size == 1:
        return (Check(name=ALL_REDUCE, outcome=CheckOutcome.SKIPPED, seen="one rank has no peers"),)
    began_s = time.monotonic()
    try:
        store = _open_store(seat)
        _mark(store, "joined", seat.rank)
    except (OSError, RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        text = f"rank {seat.rank} does not reach {seat.host}:{seat.port}: {_first_line(error)}"
        return (_gang_check(JOIN, CheckOutcome.FAILED, text, began_s),)
    joined = _gang_check(JOIN, CheckOutcome.OK, f"rank {seat.rank} joined", began_s)
    try:
        absent = _await_all(store, "joined", seat.world_size, seat.join_s)
    except RuntimeError as error:  # rank 0 has given up on another rank, and its store has ended
        text = f"rank 0 left while rank {seat.rank} waited for the others: {_first_line(error)}"
        return joined, _gang_check(ALL_REDUCE, CheckOutcome.WARNING, text, began_s)
    if absent:
        if seat.rank == 0:
            time.sleep(_LEAVE_S)  # the others may have begun to wait a little later
        ranks = ", ".join(map(str, absent[:8]))
        text = f"no answer from ranks {ranks} within {seat.join_s:g} s"
        return joined, _gang_check(ALL_REDUCE, CheckOutcome.WARNING, text, began_s)
    reduced = _all_reduce(seat, store, device)
    _mark(store, "left", seat.rank)
    if seat.rank == 0:
        _await_all(store, "left", seat.world_size, _LEAVE_S)
    return joined, reduced


def _open_store(seat: Seat) -> Store:
    if seat.rank == 0:
        return serve_store(seat.host, seat.port, seat.world_size, timeout_s=seat.join_s)
    return TCPStore(
        seat.host,
        seat.port,
        seat.world_size,
        is_master=False,
        timeout=timedelta(seconds=seat.join_s),
        wait_for_workers=False,  # _await_all can name those who do not come
    )


def _mark(store: Store, stage: str, rank: int) -> None:
    store.set(f"{stage}/{rank}", "")
    store.add(stage, 1)


def _await_all(store: Store, stage: str, world_size: int, timeout_s: float) -> list[int]:
    """Wait until every rank has marked a stage. Return the ranks that have not."""
    until_s = time.monotonic() + timeout_s
    # Counted: if every rank read every rank's mark, a large gang would make millions of reads.
    while store.add(stage, 0) < world_size:
        if time.monotonic() > until_s:
            return [rank for rank in range(world_size) if not store.check([f"{stage}/{rank}"])]
        time.sleep(POLL_S)
    return []


def _all_reduce(seat: Seat, store: Store, device: torch.device) -> Check:
    began_s = time.monotonic()
    try:
        dist.init_process_group(
            backend_of(device),
            store=PrefixStore("gang", store),
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=timedelta(seconds=seat.timeout_s),
        )
        try:
            return _measure(seat, device, began_s)
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        text = f"rank {seat.rank}: {_first_line(error)}"
        return _gang_check(ALL_REDUCE, CheckOutcome.FAILED, text, began_s)


def _measure(seat: Seat, device: torch.device, began_s: float) -> Check:
    large = _LARGE_BYTES.get(device.type, _DEVICE_LARGE_BYTES)
    latency_s = statistics.median(_time_all_reduces(seat, device, 1, SMALL_REPEATS))
    best_s = min(_time_all_reduces(seat, device, large // 4, LARGE_REPEATS))
    # As nccl-tests and hccl_test count: bytes over each link, of a ring.
    share = 2.0 * (seat.world_size - 1) / seat.world_size
    bandwidth = share * large / best_s
    figures = {"latency_us": latency_s * 1e6, "bus_bandwidth_mb_s": bandwidth / 1e6}
    text = (
        f"{backend_of(device)}, {seat.world_size} ranks: {latency_s * 1e6:.0f} us for 4 B, "
        f"{bandwidth / 1e6:.0f} MB/s for {large >> 20} MiB"
    )
    check = _gang_check(ALL_REDUCE, CheckOutcome.OK, text, began_s)
    return check.model_copy(update={"figures": figures, "allowed": "every sum right"})


def _time_all_reduces(
    seat: Seat, device: torch.device, count: int, repeats: int
) -> Iterator[float]:
    """Yield the seconds of each all-reduce of `count` floats, but those of the first.

    Raises:
        RuntimeError: a sum is wrong.
    """
    expected = seat.world_size * (seat.world_size + 1) // 2
    for number in range(repeats + 1):
        values = torch.full((count,), float(seat.rank + 1), device=device)
        synchronize(device)
        began_s = time.perf_counter()
        dist.all_reduce(values)
        synchronize(device)
        took_s = time.perf_counter() - began_s
        if not bool((values == expected).all()):
            raise RuntimeError(f"the sum over all ranks is not {expected} everywhere")
        if number:
            yield took_s


def _gang_check(name: str, outcome: CheckOutcome, text: str, began_s: float) -> Check:
    return Check(name=name, outcome=outcome, seen=text, seconds=time.monotonic() - began_s)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
