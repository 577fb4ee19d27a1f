"""Faults for tests of the ladder, as the diagnosis finds them: a log, a code or an exit goes in.

A fault that a test makes by hand has whatever the test wants it to have; what reaches the ladder
in a run is what the diagnosis made of the evidence.
"""

from __future__ import annotations

import signal
from typing import Any

from perdure.training.diagnosis.classify import diagnose as diagnose_all
from perdure.training.diagnosis.evidence import (
    Evidence,
    NodeOutput,
    SilentRank,
    SlowNode,
    WorkerEnd,
)
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.ladder import decide, fault_of_report
from perdure.training.recovery.protocol import WorkerFault, WorkerFaultKind
from perdure.training.recovery.rungs import Capacity, Decision, Policy, Recovery, Rung

ALL = frozenset(Rung)
STEP = 40
# One line each, as the stacks print them.
OUT_OF_DEVICE_MEMORY = "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB"
TIME_OUT = "RuntimeError: HCCL function error: HcclAllReduce(a), error code is 9"
AICORE = "EZ9999: The error from device(chipId:2, dieId:0), aicore execution is abnormal."
LINK = "RuntimeError: HCCS LINK ERROR"
HEARTBEAT_LOST = "RuntimeError: call aclrtSynchronizeStream failed, error code is 507010"
FULL_DISK = "OSError: [Errno 28] No space left on device"
FULL_STORE = "perdure.storage.errors.StorageFull: rank 0: file:///mnt/runs/a: the disk is full"
TYPE_ERROR = (
    "Traceback (most recent call last):\n"
    '  File "/home/user/train.py", line 12, in <module>\n'
    "    main()\n"
    "TypeError: main() missing 1 required positional argument: 'steps'\n"
)


def of_workers(*ends: WorkerEnd, at_s: float = 0.0, step: int | None = STEP, **more: Any) -> Fault:
    """The fault that the ends of workers show."""
    return diagnose_all(Evidence(at_s=at_s, step=step, workers=ends, **more)).fault


def end(
    *,
    node: str = "node-1",
    rank: int | None = 3,
    device: int | None = 1,
    exit_code: int = 1,
    at_s: float = 0.0,
    log: str = "",
) -> WorkerEnd:
    """How one worker ended."""
    return WorkerEnd(rank, node, device, exit_code, at_s, log=log)


def of_log(log: str, *, at_s: float = 0.0, step: int | None = STEP, **where: Any) -> Fault:
    """The fault of a worker that ended with exit code 1 and this log."""
    return of_workers(end(log=log, at_s=at_s, **where), at_s=at_s, step=step)


def of_exit(code: int, *, at_s: float = 0.0, step: int | None = STEP, **where: Any) -> Fault:
    """The fault of a worker that ended so without a word; negative for a signal."""
    return of_workers(end(exit_code=code, at_s=at_s, **where), at_s=at_s, step=step)


def out_of_host_memory(*, node: str = "node-1", at_s: float = 0.0, **where: Any) -> Fault:
    """The fault of a worker that the kernel killed for memory."""
    killed = end(node=node, exit_code=-signal.SIGKILL, at_s=at_s, **where)
    return of_workers(killed, at_s=at_s, oom_nodes=[node])


def of_code(
    code: str,
    *,
    severity: int | None = None,
    node: str = "node-0",
    device: int | None = 2,
    rank: int | None = None,
    at_s: float = 0.0,
    step: int | None = None,
    workers: tuple[WorkerEnd, ...] = (),
) -> Fault:
    """The fault that a chip's report of a code shows, in the log of its device."""
    said = f" severity: {severity}" if severity is not None else ""
    line = f"Fault RAS occurs in the system: [event_id:0x{code.lower()}]{said}"
    output = NodeOutput(node, "device log", line, rank=rank, device=device)
    return of_workers(*workers, at_s=at_s, step=step, outputs=[output])


def lost_node(node: str = "node-1", *, at_s: float = 0.0) -> Fault:
    """The fault of a node whose agent is gone."""
    return of_workers(at_s=at_s, lost_nodes=[node])


def slow_node(node: str = "node-1") -> Fault:
    """The fault of a node that holds the others up."""
    return of_workers(slow=SlowNode(node, 3, 1, "rank 3 is late"))


def silence(node: str = "node-0", *, rank: int | None = 0) -> Fault:
    """The fault of ranks whose heartbeats stand still."""
    return of_workers(silent=[SilentRank(rank, node, 61.0, 60.0, "training")])


def reported(kind: WorkerFaultKind, *, rank: int = 2, step: int = STEP, **what: Any) -> Fault:
    """The fault that a living worker reports."""
    report = WorkerFault(generation=1, kind=kind, text="broke", step=step, at_s=0.0, **what)
    nodes = {one: f"node-{one // 4}" for one in range(8)}
    return fault_of_report(report, reported_by=rank, nodes=nodes)


def choose(
    fault: Fault,
    *history: Recovery,
    supported: frozenset[Rung] = ALL,
    now_s: float | None = None,
    survivors: bool = False,
    capacity: Capacity | None = None,
    no_replica: str | None = None,
    no_replica_of_node: str | None = None,
    **policy: Any,
) -> Decision:
    """The ladder's answer to a fault."""
    return decide(
        fault,
        now_s=fault.at_s if now_s is None else now_s,
        history=history,
        supported=supported,
        policy=Policy(**policy),
        survivors=survivors,
        capacity=capacity,
        no_replica=no_replica,
        no_replica_of_node=no_replica_of_node,
    )


def after(fault: Fault, *rungs: Rung, progressed: bool = False) -> tuple[Recovery, ...]:
    """The fault, answered so."""
    return tuple(Recovery(fault, rung, progressed=progressed) for rung in rungs)


def failing(fault: Fault, rung: Rung) -> Recovery:
    """A rung that could not be carried out."""
    return Recovery(fault, rung, progressed=False, failed=True)


def climbed(fault: Fault, *, times: int = 20, **words: Any) -> list[Rung]:
    """The rungs that answer the same fault again and again without progress, up to a stop."""
    history: list[Recovery] = []
    while len(history) < times:
        rung = choose(fault, *history, **words).rung
        history.append(Recovery(fault, rung, progressed=False))
        if rung is Rung.STOP:
            break
    return [past.rung for past in history]
