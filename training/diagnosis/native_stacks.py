"""Stacks of native code: what gdb, a signal handler or the C library prints of a process.

A stack under the name of a signal shows a crash; one that nothing explains shows where a process
ended, or where it waits. Pure.
"""

from __future__ import annotations

import re

from perdure.training.diagnosis.lines import origin_of
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.series import StepCounts
from perdure.training.recovery.faults import FaultClass

_DECORATION = r"^[\s>|*`]{0,8}(?:\S+ ){0,4}?"
_FRAME = re.compile(
    r"^(?!.*\bNCCL (?:INFO|WARN|TRACE)\b)"  # it has rank and address of a communicator, too
    + _DECORATION[1:]
    + r"(?:#\d+\s+(?:0x[0-9a-f]+ in )?\S.*(?: \(|\bfrom /)"  # gdb
    r"|\[\s?\d+\]:? .*\(?0x[0-9a-f]{6,}\)?"  # glibc, c10
    r"|@\s+0x[0-9a-f]{6,}\s)"  # glog
)
_SIGNAL = re.compile(r"\bSIG(?P<name>SEGV|ABRT|BUS|FPE|ILL|TRAP|SYS)\b")
_WAITS = re.compile(
    r"\b(?:pthread_cond_\w*wait\w*|futex\w*|epoll_wait|poll|ppoll|select|nanosleep|sem_wait"
    r"|pthread_join\w*|accept4?|recv(?:msg|from)?|read|wait4|waitpid|syscall)\b"
)
_MIN_FRAMES = 2
_BEFORE = 6  # lines between the name of a signal and its stack
_MAX_LINES = 4000


def find_native_stack(text: str, *, year: int) -> Finding | None:
    """Find the last native stack and what it shows; None without one."""
    lines = text.splitlines()[-_MAX_LINES:]
    heads = [
        number
        for number, line in enumerate(lines[:-1])
        if _FRAME.search(line)
        and not (number and _FRAME.search(lines[number - 1]))
        and any(_FRAME.search(later) for later in lines[number + 1 : number + 1 + _MIN_FRAMES])
    ]
    if not heads:
        return None
    for head in heads:
        for line in reversed(lines[max(0, head - _BEFORE) : head + 1]):
            if match := _SIGNAL.search(line):
                return _build(line, text, year, Role.SYMPTOM, code=f"SIG{match['name']}")
    line = lines[heads[-1]]
    return _build(line, text, year, Role.HINT, is_waiting=bool(_WAITS.search(line)))


def _build(
    line: str,
    text: str,
    year: int,
    role: Role,
    *,
    code: str | None = None,
    is_waiting: bool = False,
) -> Finding:
    place = max(0, text.rfind(line))
    counts = StepCounts()
    counts.read(text, 0)
    return Finding(
        rule="native-stack",
        fault_class=FaultClass.HANG if is_waiting else FaultClass.NATIVE_CRASH,
        role=role,
        line=line,
        offset=place,
        origin=origin_of(line, year=year),
        code=code,
        is_survived=counts.goes_on_after(place),
        is_after_steps=counts.began_before(place),
        why="The stack of the native code was printed.",
    )
