"""The prefix of a line of output: its time, rank, node, device, code and level.

Every stack has a prefix of its own; each is a row of a table below. Times are seconds since
the epoch with the log's own wall clock read as UTC: they order lines, nothing else.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Sequence
from dataclasses import dataclass

_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr) if name}

_CLOCK = (
    r"(?P<hour>[01]\d|2[0-3]):(?P<minute>[0-5]\d):(?P<second>[0-5]\d)(?:[.,](?P<fraction>[\d.]+))?"
)
_ANY_CLOCK = re.compile(r"\d:[0-5]\d:[0-5]\d")
_TIMES: Sequence[re.Pattern[str]] = (
    # CANN plog 2025-11-21-13:18:47.639.860, ISO 8601, Python logging
    re.compile(r"(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[-T _]" + _CLOCK),
    # dmesg -T: [Mon Aug  1 08:38:31 2022]
    re.compile(r"\b(?P<name>[A-Z][a-z]{2})\s+(?P<day>\d{1,2}) " + _CLOCK + r" (?P<year>20\d\d)"),
    # syslog: Aug  1 08:38:31 host
    re.compile(r"^\W{0,2}(?P<name>[A-Z][a-z]{2})\s+(?P<day>\d{1,2}) " + _CLOCK),
    # glog and torch's c10 logger: E0321 02:07:08.408, [E321 02:07:08.408 (the month unpadded)
    re.compile(r"\b[EWIFD](?P<month>\d{1,2})(?P<day>\d\d) " + _CLOCK),
    # Ray and vLLM: ERROR 06-09 06:57:48
    re.compile(r"\b(?P<month>\d\d)[-/](?P<day>\d\d) " + _CLOCK),
)

_RANKS: Sequence[re.Pattern[str]] = (
    re.compile(r"\[rank:?\s?(\d+)\]"),
    re.compile(r"\b[rR]ankI[dD]:\s?(\d+)"),
    re.compile(r"\[[^\]]{0,40}\bRank (\d+)\]"),
    re.compile(r"\brank(?:Id|_id)?\[(\d+)\]"),
    re.compile(r"^\s*\[1,(\d+)\]<std(?:err|out)>"),  # mpirun --tag-output
    re.compile(r"\b[rR]ank[ =:]{1,2}(\d+)\b"),
)

_DEVICES: Sequence[re.Pattern[str]] = (
    re.compile(r"\bDevice:\s?(\d+)\b"),
    re.compile(r"\b[dD]ev(?:ice)?[_ ]?(?:[iI]d|ID)[ =:\[(]{1,2}(\d+)"),
    re.compile(r"\bdevice\[(\d+)\]"),
    re.compile(r"\bdevice=(\d+)\b"),
    re.compile(r"\b(?:[Oo]pen|[Ss]et|[Rr]eset)(?:ing)? device (\d+)\b"),
    re.compile(r"\bchipId:\s?(\d+)"),
    re.compile(r"\b(?:NPU|GPU) (\d+)\b"),
    re.compile(r"\b(?:npu|cuda):(\d+)\b"),
    re.compile(r"\blocal_rank[=: ]{1,2}(\d+)\b(?!\)| \(pid)"),  # not of torchrun's own reports
    re.compile(r"^[\w.-]+:\d+:\d+ \[(\d+)\]"),  # NCCL: host:pid:tid [device]
)

_NODES: Sequence[re.Pattern[str]] = (
    re.compile(r"^([A-Za-z][\w.-]*):\d+:\d+ \[\d+\]"),  # NCCL
    re.compile(r"^[A-Z][a-z]{2}\s+\d{1,2} [\d:]{8} ([\w.-]+) [\w\[\]/.-]+:"),  # syslog
    re.compile(r"^\s*\[([A-Za-z][\w.-]*):\d+\]"),  # pdsh-like host:rank
    re.compile(r"\bon node '?([A-Za-z][\w.-]*\d[\w.-]*)"),
    re.compile(r"\bhost\s+: ([A-Za-z][\w.-]*)"),  # torchrun's summary
)

_CODES: Sequence[re.Pattern[str]] = (
    re.compile(r"(?<![A-Za-z0-9])(E[A-Z]\d{4}|E[1-9]\d{4})(?![A-Za-z0-9])"),
    re.compile(r"\b[eE]rror ?[cC]ode(?: is|:|=)? ?\(?(\d{6})\b"),
    re.compile(r"\b(?:ErrCode|errCode|result|failed)[ =:]{1,3}(\d{6})\b"),
    re.compile(r"\bXid \(.{1,40}?\): (\d+)"),
    re.compile(r"\b(?:event_id|[fF]ault ?[cC]ode|Error Code)\s*[:=]\s*(?:0x)?([0-9a-fA-F]{8})\b"),
    re.compile(r"\[Errno (\d+)\]"),
    re.compile(r"\b(ERR\d{5})\b"),
)

# Lines below error level are no failure unless their rule makes them one.
_LOW_LEVEL = re.compile(
    r"\[(?:W|I|D|WARN(?:ING)?|INFO|DEBUG|EVENT)\b"
    r"|(?:^|[\s:|])(?:WARN(?:ING)?|INFO|DEBUG)\s?[:\]|\s-]"
    r"|^\W{0,2}[WI]\d{4} \d\d:"
    r"|\[[WI]\d{3,4} \d\d:"
    r"|\blevel=(?:info|warn(?:ing)?|debug)\b"
    r"|\b\w*Warning: ",
)
# NCCL has no level above its WARN.
_HIGH_LEVEL = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b|\bNCCL WARN\b")

# Driver severities: the numbers and names of dcmi's fault events, and the names in Chinese.
_SEVERITIES = {
    "hint": 0, "suggestion": 0, "\u63d0\u793a": 0,
    "minor": 1, "\u6b21\u8981": 1,
    "major": 2, "\u91cd\u8981": 2,
    "critical": 3, "\u7d27\u6025": 3,
}  # fmt: skip
_SEVERITY = re.compile(
    r"\b(?i:severity|alarm[ _]?level|fault[ _]?severity)\W{1,4}("
    + "|".join([*_SEVERITIES, "[0-3]"])
    + r")\b",
    re.IGNORECASE,
)

# Lines that a run prints as it trains.
PROGRESS = (
    r"\biteration\s{1,8}\d+/",
    r"\b[sS]tep\s?[=:]?\s?\[?\d+\b.{0,120}\bloss\b",
    r"'loss': ?-?\d",
    r"\d(?:it/s|s/it)\b",
    r"\bloss(?: |=|: ?)-?\d+\.\d+.{0,120}\b(?:lr|step|tok|grad)",
)
_PROGRESS = re.compile("|".join(PROGRESS))
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LAUNCHER = re.compile(r"^(?:\[[\w.:,-]{1,24}\](?:<std\w{3}>)?:? ?)+")  # its prefix for a rank
# PyTorch logs a traceback with its prefix before every line: torch/_logging/_internal.py.
_LOGGED_TRACEBACK = re.compile(
    r"^[A-Z]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ \S+\] (?=Traceback \(|\s|During handling|The above exc)"
)
FRAME = re.compile(r'File "([^"\n]{1,300})", line \d+')  # of a Python traceback


@dataclass(frozen=True, slots=True)
class Origin:
    """The place where a line comes from; None for each part that the line does not show."""

    at_s: float | None = None
    rank: int | None = None
    node: str | None = None
    device: int | None = None
    code: str | None = None


def origin_of(line: str, *, year: int) -> Origin:
    """Read the prefix and the well-known fields of a line.

    Args:
        line: one line of output.
        year: the year of a time that has none.
    """
    device, rank = _search_first(_DEVICES, line), _search_first(_RANKS, line)
    return Origin(
        at_s=time_of(line, year=year),
        rank=int(rank) if rank is not None else None,
        node=_search_first(_NODES, line),
        device=int(device) if device is not None else None,
        code=code_of(line),
    )


def code_of(line: str) -> str | None:
    """Return the error code in a line, as the stack prints it; hexadecimal in capitals."""
    code = _search_first(_CODES, line)
    return code.upper() if code is not None else None


def time_of(line: str, *, year: int) -> float | None:
    """Return the line's wall clock, read as UTC, as seconds since the epoch, or None."""
    if not _ANY_CLOCK.search(line):
        return None
    for pattern in _TIMES:
        match = pattern.search(line)
        if match is None:
            continue
        parts = match.groupdict()
        month = _MONTHS.get(parts["name"], 0) if parts.get("name") else int(parts["month"])
        day = int(parts["day"])
        if not (1 <= month <= 12 and 1 <= day <= 31):
            continue
        clock = (int(parts["hour"]), int(parts["minute"]), int(parts["second"]))
        whole = calendar.timegm((int(parts.get("year") or year), month, day, *clock))
        digits = (parts["fraction"] or "").replace(".", "")
        return whole + (float(f"0.{digits}") if digits else 0.0)
    return None


def severity_of(line: str) -> int | None:
    """Return the driver's severity of an event, 0 hint to 3 critical; None without one."""
    match = _SEVERITY.search(line)
    if match is None:
        return None
    word = match[1].lower()
    return int(word) if word.isdigit() else _SEVERITIES[word]


def is_low_level(line: str) -> bool:
    """Whether a line is logged as information or a warning."""
    head = line[:160]
    return bool(_LOW_LEVEL.search(head)) and not _HIGH_LEVEL.search(line[:240])


def is_progress(line: str) -> bool:
    """Whether a line shows that training continued."""
    return bool(_PROGRESS.search(line))


def _search_first(patterns: Sequence[re.Pattern[str]], line: str) -> str | None:
    for pattern in patterns:
        if match := pattern.search(line):
            return match.group(1)
    return None


def frames_of(context: str) -> list[str]:
    """List the last files of the traceback at the end of a text, innermost last."""
    return FRAME.findall(context[max(0, context.rfind("Traceback")) :])[-12:]


def split_lines(text: str) -> list[str]:
    """Split output into lines and redrawn bars, without colors and the prefixes of launchers."""
    parts = (_COLOURS.sub("", part) for part in re.split(r"[\r\n]+", text))
    lines = (_LAUNCHER.sub("", part).rstrip() for part in parts if part.strip())
    return [_LOGGED_TRACEBACK.sub("", line) for line in lines]
