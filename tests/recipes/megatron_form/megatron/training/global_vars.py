"""What a process has once."""

from __future__ import annotations

import signal
from argparse import Namespace
from typing import Any, Self

import torch
from megatron.core.timers import Timers

_ARGS: Namespace | None = None
_TIMERS: Timers | None = None
_SIGNAL_HANDLER: DistributedSignalHandler | None = None


class DistributedSignalHandler:
    """Takes note of a signal, which all ranks tell each other."""

    def __enter__(self) -> Self:
        self._signal_received = False
        self._original = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _receive(self, *_: Any) -> None:
        self._signal_received = True

    def release(self) -> None:
        signal.signal(signal.SIGTERM, self._original)

    def signals_received(self) -> list[bool]:
        received = [torch.zeros(1) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(received, torch.tensor([float(self._signal_received)]))
        return [bool(value) for value in received]


def set_global_variables(args: Namespace) -> None:
    global _ARGS, _TIMERS, _SIGNAL_HANDLER
    _ARGS = args
    _TIMERS = Timers(args.timing_log_level, args.timing_log_option)
    if args.exit_signal_handler:
        _SIGNAL_HANDLER = DistributedSignalHandler().__enter__()


def get_signal_handler() -> DistributedSignalHandler:
    assert _SIGNAL_HANDLER is not None
    return _SIGNAL_HANDLER


def get_args() -> Namespace:
    assert _ARGS is not None
    return _ARGS


def get_timers() -> Timers:
    assert _TIMERS is not None
    return _TIMERS
