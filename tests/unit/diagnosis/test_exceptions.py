"""Exceptions that no rule knows: judged by type, by the files they came through, by errno."""

from __future__ import annotations

import pytest

from perdure.training.diagnosis.exceptions import (
    judge_exception,
    load_exceptions,
    names_exception,
    was_raised_in_handling,
)
from perdure.training.diagnosis.rules import Role
from perdure.training.recovery.faults import FaultClass, RecoverableBy
from tests.values import not_none


def traceback(*files: str) -> str:
    frames = "".join(f'  File "{file}", line 3, in f\n    f()\n' for file in files)
    return f"Traceback (most recent call last):\n{frames}"


def raised(line: str, context: str = ""):
    return not_none(judge_exception(line, context))


@pytest.mark.parametrize(
    ("line", "fault_class", "role"),
    [
        ("ModuleNotFoundError: No module named 'x'", FaultClass.VERSION_MISMATCH, Role.ROOT),
        ("MemoryError", FaultClass.HOST_OOM, Role.ROOT),
        ("KeyboardInterrupt", FaultClass.PREEMPTED, Role.SYMPTOM),
        ("FileNotFoundError: x", FaultClass.LAUNCH_MISCONFIGURED, Role.ROOT),
        ("PermissionError: x", FaultClass.STORAGE_ERROR, Role.ROOT),
        ("_pickle.UnpicklingError: x", FaultClass.CHECKPOINT_CORRUPT, Role.ROOT),
        ("ConnectionResetError: x", FaultClass.COLLECTIVE_TIMEOUT, Role.CASCADE),
        ("TimeoutError: x", FaultClass.COLLECTIVE_TIMEOUT, Role.SYMPTOM),
        ("botocore.exceptions.ClientError: x", FaultClass.STORAGE_ERROR, Role.ROOT),
        ("OSError: x", FaultClass.STORAGE_ERROR, Role.ROOT),
        ("subprocess.CalledProcessError: x", FaultClass.UNKNOWN, Role.HINT),
        ("pydantic_core._pydantic_core.ValidationError: x", FaultClass.LAUNCH_MISCONFIGURED,
         Role.ROOT),
        ("TypeError: x", FaultClass.USER_CODE_ERROR, Role.ROOT),
        ("SyntaxError: x", FaultClass.USER_CODE_ERROR, Role.ROOT),
        ("ValueError: x", FaultClass.UNKNOWN, Role.ROOT),
        ("RuntimeError: x", FaultClass.UNKNOWN, Role.ROOT),
        ("Exception: x", FaultClass.UNKNOWN, Role.ROOT),
        ("zipfile.BadZipFile: x", FaultClass.CHECKPOINT_CORRUPT, Role.ROOT),
        ("FloatingPointError: x", FaultClass.NUMERIC_ANOMALY, Role.ROOT),
    ],
)  # fmt: skip
def test_the_type_of_an_exception_gives_its_class(line, fault_class, role):
    exception = raised(line)
    assert (exception.spec.fault_class, exception.role) == (fault_class, role)


def test_a_type_that_the_table_does_not_know_may_be_of_a_fault_that_passes():
    exception = raised("my_project.errors.FrobnicationError: x", traceback("/w/train.py"))
    assert exception.type == "FrobnicationError"
    assert (exception.spec.fault_class, exception.role) == (FaultClass.UNKNOWN, Role.ROOT)


def test_the_last_row_takes_every_type_and_no_type_is_unreachable():
    rows = load_exceptions()
    assert rows[-1].types == ("*",)
    general: set[str] = set()
    for row in rows:
        assert not general & set(row.types), row
        narrowed = (row.frames, row.raised_in, row.raised_by, row.message, row.said)
        general |= set(row.types) if not any(narrowed) else set()


@pytest.mark.parametrize(
    ("line", "files", "fault_class"),
    [
        ("ValueError: x", ["/w/train.py", "/w/megatron/arguments.py"],
         FaultClass.LAUNCH_MISCONFIGURED),
        ("AssertionError: x", ["/w/train.py", "/lib/transformers/training_args.py"],
         FaultClass.LAUNCH_MISCONFIGURED),
        ("ValueError: x", ["/w/train.py", "/w/model.py"], FaultClass.USER_CODE_ERROR),
        ("ValueError: x", ["/w/arguments.py", *["/w/model.py"] * 4], FaultClass.USER_CODE_ERROR),
        ("AssertionError", ["/w/train.py", "/lib/deepspeed/runtime/config.py"],
         FaultClass.LAUNCH_MISCONFIGURED),
        ("AssertionError", ["/lib/deepspeed/runtime/engine.py", "/w/model.py"],
         FaultClass.USER_CODE_ERROR),
        ("OSError: [Errno 22] Invalid argument", ["/w/train.py", "/lib/torch/serialization.py"],
         FaultClass.CHECKPOINT_CORRUPT),
        ("OSError: [Errno 5] Input/output error", ["/lib/torch/serialization.py"],
         FaultClass.STORAGE_ERROR),
        ("EOFError: Ran out of input", ["/lib/torch/serialization.py"],
         FaultClass.CHECKPOINT_CORRUPT),
        ("KeyError: 'x'", ["/lib/torch/utils/data/_utils/fetch.py", "/w/dataset.py"],
         FaultClass.DATALOADER_ERROR),
        ("json.decoder.JSONDecodeError: x", ["/w/dataset.py", "/lib/python3.11/json/decoder.py"],
         FaultClass.DATALOADER_ERROR),
        ("ValueError: x", ["/w/train.py", "/lib/accelerate/utils/launch.py"],
         FaultClass.LAUNCH_MISCONFIGURED),
        ("RuntimeError: x", ["/w/train.py", "/lib/torch/nn/utils/clip_grad.py"],
         FaultClass.UNKNOWN),
        ("TypeError: x", ["/w/train.py", "/lib/torch/nn/modules/module.py"],
         FaultClass.USER_CODE_ERROR),
        ("TypeError: x", ["/w/train.py", "/lib/torch/distributed/distributed_c10d.py"],
         FaultClass.UNKNOWN),
        ("AttributeError: x", ["/w/train.py", "/lib/torch_npu/npu/utils.py"], FaultClass.UNKNOWN),
        ("KeyError: x", ["/lib/python3.11/multiprocessing/pool.py"], FaultClass.UNKNOWN),
        ("ValueError: the ECC counter of the device rose", ["/w/train.py"], FaultClass.UNKNOWN),
        ("AssertionError: loss is not finite", ["/w/train.py"], FaultClass.UNKNOWN),
        ("EOFError", ["/lib/python3.11/multiprocessing/connection.py"],
         FaultClass.DATALOADER_ERROR),
        ("ConnectionError: x", ["/lib/requests/adapters.py"], FaultClass.STORAGE_ERROR),
        ("ConnectionError: x", ["/w/train.py"], FaultClass.COLLECTIVE_TIMEOUT),
    ],
)  # fmt: skip
def test_the_files_of_the_traceback_narrow_a_type_down(line, files, fault_class):
    assert raised(line, traceback(*files)).spec.fault_class is fault_class


def test_the_frame_is_the_innermost_file_of_the_last_traceback():
    context = traceback("/w/old.py") + "KeyError: 'a'\n" + traceback("/w/train.py", "/w/model.py")
    assert raised("ValueError: x", context).frame == "/w/model.py"
    assert raised("ValueError: x").frame is None


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("OSError: [Errno 28] No space left on device", RecoverableBy.USER_FIX),
        ("OSError: [Errno 30] Read-only file system", RecoverableBy.USER_FIX),
        ("OSError: [Errno 5] Input/output error", None),
        ("OSError: no number", None),
        ("ValueError: [Errno 28] not storage", None),
    ],
)
def test_the_number_of_an_os_error_decides_whether_a_retry_can_help(line, answer):
    assert raised(line).recoverable_by is answer


def test_a_dotted_name_without_a_known_ending_counts_only_after_a_traceback():
    line = "pyarrow.lib.ArrowInvalid: Not an Arrow file"
    assert judge_exception(line, "reading a.parquet\n") is None
    exception = raised(line, traceback("/w/data.py"))
    assert (exception.type, exception.spec.fault_class) == (
        "ArrowInvalid",
        FaultClass.DATALOADER_ERROR,
    )


@pytest.mark.parametrize(
    ("line", "type_name"),
    [("_queue.Empty", "Empty"), ("socket.timeout: timed out", "timeout"),
     ("cv2.error: OpenCV(4.8.0) x", "error"), ("socket.gaierror: [Errno -2] x", "gaierror")],
)  # fmt: skip
def test_a_bare_or_lower_case_name_with_its_module_is_known_after_a_traceback(line, type_name):
    assert judge_exception(line, "") is None
    assert raised(line, traceback("/w/train.py")).type == type_name


def test_an_exception_whose_message_is_on_the_next_line_is_no_cause_yet():
    assert (
        raised("RuntimeError: work = default_pg.broadcast([tensor], opts): ").role is Role.SYMPTOM
    )
    assert raised("RuntimeError: x: y").role is Role.ROOT


def test_an_exception_mentioned_within_a_log_message_is_no_cause():
    assert raised("12:00:01 worker 3 said ValueError: x").role is Role.SYMPTOM
    assert raised("[rank3]: ValueError: x", traceback("/w/train.py")).role is Role.ROOT
    assert raised("    ValueError: x").role is Role.ROOT


@pytest.mark.parametrize(
    "line",
    ["Caught exception OSError: x", "Retrying after OSError: x", "falling back, OSError: x"],
)
def test_an_exception_that_was_handled_is_an_echo(line):
    assert raised(line, traceback("/w/train.py")).role is Role.CASCADE


@pytest.mark.parametrize(
    "line",
    ["", "step 12 loss 3.4", "Traceback (most recent call last):", "no errors were found",
     "errors: 0", "Error: x", "class MyError(Exception):"],
)  # fmt: skip
def test_a_line_without_an_exceptions_name_is_none(line):
    assert judge_exception(line, "") is None
    assert not names_exception(line)


HANDLING = "During handling of the above exception, another exception occurred:"
DIRECT = "The above exception was the direct cause of the following exception:"


def test_an_exception_raised_in_the_handling_of_another_is_known_as_such():
    context = f"{traceback('/w/a.py')}KeyError: 'a'\n\n{HANDLING}\n\n{traceback('/w/b.py')}"
    assert was_raised_in_handling("ValueError: x", context)
    assert not was_raised_in_handling("step 12", context)


def test_a_direct_cause_and_an_older_chain_are_no_handling():
    first = f"{traceback('/w/a.py')}KeyError: 'a'\n\n"
    assert not was_raised_in_handling("ValueError: x", f"{first}{DIRECT}\n\n{traceback('b.py')}")
    old = f"{first}{HANDLING}\n\n{traceback('/w/b.py')}KeyError: 'b'\n" + "noise\n" * 60
    assert not was_raised_in_handling("ValueError: x", old + traceback("/w/c.py"))
