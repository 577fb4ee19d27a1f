"""What a hang's fault says: the limit and its field, the advice, the place in the program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, SilentRank, WorkerEnd
from perdure.training.diagnosis.hang import locate
from perdure.training.recovery.faults import IDLE_START, SLOW_START, Fault, FaultClass
from perdure.training.wire.rank_snapshot import RankSnapshot

QUIET = SilentRank(
    None, "node-0", 31.0, 30.0, "command", "neither output nor I/O", (),
    "watch.command_quiet_s", is_slow_start=True, is_busy=True,
)  # fmt: skip
STEP = SilentRank(1, "node-0", 61.0, 60.0, "step", "", (), "restart.hang_timeout_s")


def rank_at(rank: int, **changes: Any) -> RankSnapshot:
    """A rank that waits in a collective of step 21."""
    fields: dict[str, Any] = {
        "rank": rank, "node": "node-0", "device": rank, "pid": 100 + rank, "step": 20,
        "phase": "step", "entered": 4, "left": 3, "has_stepped": True,
        "operation": "allreduce in world", "silent_s": 61.0, "process_state": "S",
    }  # fmt: skip
    return RankSnapshot(**{**fields, **changes})


ALONE = rank_at(0, entered=3)
GANG = (ALONE, rank_at(1))


def fault_of(*silent: SilentRank, ranks: Any = (), log: str = "") -> Fault:
    return diagnose(evidence_of(*silent, ranks=ranks, log=log)).fault


def evidence_of(*silent: SilentRank, ranks: Any = (), log: str = "") -> Evidence:
    end = WorkerEnd(None, "node-0", None, -15, 1.0, log=log, stopped=True)
    return Evidence(at_s=1.0, step=20, silent=silent, rank_progress=ranks, workers=(end,))


def test_a_slow_start_names_its_field_its_value_and_the_reasons_that_it_may_have():
    fault = fault_of(QUIET)
    assert (fault.fault_class, fault.code) == (FaultClass.HANG, SLOW_START)
    assert "limit 30 s (raise watch.command_quiet_s if it needs longer)" in fault.evidence
    assert "raise watch.command_quiet_s, 30 s were too few" in fault.action
    assert "skipping data" in fault.action


def test_a_slow_start_of_a_session_says_whether_processors_were_busy():
    use = "no step since its start, processors were busy, 1.00 of 8 cores in use all the while"
    start = replace(
        STEP, why=use, field="restart.start_timeout_s", is_slow_start=True, is_busy=True
    )
    fault = fault_of(start, ranks=[replace(rank, has_stepped=False) for rank in GANG])
    assert fault.code == SLOW_START
    assert f"(raise restart.start_timeout_s if it needs longer): {use}" in fault.evidence


@pytest.mark.parametrize(
    ("silent", "ranks", "log"),
    [
        (STEP, GANG, ""),
        (QUIET, (rank_at(0, phase="", counts_collectives=False),), ""),
        (
            replace(QUIET, field="watch.output_quiet_s"),
            (),
            "step 11/100 loss 2.1\nstep 12/100 loss 2.0\n",
        ),
    ],
    ids=["a step of these processes", "a rank has stepped", "steps in an output nobody follows"],
)
def test_a_hang_after_a_step_is_no_slow_start(silent, ranks, log):
    assert fault_of(silent, ranks=ranks, log=log).code is None


def test_a_rank_that_the_others_wait_for_gets_the_advice_to_evaluate_in_its_phase():
    fault = fault_of(STEP, ranks=GANG)
    assert fault.rank == 0
    assert fault.evidence.startswith("rank 0 on node-0: in no collective")
    assert "limit 60 s (raise restart.hang_timeout_s" in fault.evidence
    assert "If rank 0 evaluates" in fault.action
    assert "`with session.evaluation():` on every rank" in fault.action
    assert "raise restart.hang_timeout_s, 60 s were too few" in fault.action


def test_a_rank_of_a_command_gets_the_advice_for_its_heartbeat():
    ranks = [
        rank_at(r, entered=0, left=0, counts_collectives=False, step=20 - (r == 0)) for r in (0, 1)
    ]
    assert "Phase.EVALUATE" in fault_of(STEP, ranks=ranks).action


def test_a_rank_that_a_signal_has_stopped_gets_no_advice_about_limits():
    stopped = (rank_at(0, entered=3, process_state="T"), rank_at(1))
    assert "raise" not in fault_of(STEP, ranks=stopped).action


def test_nodes_that_start_late_are_a_slow_start_too():
    evidence = Evidence(
        at_s=1.0, step=None, refusal="node-0 did not start within 600 s", is_late_start=True
    )
    assert diagnose(evidence).fault.code == SLOW_START


PY_SPY = """process 7 is sleeping
Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    clock_nanosleep (libc.so.6)
    linear (torch/nn/functional.py:2300)
    forward (net.py:7)
    evaluate (pkg/evaluation.py:31)
    main (train.py:52)
    main (perdure/training/runtime/worker.py:109)
    _run_code (<frozen runpy>:88)
Thread 9 (idle): "loader"
    recv (libc.so.6)
    read_forever (mine.py:1)
"""
FAULTHANDLER = """process 7 is sleeping
Thread 0x00007f0000000001 (most recent call first):
  File "/opt/app/mine.py", line 1 in read_forever

Thread 0x00007f0000000000 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 706 in readinto
  File "/opt/app/pkg/evaluation.py", line 31 in evaluate
  File "/opt/app/train.py", line 52 in main
  File "/opt/venv/lib/python3.11/site-packages/perdure/training/runtime/worker.py", line 109 in main
"""
UNNAMED = "Thread 7 (active+gil)\n    <module> (mini.py:148)\n    0x7f48d744524a (libc.so.6)\n"
IN_EVALUATE = "main (train.py) > evaluate (evaluation.py)"


@pytest.mark.parametrize(
    ("text", "frame"),
    [(PY_SPY, IN_EVALUATE), (FAULTHANDLER, IN_EVALUATE), (UNNAMED, "<module> (mini.py)")],
    ids=["py-spy", "faulthandler", "a program without threads"],
)
def test_the_place_of_a_hang_is_in_the_functions_of_the_program(text, frame):
    fault = locate(fault_of(STEP, ranks=GANG), [(0, text), (1, PY_SPY)], evidence_of(STEP))
    assert fault.frame == frame
    assert f"{frame.split(' ')[0]} (" in fault.explanation


def test_the_stack_of_the_rank_is_shown_with_its_lines():
    fault = locate(fault_of(STEP, ranks=GANG), [(0, PY_SPY)], evidence_of(STEP))
    assert "main (train.py:52) > evaluate (evaluation.py:31) > forward (net.py:7)" in (
        fault.explanation
    )


def test_an_evaluation_is_one_place_whatever_it_calls_at_the_moment():
    later = PY_SPY.replace("forward (net.py:7)", "next_batch (data.py:3)")
    first, second = (
        locate(fault_of(STEP, ranks=GANG), [(0, text)], evidence_of(STEP))
        for text in (PY_SPY, later)
    )
    assert first.frame == second.frame


@pytest.mark.parametrize(
    ("silent", "ranks"),
    [
        (STEP, (rank_at(0), rank_at(1))),
        (STEP, (rank_at(0, entered=3, process_state="T"), rank_at(1))),
        (STEP, (rank_at(0, entered=3, process_state="D"), rank_at(1))),
        (QUIET, ()),
    ],
    ids=["all wait in a collective", "stopped by a signal", "waits for storage", "computes"],
)
def test_a_hang_that_need_not_be_the_programs_has_no_place(silent, ranks):
    evidence = evidence_of(silent, ranks=ranks)
    assert locate(diagnose(evidence).fault, [(0, PY_SPY)], evidence).frame is None


def test_a_start_that_computes_has_a_place_where_the_others_wait_for_one_rank():
    busy = replace(STEP, is_slow_start=True, is_busy=True)
    waiting = [replace(rank, has_stepped=False) for rank in GANG]
    evidence = evidence_of(busy, ranks=waiting)
    fault = locate(diagnose(evidence).fault, [(0, PY_SPY)], evidence)
    assert (fault.code, fault.frame) == (SLOW_START, IN_EVALUATE)
    skipping = [replace(rank, has_stepped=False, entered=0, left=0) for rank in GANG]
    evidence = evidence_of(busy, ranks=skipping)
    assert locate(diagnose(evidence).fault, [(0, PY_SPY)], evidence).frame is None


def test_an_idle_start_has_a_code_of_its_own():
    idle = replace(QUIET, is_busy=False)
    assert fault_of(idle).code == IDLE_START
    assert fault_of(idle, QUIET).code == SLOW_START
    assert fault_of(replace(QUIET, is_busy=None)).code == SLOW_START


def test_without_a_rank_the_place_is_known_only_where_one_process_has_frames_of_the_program():
    idle = evidence_of(SilentRank(None, "node-0", 31.0, 30.0, "command"))
    fault = diagnose(idle).fault
    launcher = "Thread 1 (idle)\n    run (torch/distributed/run.py:900)\n"
    assert locate(fault, [(None, launcher), (None, UNNAMED)], idle).frame == "<module> (mini.py)"
    assert locate(fault, [(0, UNNAMED), (1, UNNAMED)], idle).frame is None
    assert locate(fault, [], idle).frame is None


def test_a_fault_that_is_no_hang_has_no_place():
    crash = Fault(FaultClass.NATIVE_CRASH, 1.0, "killed")
    assert locate(crash, [(0, PY_SPY)], evidence_of()) == crash
