"""Stacks of processes that live but do not move: what py-spy, gdb and faulthandler print.

Somebody takes a stack dump of a run that hangs; the dump alone is evidence of a hang, and its
innermost frame outside the standard library says where.
"""

from __future__ import annotations

import re

from training.diagnosis.lines import origin_of
from training.diagnosis.recognise import Finding
from training.diagnosis.rules import Role
from training.recovery.faults import FaultClass

# py-spy: `Thread 1439102 (idle): "MainThread"` and `    wait (threading.py:306)`
_PY_SPY_THREAD = re.compile(r'^\s*Thread (?:0x)?[0-9A-Fa-f]+ \((?:idle|active)[^)]*\)(?:: "(.+)")?')
_PY_SPY_FRAME = re.compile(r"^\s+[\w<>.]+ \(([^():\n]+\.pyx?):\d+\)")
# faulthandler: `Current thread 0x00007f (most recent call first):` and `  File "x.py", line 3 in f`
_FAULTHANDLER_THREAD = re.compile(r"^(?:Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\)")
_FAULTHANDLER_FRAME = re.compile(r'^\s+File "([^"\n]+)", line \d+ in [\w<]')

_STANDARD = re.compile(
    r"(?:^|/lib/python3\.\d+/)(?:threading|queue|selectors|socket|ssl|subprocess|signal|concurrent"
    r"/futures/\w+|multiprocessing/\w+|asyncio/\w+|contextlib|runpy)\.py$"
)


def find_stacks(text: str, *, year: int) -> Finding | None:
    """The frame at which the main thread of a dump stands; None without a dump."""
    lines = text.splitlines()
    heads = [(i, m) for i, line in enumerate(lines) if (m := _PY_SPY_THREAD.match(line))]
    main = next((i for i, m in heads if m[1] == "MainThread"), heads[0][0] if heads else None)
    if main is not None:
        return _finding(lines, main, _PY_SPY_FRAME, text, year)
    current = [i for i, line in enumerate(lines) if _FAULTHANDLER_THREAD.match(line)]
    if current:
        return _finding(lines, current[-1], _FAULTHANDLER_FRAME, text, year)
    return None


def _finding(
    lines: list[str], head: int, frame: re.Pattern[str], text: str, year: int
) -> Finding | None:
    frames = []
    for line in lines[head + 1 :]:
        if not line[:1].isspace() or _PY_SPY_THREAD.match(line):
            break
        if found := frame.match(line):  # else a native frame, or variables
            frames.append((line, found[1]))
    if not frames:
        return None
    inner = next((line for line, path in frames if not _STANDARD.search(path)), frames[0][0])
    return Finding(
        rule="stack-dump",
        fault_class=FaultClass.HANG,
        role=Role.SYMPTOM,
        line=inner,
        offset=text.find(inner),
        origin=origin_of(inner, year=year),
        why="Somebody took the stacks of a process that did not move; the main thread stands here.",
    )
