"""Check a node: `python -m perdure.training.node_checks.program`, which reads its task on stdin.

It forks a rank for every slot: each burns its device in and takes part in the check of the gang,
while the program itself checks everything else on the node. It imports torch once, before the
fork, and touches no device. It prints its checks as a line of JSON on stdout. Times are seconds.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.training.config.job import Job
from perdure.training.device import pick_device
from perdure.training.node_checks import burn_in
from perdure.training.node_checks import collectives as gang
from perdure.training.node_checks.collectives import check_links
from perdure.training.node_checks.device_network import check_pings, check_tls
from perdure.training.node_checks.device_network import check_ports as check_ports_of_devices
from perdure.training.node_checks.devices import check_devices
from perdure.training.node_checks.host import (
    check_disks,
    check_job_store,
    check_logs,
    check_memory,
    check_ports,
    check_secrets,
    listening_ports,
)
from perdure.training.node_checks.limits import (
    check_address,
    check_open_files,
    check_shared_memory,
)
from perdure.training.node_checks.versions import check_versions, read_installed
from perdure.training.telemetry.device_addresses import check_rank_table, query_of
from perdure.training.wire.node import CHECKS, Check, CheckOutcome, NodeTask, worst

_END_MARGIN_S = 5.0  # for the answer of a node that is late with some of its checks
MAX_LISTED = 4  # ranks with a failure that are listed one by one


def main() -> None:
    """Read the task, check, print."""
    task = NodeTask.model_validate_json(sys.stdin.buffer.read())
    sys.stdout.buffer.write(CHECKS.dump_json(_check_node(task)) + b"\n")
    sys.stdout.flush()


def _check_node(task: NodeTask) -> tuple[Check, ...]:
    """Run every check of the task, and put the node's name on each."""
    job = task.job
    until_s = time.monotonic() + task.timeout_s - _END_MARGIN_S
    ports = _run_timed(lambda: _check_ports(job, task)) if task.is_new else []
    ranks = [_fork(task, job, local_rank) for local_rank in range(task.slots)]
    try:
        of_host = _check_host(job, task) if task.is_new else []
        of_ranks = [rank.await_checks(until_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    # Once the ranks have let go of the devices.
    network = _run_timed(lambda: _check_network(job, task, until_s))
    links = _run_timed(lambda: _check_links(job, task, until_s)) if task.is_new else []
    every = (*of_host, *ports, *merge_checks(of_ranks), *network, *links)
    return tuple(check.model_copy(update={"node": task.node}) for check in every)


def _check_ports(job: Job, task: NodeTask) -> Sequence[Check]:
    is_first = task.first_rank == 0
    has_npus = importlib.util.find_spec("torch_npu") is not None
    return [check_ports(job, is_first=is_first, has_npus=has_npus, used=listening_ports)]


def _check_network(job: Job, task: NodeTask, until_s: float) -> Sequence[Check]:
    """Check the ports of a new node, and against other nodes those of every node of the gang."""
    checks = check_ports_of_devices(task.slots) if task.is_new else ()
    if task.gang_host is None and not task.is_new:
        return checks
    return (*checks, *check_tls(task.slots), *check_pings(job, task.pings, until_s=until_s))


def _check_links(job: Job, task: NodeTask, until_s: float) -> Sequence[Check]:
    left_s = min(job.preflight.collective_s, until_s - time.monotonic())
    return check_links(task.slots, os.environ, timeout_s=max(0.0, left_s))


def _check_host(job: Job, task: NodeTask) -> list[Check]:
    folder = Path(task.folder)
    disk = Path(task.node_folder).parent if task.node_folder is not None else folder
    checks = [
        *_run_timed(lambda: check_devices(folder, task.slots)),
        *_run_timed(lambda: check_versions(read_installed())),
        *_run_timed(
            lambda: tuple(check_disks(job, disk if disk.is_dir() else folder, task.state_bytes))
        ),
        *_run_timed(lambda: [check_memory(job, task.slots, task.state_bytes)]),
        check_open_files(job),
        check_shared_memory(),
        *_run_timed(lambda: [_check_address(job, task)]),
        check_logs(job, os.environ),
    ]
    if any(source.block is None for source in job.env_from.values()):
        checks += _run_timed(lambda: [check_secrets(job, os.environ)])
    query = query_of(job)
    if query is not None:
        checks += _run_timed(lambda: [check_rank_table(query, task.node)])
    if task.with_store:
        checks += _run_timed(lambda: [check_job_store(job)])
    return checks


def _check_address(job: Job, task: NodeTask) -> Check:
    is_here, limit_s = job.engine.on_this_machine, job.preflight.collective_s
    return check_address(task.gang_host, on_this_machine=is_here, timeout_s=limit_s)


def _run_timed(check: Callable[[], Sequence[Check]]) -> list[Check]:
    """Run checks, and put the seconds that they took together on each."""
    began_s = time.monotonic()
    checks = check()
    took_s = time.monotonic() - began_s
    return [item.model_copy(update={"seconds": took_s}) for item in checks]


@dataclass(slots=True)
class _Rank:
    """A forked rank, and the pipe that its checks come through."""

    local_rank: int
    pid: int
    pipe: int
    is_over: bool = False

    def await_checks(self, until_s: float) -> tuple[Check, ...]:
        """Wait for its checks; an end without a result, or a late result, is a failed check."""
        text = self._read(until_s)
        if text is None:
            reason = f"slot {self.local_rank}: no result in time"
            return (Check(name=burn_in.NAME, outcome=CheckOutcome.FAILED, seen=reason),)
        _, status = os.waitpid(self.pid, 0)
        self.is_over = True
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and text:
            return CHECKS.validate_json(text)
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = f"slot {self.local_rank}: its process {ended}"
        return (Check(name=burn_in.NAME, outcome=CheckOutcome.FAILED, seen=reason),)

    def _read(self, until_s: float) -> bytes | None:
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while selector.select(max(0.0, until_s - time.monotonic())):
                part = os.read(self.pipe, 1 << 16)
                if not part:
                    return b"".join(parts)
                parts.append(part)
        return None

    def end(self) -> None:
        """Kill its process, and close the pipe."""
        os.close(self.pipe)
        if not self.is_over:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _fork(task: NodeTask, job: Job, local_rank: int) -> _Rank:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Rank(local_rank, pid, reader)
    code = 1
    try:
        os.close(reader)
        os.write(writer, CHECKS.dump_json(_check_rank(task, job, local_rank)))
        code = 0
    except BaseException:  # noqa: BLE001 the end of the process, as the interpreter would have it
        traceback.print_exc()
    finally:
        os._exit(code)


def _check_rank(task: NodeTask, job: Job, local_rank: int) -> tuple[Check, ...]:
    """Check, in the forked process, the device, then the gang."""
    began_s = time.monotonic()
    device = pick_device(local_rank)
    checks: list[Check] = []
    if task.is_new:
        check = burn_in.check_device(device, job.preflight.burn_in_s)
        checks.append(check.model_copy(update={"seconds": time.monotonic() - began_s}))
    if task.gang_host is not None:
        seat = gang.Seat(
            rank=task.first_rank + local_rank,
            world_size=task.world_size,
            host=task.gang_host,
            port=task.gang_port,
            # Others may burn their devices in first.
            join_s=job.preflight.collective_s + job.preflight.burn_in_s,
            timeout_s=job.preflight.collective_s,
        )
        checks += gang.check_gang(seat, device)
    return tuple(checks)


def merge_checks(ranks: Sequence[Sequence[Check]]) -> Iterator[Check]:
    """Merge the checks of a node's ranks by name: the worst outcome, and the ranks' words."""
    names = dict.fromkeys(check.name for checks in ranks for check in checks)
    for name in names:
        of_name = [check for checks in ranks for check in checks if check.name == name]
        outcome = worst([check.outcome for check in of_name])
        having = list(dict.fromkeys(c.seen for c in of_name if c.outcome is outcome))
        limit = 1 if outcome is CheckOutcome.OK else MAX_LISTED
        more = f"; and {len(having) - limit} more" if len(having) > limit else ""
        figures = {
            figure: statistics.fmean(c.figures[figure] for c in of_name if figure in c.figures)
            for figure in of_name[0].figures
        }
        yield of_name[0].model_copy(
            update={
                "outcome": outcome,
                "seen": "; ".join(having[:limit]) + more,
                "figures": figures,
                "seconds": max(check.seconds for check in of_name),
            }
        )


if __name__ == "__main__":
    main()
