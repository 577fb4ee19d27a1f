"""Logs that name no failure: a good end needs a proof, else the most suspicious line is shown."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.native_stacks import find_native_stack
from perdure.training.diagnosis.scan import scan_text
from perdure.training.diagnosis.silence import find_suspect, has_ended_well
from perdure.training.diagnosis.sources import diagnose_files
from perdure.training.recovery.faults import FaultClass
from tests.values import not_none

STEPS = "".join(f"step {step} loss 2.{step} lr 1e-4\n" for step in range(1, 9))
LOADING = "".join(f"reading part {part} of 90\n" for part in range(40))
PY_CRASH = (
    "SIGSEGV(11), PID: 7, Thread 7:\n[0] ???(0x7fa7b2d1d61b) in a.so\n[1] f(0x7fa7b2d1d3fb)\n"
)
GDB = "#0  0x00007fff78d7e260 in {0} () from /lib/libc.so\n#1  0x00007fff0000aaaa in g () from x\n"


def diagnose(tmp_path, **logs: str):
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    files = sorted(tmp_path.iterdir())
    return diagnose_files(str(tmp_path), files, at_s=0.0, year=2026).diagnosis


@pytest.mark.parametrize(
    "end",
    [
        "Training completed.\n",
        "training is done\n",
        "worker 3 exited with code 0\n",
        "100%|##########| 200/200 [03:32<00:00,  1.06s/it]\n",
        "iteration      100/     100 | lm loss: 2.19E+00\n",
        "Early stopping: no improvement for 3 epochs\n",
        "Training completed.\nuploading logs: 0 failed\n",
    ],
)
def test_a_good_end_is_proven_by_words_a_code_or_the_target(end):
    assert has_ended_well(STEPS + end)


@pytest.mark.parametrize(
    "end",
    [
        "",
        "cleaning up\n",
        "Training completed or interrupted\n[platform] Job failed: 1 of 8 tasks\n",
        "Training finished\nworker process 3 exited with code 1\n",
        "iteration       98/     100 | lm loss: 2.19E+00\n",
    ],
)
def test_steps_alone_and_words_before_a_stated_failure_prove_nothing(end):
    assert not has_ended_well(STEPS + end)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (LOADING + "the ring has 7 members of 8\n" + LOADING[:200], "the ring has 7 members of 8"),
        (LOADING + "checking\n" + "giving up on part 7\n", "giving up on part 7"),
        ("one thing\nanother thing\nlast thing\n", "last thing"),
        (STEPS + "queue closed by its owner\n", "queue closed by its owner"),
    ],
)
def test_the_most_suspicious_line_is_rare_and_near_the_end(log, line):
    assert not_none(find_suspect(log, year=2026)).finding.line == line


def test_a_log_that_proves_nothing_is_unknown_and_never_healthy(tmp_path):
    diagnosis = not_none(diagnose(tmp_path, rank=LOADING + "the ring has 7 members of 8\n"))
    assert diagnosis.fault.fault_class is FaultClass.UNKNOWN
    assert diagnosis.fault.evidence == "the ring has 7 members of 8"
    assert not_none(diagnosis.fault.confidence) < 0.7


def test_one_log_that_shows_a_good_end_speaks_for_its_attempt(tmp_path):
    assert diagnose(tmp_path, a=LOADING, b=STEPS + "Training completed.\n") is None


def test_a_log_without_words_shows_nothing(tmp_path):
    assert diagnose(tmp_path, a="12 34\n==\n") is None


@pytest.mark.parametrize(
    ("text", "fault_class", "line"),
    [
        (PY_CRASH, FaultClass.NATIVE_CRASH, "SIGSEGV(11), PID: 7, Thread 7:"),
        (
            f'Thread 1 "python3" received signal SIGBUS, Bus error.\n{GDB.format("f")}',
            FaultClass.NATIVE_CRASH,
            'Thread 1 "python3" received signal SIGBUS, Bus error.',
        ),
        (
            "> " + GDB.format("free").replace("\n#", "\n> #"),
            FaultClass.NATIVE_CRASH,
            "> #0  0x00007fff78d7e260 in free () from /lib/libc.so",
        ),
        (
            GDB.format("pthread_cond_wait@@GLIBC_2.3.2"),
            FaultClass.HANG,
            "#0  0x00007fff78d7e260 in pthread_cond_wait@@GLIBC_2.3.2 () from /lib/libc.so",
        ),
    ],
)
def test_a_native_stack_shows_a_crash_or_where_a_process_waits(text, fault_class, line):
    finding = not_none(find_native_stack(STEPS + text, year=2026))
    assert (finding.fault_class, finding.line) == (fault_class, line)
    assert finding.is_after_steps


COMMUNICATOR = "n1:7:9 [0] NCCL INFO comm 0x55d0a1b2c3d4 rank 0 nranks 2 - Destroy COMPLETE\n"


@pytest.mark.parametrize(
    "text",
    [STEPS, "#0 of 8 done\n#1 of 8 done\n", "[0] a\n[1] b\n", 3 * COMMUNICATOR,
     3 * COMMUNICATOR.removeprefix("n1:7:9 ")],
)  # fmt: skip
def test_numbered_lines_are_no_stack(text):
    assert find_native_stack(text, year=2026) is None


@pytest.mark.parametrize(
    "line",
    [
        r'detail="Traceback (most recent call last):\n  File \"/w/a.py\", line 9, in f\n    g()\nNameError: name \'q\' is not defined\n"',  # noqa: E501
        r"msg='Traceback (most recent call last):\n  File \"/w/a.py\", line 9\nNameError: q\n'",
        r'{"text": "Traceback (most recent call last):\n  File \"/w/a.py\", line 9\nNameError: q"}',
    ],
)
def test_a_traceback_with_escaped_newlines_is_read(line):
    findings = scan_text(f"starting\n{line}\n", year=2026).findings
    assert [f.fault_class for f in findings] == [FaultClass.USER_CODE_ERROR]


def test_a_path_of_windows_keeps_its_backslashes():
    line = r"RuntimeError: cannot open C:\new\nodes\npu"
    assert [f.line for f in scan_text(f"{line}\n", year=2026).findings] == [line]
