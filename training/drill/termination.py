"""SIGTERM and SIGHUP as an exception: a driver that ends takes down what it started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from perdure.training.diagnosis.exits import SHELL_SIGNAL_BASE

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminated_as_exception() -> Iterator[None]:
    """Have the first of these signals raise SystemExit in the main thread; more are ignored.

    A handler that is there already (Prefect's, a test's) is left alone, and so is an ignored
    signal (nohup). In another thread than the main one nothing is changed: it cannot be.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _terminated)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _terminated(number: int, _frame: FrameType | None) -> NoReturn:
    for handled in _SIGNALS:
        if signal.getsignal(handled) is _terminated:
            signal.signal(handled, signal.SIG_IGN)  # nothing is to cut the taking down short
    raise SystemExit(SHELL_SIGNAL_BASE + number)
