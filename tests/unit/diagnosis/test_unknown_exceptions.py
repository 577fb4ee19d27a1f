"""An exception that no rule knows is not the user's: from the log to the rung."""

from __future__ import annotations

import pytest

from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from tests.unit.recovery.diagnosed import AICORE, choose, climbed, end, of_log, of_workers

OWN = "/home/user/project/train.py"
LIBRARY = "/usr/lib/python3.11/site-packages/torch_npu/npu/utils.py"


def traceback(message: str, *files: str) -> str:
    frames = "".join(f'  File "{file}", line 3, in step\n    run()\n' for file in files)
    return f"Traceback (most recent call last):\n{frames}{message}\n"


# The first four as ModelArts' documents name them.
OF_HARDWARE = {
    "RuntimeError: HCCL timeout": FaultClass.COLLECTIVE_TIMEOUT,
    "RuntimeError: ECC error": FaultClass.DEVICE_MEMORY_ERROR,
    "RuntimeError: aicore kernel error": FaultClass.OPERATOR_ERROR,
    "RuntimeError: Device disconnected": FaultClass.DEVICE_LOST,
    "RuntimeError: NPU 3 disconnected": FaultClass.DEVICE_LOST,
    "RuntimeError: HCCL collective timed out": FaultClass.COLLECTIVE_TIMEOUT,
}


@pytest.mark.parametrize("line", OF_HARDWARE)
@pytest.mark.parametrize("is_traced", [True, False])
def test_what_the_documents_name_is_known_alone_and_restarted(line, is_traced):
    fault = of_log(traceback(line, OWN) if is_traced else f"{line}\n")
    assert fault.fault_class is OF_HARDWARE[line]
    assert choose(fault).rung not in {Rung.STOP, Rung.HANG_RESTART}


@pytest.mark.parametrize(
    "line",
    [
        "HCCL timeout is set to 1800",
        "HCCL timeout: 1800",
        "corrected ECC error on HBM 3",
        "ECC error count: 0",
        "no ECC error was found",
    ],
)
def test_the_same_words_in_a_report_are_no_fault(line):
    assert of_log(f"{line}\nstep 10 loss 2.31\n").fault_class is FaultClass.UNKNOWN


@pytest.mark.parametrize(
    ("message", "files"),
    [
        ("RuntimeError: the frobs do not fit", (OWN,)),
        ("my.errors.FrobnicationError: x", (OWN,)),
        ("Exception: something went wrong", (OWN,)),
        ("TypeError: 'NoneType' object is not subscriptable", (OWN, LIBRARY)),
        ("AssertionError: the ring is not closed", (LIBRARY,)),
    ],
)
def test_an_unknown_exception_is_restarted_in_place_then_elsewhere_and_the_fourth_time_stops(
    message, files
):
    fault = of_log(traceback(message, *files))
    assert fault.fault_class is FaultClass.UNKNOWN
    assert fault.evidence.endswith(message)
    rungs = climbed(fault, max_restarts=20)
    assert rungs == [
        *[Rung.IN_PLACE_RESTART] * 3,
        *[Rung.JOB_RESCHEDULE] * 3,
        Rung.STOP,
    ]
    assert climbed(fault, unconditional=False) == [*[Rung.IN_PLACE_RESTART] * 3, Rung.STOP]


@pytest.mark.parametrize(
    ("message", "fault_class"),
    [
        ("TypeError: step() got an unexpected keyword argument 'x'", FaultClass.USER_CODE_ERROR),
        ("NameError: name 'modle' is not defined", FaultClass.USER_CODE_ERROR),
        ("KeyError: 'hidden'", FaultClass.USER_CODE_ERROR),
        ("ModuleNotFoundError: No module named 'my_model'", FaultClass.VERSION_MISMATCH),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'corpus.txt'",
         FaultClass.LAUNCH_MISCONFIGURED),
    ],
)  # fmt: skip
def test_what_is_beyond_doubt_the_programs_stops_at_once_though_restarts_are_unconditional(
    message, fault_class
):
    fault = of_log(traceback(message, OWN))
    assert fault.fault_class is fault_class
    assert climbed(fault, unconditional=True) == [Rung.STOP]


def test_wrong_arguments_of_the_program_stop_at_once():
    usage = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --rl 3\n"
    fault = of_workers(end(exit_code=2, log=usage))
    assert fault.fault_class is FaultClass.USER_CODE_ERROR
    assert climbed(fault) == [Rung.STOP]


def test_a_mistake_in_the_handling_of_a_fault_does_not_hide_the_fault():
    first = traceback("RuntimeError: HCCL timeout", OWN)
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    fault = of_log(first + during + traceback("TypeError: cannot unpack None", OWN))
    assert fault.fault_class is FaultClass.COLLECTIVE_TIMEOUT


def test_what_a_device_shows_explains_an_exception_that_nothing_else_does():
    fault = of_log(f"{AICORE}\n" + traceback("RuntimeError: the frobs do not fit", OWN))
    assert fault.fault_class is FaultClass.OPERATOR_ERROR
