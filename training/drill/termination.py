"""SIGTERM and SIGHUP as an exception, so that a driver that ends takes down its run."""

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
def raise_on_termination(*signals: signal.Signals) -> Iterator[None]:
    """Raise SystemExit in the main thread at the first of these signals; ignore later ones.

    Without any it does so at SIGTERM and SIGHUP.

    It leaves existing handlers (Prefect's, a test's) and ignored signals (nohup) alone. Outside of
    the main thread it changes nothing, because handlers can only be set there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in signals or _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
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
            # A second signal must not interrupt the end of the run.
            signal.signal(handled, signal.SIG_IGN)
    raise SystemExit(SHELL_SIGNAL_BASE + number)
