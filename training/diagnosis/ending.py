"""Ends of commands: which rank failed first, and which exits with code 0 are failures.

The exit status of a shell's pipeline is that of its last command, so a crash behind `| tee` reads
as 0. Two signs show it: the death of a program or of its launcher as the last event in the output,
or a count of steps that has stopped short of its target. An error that the program survived or
only logged shows nothing.

torchrun has one output for all ranks of a node, and its summary at the end names the failures of
that node. Its times are whole seconds: peers of a killed rank fail in the same second.

Pure; times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perdure.training.diagnosis.counts import Count
from perdure.training.diagnosis.exceptions import TRACEBACK
from perdure.training.diagnosis.lines import is_low_level, is_progress, split_lines
from perdure.training.diagnosis.series import MARGINS, StepCounts, find_stacks
from perdure.training.diagnosis.stated_end import EndReason, StatedEnd
from perdure.training.recovery.faults import Fault, FaultClass, RecoverableBy

_ROOT = "Root Cause (first observed failure)"
_ENTRY = re.compile(
    r"\btime +: (\S+)[^\n]*\n[^\n]*\bhost +: [^\n]*\n"
    r"[^\n]*\brank +: (\d+) \(local_rank: (\d+)\)[^\n]*\n[^\n]*\bexitcode +: (-?\d+)"
)
# Signals that torchrun sends to the other ranks, or by which communication libraries end when a
# peer has ended.
_ECHOES = frozenset({-signal.SIGTERM, -signal.SIGABRT})


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank in the summary of torchrun.

    Attributes:
        time: text of it, in whole seconds.
        exit_code: negative for a signal.
    """

    time: str
    rank: int
    local_rank: int
    exit_code: int

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it, but not as an answer to the end of another rank."""
        return self.exit_code < 0 and self.exit_code not in _ECHOES


def find_first_failed(text: str) -> FailedRank | None:
    """Find the rank that failed first; None where the output does not single it out.

    Args:
        text: the end of the output of a node's launcher.
    """
    place = text.rfind(_ROOT)
    if place < 0:
        return None
    begin = max(0, text.rfind("Failures:", 0, place))
    root = _ENTRY.search(text, place)
    if root is None:
        return None
    entries = [_read_entry(match) for match in _ENTRY.finditer(text, begin)]
    first = [entry for entry in entries if entry.time == _read_entry(root).time]
    killed = [entry for entry in first if entry.is_killed]
    candidates = killed or first
    return candidates[0] if len(candidates) == 1 else None


def find_failed_ranks(text: str) -> frozenset[int]:
    """List the ranks that torchrun's last summary names; those it leaves out exited with 0."""
    place = text.rfind(_ROOT)
    begin = max(0, text.rfind("Failures:", 0, place))
    if place < 0:
        return frozenset()
    return frozenset(_read_entry(match).rank for match in _ENTRY.finditer(text, begin))


def _read_entry(match: re.Match[str]) -> FailedRank:
    time, rank, local_rank, exit_code = match.groups()
    return FailedRank(time, int(rank), int(local_rank), int(exit_code))


def find_exit_codes(text: str, exit_code: int) -> set[int]:
    """Find the exit codes of ranks that torchrun's summary names; else that of the process.

    Args:
        text: the end of the output of a node's launcher.
        exit_code: of the launcher, which is 1 whatever the ranks' codes were.
    """
    place = text.rfind(_ROOT) if exit_code == 1 else -1
    begin = max(0, text.rfind("Failures:", 0, place))
    entries = [_read_entry(match) for match in _ENTRY.finditer(text, begin)] if place >= 0 else []
    codes = {entry.exit_code for entry in entries} - _ECHOES
    return codes or {exit_code}


_CORRUPT_WHY = "It is the program's own: Perdure does not know its files, and cannot set it aside."
CORRUPT_ACTION = (
    "Move the damaged checkpoint away, so that the program resumes from the one before it."
)


def fault_of_command(fault: Fault) -> Fault:
    """Adapt a fault to a command: its user repairs what Perdure repairs for sessions."""
    if fault.fault_class is not FaultClass.CHECKPOINT_CORRUPT:
        return fault
    # A reading that was cut short may succeed the next time; the ladder tries that once.
    return replace(
        fault,
        explanation=f"{fault.explanation} {_CORRUPT_WHY} {CORRUPT_ACTION}".strip(),
        action=CORRUPT_ACTION,
        recoverable_by=RecoverableBy.USER_FIX,
        user_fault=True,
    )


SHORT_CODE = "ENDED_SHORT"
LIMIT_CODE = "ENDED_BY_LIMIT"
NO_SAMPLE_CODE = "NO_SAMPLE"
RANK_CODE = "RANK_ENDED"
SHORT_CODES = frozenset({SHORT_CODE, LIMIT_CODE, NO_SAMPLE_CODE, RANK_CODE})
# A stream that was last written so long before another stream of its process lacks the end.
LAST_WITHIN_S = 10.0
# The message of an exception may have further lines, and an interpreter that exits may warn.
_MAX_LINES_AFTER = 12

PIPE_ADVICE = (
    "The command failed, but exited with 0: a shell's pipeline has the exit status of its last "
    "command, and one such as `torchrun ... | tee train.log` needs `set -o pipefail`."
)

_LEFTOVERS_WHY = (
    "The script has ended, and with it the container's work, while the training that it had "
    "started was still running: that was ended with the container."
)
_LEFTOVERS_ACTION = (
    "Let the script wait for the training: start the launcher without `&`, or end with `wait`."
)
_SIGNAL_WHY = (
    "The program says that it left for a signal, which Perdure did not send: the platform drained "
    "or preempted the node, or a person asked the process to end."
)
_SHORT_WHY = "The command ended without an error before its target."
_NO_SAMPLE_WHY = "The program ended before its target because it found no sample to train on."
RANK_WHY = (
    "A rank that leaves the training keeps the others waiting, and their errors about a missing "
    "peer follow from it: no node and no network is to blame."
)
_LIMIT_WHY = "A limit of the program's own settings ended it before its target."
_LIMIT_ACTION = (
    "Start the run again to go on from the last checkpoint, or raise the limit that the line names."
)
# The second time: class, explanation, action.
_REPEATED: Mapping[str, tuple[FaultClass, str, str]] = {
    SHORT_CODE: (
        FaultClass.USER_CODE_ERROR,
        (
            "The program has ended twice at the same step, before its target and without an error: "
            "`steps` of the job is not what the command trains to, or it ends by itself."
        ),
        "Give the job the target that the command has, or correct the command.",
    ),
    NO_SAMPLE_CODE: (
        FaultClass.LAUNCH_MISCONFIGURED,
        (
            "The program found no sample to train on for the second time: its data ends before its "
            "target."
        ),
        (
            "Give the training more data or further epochs, or lower its target to where the data "
            "ends; check what it skips when it resumes."
        ),
    ),
    RANK_CODE: (
        FaultClass.USER_CODE_ERROR,
        (
            "The same rank has left the training for the second time at the same step with exit "
            "code 0: its data ends before that of the other ranks, or its code returns early."
        ),
        (
            "Give every rank the same number of batches, for example with `drop_last` or a "
            "distributed sampler, and let no rank return before the others."
        ),
    ),
}
UNSEEN_NOTE = (
    "no training step was seen: the end of its output counts none, and no rank wrote a heartbeat"
)

_DEATHS = re.compile(
    r"\bChildFailedError\b|Root Cause \(first observed failure\)"  # torchrun
    r"|\bexits with return code = -?[1-9]|sigkill_handler\] Killing subprocess"  # DeepSpeed
    r"|\b(?:mpirun|mpiexec|prterun) (?:noticed that|has exited due to) process rank"
    r"|Primary job +terminated normally, but|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
    # a shell, about a child that a signal has ended
    r"|^\S+: (?:line \d+: +)?\d+ (?:Killed|Segmentation fault|Aborted|Bus error|Terminated"
    r"|Illegal instruction|Floating point exception)\b"
    r"|^(?:Killed|Segmentation fault|Aborted|Bus error)(?: \(core dumped\))?$"
    r"|^Fatal Python error: |^terminate called after throwing\b"
)
_NOT_FOUND = re.compile(r"^\S+: (?:(?:line )?\d+: )?\S{1,200}: (?:command )?not found$")
_STEPS = frozenset(MARGINS) - {"done"}  # a script may print that it is done, whatever became of it
_FRAME = re.compile(r'File "([^"\n]{1,300})", line \d+')
_LAUNCHER_FRAME = re.compile(
    r"/torch/distributed/(?:launcher|elastic|run)\b|/bin/torchrun\b|\bin wrapper$"
)
_ABORT_WORDS = re.compile(
    r"^terminate called |^Fatal Python error: |\bSignal \d+ \(SIG\w+\) received by PID"
)
_ANY_YEAR = 1970  # of a stack, whose time does not matter
_CHAINED = re.compile(r"^(?:During handling of the above|The above exception was the direct cause)")
# Lines before the traceback of an exception that does not end its program.
_SURVIVED = re.compile(
    r"^(?:Exception ignored |Exception in (?:thread|callback) |Error in atexit|Error in sys\."
    r"|Task exception was never retrieved|--- Logging error ---)"
    # torchrun, whose peer with the store ended first: elastic/agent/server/api.py, _exit_barrier
    r"|\bError waiting on exit barrier\b"
)
_OF_CHILD = re.compile(r"^Process \S+:$")  # multiprocessing
_OF_HELPER = re.compile(rf"{_OF_CHILD.pattern}|^Exception in thread ")
_AT_EXIT = re.compile(
    r"^(?:BrokenPipe|ConnectionReset|ConnectionRefused|EOF|FileNotFound)Error\b|^KeyboardInterrupt"
)
# CPython 3.8 to 3.12 complains at exit about a segment that another process has removed already.
_AT_EXIT_FRAME = re.compile(r"/multiprocessing/resource_tracker\.py$")
_LOGGED = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b|\[[EF]\d{0,4} |^[EF]\d{4} \d\d:\d\d:\d\d\.")


@dataclass(frozen=True, slots=True)
class FalseSuccess:
    """The reason why an exit with code 0 is a failure.

    Attributes:
        text: the evidence.
        fault_class: None where the output of the worker explains it.
        why: replaces the meaning of its class, if not empty.
        action: replaces the action of its class, if not empty.
        code: of the fault; None: it has none.
    """

    text: str
    fault_class: FaultClass | None = None
    why: str = ""
    action: str = ""
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The end of a stream of a process.

    Attributes:
        written_s: time of its last line; None where it is unknown.
    """

    text: str
    written_s: float | None = None


def explain_early_end(step: int, target: int) -> str | None:
    """Explain how a session program ended with 0 early; None where it was at its target."""
    if step >= target:
        return None
    return (
        f"RecipeEndedEarly: the process ended with exit code 0 at step {max(0, step)} of {target}, "
        "before the end of its loop over session.steps()"
    )


def judge_short_end(
    count: Count, stated: StatedEnd | None, *, has_stepped: bool
) -> FalseSuccess | None:
    """Judge an exit with 0 before the target; None: the program met a rule of its own.

    Args:
        count: how far the run came.
        stated: the reason that the program stated.
        has_stepped: whether this attempt has completed a step.
    """
    reason = stated.reason if stated is not None else None
    line = f": {stated.line}" if stated is not None else ""
    if reason is EndReason.GOAL:
        return None
    if reason is EndReason.SIGNAL:
        return judge_signal(f"{count.text}{line}")
    if reason is EndReason.NO_SAMPLE or not has_stepped:
        without = "" if has_stepped else " without a step"
        return judge_no_sample(f"{count.text}{without}{line or ' with exit code 0'}")
    if reason is EndReason.LIMIT:
        text = f"{count.text}{line}"
        return FalseSuccess(
            text, FaultClass.LAUNCH_MISCONFIGURED, _LIMIT_WHY, _LIMIT_ACTION, LIMIT_CODE
        )
    return FalseSuccess(
        f"{count.text} with exit code 0", FaultClass.UNKNOWN, _SHORT_WHY, code=SHORT_CODE
    )


def judge_signal(text: str) -> FalseSuccess:
    """Judge a program that says that it left for a signal, which Perdure did not send."""
    return FalseSuccess(text, FaultClass.PREEMPTED, _SIGNAL_WHY)


def judge_no_sample(text: str) -> FalseSuccess:
    """Judge a program that found no sample to train on; it may be the reading that failed once."""
    return FalseSuccess(text, FaultClass.UNKNOWN, _NO_SAMPLE_WHY, code=NO_SAMPLE_CODE)


def judge_leftovers(processes: Sequence[str]) -> FalseSuccess:
    """Judge a script that did not wait for the training that it had started.

    Args:
        processes: text about each process that was still running, at least one text.
    """
    return FalseSuccess(
        f"exit code 0 while {_list_processes(processes)} was still running",
        FaultClass.LAUNCH_MISCONFIGURED,
        why=_LEFTOVERS_WHY,
        action=_LEFTOVERS_ACTION,
    )


def describe_leftovers(processes: Sequence[str]) -> str:
    """Describe, as a warning, processes that were still running and did not train."""
    return f"{_list_processes(processes)} was still running and has been ended with the container"


def describe_late_fault(step: int, fault: Fault, *, logs: str, stacks: str) -> str:
    """Describe, as a note, what happened once the last step was done and saved.

    Args:
        step: the last step.
        fault: the diagnosis of what followed.
        logs: the end of the output of the processes that ended.
        stacks: the stacks of those that did not end.
    """
    text = fault.evidence
    if stacks:
        finding = find_stacks(stacks, year=_ANY_YEAR)
        frame = finding.line.strip() if finding is not None else None
    else:
        frame = _last_frame(logs)
    words = [line.strip() for line in split_lines(logs) if _ABORT_WORDS.search(line)]
    details = [*words[-1:], *([frame] if frame is not None else [])]
    more = f" ({'; '.join(details)})" if details else ""
    where = f". {fault.explanation}" if stacks else ""
    return (
        f"all {step} steps are done and the checkpoint of step {step} is complete; after that, "
        f"{fault.fault_class}: {text}{more}{where}"
    )


def _last_frame(text: str) -> str | None:
    """Return the innermost frame of the last traceback that is not the launcher's."""
    for traceback in reversed(text.split("Traceback (most recent call last)")[1:]):
        frames = [line.strip() for line in traceback.splitlines() if _FRAME.search(line)]
        frames = [frame for frame in frames if not _LAUNCHER_FRAME.search(frame)]
        if frames and "runpy" not in frames[-1]:
            return frames[-1]
    return None


def _list_processes(processes: Sequence[str]) -> str:
    more = f" (and {len(processes) - 1} more)" if len(processes) > 1 else ""
    return f"{processes[0]}{more}"


def shows_steps(text: str) -> bool:
    """Whether some output has a line of a training step, an epoch or a loss."""
    counts = StepCounts()
    counts.read("\n".join(split_lines(text)), 0)
    return counts.has_any


def blame_repeated_end(fault: Fault, previous: Fault | None) -> Fault:
    """Blame the program, or its data, for the second end without an error at the same step."""
    if previous is None or (previous.code, previous.evidence) != (fault.code, fault.evidence):
        return fault
    repeated = _REPEATED.get(fault.code or "")
    if repeated is None or fault.fault_class is not FaultClass.UNKNOWN:
        return fault
    fault_class, why, action = repeated
    return replace(fault.of_class(fault_class), explanation=why, action=action)


def find_crash(outputs: Sequence[Output]) -> str | None:
    """Find the line that shows a failure at the end of a program; None without such a line.

    Args:
        outputs: the streams of a process and of its descendants.
    """
    times = [output.written_s for output in outputs if output.written_s is not None]
    newest_s = max(times, default=0.0)
    for output in outputs:
        if output.written_s is None or newest_s - output.written_s <= LAST_WITHIN_S:
            line = _find_death(split_lines(output.text))
            if line is not None:
                return line
    return None


def find_last_traceback(text: str) -> str | None:
    """Find the exception of the last traceback, caught or not, if no step follows it."""
    if re.search(TRACEBACK, text) is None:
        return None
    lines = split_lines(text)
    begin = _last_traceback(lines)
    if begin is None or _count_steps(lines).goes_on_after(begin):
        return None
    return _find_uncaught(lines, begin, limit=len(lines))


def find_traceback_of_helper(text: str) -> str | None:
    """Find the exception that ended a child or a thread of a program, if no step follows it."""
    lines = split_lines(text)
    begin = _last_traceback(lines)
    if begin is None or _count_steps(lines).goes_on_after(begin):
        return None
    raised = lines[_end_of_traceback(lines, begin)]
    is_helper = _OF_HELPER.search(_line_before_chain(lines, begin))
    return raised if is_helper and not _AT_EXIT.search(raised) else None


def _find_death(lines: Sequence[str]) -> str | None:
    """Find the line of a program's death, if no later line shows that training continued."""
    counts = _count_steps(lines)
    for index, line in enumerate(lines):
        if _DEATHS.search(line) and not counts.goes_on_after(index, kinds=_STEPS):
            return line
    if lines and _NOT_FOUND.search(lines[-1]):
        return lines[-1]
    begin = _last_traceback(lines)
    if begin is None or counts.goes_on_after(begin):
        return None
    return _find_uncaught(lines, begin)


def _count_steps(lines: Sequence[str]) -> StepCounts:
    counts = StepCounts()
    for index, line in enumerate(lines):
        counts.read(line, index)
    return counts


def _last_traceback(lines: Sequence[str]) -> int | None:
    places = (i for i in range(len(lines) - 1, -1, -1) if re.search(TRACEBACK, lines[i]))
    return next(places, None)


def _find_uncaught(lines: Sequence[str], begin: int, *, limit: int | None = None) -> str | None:
    """Return the last line of the traceback at `begin`, if the output ends with it.

    Args:
        lines: the end of the output.
        begin: index of the traceback's first line.
        limit: how many lines may follow; None: as many as are usual at the end of a process.
    """
    inside = _end_of_traceback(lines, begin)
    raised = lines[inside]
    frames = _FRAME.findall("\n".join(lines[begin:inside]))
    # A bar is printed once more when it is closed.
    following = [
        line for line in lines[inside + 1 :] if not is_low_level(line) and not is_progress(line)
    ]
    heading = _line_before_chain(lines, begin)
    if limit is None:
        limit = 0 if _LOGGED.search(heading) else _MAX_LINES_AFTER
    if len(following) > limit or _SURVIVED.search(heading):
        return None
    if frames and _AT_EXIT_FRAME.search(frames[-1]):
        return None
    return None if _OF_CHILD.search(heading) and _AT_EXIT.search(raised) else raised


def _end_of_traceback(lines: Sequence[str], begin: int) -> int:
    """Return the index of the line with the exception."""
    inside = begin + 1
    while inside < len(lines) and lines[inside][:1].isspace():
        inside += 1
    return min(inside, len(lines) - 1)


def _line_before_chain(lines: Sequence[str], begin: int) -> str:
    """Return the line before a traceback, or before the first of a chain of them."""
    while begin > 0 and _CHAINED.search(lines[begin - 1]):
        earlier = (i for i in range(begin - 1, -1, -1) if re.search(TRACEBACK, lines[i]))
        begin = next(earlier, 0)
    return lines[begin - 1] if begin > 0 else ""
