"""From evidence to the first cause."""

from __future__ import annotations

import itertools
import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.ending import CORRUPT_ACTION, fault_of_command
from perdure.training.diagnosis.evidence import (
    CoordinatorLost,
    Evidence,
    NodeOutput,
    SilentRank,
    SlowNode,
    SmallWorld,
    WorkerEnd,
)
from perdure.training.diagnosis.exits import EXIT_ABOVE_PROCESS, EXIT_RESTART_ME, EXIT_USER
from perdure.training.diagnosis.recognise import recognise
from perdure.training.diagnosis.rules import load_rules
from perdure.training.diagnosis.scan import scan_text
from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy
from perdure.training.recovery.protocol import AttemptGivenUp
from tests.values import not_none

PEER_CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:4123"
WATCHDOG = "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"
ABORT_NOTE = "terminate called without an active exception"
DEVICE_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TYPE_ERROR = "TypeError: forward() missing 1 required positional argument: 'targets'"
UCE = "RuntimeError: UCE ERROR"


def end(exit_code: int, *, rank: int = 0, ended_s: float = 10.0, **result) -> WorkerEnd:
    return WorkerEnd(
        rank=rank,
        node=f"node-{rank // 2}",
        device=rank % 2,
        exit_code=exit_code,
        ended_s=ended_s,
        **result,
    )


def cause(*workers: WorkerEnd, **further) -> Fault:
    return diagnose(Evidence(at_s=100.0, step=40, workers=workers, **further)).fault


def torchrun_summary(**exit_codes: int) -> str:
    """What torchrun prints when processes of its node have failed, first one first."""
    failures = {
        local_rank: ProcessFailure(local_rank, 4000 + local_rank, exit_code, "")
        for local_rank, exit_code in enumerate(exit_codes.values())
    }
    for number, failure in enumerate(failures.values()):
        failure.timestamp = 1_700_000_000 + number
    return f"E0101 api.py:874] failed\nTraceback\n{ChildFailedError('train.py', failures)}"


@pytest.mark.parametrize("order", list(itertools.permutations([1.0, 2.0, 3.0])))
def test_a_cause_beats_its_echoes_whatever_the_order_in_time(order):
    fault = cause(
        end(1, rank=0, ended_s=order[0], error=PEER_CLOSED),
        end(1, rank=1, ended_s=order[1], error=UCE),
        end(1, rank=2, ended_s=order[2], log=WATCHDOG),
    )
    assert fault.fault_class is FaultClass.DEVICE_MEMORY_ERROR
    assert (fault.rank, fault.node, fault.device) == (1, "node-0", 1)
    assert (fault.at_s, fault.step, fault.evidence) == (order[1], 40, UCE)


@pytest.mark.parametrize("first", [1, 2])
def test_the_earliest_of_several_causes_wins(first):
    fault = cause(
        end(1, rank=1, ended_s=1.0 if first == 1 else 3.0, error=UCE),
        end(1, rank=2, ended_s=2.0, error=DEVICE_OOM),
    )
    assert fault.rank == first


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"log": WATCHDOG}, {"error": PEER_CLOSED}, 0),
        ({"error": "Oops"}, {"error": PEER_CLOSED}, 1),
    ],
    ids=["the first echo where nothing else is known", "an echo before an unexplained end"],
)
def test_an_echo_is_named_when_no_cause_is_known(first, second, named):
    fault = cause(end(1, rank=1, ended_s=2.0, **second), end(1, rank=0, ended_s=1.0, **first))
    assert (fault.fault_class, fault.rank) == (FaultClass.COLLECTIVE_TIMEOUT, named)


FULL = {"node-0": "No space left on device: /scratch/run"}


@pytest.mark.parametrize(
    "evidence",
    [
        {"refusal": "agent at 127.0.0.1:1 refused rendezvous"},
        {"staging_errors": {"node-0": "OSError: [Errno 28] No space left on device"}},
        {"workers": [end(1, rank=0, log="loss 2.1\nloss 2.0\n")]},
        {"workers": [end(1, rank=0)], "coordinator": CoordinatorLost("node-0", 1, 9.0, "import")},
    ],
    ids=["a refused rendezvous", "a failed start", "an end without a word", "its coordinator"],
)
def test_a_node_that_takes_no_files_is_the_cause_of_what_nothing_else_explains(evidence):
    fault = cause(*evidence.pop("workers", ()), unwritable=FULL, **evidence)
    assert (fault.fault_class, fault.code) == (FaultClass.STORAGE_ERROR, "NODE_UNWRITABLE")
    assert fault.node == "node-0"
    assert fault.evidence == "node-0 takes no files: No space left on device: /scratch/run"
    assert fault.action.startswith("Make room on that node")


def test_a_program_that_names_its_error_beside_a_full_disk_is_believed():
    fault = cause(end(1, rank=0, error=TYPE_ERROR), unwritable=FULL)
    assert fault.fault_class is FaultClass.USER_CODE_ERROR


def test_a_killed_process_is_a_native_crash():
    fault = cause(
        end(-signal.SIGKILL, rank=3, ended_s=5.0), end(1, rank=0, ended_s=4.9, error=PEER_CLOSED)
    )
    assert fault.fault_class is FaultClass.NATIVE_CRASH
    assert (fault.code, fault.rank, fault.evidence) == ("SIGKILL", 3, "rank 3 ended by SIGKILL")
    assert fault.chip_code is None


@pytest.mark.parametrize(
    ("killed", "oom_node", "fault_class", "code"),
    [
        (end(-signal.SIGKILL, rank=3), "node-1", FaultClass.HOST_OOM, "SIGKILL"),
        (end(-signal.SIGKILL, rank=3), "node-0", FaultClass.NATIVE_CRASH, "SIGKILL"),
        (end(-signal.SIGTERM), None, FaultClass.PREEMPTED, "SIGTERM"),
        (end(-signal.SIGSEGV, log=ABORT_NOTE), None, FaultClass.NATIVE_CRASH, "SIGSEGV"),
        (end(-signal.SIGBUS, log=ABORT_NOTE), None, FaultClass.NATIVE_CRASH, "SIGBUS"),
        (end(-signal.SIGFPE, log=ABORT_NOTE), None, FaultClass.NATIVE_CRASH, "SIGFPE"),
        (end(-signal.SIGABRT, log=ABORT_NOTE), None, FaultClass.NATIVE_CRASH, "SIGABRT"),
        (end(-40), None, FaultClass.NATIVE_CRASH, "SIG40"),
        (end(128 + 9), None, FaultClass.NATIVE_CRASH, "SIGKILL"),
        (end(128 + 6), None, FaultClass.NATIVE_CRASH, "SIGABRT"),
    ],
    ids=[
        "its node ran out of memory", "another node ran out of memory", "terminated by others",
        "SEGV", "BUS", "FPE", "ABRT", "a signal without a name", "shell: KILL", "shell: ABRT",
    ],
)  # fmt: skip
def test_a_process_ended_by_a_signal_has_the_class_of_the_signal(
    killed, oom_node, fault_class, code
):
    fault = cause(killed, oom_nodes=[oom_node] if oom_node else [])
    assert (fault.fault_class, fault.code) == (fault_class, code)


def test_an_abort_with_a_communication_message_is_an_echo():
    fault = cause(
        end(-signal.SIGABRT, rank=1, ended_s=1.0, log=f"{WATCHDOG}\n{ABORT_NOTE}"),
        end(-signal.SIGKILL, rank=3, ended_s=2.0),
    )
    assert (fault.rank, fault.code) == (3, "SIGKILL")
    alone = cause(end(-signal.SIGABRT, rank=1, log=WATCHDOG))
    assert (alone.fault_class, alone.code) == (FaultClass.COLLECTIVE_TIMEOUT, "SIGABRT")


@pytest.mark.parametrize(
    ("exit_code", "fault_class"),
    [
        (EXIT_USER, FaultClass.USER_CODE_ERROR),
        (EXIT_ABOVE_PROCESS, FaultClass.DEVICE_LOST),
        (127, FaultClass.LAUNCH_MISCONFIGURED),
    ],
)
def test_an_agreed_exit_code_is_a_cause(exit_code, fault_class):
    fault = cause(
        end(exit_code, rank=1, ended_s=2.0), end(1, rank=0, ended_s=1.0, error=PEER_CLOSED)
    )
    assert (fault.fault_class, fault.rank) == (fault_class, 1)
    assert str(exit_code) in fault.evidence
    assert fault.explanation


def test_an_agreed_exit_code_quotes_the_line_that_explains_it():
    line = "perdure: cannot start 'trian': No such file or directory"
    fault = cause(end(127, log=f"starting\n{line}\n"))
    assert (fault.fault_class, fault.evidence) == (FaultClass.LAUNCH_MISCONFIGURED, line)


@pytest.mark.parametrize("exit_code", [1, EXIT_RESTART_ME, -signal.SIGTERM, -signal.SIGKILL])
def test_a_worker_stopped_by_the_agent_is_never_the_cause(exit_code):
    stopped = end(exit_code, rank=0, ended_s=1.0, error=TYPE_ERROR, stopped=True)
    assert cause(stopped, end(1, rank=1, ended_s=9.0, error=PEER_CLOSED)).rank == 1
    assert cause(stopped, end(3, rank=1, ended_s=9.0)).rank == 1
    silent = SilentRank(2, "node-1", 61.0, 60.0, "step")
    assert cause(stopped, silent=[silent]).fault_class is FaultClass.HANG
    assert cause(stopped).fault_class is FaultClass.UNKNOWN


def test_a_survivor_that_asks_for_a_restart_never_outranks_a_death():
    skewed = [end(EXIT_RESTART_ME, rank=2, ended_s=1.0), end(-signal.SIGKILL, rank=1, ended_s=9.0)]
    assert cause(*skewed).rank == 1
    assert cause(skewed[0]).fault_class is FaultClass.UNKNOWN
    for death in (end(3, rank=1), end(1, rank=1, error=PEER_CLOSED)):
        assert cause(skewed[0], death).rank == 1, "whatever else is known explains more"


def given_up(fault_class: FaultClass, *, rank: int = 1) -> AttemptGivenUp:
    fault = Fault(fault_class, 5.0, f"rank {rank}: killed by signal 9", node="node-0", rank=rank)
    return AttemptGivenUp(at_s=6.0, number=1, fault=fault, why="process_replace: no replica")


def test_what_the_coordinator_knew_of_a_replaced_rank_outranks_the_survivors_that_end_well():
    survivors = [end(EXIT_RESTART_ME, rank=rank) for rank in range(4)]
    fault = cause(*survivors, given_up=given_up(FaultClass.NATIVE_CRASH))
    assert (fault.fault_class, fault.rank, fault.node) == (FaultClass.NATIVE_CRASH, 1, "node-0")
    assert (fault.evidence, fault.at_s) == ("rank 1: killed by signal 9", 5.0)
    assert "no replica" in fault.explanation


def test_a_line_of_output_that_names_a_cause_outranks_what_the_coordinator_knew():
    damaged = end(1, rank=2, error=UCE)
    assert cause(damaged, given_up=given_up(FaultClass.NATIVE_CRASH)).rank == 2
    timeout = end(1, rank=2, log=WATCHDOG)
    assert cause(timeout, given_up=given_up(FaultClass.NATIVE_CRASH)).rank == 1
    assert cause(timeout, given_up=given_up(FaultClass.COLLECTIVE_TIMEOUT)).rank == 2
    program = end(3, rank=2, log="own words")
    assert "own words" in cause(program, given_up=given_up(FaultClass.USER_CODE_ERROR)).evidence


@pytest.mark.parametrize(
    ("exit_code", "oom_nodes", "fault_class", "how"),
    [
        (-signal.SIGKILL, (), FaultClass.NATIVE_CRASH, "by SIGKILL"),
        (-signal.SIGKILL, ("node-0",), FaultClass.HOST_OOM, "by SIGKILL"),
        (1, (), FaultClass.UNKNOWN, "with exit code 1: OSError: no space"),
    ],
)
def test_the_end_of_the_coordinator_is_the_cause_of_every_rank_that_ends_over_it(
    exit_code, oom_nodes, fault_class, how
):
    lost = CoordinatorLost("node-0", exit_code, 9.0, "OSError: no space")
    survivors = [end(EXIT_RESTART_ME, rank=rank) for rank in range(4)]
    fault = cause(*survivors, coordinator=lost, oom_nodes=oom_nodes)
    assert (fault.fault_class, fault.rank, fault.node) == (fault_class, None, "node-0")
    assert fault.evidence == f"the coordinator of the attempt on node-0 ended {how}"


def test_a_coordinator_that_was_stopped_is_not_taken_for_one_that_was_killed():
    why = "a signal had stopped it for 61 s"
    lost = CoordinatorLost("node-0", -signal.SIGKILL, 9.0, why, was_stopped=True)
    fault = cause(end(EXIT_RESTART_ME), coordinator=lost)
    assert fault.evidence == f"the coordinator of the attempt on node-0 was ended: {why}"


def test_a_worker_that_ended_well_is_never_the_cause():
    assert cause(end(0, log=UCE), end(1, rank=1, error="Oops")).rank == 1
    assert cause(end(0, log=UCE)).evidence == "no evidence"


def test_a_lost_node_beats_what_its_peers_print():
    fault = cause(end(1, rank=0, ended_s=1.0, error=PEER_CLOSED), lost_nodes=["node-1"])
    assert fault.fault_class is FaultClass.NODE_LOST
    assert (fault.node, fault.rank, fault.code) == ("node-1", None, "NODE_LOST")
    assert fault.at_s == 100.0


def test_hardware_is_to_blame_only_where_evidence_names_it():
    assert cause(lost_nodes=["node-1"]).hardware_fault is False, "an agent that is gone"
    slow = SlowNode("node-1", 3, 1, "rank 3 is late in 9 of 10 steps")
    assert cause(slow=slow).hardware_fault is False
    assert cause(end(1, error=UCE)).hardware_fault is True


def test_data_that_could_not_be_staged_is_a_storage_error_of_its_node():
    fault = cause(staging_errors={"node-1": "Corrupt: tokens-00001.bin: hash differs"})
    assert (fault.fault_class, fault.node) == (FaultClass.STORAGE_ERROR, "node-1")
    assert "tokens-00001.bin" in fault.evidence


def test_silence_beyond_the_limit_is_a_hang():
    fault = cause(silent=[SilentRank(5, "node-2", 75.2, 60.0, "step")])
    assert (fault.fault_class, fault.rank, fault.node) == (FaultClass.HANG, 5, "node-2")
    assert fault.evidence == "rank 5: no progress for 75 s in phase step, limit 60 s"


def test_no_evidence_gives_unknown():
    fault = cause()
    assert (fault.fault_class, fault.node, fault.step) == (FaultClass.UNKNOWN, None, 40)


def test_an_end_without_a_word_quotes_its_exit_code():
    ended = "rank 0 ended with exit code 3"
    assert cause(end(3)).evidence == ended
    assert cause(end(3, log="\n last words \n\n")).evidence == f"{ended}, after: last words"
    named = cause(end(3, error="MyError: no", log="later noise"))
    assert named.evidence == "MyError: no"


def test_evidence_is_cut_to_a_readable_length():
    assert len(cause(end(1, error="x" * 5000)).evidence) == 500


def test_the_recorded_exception_beats_the_output():
    assert cause(end(1, error=TYPE_ERROR, log=UCE)).fault_class is FaultClass.USER_CODE_ERROR


def test_a_cause_earlier_in_the_output_beats_an_echo_after_it():
    fault = cause(end(1, error="Oops", log=f"{UCE}\nretrying\n{PEER_CLOSED}\nbye"))
    assert (fault.fault_class, fault.evidence) == (FaultClass.DEVICE_MEMORY_ERROR, UCE)


def test_a_traceback_in_the_output_of_a_command_is_found_without_a_recorded_error():
    log = (
        "step 17 loss 3.2\n"
        "Traceback (most recent call last):\n"
        '  File "/work/train.py", line 5, in <module>\n'
        "    main()\n"
        f"{TYPE_ERROR}\n"
    )
    fault = cause(end(1, log=log))
    assert (fault.fault_class, fault.evidence) == (FaultClass.USER_CODE_ERROR, TYPE_ERROR)


def test_the_last_exception_of_a_chained_traceback_names_the_fault():
    log = (
        "Traceback (most recent call last):\nKeyError: 'lr'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        f"Traceback (most recent call last):\n{DEVICE_OOM}\n"
    )
    assert cause(end(1, log=log)).fault_class is FaultClass.DEVICE_OOM


@pytest.mark.parametrize(
    ("log", "fault_class", "evidence"),
    [
        (torchrun_summary(first=-9), FaultClass.NATIVE_CRASH, r".*\(SIGKILL\).*"),
        (f"[rank0]: {TYPE_ERROR}\n{torchrun_summary(first=1)}", FaultClass.USER_CODE_ERROR,
         ".*" + re.escape(TYPE_ERROR)),
        (f"{ABORT_NOTE}\n{torchrun_summary(first=-6)}", FaultClass.NATIVE_CRASH, ABORT_NOTE),
        (f"{WATCHDOG}\n{torchrun_summary(first=-6)}", FaultClass.COLLECTIVE_TIMEOUT, ".*"),
    ],
    ids=["a killed child", "a traceback of the child", "an aborted child",
         "a child aborted by its communication library"],
)  # fmt: skip
def test_torchruns_summary_gives_the_fault_of_its_child(log, fault_class, evidence):
    fault = cause(end(1, log=log))
    assert fault.fault_class is fault_class
    assert re.fullmatch(evidence, fault.evidence, re.DOTALL)


@pytest.mark.parametrize(("echo", "exit_code"), [(PEER_CLOSED, 1), (WATCHDOG, -6)])
def test_torchruns_summary_of_the_peer_of_a_dead_rank_is_an_echo(echo, exit_code):
    second_end = end(1, rank=2, ended_s=2.0, log=torchrun_summary(first=-9))
    first_end = end(1, rank=0, ended_s=1.0, log=f"{echo}\n{torchrun_summary(first=exit_code)}")
    assert cause(first_end, second_end).rank == 2


LINES = st.sampled_from([*(rule.spec.example for rule in load_rules()), "", "noise", "Oops: no"])
ENDS = st.builds(
    WorkerEnd,
    rank=st.integers(0, 7),
    node=st.sampled_from(["node-0", "node-1"]),
    device=st.integers(0, 3),
    exit_code=st.integers(-64, 255),
    ended_s=st.floats(0, 99),
    error=st.none() | LINES,
    log=st.lists(LINES).map("\n".join),
    stopped=st.booleans(),
)


@given(
    st.lists(ENDS, max_size=4, unique_by=lambda end: end.ended_s),
    st.lists(st.sampled_from(["node-0", "node-1"]), max_size=1),
)
def test_diagnosis_is_total_and_does_not_depend_on_the_order_of_reports(ends, lost):
    fault = cause(*ends, lost_nodes=lost)
    assert fault == cause(*reversed(ends), lost_nodes=lost)


def test_the_end_of_a_command_is_of_no_rank_but_for_the_one_that_its_output_names():
    def fault_of_command(exit_code: int, log: str = "") -> Fault:
        return cause(WorkerEnd(None, "node-1", None, exit_code, 10.0, log=log))

    killed = fault_of_command(-signal.SIGKILL)
    assert (killed.rank, killed.device, killed.node) == (None, None, "node-1")
    assert killed.evidence == "the command on node-1 ended by SIGKILL"
    assert fault_of_command(1, f"[rank3]: {UCE}").rank == 3


def test_what_perdure_cannot_mend_for_a_command_is_the_users():
    log = "RuntimeError: PytorchStreamReader failed reading zip archive: invalid header"
    corrupt = cause(end(1, log=log))
    assert corrupt.fault_class is FaultClass.CHECKPOINT_CORRUPT
    mine = fault_of_command(corrupt)
    assert (mine.action, mine.recoverable_by) == (CORRUPT_ACTION, RecoverableBy.USER_FIX)
    other = cause(end(1, error=DEVICE_OOM))
    assert fault_of_command(other) == other


HEALTH = """
        Health Status                  : Alarm
        Error Code                     : {codes}
        Error Information              : {words}
"""
MULTI_BIT = "node type=HBM, sensor type=Memory, event state=multi bit ecc error occur"
HEARTBEAT = "node type=adda, sensor type=Heartbeat Sensor, event state=Heartbeat Lost."


def of_device(*answers: str) -> Fault:
    """After the answers of npu-smi about the devices of a node."""
    outputs = [
        NodeOutput("node-1", f"npu-smi info -t health -i {number} -c 0", text, device=number)
        for number, text in enumerate(answers)
    ]
    return cause(end(1, log="RuntimeError: boom"), outputs=outputs)


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ("80E01801", MULTI_BIT),
        ("80E01801", "HBM multi bit ecc error"),
        ("80E01801", "HBM multi-bit ECC error"),
        # RestartNPU asks for more than RestartBusiness, and is no answer to an error of memory.
        ("8C03A000 80E01801", f"{MULTI_BIT}\n                                       : {HEARTBEAT}"),
        ("80E01801 8C03A000", f"{MULTI_BIT}\n                                       : {HEARTBEAT}"),
    ],
)
def test_the_words_for_a_memory_error_come_with_the_chips_code(codes, words):
    fault = of_device(HEALTH.format(codes=codes, words=words))
    assert (fault.fault_class, fault.code) == (FaultClass.DEVICE_MEMORY_ERROR, "80E01801")
    assert (fault.node, fault.device) == ("node-1", 0)
    assert (fault.recoverable_by, fault.hardware_fault) == (RecoverableBy.RETRY, True)
    assert "Code 80E01801: " in fault.explanation


def test_the_code_of_another_device_is_not_that_of_the_words():
    well = "        Health Status : OK\n        Error Code : 80E01801\n"
    ill = HEALTH.format(codes="NA", words=MULTI_BIT)
    text = f"{well}{ill}"
    words = [
        finding for finding in scan_text(text, year=2026).findings if "multi bit" in finding.line
    ]
    assert [finding.code for finding in words] == [None]
    fault = of_device("        Health Status : OK\n        Error Code : NA\n", ill)
    assert (fault.device, fault.code) == (1, None)


def test_words_that_no_code_was_reported_for_have_none():
    line = "[ERROR] TS(1,tsfw): HBM multi-bit ECC error is detected, addr=0x12c0c0013000"
    finding = not_none(recognise(line, "        Error Code : 80E01801\n"))
    assert (finding.fault_class, finding.code) == (FaultClass.DEVICE_MEMORY_ERROR, None)


def test_an_exception_that_points_at_the_output_gives_way_to_what_it_points_at():
    raised = (
        "RuntimeError: The Inner error is reported as above. The process exits for this inner "
        "error, and the current working event is 0x7f8414016260."
    )
    log = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
        f"{raised}\n"
        "EE9999: Inner Error!\n"
        "EZ9999: The error from device(chipId:1, dieId:0), serial number is 1, there is an "
        "exception of aicore error, core id is 0, error code = 0x800000\n"
    )
    end = WorkerEnd(1, "node-0", 1, 1, 5.0, log=log, error=raised)
    fault = diagnose(Evidence(at_s=5.0, step=6, workers=(end,))).fault
    assert fault.fault_class is FaultClass.OPERATOR_ERROR
    assert fault.code == "EZ9999"
    assert "aicore error" in fault.evidence


@pytest.mark.parametrize(
    ("world", "line"),
    [
        (
            SmallWorld(2, 2, 2, ("node-0", "node-1")),
            "4 (engine.nodes 2 x slots_per_node 2): node-0, node-1 trained separately",
        ),
        (
            SmallWorld(1, 1, 8, ("node-0",)),
            "8 (engine.nodes 1 x slots_per_node 8)",
        ),
    ],
)
@pytest.mark.parametrize("workers", [(), (end(0),), (end(-15, stopped=True),)])
def test_too_few_ranks_are_a_wrong_launch_with_the_numbers(world, line, workers):
    fault = cause(*workers, small_world=world)
    assert (fault.fault_class, fault.code) == (FaultClass.LAUNCH_MISCONFIGURED, "SMALL_WORLD")
    ranks = f"{world.size} {'ranks' if world.size > 1 else 'rank'}"
    assert fault.evidence == f"the launcher started a gang of {ranks}, the job has {line}"
    assert fault.recoverable_by is RecoverableBy.USER_FIX
    assert "engine.slots_per_node" in fault.action
