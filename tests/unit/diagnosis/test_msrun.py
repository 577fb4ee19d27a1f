"""What ended a job of msrun: not the scheduler's time-out, which is the loudest line of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.diagnosis.sources import diagnose_files, list_logs
from perdure.training.recovery.faults import Fault, FaultClass
from tests.values import not_none

PIDS = (5100, 5101, 5102)
SCHEDULER = 5000


def at(second: int) -> str:
    return f"2026-03-04-08:{10 + second // 60}:{second % 60:02d}.120.350"


def line(level: str, module: str, pid: int, second: int, place: str, text: str) -> str:
    return f"[{level}] {module}({pid},7fbd784b,python):{at(second)} [mindspore/{place}] {text}\n"


def started(rank: int) -> str:
    place = "ccsrc/cluster/topology/cluster_context.cc:428"
    text = f"PostProcess] This node {rank} rank id: {rank}"
    steps = "".join(f"step {step} loss 0.{step}\n" for step in range(1, 6))
    return line("WARNING", "DISTRIBUTED", PIDS[rank], 1, place, text) + steps


def ended(rank: int, code: int, second: int) -> str:
    return (
        f"[ERROR] ME(4900:139982868388736,MainProcess):{at(second)} "
        "[mindspore/parallel/cluster/process_entity/_api.py:365] "
        f"Worker process {PIDS[rank]} exit with exception. Error code: {code}.\n"
    )


def timed_out(rank: int, second: int) -> str:
    place = "ccsrc/cluster/topology/meta_server_node.cc:548"
    text = f"UpdateTopoState] The node: {rank} is timed out. It may exit with exception."
    return (
        line("ERROR", "DISTRIBUTED", SCHEDULER, second, place, text)
        + "Traceback (most recent call last):\n"
        + '  File "/work/train.py", line 20, in <module>\n    init()\n'
        + "RuntimeError: The total number of timed out node is 1. Timed out node list is: [const "
        f"vector]{{{rank}}}, worker {rank} is the first one timed out, please check its log.\n"
    )


def kills_itself(rank: int, second: int) -> str:
    place = "ccsrc/cluster/init.cc:135"
    text = "operator()] Kill this process with SIGTERM."
    return line("WARNING", "DISTRIBUTED", PIDS[rank], second, place, text)


def reconnects(rank: int, second: int) -> str:
    place = "ccsrc/cluster/topology/compute_graph_node.cc:412"
    text = "ReconnectWithTimeout] Retry to reconnect to the meta server... Retry count: 1."
    return line("WARNING", "DISTRIBUTED", PIDS[rank], second, place, text)


RAISED = (
    "Traceback (most recent call last):\n"
    '  File "/work/train.py", line 39, in <module>\n    check(step)\n'
    "RuntimeError: the batch is not as it was\n"
)
TORN = RAISED.replace(
    "RuntimeError: the batch", "ValueError: Fail to parse the input safetensors: "
)
TRE = RAISED.replace("the batch is not as it was", "TREError occurred......")
LAST = "RuntimeError: Distributed job exited with exception. Please check logs in directory: out.\n"

# What the workers print, what msrun prints, what the scheduler prints; the rank and the fault.
CASES = {
    "SIGKILL": ({}, ended(1, -9, 9), timed_out(1, 39), 1, FaultClass.HOST_OOM, "SIGKILL"),
    "SIGTERM": ({}, ended(2, -15, 9), timed_out(2, 39), 2, FaultClass.PREEMPTED, "SIGTERM"),
    "SIGSEGV": ({}, ended(0, -11, 9), timed_out(0, 39), 0, FaultClass.NATIVE_CRASH, "SIGSEGV"),
    "SIGBUS": ({}, ended(0, -7, 9), timed_out(0, 39), 0, FaultClass.NATIVE_CRASH, None),
    "exit 3": ({}, ended(2, 3, 9), timed_out(2, 39), 2, FaultClass.UNKNOWN, None),
    "raised": ({1: RAISED}, ended(1, 1, 9), timed_out(1, 39), 1, FaultClass.UNKNOWN, None),
    "torn": ({2: TORN}, ended(2, 1, 9), timed_out(2, 39), 2, FaultClass.CHECKPOINT_CORRUPT, None),
    "TRE": ({0: TRE}, ended(0, 1, 9), timed_out(0, 39), 0, FaultClass.NUMERIC_ANOMALY, "TRE"),
    "stopped": (
        {0: kills_itself(0, 41)}, ended(0, -15, 42), timed_out(2, 39), 2, FaultClass.HANG, None,
    ),
    "scheduler": (
        {r: reconnects(r, 9) + reconnects(r, 25) + kills_itself(r, 31) for r in range(3)},
        ended(1, -15, 32), "", None, FaultClass.UNKNOWN, "SCHEDULER_LOST",
    ),
}  # fmt: skip


def fault_of(folder: Path) -> Fault:
    case = diagnose_files(str(folder), list_logs(folder), at_s=0.0, year=2026)
    return not_none(case.diagnosis).fault


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_folder_of_logs_shows_the_rank_and_the_cause(case, tmp_path: Path):
    printed, launcher, scheduler, rank, fault_class, code = case
    workers = [started(number) + printed.get(number, "") for number in range(3)]
    for number, text in enumerate(workers):
        (tmp_path / f"worker_{number}.log").write_text(text)
    (tmp_path / "scheduler.log").write_text(scheduler)
    (tmp_path / "msrun.log").write_text("".join(workers) + launcher + scheduler + LAST)
    fault = fault_of(tmp_path)
    assert (fault.fault_class, fault.code) == (fault_class, code), fault.evidence
    assert fault.rank == rank or rank is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_launchers_own_output_is_enough(case):
    printed, launcher, scheduler, rank, fault_class, code = case
    text = "".join(started(number) + printed.get(number, "") for number in range(3))
    end = WorkerEnd(
        None, "node-0", None, 1, 100.0, log=text + launcher + scheduler + LAST, is_command=True
    )
    fault = diagnose(Evidence(at_s=100.0, step=5, workers=[end])).fault
    # The kernel's counter of kills, which an attempt has, says that memory was not short.
    fault_class = FaultClass.NATIVE_CRASH if code == "SIGKILL" else fault_class
    assert (fault.fault_class, fault.code) == (fault_class, code), fault.evidence
    assert fault.rank == rank


def test_a_survivor_that_ended_for_another_rank_says_where_to_look(tmp_path: Path):
    (tmp_path / "worker_0.log").write_text(
        started(0) + f"[ERROR] ME({PIDS[0]}:140289278609088,MainProcess):{at(9)} [mindspore/train/"
        "callback/_train_fault_tolerance.py:117] Enter mindio ttp exit process, which means other "
        "ranks occur exception, check other ranks' logs!\n"
    )
    fault = fault_of(tmp_path)
    assert fault.fault_class is FaultClass.UNKNOWN
    assert "Another rank failed" in fault.explanation
