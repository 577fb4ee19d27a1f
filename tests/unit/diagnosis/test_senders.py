"""Who sent a signal and who received it: schedulers, platforms and people end jobs differently."""

from __future__ import annotations

import itertools
import signal

import pytest

from perdure.training.diagnosis.cause import choose_cause
from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.diagnosis.scan import scan_text
from perdure.training.diagnosis.sources import read_scan
from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.rungs import Policy, Rung
from tests.values import not_none

STEP = "[default3]: [2026-02-03 10:00:00] iteration  120/ 9000 | lm loss: 2.1E+00 |"
SAVED = "[default0]:  successfully saved checkpoint from iteration     121 to /ckpt"
RECEIVED = "[default0]:[exiting program after receiving SIGTERM.] datetime: 2026-02-03 10:00:31"
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
STEP_ENDED = "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-02-03T10:00:10 ***"
CANCELLED = "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-02-03T10:00:10 ***"
TIME_LIMIT = f"{CANCELLED[:-4]} DUE TO TIME LIMIT ***"
PREEMPTED = f"{CANCELLED[:-4]} DUE TO PREEMPTION ***"
ELASTIC = "W0203 10:00:11.1 9 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers"  # noqa: E501 as torch prints it
STOPPED = 'level=info msg="Container failed to exit within 10s of signal 15 - using the force"'
OWNER = "TERM_OWNER: job killed by owner."


def of_log(*lines: str) -> Fault:
    log = read_scan("slurm.out", scan_text("\n".join(lines), year=2026), order=0, year=2026)
    return not_none(choose_cause([log.source], at_s=0.0)).fault


def rung_of(fault: Fault) -> Rung:
    supported = frozenset(Rung)
    return decide(fault, now_s=0.0, history=(), supported=supported, policy=Policy()).rung


def test_three_ends_that_look_alike_have_three_answers():
    signalled = of_log(STEP, STEP_ENDED, SAVED, RECEIVED)
    cancelled = of_log(STEP, ABORTED, CANCELLED, STEP_ENDED, RECEIVED)
    limited = of_log(STEP, TIME_LIMIT, ELASTIC)
    faults = (signalled, cancelled, limited)
    assert {fault.fault_class for fault in faults} == {FaultClass.PREEMPTED}
    assert [fault.code for fault in faults] == ["SIGTERM", "CANCELLED", "TIME_LIMIT"]
    answers = {(fault.recoverable_by, fault.action) for fault in faults}
    assert len(answers) == len(faults)
    assert not any(fault.hardware_fault for fault in faults)
    assert [rung_of(f) for f in faults] == [Rung.JOB_RESCHEDULE, Rung.STOP, Rung.JOB_RESCHEDULE]


@pytest.mark.parametrize(
    ("sender", "code", "answer"),
    [
        (CANCELLED, "CANCELLED", RecoverableBy.USER_FIX),
        (OWNER, "CANCELLED", RecoverableBy.USER_FIX),
        (STOPPED, "STOPPED", RecoverableBy.USER_FIX),
        ("Gracefully stopping... (press Ctrl+C again to force)", "STOPPED", RecoverableBy.USER_FIX),
        ("n1 systemd[1]: Stopping train.service - Pretraining...", "STOPPED", None),
        (TIME_LIMIT, "TIME_LIMIT", RecoverableBy.RESCHEDULE),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", "TIME_LIMIT", None),
        ("=>> PBS: job killed: qdel by user bob", "CANCELLED", RecoverableBy.USER_FIX),
        ("=>> PBS: job killed: walltime 99 exceeded limit 90", "TIME_LIMIT", None),
        (PREEMPTED, "PREEMPTED", RecoverableBy.RESCHEDULE),
        ("EC2 spot interruption notice received: terminate at 10:02", "PREEMPTED", None),
    ],
)
def test_who_sent_the_signal_beats_who_received_it_in_any_order(sender, code, answer):
    for lines in itertools.permutations([sender, RECEIVED, ELASTIC]):
        fault = of_log(STEP, *lines)
        assert (fault.fault_class, fault.code) == (FaultClass.PREEMPTED, code)
        assert answer in (None, fault.recoverable_by)


@pytest.mark.parametrize("unit", ["apt-daily.service", "rsyslog.service", "session-4.scope"])
def test_a_unit_of_the_system_that_is_stopped_is_no_sender(unit):
    stopping = f"n1 systemd[1]: Stopping {unit} - Housekeeping..."
    assert of_log(stopping, STEP, RECEIVED, ELASTIC).code == "SIGTERM"


def test_a_service_that_is_stopped_hides_no_fault_of_the_node():
    stopping = "n1 systemd[1]: Stopping metrics.service - Exporter..."
    killed = "n1 kernel: Out of memory: Killed process 4711 (python) total-vm:1kB, anon-rss:1kB"
    assert of_log(stopping, STEP, killed).fault_class is FaultClass.HOST_OOM


def test_a_receiver_speaks_where_nobody_names_the_sender():
    assert of_log(STEP, ELASTIC).code == "SIGTERM"


def test_a_cancellation_after_another_fault_hides_nothing():
    timeout = (
        "[rank1]:[E203 09:20:00.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, Timeout(ms)=600000)"
    )
    assert of_log(timeout, CANCELLED, RECEIVED).fault_class is FaultClass.COLLECTIVE_TIMEOUT


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("exit_code", [-signal.SIGTERM, 143, 1])
def test_the_sender_in_one_output_explains_the_ends_of_all_processes(exit_code, is_first):
    logs = [f"{STEP}\n{CANCELLED}\n", f"{STEP}\n{RECEIVED}\n"]
    ends = [
        WorkerEnd(None, f"node-{n}", None, exit_code, 10.0 + n, log=log, is_command=True)
        for n, log in enumerate(logs if is_first else reversed(logs))
    ]
    fault = diagnose(Evidence(at_s=20.0, step=120, workers=ends)).fault
    assert (fault.code, fault.recoverable_by) == ("CANCELLED", RecoverableBy.USER_FIX)
