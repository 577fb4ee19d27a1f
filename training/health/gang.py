"""All ranks of the gang find each other, and all-reduce numbers whose sum is known.

A rank that does not come is named by those that did: they meet in a store before any collective
starts. The sums are of whole numbers and therefore exact. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from perdure.training.device import backend_of, synchronize
from perdure.training.health.verdict import ALL_REDUCE, JOIN
from perdure.training.wire.node import Check, CheckOutcome
from perdure.training.wire.rendezvous import serve_store

POLL_S = 0.1
LEAVE_S = 5.0  # for the others to be done with the store before its owner leaves
SMALL_REPEATS, LARGE_REPEATS = 10, 3
LARGE_BYTES = {"cpu": 4 << 20}
DEVICE_LARGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in the gang.

    Attributes:
        host: where rank 0 listens.
        join_s: for all ranks to come.
        timeout_s: of a collective.
    """

    rank: int
    world_size: int
    host: str
    port: int
    join_s: float
    timeout_s: float


def check_gang(seat: Seat, device: torch.device) -> tuple[Check, ...]:
    """Join, then all-reduce; what cannot be is a failed check, not an error."""
    if seat.world_size == 1:
        return (Check(name=ALL_REDUCE, outcome=CheckOutcome.SKIPPED, seen="one rank has no peers"),)
    began_s = time.monotonic()
    try:
        store = _open_store(seat)
        _mark(store, "joined", seat.rank)
    except (OSError, RuntimeError, ValueError) as error:  # DistError is a RuntimeError
        seen = f"rank {seat.rank} does not reach {seat.host}:{seat.port}: {_first_line(error)}"
        return (_check(JOIN, CheckOutcome.FAILED, seen, began_s),)
    joined = _check(JOIN, CheckOutcome.OK, f"rank {seat.rank} joined", began_s)
    try:
        absent = _await_all(store, "joined", seat.world_size, seat.join_s)
    except RuntimeError as error:  # rank 0 has given up on another rank, and its store has ended
        seen = f"rank 0 left while rank {seat.rank} waited for the others: {_first_line(error)}"
        return joined, _check(ALL_REDUCE, CheckOutcome.WARNING, seen, began_s)
    if absent:
        if seat.rank == 0:
            time.sleep(LEAVE_S)  # the others may have begun to wait a little later
        ranks = ", ".join(map(str, absent[:8]))
        seen = f"no answer from ranks {ranks} within {seat.join_s:g} s"
        return joined, _check(ALL_REDUCE, CheckOutcome.WARNING, seen, began_s)
    reduced = _all_reduce(seat, store, device)
    _mark(store, "left", seat.rank)
    if seat.rank == 0:
        _await_all(store, "left", seat.world_size, LEAVE_S)
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
    """Wait until every rank has marked a stage. Those that have not."""
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
            return _measured(seat, device, began_s)
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        seen = f"rank {seat.rank}: {_first_line(error)}"
        return _check(ALL_REDUCE, CheckOutcome.FAILED, seen, began_s)


def _measured(seat: Seat, device: torch.device, began_s: float) -> Check:
    large = LARGE_BYTES.get(device.type, DEVICE_LARGE_BYTES)
    latency_s = statistics.median(_timed(seat, device, 1, SMALL_REPEATS))
    best_s = min(_timed(seat, device, large // 4, LARGE_REPEATS))
    # As nccl-tests and hccl_test count: bytes over each link, of a ring.
    share = 2.0 * (seat.world_size - 1) / seat.world_size
    bandwidth = share * large / best_s
    figures = {"latency_us": latency_s * 1e6, "bus_bandwidth_mb_s": bandwidth / 1e6}
    seen = (
        f"{backend_of(device)}, {seat.world_size} ranks: {latency_s * 1e6:.0f} us for 4 B, "
        f"{bandwidth / 1e6:.0f} MB/s for {large >> 20} MiB"
    )
    check = _check(ALL_REDUCE, CheckOutcome.OK, seen, began_s)
    return check.model_copy(update={"figures": figures, "allowed": "every sum right"})


def _timed(seat: Seat, device: torch.device, count: int, repeats: int) -> Iterator[float]:
    """Seconds of each all-reduce of `count` floats, the first one not counted.

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


def _check(name: str, outcome: CheckOutcome, seen: str, began_s: float) -> Check:
    return Check(name=name, outcome=outcome, seen=seen, seconds=time.monotonic() - began_s)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
