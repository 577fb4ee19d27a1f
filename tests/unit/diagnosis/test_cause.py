"""Which of many findings is the first cause."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest

from perdure.training.diagnosis.cause import MAX_RUNNERS_UP, Diagnosis, LogSource, choose_cause
from perdure.training.diagnosis.scan import scan_text
from perdure.training.recovery.faults import TRAITS, Fault, FaultClass, RecoverableBy
from tests.values import not_none

YEAR = 2026
STARTED_S = datetime(2026, 3, 21, 2, tzinfo=UTC).timestamp()

TYPE_ERROR = "TypeError: forward() missing 1 required positional argument: 'targets'"
DEVICE_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
UCE = "RuntimeError: UCE ERROR"
PEER_CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:4123"
UNEXPLAINED = "ERROR something odd"
STEP = " iteration      100/    1000 | lm loss: 2.345E+00 | grad norm: 0.9 |"


def steps(count: int) -> str:
    """Lines of a training that goes on."""
    return "".join(f"step {number} loss 3.4\n" for number in range(1, count + 1))


def clock(at_s: float) -> str:
    return f"{datetime.fromtimestamp(STARTED_S + at_s, UTC):%Y-%m-%d %H:%M:%S}"


def traceback(line: str, *, at_s: float | None = None) -> str:
    """An exception as a program prints it, after a line with a time."""
    head = f"{clock(at_s)} forward\n" if at_s is not None else ""
    frame = '  File "/w/train.py", line 3, in f'
    return f"{head}Traceback (most recent call last):\n{frame}\n    f()\n{line}\n"


def watchdog(rank: int, *, at_s: float) -> str:
    moment = datetime.fromtimestamp(STARTED_S + at_s, UTC)
    return (
        f"[rank{rank}]:[E{moment:%-m%d %H:%M:%S}.408271257 ProcessGroupNCCL.cpp:629] [PG ID 0 PG "
        f"GUID 0(default_pg) Rank {rank}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
        "600020 milliseconds before timing out.\n"
    )


def notify_timeout(*, at_s: float) -> str:
    moment = datetime.fromtimestamp(STARTED_S + at_s, UTC)
    return (
        f"EI0002: [PID: 4711] {moment:%Y-%m-%d-%H:%M:%S}.639.860 Notify timeout: The wait "
        "execution of the Notify register times out.\n"
    )


def source(text: str, order: int = 0, **place) -> LogSource:
    return LogSource(f"rank_{order}.log", scan_text(text, year=YEAR).findings, order, **place)


def diagnosis(*texts: str) -> Diagnosis:
    return not_none(
        choose_cause([source(text, order) for order, text in enumerate(texts)], at_s=99.0, step=40)
    )


def cause(*texts: str) -> Fault:
    return diagnosis(*texts).fault


PARTS = (traceback(TYPE_ERROR), notify_timeout(at_s=5), f"{PEER_CLOSED}\n", f"{UNEXPLAINED}\n")


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_cause_beats_a_symptom_beats_an_echo_wherever_they_are(order):
    parts = [PARTS[i] for i in order]
    assert cause("".join(parts)).evidence == TYPE_ERROR
    assert cause(*parts).evidence == TYPE_ERROR
    symptoms = [PARTS[i] for i in order if i]
    assert cause(*symptoms).code == cause("".join(symptoms)).code == "EI0002"
    echoes = [PARTS[i] for i in order if i > 1]
    assert cause(*echoes).evidence == cause("".join(echoes)).evidence == PEER_CLOSED


def test_a_cause_beats_a_symptom_and_an_echo_that_were_printed_long_before():
    echo, symptom = f"{clock(50)} x\n{PEER_CLOSED}\n", watchdog(1, at_s=100)
    assert cause(echo, symptom, traceback(TYPE_ERROR, at_s=700)).evidence == TYPE_ERROR
    assert cause(echo, symptom).rank == 1


def test_of_attempts_that_failed_the_last_one_counts():
    tried = "E aws_logging.cc:60] Curl returned error code 28 after {} ms"
    text = "\n".join(tried.format(wait) for wait in (100, 200, 400))
    assert cause(f"{UNEXPLAINED}\n{text}\n").evidence == tried.format(400)


def test_a_loss_scale_that_falls_and_falls_is_a_fault_unless_training_goes_on():
    overflow = "| WARNING: overflow detected, setting loss scale to: {}"
    text = "\n".join(overflow.format(scale) for scale in (0.25, 0.125, 0.0625)) + "\n"
    assert cause(steps(3) + text).evidence == overflow.format(0.0625)
    assert choose_cause([source(text + steps(9))], at_s=99.0) is None


@pytest.mark.parametrize(
    "lines",
    [
        ("THCudaCheck FAIL file=a.cu line=58 error=59 : device-side assert triggered",
         "RuntimeError: cuda runtime error (59) : device-side assert triggered at a.cu:58"),
        ("RuntimeError: Failed to import x because of the following error (look up):",
         "/lib/x.so: undefined symbol: _ZN2at4_ops5zeros4callE"),
        ("  error_file: <N/A>", "  exitcode  : 1 (pid: 4711)"),
        ("The actor died because its node has died. Node Id: 5f",
         "\tthe actor's node was preempted: spot"),
    ],
)  # fmt: skip
def test_a_line_that_announces_another_gives_way_to_it(lines):
    assert cause("\n".join(lines) + "\n").evidence == lines[1].strip()


def test_a_crash_behind_a_progress_bar_with_a_loss_is_one_after_steps():
    bar = "loss: 4.38811e+02:  20%|## | 11/56 [00:02<00:08,  5.02it/s]"
    crash = "Segmentation fault (core dumped)"
    assert cause(f"{bar}{crash}\n").recoverable_by is RecoverableBy.RETRY
    assert cause(f"{crash}\n").recoverable_by is RecoverableBy.USER_FIX


def test_nothing_that_counts_is_no_failure():
    assert choose_cause([], at_s=99.0) is None
    assert choose_cause([source("step 12 loss 3.4\n"), LogSource("b", ())], at_s=99.0) is None
    assert choose_cause([source(f"[INFO] {TYPE_ERROR}\n")], at_s=99.0) is None


@pytest.mark.parametrize("first", [0, 1])
def test_the_earliest_of_several_causes_wins_across_sources(first):
    times = (100, 200) if first == 0 else (200, 100)
    result = diagnosis(traceback(DEVICE_OOM, at_s=times[0]), traceback(TYPE_ERROR, at_s=times[1]))
    assert result.source == f"rank_{first}.log"
    assert result.fault.at_s == STARTED_S + 100


def test_a_clock_that_is_off_does_not_decide_which_cause_was_first():
    late = source(traceback(DEVICE_OOM, at_s=100), 0)
    ahead = source(traceback(TYPE_ERROR, at_s=150), 1, clock_offset_s=-60.0)
    result = not_none(choose_cause([late, ahead], at_s=99.0))
    assert (result.source, result.fault.at_s) == ("rank_1.log", STARTED_S + 90)


def test_a_cause_without_a_time_comes_after_those_with_one():
    untimed, timed = traceback(DEVICE_OOM), traceback(TYPE_ERROR, at_s=500)
    assert diagnosis(untimed, timed, notify_timeout(at_s=700)).source == "rank_1.log"
    alone = diagnosis(traceback(DEVICE_OOM), traceback(TYPE_ERROR))
    assert (alone.source, alone.fault.at_s) == ("rank_0.log", 99.0)


@pytest.mark.parametrize(
    "later",
    [
        steps(8),
        "Epoch 3 acc 0.71 ppl 12\nEpoch 4 acc 0.72 ppl 11\n",
        '{"step": 10, "loss": 2.1}\n{"step": 20, "loss": 2.0}\n',
        " 12%|# | 120/1000 [01:00<07:20,  2.0it/s]\n 99%|##| 990/1000 [08:00<00:04,  2.0it/s]\n",
        "Training completed. Model saved to out/\n",
        "\u635f\u5931: 2.31\n" * 50,
    ],
)
def test_an_exception_that_was_caught_before_the_work_went_on_is_no_failure(later):
    assert choose_cause([source(traceback(TYPE_ERROR) + later)], at_s=99.0) is None


def test_one_step_more_of_many_ranks_hides_no_cause():
    head = "".join(f"[rank{r}]: step 100 loss 2.1\n" for r in range(64))
    tail = "".join(f"[rank{r}]: step 101 loss 2.0\n" for r in range(64) if r != 17)
    assert cause(head + traceback(TYPE_ERROR) + tail).evidence == TYPE_ERROR


SUMMARY = "wandb: train/loss 2.1\nwandb: train/global_step 9000\n" * 20


@pytest.mark.parametrize(("before", "after"), [(steps(20), SUMMARY), ("", f"{STEP}\n" * 7)])
def test_a_trackers_summary_and_the_last_steps_of_other_ranks_are_no_progress(before, after):
    assert cause(before + traceback(TYPE_ERROR) + after).evidence == TYPE_ERROR


def test_broken_hardware_that_training_survived_is_a_fault_all_the_same():
    fault = cause(f"{UCE}\n" + f"{STEP}\n" * 20)
    assert (fault.fault_class, fault.hardware_fault) == (FaultClass.DEVICE_MEMORY_ERROR, True)


def test_what_training_survived_before_does_not_hide_what_ended_it():
    text = traceback(TYPE_ERROR) + steps(20) + traceback(DEVICE_OOM)
    result = diagnosis(text)
    assert (result.fault.evidence, result.runners_up) == (DEVICE_OOM, ())


def test_runners_up_are_distinct_and_few():
    text = (
        traceback(TYPE_ERROR) * 3 + traceback(DEVICE_OOM) * 3 + traceback(UCE)
        + notify_timeout(at_s=5) * 3 + f"{PEER_CLOSED}\n{UNEXPLAINED}\n" * 3
        + traceback("KeyError: 'a'") + traceback("FileNotFoundError: a") + "Killed\n"
    )  # fmt: skip
    result = diagnosis(text, text)
    kinds = [(fault.fault_class, fault.evidence) for fault in result.runners_up]
    assert len(kinds) == len(set(kinds)) == MAX_RUNNERS_UP
    assert result.fault.evidence not in {evidence for _, evidence in kinds}
    assert result.runners_up[0].fault_class is FaultClass.DEVICE_OOM


DETAIL = "EZ9999: [PID: 4711] 2026-03-21-02:07:08.639.860 The aicore execution is abnormal"
WRAPPER = (
    "RuntimeError: npuSynchronizeDevice:build/CMakeFiles/torch_npu.cpp:416 NPU function error: "
    "AclrtSynchronizeDeviceWithTimeout, error code is {}"
)


LOST = "RuntimeError: ACL stream synchronize failed, error code is 507899"


@pytest.mark.parametrize("is_detail_first", [True, False])
@pytest.mark.parametrize(
    ("wrapper", "fault_class"),
    [(WRAPPER.format("507015"), FaultClass.OPERATOR_ERROR), (LOST, FaultClass.DEVICE_LOST)],
)
def test_what_cann_reports_in_detail_is_shown_and_the_code_around_it_gives_the_class(
    is_detail_first, wrapper, fault_class
):
    lines = [DETAIL, wrapper] if is_detail_first else [wrapper, DETAIL]
    fault = cause("\n".join(lines))
    assert (fault.fault_class, fault.evidence, fault.code) == (fault_class, DETAIL, "EZ9999")


def test_the_wrapper_of_another_rank_adds_nothing_to_the_detail():
    fault = cause(DETAIL, LOST)
    assert (fault.fault_class, fault.evidence) == (FaultClass.OPERATOR_ERROR, DETAIL)


def test_the_dump_of_a_core_shows_that_the_kernels_own_addresses_are_wrong():
    core = (
        "EZ9999[PID: 35] 2026-08-03-20:55:35.272.841 (EZ9999):  The error from device(chipId:0, "
        "dieId:1), serial number is 25, there is an exception of fftsplus aicore error, core id "
        "is 18, error code = 0, dump info: pc start: 0x1242.[FUNC:PrintCoreInfo]\n"
    )
    dump = (
        "       The extend info: errcode:(0, 0x8000, 0) errorStr: When the D-cache reads and "
        "writes data to the UB, the response value returned by the bus is a non-zero value.\n"
    )
    alone, reported, elsewhere = cause(core), cause(core + dump), cause(core, dump)
    assert reported.evidence == alone.evidence == core.strip()
    answers = [fault.recoverable_by for fault in (alone, reported, elsewhere)]
    assert answers == [RecoverableBy.RETRY, RecoverableBy.USER_FIX, RecoverableBy.RETRY]


def test_a_crash_before_any_step_is_the_users_to_fix_and_later_a_matter_of_a_retry():
    crash = "Segmentation fault (core dumped)\n"
    assert cause(f"loading\n{crash}").recoverable_by is RecoverableBy.USER_FIX
    assert cause(f"{STEP}\n{crash}").recoverable_by is RecoverableBy.RETRY


def test_a_fault_carries_the_traits_of_its_class_and_what_is_known_of_its_place():
    result = not_none(
        choose_cause(
            [source(traceback(TYPE_ERROR), rank=3, node="node-1", device=2)], at_s=99.0, step=40
        )
    )
    fault, traits = result.fault, TRAITS[FaultClass.USER_CODE_ERROR]
    assert (fault.rank, fault.node, fault.device, fault.step) == (3, "node-1", 2, 40)
    assert (fault.user_fault, fault.hardware_fault) == (True, False)
    assert (fault.recoverable_by, fault.action) == (RecoverableBy.USER_FIX, traits.action)
    assert fault.explanation.startswith(traits.meaning)


def test_what_a_line_shows_of_its_place_beats_the_name_of_its_file():
    result = not_none(
        choose_cause([source(f"[rank7]: {UCE} on npu:4\n", rank=3, device=2)], at_s=99.0)
    )
    assert (result.fault.rank, result.fault.device) == (7, 4)


@pytest.mark.parametrize("cause_at", [0, 17, 63])
@pytest.mark.parametrize("echo", ["nccl", "hccl"])
def test_one_rank_with_a_type_error_outweighs_63_that_wait_for_it(cause_at, echo):
    texts = [
        watchdog(rank, at_s=700) if echo == "nccl" else notify_timeout(at_s=700)
        for rank in range(64)
    ]
    texts[cause_at] = traceback(TYPE_ERROR, at_s=100)
    sources = [source(text, order, rank=order) for order, text in enumerate(texts)]
    result = not_none(choose_cause(sources, at_s=9999.0))
    assert (result.fault.evidence, result.fault.rank) == (TYPE_ERROR, cause_at)
    assert (result.source, result.fault.at_s) == (f"rank_{cause_at}.log", STARTED_S + 100)
    assert [fault.fault_class for fault in result.runners_up] == [FaultClass.COLLECTIVE_TIMEOUT]


def test_in_one_log_of_all_ranks_the_type_error_names_its_rank():
    lines = "".join(watchdog(rank, at_s=700) for rank in range(64) if rank != 5)
    failed = "".join(f"[rank5]: {line}\n" for line in traceback(TYPE_ERROR).splitlines())
    fault = cause(lines + failed)
    assert (fault.fault_class, fault.rank) == (FaultClass.USER_CODE_ERROR, 5)


def test_the_drivers_severity_goes_with_the_fault():
    fault = cause("Fault RAS occurs: [event_id:0x80e01801] severity: critical\n")
    assert (fault.code, fault.severity) == ("80E01801", 3)


WRAPPER = "RuntimeError: HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64"


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("at_s", [61.0, 183.0, 3600.0])
def test_the_cause_beats_its_wrapper_whose_time_is_that_of_an_older_line(at_s, is_first):
    lines = [f"{WRAPPER}\n", notify_timeout(at_s=at_s)]
    head = f"[{clock(0)}] iteration 60/ 120 | lm loss: 1.6E-01 |\n"
    text = head + "".join(lines if is_first else reversed(lines))
    result = not_none(choose_cause([source(text)], at_s=0.0))
    assert result.fault.evidence.startswith("EI0002")


def test_a_later_event_stays_later_where_lines_with_a_time_are_between():
    text = f"[{clock(0)}] begin\n{WRAPPER}\n" + "".join(
        f"[{clock(number)}] INFO waiting for the file system\n" for number in range(1, 400)
    )
    result = not_none(choose_cause([source(text + notify_timeout(at_s=900))], at_s=0.0))
    assert result.fault.evidence.startswith("RuntimeError")


PLACED = "[ERROR] 2026-03-21-02:00:01 (PID:77, Device:3, RankID:5) ERR02200 DIST call hccl failed"


@pytest.mark.parametrize(
    ("before", "rank", "device"),
    [
        (f"{PLACED}\n", 5, 3),
        ("[ERROR] DRV(77,python): open device 2 failed, ret=87\n", None, 2),
        (f"{PLACED}\n{PLACED.replace('Device:3, RankID:5', 'Device:4, RankID:6')}\n", None, None),
        ("", None, None),
    ],
    ids=["rank and device", "device", "two ranks", "none"],
)
def test_a_cause_without_a_place_has_the_one_that_the_lines_around_it_name(before, rank, device):
    fault = not_none(choose_cause([source(before + traceback(UCE))], at_s=0.0)).fault
    assert (fault.evidence, fault.rank, fault.device) == (UCE, rank, device)


@pytest.mark.parametrize(
    "line",
    [
        "socket.gaierror: [Errno -2] Name or service not known",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "The IPv6 network addresses of (trainer-0, 29500) cannot be retrieved (gai error: -2)",
    ],
)
def test_a_name_without_an_address_is_tried_again_and_no_node_is_blamed(line):
    fault = cause(traceback(line))
    assert fault.recoverable_by is RecoverableBy.RETRY
    assert (fault.node, fault.hardware_fault, fault.user_fault) == (None, False, False)
