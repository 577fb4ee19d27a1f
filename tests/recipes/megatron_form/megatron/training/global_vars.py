"""What a process has once."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.timers import Timers

_ARGS: Namespace | None = None
_TIMERS: Timers | None = None


def set_global_variables(args: Namespace) -> None:
    global _ARGS, _TIMERS
    _ARGS = args
    _TIMERS = Timers(args.timing_log_level, args.timing_log_option)


def get_args() -> Namespace:
    assert _ARGS is not None
    return _ARGS


def get_timers() -> Timers:
    assert _TIMERS is not None
    return _TIMERS
