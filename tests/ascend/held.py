"""A stream that stands still until the test lets it go on."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LIMIT_S = 240.0


@contextmanager
def held(stream: int) -> Iterator[None]:
    """Within it nothing that is submitted to the stream from now on runs.

    Args:
        stream: the aclrtStream, which torch_npu calls `npu_stream`.
    """
    go_on = threading.Event()
    wait = _FUNCTION(lambda _: go_on.wait(LIMIT_S) and None)
    assert ascendcl().aclrtLaunchHostFunc(ctypes.c_void_p(stream), wait, None) == 0
    try:
        yield
    finally:
        go_on.set()
        ascendcl().aclrtSynchronizeStream(ctypes.c_void_p(stream))  # while `wait` still lives


@cache
def ascendcl() -> ctypes.CDLL:
    """The emulator's libascendcl.so, by its C functions."""
    return ctypes.CDLL(str(Path(os.environ["ASCEND_EMULATOR"]) / "lib" / "libascendcl.so"))
