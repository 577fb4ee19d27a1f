"""Names of faults in plain words, and the titles of their codes."""

from __future__ import annotations

import pytest

from perdure.training.recovery.fault_names import name_fault
from perdure.training.recovery.faults import Fault, FaultClass


def fault(fault_class: FaultClass, code: str | None = None) -> Fault:
    return Fault(fault_class, 0.0, "line", code=code)


@pytest.mark.parametrize("fault_class", FaultClass)
def test_every_class_has_a_name_in_english_and_chinese(fault_class):
    name = name_fault(fault(fault_class))
    assert name.english.isascii()
    assert any("\u4e00" <= letter <= "\u9fff" for letter in name.chinese)
    assert name.text == f"{name.english} ({name.chinese})"


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("80E01801", "HBM: multi-bit ECC error"),
        ("80E21007", "\u4e3b\u7535\u6e90\u8fc7\u6d41\u544a\u8b66"),
        ("80FB8000", "TSCPU"),
        ("EI0006", "link setup timed out (\u5efa\u94fe\u8d85\u65f6)"),
    ],
)
def test_a_code_has_the_title_of_its_code_book(code, part):
    name = name_fault(fault(FaultClass.DEVICE_LOST, code))
    assert part in name.title
    assert name.text.endswith(f": {name.title}")


@pytest.mark.parametrize("code", ["SIGKILL", "EZ9999", "00000000"])
def test_a_code_of_no_code_book_has_no_title(code):
    assert name_fault(fault(FaultClass.HANG, code)).title == ""
