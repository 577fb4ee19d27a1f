"""An exit code as the message of a program that says nothing else."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.evidence import Evidence, WorkerEnd
from perdure.training.diagnosis.exits import EXIT_RESTART_ME, signal_of
from perdure.training.recovery.faults import Fault, FaultClass

HEALTHY = "step 20/200 loss 5.0000\n"
TYPE_ERROR = (
    "Traceback (most recent call last):\n"
    '  File "/w/train.py", line 3, in f\n'
    "TypeError: forward() missing 1 required positional argument: 'targets'\n"
)


def cause(*ends: WorkerEnd, restart_codes: tuple[int, ...] = ()) -> Fault:
    evidence = Evidence(at_s=100.0, step=20, workers=ends, restart_codes=restart_codes)
    return diagnose(evidence).fault


def command(exit_code: int, log: str = HEALTHY, *, node: str = "node-0") -> WorkerEnd:
    return WorkerEnd(None, node, None, exit_code, 10.0, log=log, is_command=True)


def summary(*exit_codes: int) -> str:
    """The end of torchrun's output, whose own exit code is 1."""
    failures = {n: ProcessFailure(n, 4000 + n, code, "") for n, code in enumerate(exit_codes)}
    for number, failure in enumerate(failures.values()):
        failure.timestamp = 1_700_000_000 + number
    return f"{HEALTHY}{ChildFailedError('train.py', failures)}\n"


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (85, "start me again"),
        (99, "requeue"),
        (75, "a temporary failure, try again"),
        (78, "a configuration error"),
        (66, "an input file is not there"),
        (124, "timeout"),
        (255, "ssh"),
        (42, ""),
    ],
)
def test_a_code_without_a_failing_line_is_the_message_with_its_meaning_in_words(exit_code, words):
    fault = cause(command(exit_code))
    assert fault.fault_class is FaultClass.UNKNOWN
    assert fault.evidence.startswith(f"the command on node-0 ended with exit code {exit_code}")
    assert words in fault.evidence
    assert "loss" not in fault.evidence, "a healthy line is no evidence"
    assert HEALTHY.strip() in fault.explanation, "it is the context"


def test_a_last_line_that_shows_no_progress_stands_behind_the_code():
    fault = cause(command(7, f"{HEALTHY}giving up on the quota\n"))
    assert fault.evidence.endswith("exit code 7, after: giving up on the quota")


def test_a_failing_line_still_beats_the_code():
    assert cause(command(85, TYPE_ERROR)).fault_class is FaultClass.USER_CODE_ERROR


@pytest.mark.parametrize(
    ("exit_code", "fault_class", "code"),
    [
        (128 + 15, FaultClass.PREEMPTED, "SIGTERM"),
        (256 - 15, FaultClass.PREEMPTED, "SIGTERM"),
        (128 + 2, FaultClass.PREEMPTED, "SIGINT"),
        (-signal.SIGHUP, FaultClass.PREEMPTED, "SIGHUP"),
        (-signal.SIGUSR1, FaultClass.PREEMPTED, "SIGUSR1"),
        (-signal.SIGXCPU, FaultClass.PREEMPTED, "SIGXCPU"),
        (-signal.SIGXFSZ, FaultClass.STORAGE_ERROR, "SIGXFSZ"),
        (256 - 9, FaultClass.NATIVE_CRASH, "SIGKILL"),
        (256 - 11, FaultClass.NATIVE_CRASH, "SIGSEGV"),
        (128 + 11, FaultClass.NATIVE_CRASH, "SIGSEGV"),
    ],
)
def test_a_signal_is_read_from_the_sum_that_a_shell_or_a_launcher_makes_of_it(
    exit_code, fault_class, code
):
    fault = cause(command(exit_code))
    assert (fault.fault_class, fault.code) == (fault_class, code)
    assert code in fault.evidence


@pytest.mark.parametrize("exit_code", [1, 2, 85, 99, 127, 200, 253, 254, 255])
def test_a_code_that_programs_choose_themselves_is_no_signal(exit_code):
    assert signal_of(exit_code) is None


@pytest.mark.parametrize(
    ("exit_code", "fault_class", "words"),
    [
        (2, FaultClass.USER_CODE_ERROR, "wrong arguments"),
        (126, FaultClass.LAUNCH_MISCONFIGURED, "may not be executed"),
        (127, FaultClass.LAUNCH_MISCONFIGURED, "it is not there"),
    ],
)
def test_a_code_that_means_a_mistake_of_the_user_stops(exit_code, fault_class, words):
    fault = cause(command(exit_code))
    assert fault.fault_class is fault_class
    assert fault.evidence.startswith(f"the command on node-0 ended with exit code {exit_code}: ")
    assert words in fault.evidence


@pytest.mark.parametrize("exit_code", [EXIT_RESTART_ME, 76])
def test_a_code_agreed_with_the_runtime_means_nothing_for_a_command(exit_code):
    fault = cause(command(exit_code))
    assert (fault.fault_class, fault.hardware_fault) == (FaultClass.UNKNOWN, False)
    assert f"exit code {exit_code} (sysexits" in fault.evidence


@pytest.mark.parametrize(
    "ends",
    [
        (command(85),),
        (command(99, f"{TYPE_ERROR}step 21/200 loss 4.9\n"),),
        (command(1, summary(85)),),
        (command(1, summary(99, 99, -15)),),
        (command(85), command(1, "RuntimeError: Connection closed by peer [::1]:4", node="node-1")),
    ],
    ids=["itself", "after a survived error", "torchrun", "torchrun, all ranks", "a peer breaks"],
)
def test_a_code_that_the_job_names_asks_for_a_start_and_is_no_fault(ends):
    fault = cause(*ends, restart_codes=(85, 99))
    assert fault.fault_class is FaultClass.RESTART_REQUESTED
    assert "exit code 85" in fault.evidence or "exit code 99" in fault.evidence
    assert (fault.user_fault, fault.hardware_fault) == (False, False)


@pytest.mark.parametrize(
    ("ends", "fault_class"),
    [
        ((command(86),), FaultClass.UNKNOWN),
        ((command(1, summary(85, -9)),), FaultClass.RESTART_REQUESTED),
        ((command(85), command(-signal.SIGKILL, node="node-1")), FaultClass.NATIVE_CRASH),
        ((command(85), command(1, TYPE_ERROR, node="node-1")), FaultClass.USER_CODE_ERROR),
    ],
    ids=["another code", "asked first", "another node dies", "another node raises"],
)
def test_a_request_for_a_start_hides_no_fault_elsewhere(ends, fault_class):
    assert cause(*ends, restart_codes=(85,)).fault_class is fault_class


def rank(exit_code: int, *, number: int, log: str = "") -> WorkerEnd:
    return WorkerEnd(number, f"node-{number // 2}", number % 2, exit_code, 10.0, log=log)


def test_the_rank_that_got_the_signal_is_the_cause_not_the_code_with_which_all_leave():
    ends = [rank(EXIT_RESTART_ME, number=number) for number in range(4)]
    ends[2] = rank(EXIT_RESTART_ME, number=2, log=f"{HEALTHY}[rank2]: received SIGTERM\n")
    fault = cause(*ends)
    assert (fault.fault_class, fault.code) == (FaultClass.PREEMPTED, "SIGTERM")
    assert (fault.rank, fault.node) == (2, "node-1")
