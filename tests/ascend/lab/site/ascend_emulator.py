"""The emulator as its own process sees it: operators for torch_npu, faults on command.

It emulates calls and their contracts, not the silicon, and not timing.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path


def install() -> None:
    """Have torch_npu's operators run on the host, in the order of their streams."""
    _library("ascend_operators").ascend_install_operators()


def fault(line: str) -> None:
    """Arm or clear a fault of this process; the language is in tests/ascend/README.md.

    Raises:
        ValueError: the line is not understood.
    """
    command = _library("ascendcl").ascend_command_fault
    command.restype = ctypes.c_char_p
    if wrong := command(line.encode()).decode():
        raise ValueError(wrong)


@cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(os.environ["ASCEND_EMULATOR"]) / "lib" / f"lib{name}.so"))
