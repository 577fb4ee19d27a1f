"""Exit code 0 of what has failed: what shows it, and what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from perdure.training.diagnosis.classify import diagnose
from perdure.training.diagnosis.counts import Count
from perdure.training.diagnosis.ending import (
    LAST_WITHIN_S,
    LIMIT_CODE,
    NO_SAMPLE_CODE,
    RANK_CODE,
    SHORT_CODE,
    FalseSuccess,
    Output,
    blame_repeated_end,
    describe_late_fault,
    explain_early_end,
    find_crash,
    judge_leftovers,
    judge_short_end,
)
from perdure.training.diagnosis.evidence import EndedRank, Evidence, SilentRank, WorkerEnd
from perdure.training.diagnosis.stated_end import EndReason, StatedEnd
from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy
from tests.values import not_none

STEPS = "".join(
    f" [2026-11-21] iteration {at:8d}/    6000 | lm loss: {9 / at:.3f} | grad norm: 1.0 |\n"
    for at in range(10, 160, 10)
)
RAISED = "TypeError: forward() missing 1 required positional argument: 'targets'"
FRAMES = """Traceback (most recent call last):
  File "/work/train.py", line 5, in <module>
    main()
    ^^^^^^
"""
TRACEBACK = f"{FRAMES}{RAISED}\n"
NOT_DESTROYED = (
    "[rank0]:[W1123 10:00:00.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: "
    "destroy_process_group() was not called before program exit\n"
)
LOGGED_BY_TORCH = "".join(
    f"E1126 21:59:19.453000 2704 torch/distributed/elastic/agent/server/api.py:1008] {line}\n"
    for line in ("Error waiting on exit barrier. Elapsed: 1.0 seconds", *TRACEBACK.splitlines())
)
LOGGED_BY_OLDER_TORCH = (
    "[2024-04-21 10:00:00] torch.distributed.elastic.agent.server.api: [ERROR] "
    f"Error waiting on exit barrier. Elapsed: 1.0 seconds\n{TRACEBACK}"
)


def summary(exit_code: int = 1, num_failed: int = 1) -> str:
    """What torchrun prints at last."""
    failures = {
        rank: ProcessFailure(rank, 4000 + rank, exit_code, "") for rank in range(num_failed)
    }
    for failure in failures.values():
        failure.timestamp = 1_700_000_000
    name = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
    return f"{FRAMES}{name}: {ChildFailedError('train.py', failures)}\n"


BAR = "Epoch 0:  16%|#      | 7395/45743 [13:13:43<68:36:00,  6.44s/it"
CUDA = (
    "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
CHAIN = (
    f"{FRAMES}KeyError: 'lr'\n\n"
    f"During handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (STEPS + TRACEBACK, RAISED),
        (TRACEBACK, RAISED),
        (STEPS + TRACEBACK.replace("\n", "\n[rank1]: ")[:-9], RAISED),
        (STEPS + FRAMES + CUDA, "RuntimeError: CUDA error: an illegal memory access"),
        (STEPS + TRACEBACK + NOT_DESTROYED, RAISED),
        (STEPS + CHAIN, RAISED),
        (f"2026-11-21 10:00:00 - ERROR - training failed\n{TRACEBACK}", RAISED),
        (STEPS + LOGGED_BY_TORCH.replace("waiting on exit barrier", "in training"), RAISED),
        (STEPS + LOGGED_BY_TORCH + summary(), "ChildFailedError"),
        (STEPS + TRACEBACK + summary(), "ChildFailedError"),
        (STEPS + summary(-9, num_failed=16), "ChildFailedError"),
        (STEPS + summary() + "training finished\ncopying the logs\n" * 30, "ChildFailedError"),
        (STEPS + "[INFO] [launch.py:328:main] x\n[ERROR] exits with return code = -9\n",
         "exits with return code = -9"),
        (STEPS + "train.sh: line 9: 4711 Killed                  python train.py\n", "Killed"),
        (STEPS + "bash: 4711 Segmentation fault   (core dumped) ./train\n", "Segmentation fault"),
        (STEPS + "Segmentation fault (core dumped)\n", "Segmentation fault"),
        (STEPS + "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n",
         "Fatal Python error"),
        (f"{BAR}, loss: 0.08]{TRACEBACK}", RAISED),
        (f"{BAR}, loss: 0.08][rank3]: {TRACEBACK}", RAISED),
        (f"{BAR}]\n{TRACEBACK}{BAR}]\n", RAISED),
        ("[INFO] [launch.py:318:sigkill_handler] Killing subprocess 80\n", "Killing subprocess"),
        ("train.sh: line 12: torchrun: command not found\n", "torchrun: command not found"),
        ("sh: 1: torchrun: not found\n", "torchrun: not found"),
        (f"{FRAMES}BrokenPipeError: [Errno 32] Broken pipe\n", "BrokenPipeError"),
    ],
    ids=[
        "a traceback", "nothing but a traceback", "with the prefix of its rank",
        "a message of several lines", "a warning at exit", "a chain of exceptions",
        "logged and nothing after it", "logged by torch and nothing after it",
        "torchrun, whose last barrier failed, too", "torchrun", "torchrun with many failures",
        "torchrun in a script that goes on", "DeepSpeed", "a shell: killed", "bash -c: crashed",
        "a shell: crashed", "faulthandler", "behind a bar", "behind a bar, of a rank",
        "a bar that is closed after it", "DeepSpeed: killed", "no such program",
        "no such program: dash",
        "an error of the program itself",
    ],
)  # fmt: skip
def test_the_death_of_a_program_as_its_last_words_is_a_crash(text, line):
    result = find_crash([Output(text)])
    assert result is not None
    assert line in result


@pytest.mark.parametrize(
    "text",
    [
        "",
        STEPS,
        STEPS + "WARNING: could not reach the tracker: Connection reset by peer\n",
        STEPS + "wandb: ERROR Error while calling W&B API: network error (ConnectionError)\n",
        STEPS + "ERROR: failed to upload ckpt: 503 SlowDown\n",
        TRACEBACK + STEPS,
        summary() + STEPS,
        f"{TRACEBACK}{BAR}]\r{BAR.replace('7395', '7405')}]\n",
        STEPS + TRACEBACK + "caught, training goes on with the next file\n" * 20,
        STEPS + TRACEBACK + "Training completed\n",
        STEPS + TRACEBACK + "{'train_runtime': 12.3}\n",
        f"{STEPS}2026-11-21 10:00:00 - ERROR - no upload, will go without\n{TRACEBACK}bye\n",
        f"{STEPS}Exception ignored in: <function Pool.__del__ at 0x7f>\n{TRACEBACK}",
        f"{STEPS}Exception ignored in atexit callback: <function x>\n{TRACEBACK}",
        f"{STEPS}Exception in thread Thread-3 (upload):\n{TRACEBACK}",
        f"{STEPS}Task exception was never retrieved\n{TRACEBACK}",
        f"{STEPS}--- Logging error ---\n{TRACEBACK}",
        f"{STEPS}Process Process-3:\n{FRAMES}ConnectionResetError: [Errno 104] reset\n",
        STEPS + FRAMES.replace("/work/train.py", "/usr/lib/python3.11/multiprocessing/"
                               "resource_tracker.py") + "KeyError: '/psm_12'\n",
        STEPS + "nvidia-smi: command not found\n" + STEPS,
        STEPS + NOT_DESTROYED,
        STEPS + LOGGED_BY_TORCH,
        STEPS + LOGGED_BY_OLDER_TORCH,
        STEPS + LOGGED_BY_TORCH.replace("waiting on exit barrier", "in a callback") + "bye\n",
    ],
    ids=[
        "nothing", "steps", "a warning", "a tracker's error", "a failed upload",
        "a traceback before the steps", "a try of torchrun before the steps", "a bar that moves on",
        "a traceback that the program went on from", "done", "done: Trainer", "logged, then more",
        "ignored", "ignored at exit", "of a thread", "of a task", "of the log",
        "of a loader at the end", "of the resource tracker", "a missing tool", "a warning at exit",
        "the last barrier of torchrun", "the last barrier of an older torchrun",
        "logged by torch, then more",
    ],
)  # fmt: skip
def test_what_a_program_survives_or_logs_is_no_crash(text):
    assert find_crash([Output(text)]) is None


def test_the_stream_that_was_written_last_has_the_end():
    early = Output(TRACEBACK, written_s=100.0)
    assert find_crash([early, Output(STEPS, written_s=101.0 + LAST_WITHIN_S)]) is None
    assert find_crash([early, Output(STEPS, written_s=99.0 + LAST_WITHIN_S)]) == RAISED
    assert find_crash([early, Output(STEPS)]) == RAISED, "not known"


@pytest.mark.parametrize(
    ("count", "is_short"),
    [
        (Count(150, 6000, 10), True),
        (Count(5900, 6000, 50), True),
        (Count(5900, 6000, 100), False),
        (Count(5999, 6000, 1), False),
        (Count(6000, 6000, 10), False),
        (Count(7000, 6000, 10), False),
    ],
    ids=[
        "far",
        "two prints",
        "the next print would be the last",
        "counted from 0",
        "there",
        "over",
    ],
)
def test_short_is_what_the_next_step_to_be_shown_would_not_reach(count, is_short):
    assert count.is_short == is_short


def end(log: str, bad: FalseSuccess) -> WorkerEnd:
    return WorkerEnd(0, "node-0", 0, 0, 10.0, log=log, bad_end=bad)


def cause(log: str, bad: FalseSuccess) -> Fault:
    return diagnose(Evidence(at_s=100.0, step=40, workers=[end(log, bad)])).fault


def test_a_hidden_crash_has_the_fault_that_its_output_shows_and_the_way_to_show_it():
    fault = cause(STEPS + TRACEBACK + summary(), FalseSuccess("ChildFailedError"))
    assert (fault.fault_class, fault.evidence) == (FaultClass.USER_CODE_ERROR, RAISED)
    assert "set -o pipefail" in fault.explanation
    killed = cause(STEPS + summary(-9), FalseSuccess("ChildFailedError"))
    assert killed.fault_class is FaultClass.NATIVE_CRASH
    assert "counts no kill for memory" in killed.explanation
    assert "who sent SIGKILL" in killed.action
    unknown = cause("odd", FalseSuccess("odd"))
    assert (unknown.fault_class, unknown.evidence) == (FaultClass.UNKNOWN, "odd")


def stated(reason: EndReason, line: str = "x") -> StatedEnd:
    return StatedEnd(reason, line)


def short_end(reason: EndReason | None, line: str = "x", *, has_stepped: bool = True) -> Fault:
    """The fault of a program that ended at 150 of 6000."""
    end_ = stated(reason, line) if reason is not None else None
    count = Count(150, 6000, 10, "iteration")
    return cause(TRACEBACK + STEPS, not_none(judge_short_end(count, end_, has_stepped=has_stepped)))


def test_an_end_before_the_target_is_not_blamed_on_what_was_survived():
    fault = short_end(None)
    assert (fault.fault_class, fault.code) == (FaultClass.UNKNOWN, SHORT_CODE)
    assert fault.evidence == "ended at iteration 150 of 6000 with exit code 0"


def test_a_signal_makes_an_end_before_the_target_a_preemption():
    fault = short_end(EndReason.SIGNAL, "[exiting program after receiving SIGTERM.]")
    assert (fault.fault_class, fault.user_fault) == (FaultClass.PREEMPTED, False)
    assert fault.evidence == (
        "ended at iteration 150 of 6000: [exiting program after receiving SIGTERM.]"
    )


def test_a_limit_of_its_own_ends_the_run_short_of_the_target():
    fault = short_end(EndReason.LIMIT, "[exiting program after 690 minutes]")
    assert (fault.fault_class, fault.code) == (FaultClass.LAUNCH_MISCONFIGURED, LIMIT_CODE)
    assert "150 of 6000" in fault.evidence
    assert "go on from the last checkpoint" in fault.action


def test_a_rule_of_the_program_is_no_failure():
    count = Count(150, 6000, 10)
    assert judge_short_end(count, stated(EndReason.GOAL), has_stepped=True) is None


@pytest.mark.parametrize(
    ("reason", "has_stepped"),
    [(EndReason.NO_SAMPLE, False), (EndReason.NO_SAMPLE, True), (None, False)],
)
def test_the_second_end_without_a_sample_is_a_setting_to_correct(reason, has_stepped):
    first = short_end(reason, "the stream is exhausted", has_stepped=has_stepped)
    assert (first.fault_class, first.code) == (FaultClass.UNKNOWN, NO_SAMPLE_CODE)
    assert ("without a step" in first.evidence) is not has_stepped
    again = blame_repeated_end(first, first)
    assert again.fault_class is FaultClass.LAUNCH_MISCONFIGURED
    assert again.user_fault
    assert "its data ends before its target" in again.explanation


def test_who_ends_at_the_same_step_again_means_to():
    def fault(step: int) -> Fault:
        return cause("", not_none(judge_short_end(Count(step, 6000, 10), None, has_stepped=True)))

    assert blame_repeated_end(fault(150), None).fault_class is FaultClass.UNKNOWN
    assert blame_repeated_end(fault(150), fault(140)).fault_class is FaultClass.UNKNOWN
    repeated = blame_repeated_end(fault(150), fault(150))
    assert repeated.fault_class is FaultClass.USER_CODE_ERROR
    assert repeated.user_fault
    crash = cause(TRACEBACK, FalseSuccess(RAISED))
    assert blame_repeated_end(crash, crash) == crash
    signal = short_end(EndReason.SIGNAL)
    assert blame_repeated_end(signal, signal) == signal, "it may come as often as it likes"


MISSING_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9\n"


def ended_rank(**fields: Any) -> EndedRank:
    return EndedRank(
        **{"rank": 1, "node": "node-1", "device": 0, "ended_s": 9.0, "step": 30, **fields}
    )


def test_a_rank_that_left_is_the_first_cause_of_the_peers_that_miss_it():
    peer = WorkerEnd(0, "node-0", 0, 1, 9.5, log=STEPS + FRAMES + MISSING_PEER)
    evidence = Evidence(at_s=100.0, step=30, workers=[peer])
    assert diagnose(evidence).fault.rank == 0
    fault = diagnose(replace(evidence, ended_ranks=[ended_rank()])).fault
    assert (fault.rank, fault.node, fault.code) == (1, None, RANK_CODE)
    assert fault.evidence == (
        "rank 1 ended with exit code 0 after step 30, while the other ranks had not come to "
        "their end"
    )
    assert "no network is to blame" in fault.explanation
    again = blame_repeated_end(fault, fault)
    assert again.fault_class is FaultClass.USER_CODE_ERROR
    assert "same number of batches" in again.action
    late = replace(evidence, ended_ranks=[ended_rank(ended_s=60.0)])
    assert diagnose(late).fault.rank == 0, "it left because the others had failed"


def test_a_rank_that_left_explains_a_hang_but_no_stopped_process_and_no_error():
    silent = SilentRank(0, "node-0", 70.0, 60.0, "step")
    hang = Evidence(at_s=100.0, step=30, silent=[silent], ended_ranks=[ended_rank()])
    assert diagnose(hang).fault.code == RANK_CODE
    stopped = replace(hang, silent=[replace(silent, stopped=["python"])])
    assert diagnose(stopped).fault.fault_class is FaultClass.HANG
    raised = WorkerEnd(0, "node-0", 0, 1, 9.5, log=STEPS + TRACEBACK)
    crash = Evidence(at_s=100.0, step=30, workers=[raised], ended_ranks=[ended_rank()])
    assert diagnose(crash).fault.fault_class is FaultClass.USER_CODE_ERROR


def test_a_rank_that_torchrun_lists_as_failed_did_not_leave_with_0():
    log = STEPS + FRAMES + MISSING_PEER + summary(num_failed=2)
    launcher = WorkerEnd(None, "node-0", None, 1, 9.5, log=log)
    lists_it = Evidence(
        at_s=100.0, step=30, workers=[launcher],
        ended_ranks=[ended_rank(node="node-0", ended_s=None)],
    )  # fmt: skip
    assert diagnose(lists_it).fault.code != RANK_CODE
    not_it = replace(launcher, log=STEPS + FRAMES + MISSING_PEER + summary())
    assert diagnose(replace(lists_it, workers=[not_it])).fault.code == RANK_CODE


def test_a_fault_after_the_last_step_is_a_note_with_its_stack():
    raised = cause(STEPS + TRACEBACK, FalseSuccess(RAISED))
    note = describe_late_fault(60, raised, logs=STEPS + TRACEBACK, stacks="")
    assert note.startswith("all 60 steps are done and the checkpoint of step 60 is complete")
    assert RAISED in note
    assert 'File "/work/train.py", line 5' in note
    words = "terminate called without an active exception\n"
    abort = describe_late_fault(60, raised, logs=STEPS + words + summary(-6), stacks="")
    assert words.strip() in abort or "SIGABRT" in abort
    stack = 'Thread 7 (idle): "MainThread"\n    _shutdown (/x/tracker.py:1590)\n'
    hang = describe_late_fault(60, raised, logs=STEPS, stacks=stack)
    assert "_shutdown (/x/tracker.py:1590)" in hang


def test_a_session_that_exits_before_its_target_is_the_programs_fault():
    text = explain_early_end(6, 30)
    assert text is not None
    assert "step 6 of 30" in text
    fault = cause(STEPS, FalseSuccess(text, FaultClass.USER_CODE_ERROR))
    assert (fault.fault_class, fault.evidence) == (FaultClass.USER_CODE_ERROR, text)
    assert explain_early_end(30, 30) is explain_early_end(31, 30) is None
    assert "step 0 of 30" in str(explain_early_end(-1, 30))


def test_a_script_that_left_its_training_running_has_a_fault_that_says_how_to_wait():
    fault = cause(STEPS, judge_leftovers(["torchrun train.py (pid 8)", "train.py (pid 9)"]))
    assert fault.fault_class is FaultClass.LAUNCH_MISCONFIGURED
    assert fault.evidence == (
        "exit code 0 while torchrun train.py (pid 8) (and 1 more) was still running"
    )
    assert fault.recoverable_by is RecoverableBy.USER_FIX
    assert "started was still running" in fault.explanation
    assert "without `&`" in fault.action
