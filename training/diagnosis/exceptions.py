"""Python exceptions that no rule knows, judged by their types and the files that they came through.

An unfamiliar message blames the program only where its type and the file that raised it leave no
doubt, because such an error ends the run. By their type all others are errors of storage, peers,
memory or versions, or unknown.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from perdure.training.diagnosis.lines import FRAME, frames_of
from perdure.training.diagnosis.rules import Classification, Role
from perdure.training.diagnosis.subsystems import Subsystem, find_raiser
from perdure.training.recovery.faults import FaultClass, RecoverableBy

_NAMES = (
    r"_?[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Failure|Failed|Exit|Conflict|Disconnected"
    r"|NotFound|TooLarge|Unsupported|Expired|BadZipFile)|Unsupported|BadZipFile"
    r"|Exception(?=:\s)|Stop(?:Async)?Iteration"
)
# A name with its module needs no such ending: "pyarrow.lib.ArrowInvalid: ...".
_WITH_MODULE = r"^\s*(?:[a-z_]\w*\.){1,8}(?P<dotted>[A-Z]\w+|error|timeout|gaierror)(?:: |[ \t]*$)"
PATTERN = (
    rf"(?:^|[\s\]:|>)\"])(?:[A-Za-z_]\w*\.){{0,8}}(?P<type>{_NAMES})(?::\s|:?\s*$)|{_WITH_MODULE}"
)
_PATTERN = re.compile(PATTERN)
# The same without the text before the name: a cheap search in every line. A search for names that
# only their module marks follows tracebacks alone.
PREFILTER = (
    r"(?:Error|Exception|Interrupt|Timeout|Failure|Failed|Exit|Conflict|Disconnected|NotFound"
    r"|TooLarge|Unsupported|Expired|BadZipFile|Iteration)(?::\s|:?\s*$)"
)
TRACEBACK = r"Traceback \(most recent"
DOTTED = re.compile(_WITH_MODULE.encode(), re.MULTILINE)
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^\s*File \"|\bFile \"[^\"]+\", line")
_QUOTED = re.compile(r"Caught exception|[Rr]etry|[Ii]gnor|[Ff]all(?:ing|s)? back|handled")
_ANNOUNCES = re.compile(r"\S:\s*$")  # the message itself is on the next line
_HANDLING = "During handling of the above exception, another exception occurred"
_MARKS = re.compile(r"^[\s^~]*$")  # under the quoted source line
_ERRNO_USER = {"1", "2", "13", "17", "20", "21", "22", "28", "30", "122"}


class ExceptionSpec(Classification):
    """A row of `exceptions.toml`.

    Attributes:
        frames: searched in the last files of the traceback.
        raised_in: searched in the last one, whose line raised the exception.
        raised_by: subsystems to one of which that file belongs.
        message: searched in the exception's own line.
        said: searched in that line and in the line of source that raised it.
    """

    types: tuple[str, ...]
    frames: str | None = None
    raised_in: str | None = None
    raised_by: tuple[Subsystem, ...] = ()
    message: str | None = None
    said: str | None = None


@dataclass(frozen=True, slots=True)
class Raised:
    """The last line of an exception, with its judgment.

    Attributes:
        type: last part of the exception's name.
        frame: file that raised it; None without a traceback.
    """

    type: str
    spec: ExceptionSpec
    role: Role
    frame: str | None
    recoverable_by: RecoverableBy | None


@cache
def load_exceptions() -> tuple[ExceptionSpec, ...]:
    """Load the table, in order of precedence."""
    text = (
        resources.files("perdure.training.diagnosis").joinpath("exceptions.toml").read_text("utf-8")
    )
    rows = tomllib.loads(text)["exception"]
    return tuple(ExceptionSpec.model_validate(row) for row in rows)


def judge_exception(line: str, context: str) -> Raised | None:
    """Classify a line as the last one of a traceback.

    Args:
        line: one line of output.
        context: text shortly before the line, where its traceback would be.

    Returns:
        None when the line names no exception.
    """
    match = _PATTERN.search(line)
    if match is None or line.rstrip().endswith("Traceback (most recent call last):"):
        return None
    name = match["type"] or match["dotted"]
    traced = bool(_TRACEBACK.search(context))
    if match["type"] is None and not traced:
        return None
    frames = frames_of(context)
    said = f"{_source_line(context)}\n{line}"
    spec = next(row for row in load_exceptions() if _applies(row, name, frames, line, said))
    role = spec.role
    stands_alone = match.start() == 0 or not line[: match.start()].strip(" \t")
    if not traced and not stands_alone and role is Role.ROOT:
        role = Role.SYMPTOM  # a message that mentions an exception, not an exception
    if _ANNOUNCES.search(line[match.end() :]):
        role = max(role, Role.SYMPTOM)
    if _QUOTED.search(line[: match.start()]):
        role = Role.CASCADE
    return Raised(name, spec, role, frames[-1] if frames else None, _answer(spec, line))


def _source_line(context: str) -> str:
    """Return the line of source that the traceback quotes last; empty without a traceback."""
    lines = [line for line in context.splitlines()[-4:] if not _MARKS.match(line)]
    return lines[-1] if len(lines) > 1 and FRAME.search(lines[-2]) else ""


def _applies(row: ExceptionSpec, name: str, frames: list[str], line: str, said: str) -> bool:
    if name not in row.types and row.types != ("*",):
        return False
    if row.said is not None and not re.search(row.said, said):
        return False
    if row.message is not None and not re.search(row.message, line):
        return False
    if row.raised_by and find_raiser(frames) not in row.raised_by:
        return False
    if row.raised_in is not None and not (frames and re.search(row.raised_in, frames[-1])):
        return False
    return row.frames is None or any(re.search(row.frames, path) for path in frames[-4:])


def _answer(spec: ExceptionSpec, line: str) -> RecoverableBy | None:
    errno = re.search(r"\[Errno (\d+)\]", line)
    if errno and spec.fault_class is FaultClass.STORAGE_ERROR and errno[1] in _ERRNO_USER:
        return RecoverableBy.USER_FIX
    return spec.recoverable_by


def names_exception(line: str) -> bool:
    """Whether a line has the form of an exception's last line."""
    return _PATTERN.search(line) is not None


def was_raised_in_handling(line: str, context: str) -> bool:
    """Whether an exception's last line belongs to a traceback that began in another's handling."""
    return (
        _PATTERN.search(line) is not None
        and _HANDLING in context[max(0, context.rfind("Traceback (most recent") - 200) :]
    )
