"""Files and folders of output as the sources of a diagnosis.

A folder is an attempt: every file in it is the output of some rank, node or tool, named by its
path. Memory holds a bounded number of lines, never a whole file.
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from perdure.training.diagnosis.cause import Diagnosis, LogSource, choose_cause, counts_as_failure
from perdure.training.diagnosis.native_stacks import find_native_stack
from perdure.training.diagnosis.peers import clock_offsets, compare_sources, find_step_times
from perdure.training.diagnosis.recognise import Finding
from perdure.training.diagnosis.scan import (
    BLOCK_SIZE_BYTES,
    MAX_LINE_CHARS,
    MAX_LINE_SIZE_BYTES,
    Scan,
    scan_output,
)
from perdure.training.diagnosis.series import find_jump, find_stacks, find_stall, find_wait
from perdure.training.diagnosis.silence import Suspect, find_suspect, has_ended_well
from perdure.training.diagnosis.zones import LogClock, read_clock, zone_shifts
from perdure.training.errors import InputError
from perdure.training.recovery.faults import FaultClass, RecoverableBy

STANDARD_INPUT = "-"
_GZIP_MAGIC = b"\x1f\x8b"
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_UNREADABLE = (OSError, EOFError, zlib.error)  # the last two: a compressed file that is damaged
# Suffixes of files beside logs that are no logs; a file that is named itself is always read.
_NOT_LOGS = frozenset(
    ".json .jsonl .yaml .yml .toml .py .md .csv .html .png .svg .pt .pth .bin .npy .npz .idx"  # noqa: SIM905 short
    " .safetensors .distcp .parquet .arrow .zip .tar .so .pyc .sqlite .db".split()
)

# Words of a program that goes on from what it saved itself.
_OWN_CHECKPOINT = re.compile(
    r"history checkpoint|[Rr]esum(?:e|ing) (?:from|training)|[Rr]estor(?:e|ing)|load_checkpoint"
    r"|latest(?:_checkpoint|[ _]iteration)|iter_\d{5,}|global_step\d+|checkpoint-\d+"
)
_PATH_RANK = re.compile(r"(?:^|(?<!local)[/_.-])rank[-_]?(\d+)(?=[/_.-]|$)")
_PATH_WORKER = re.compile(r"(?:^|[/_.-])(?:worker|task|proc)[-_]?(\d+)(?=[/_.-]|$)")
_PATH_NODE = re.compile(
    r"(?:^|/)((?:node|host|server|pod)(?:[\w-]*?\d|[-_][A-Za-z]|[A-Z]))(?=[/.]|$|[_-]+[a-z])"
)
_PATH_DEVICE = re.compile(r"(?:^|/)(?:device|local_rank|npu)[-_](\d+)(?=[/_.-]|$)")
_TORCHRUN_LOCAL_RANK = re.compile(r"(?:^|/)attempt_\d+/(\d+)/std(?:out|err)\.log$")


@dataclass(frozen=True, slots=True)
class ScannedLog:
    """A file that has been scanned.

    Attributes:
        steps: time of each printed step, for the comparison of clocks.
        clock: its wall clock, for the comparison of time zones.
        has_ended_well: whether it shows that its program came to a good end.
        suspect: the most suspicious line, for a log that names no failure.
    """

    source: LogSource
    steps: dict[int, float]
    size_bytes: int
    is_text: bool
    clock: LogClock | None = None
    has_ended_well: bool = False
    suspect: Suspect | None = None


@dataclass(frozen=True, slots=True)
class PathDiagnosis:
    """The diagnosis of a path, with the files that were read.

    Attributes:
        diagnosis: None where the logs show that nothing failed, or show nothing at all.
        readings: the files in the order of reading.
        unreadable: files of a folder that could not be read, with the reason.
    """

    path: str
    diagnosis: Diagnosis | None
    readings: Sequence[ScannedLog]
    unreadable: Sequence[str] = ()


def list_logs(path: Path) -> list[Path]:
    """List the logs below a folder, sorted; a file stands for itself.

    Raises:
        InputError: there is no such file or folder, or no log in it.
    """
    if path.is_file() or str(path) == STANDARD_INPUT:
        return [path]
    if not path.exists():
        raise InputError("PATH", f"{str(path)!r}: no such file or folder")
    if not path.is_dir():
        raise InputError("PATH", f"{str(path)!r} is neither a file nor a folder")
    logs = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not file.name.startswith(".") and file.suffix not in _NOT_LOGS
    )
    if not logs:
        raise InputError("PATH", f"{str(path)!r} holds no logs")
    return logs


def diagnose_files(path: str, files: Sequence[Path], *, at_s: float, year: int) -> PathDiagnosis:
    """Diagnose files that belong to one attempt.

    Args:
        path: the path in the user's words.
        files: logs of ranks, nodes and tools.
        at_s: the time of a fault whose line has none.
        year: the year of times that have none.

    Raises:
        InputError: none of the files can be read.
    """
    readings: list[ScannedLog] = []
    unreadable: list[InputError] = []
    for order, file in enumerate(files):
        try:
            readings.append(_read_file(file, base=Path(path), order=order, year=year))
        except InputError as error:
            unreadable.append(error)
    if not readings:
        raise unreadable[0]
    offsets = clock_offsets([reading.steps for reading in readings])
    if not any(offsets):  # steps show a difference of zones, too
        offsets = zone_shifts([reading.clock for reading in readings])
    merged = [
        replace(reading.source, clock_offset_s=offset_s)
        for reading, offset_s in zip(readings, offsets, strict=True)
    ]
    skipped = [str(error) for error in unreadable]
    diagnosis = choose_cause(compare_sources(merged), at_s=at_s)
    if diagnosis is None:
        diagnosis = _name_suspect(readings, at_s=at_s)
    return PathDiagnosis(path, diagnosis, readings, skipped)


def _name_suspect(readings: Sequence[ScannedLog], *, at_s: float) -> Diagnosis | None:
    """Name the most suspicious line; None where a log shows a good end, or none has words."""
    if any(reading.has_ended_well for reading in readings):
        return None
    suspects = [(r.suspect, r.source) for r in readings if r.suspect is not None]
    if not suspects:
        return None
    suspect, source = max(suspects, key=lambda pair: pair[0].score)
    return choose_cause([replace(source, findings=[suspect.finding])], at_s=at_s)


def _read_file(file: Path, *, base: Path, order: int, year: int) -> ScannedLog:
    """Read a file into a source.

    Raises:
        InputError: it cannot be read.
    """
    name = file.name if file == base else str(file.relative_to(base))
    try:
        with _open(file) as stream:
            result = scan_output(_read_chunks(stream), year=year)
    except _UNREADABLE as error:
        raise InputError("PATH", f"{str(file)!r}: {error}") from error
    return read_scan(name, result, order=order, year=year)


def read_scan(name: str, result: Scan, *, order: int, year: int) -> ScannedLog:
    """Turn a scan into a source: add the faults that several lines show, place it by its name."""
    finders = (
        (find_jump, find_stall, find_wait, find_stacks, find_native_stack) if result.is_text else ()
    )
    further = [find(result.tail, year=year) for find in finders]
    shift = max(0, result.size_bytes - len(result.tail))
    findings = [
        *(result.findings if result.is_text else ()),
        *(replace(f, offset=f.offset + shift) for f in further if f is not None),
    ]
    findings = [_judge_checkpoint(f, result.tail) for f in findings]
    rank = _PATH_RANK.search(name) or _PATH_WORKER.search(name)
    device = _PATH_DEVICE.search(name) or _TORCHRUN_LOCAL_RANK.search(name)
    node = _PATH_NODE.search(name)
    source = LogSource(
        name=name,
        findings=findings,
        order=order,
        rank=int(rank[1]) if rank else None,
        node=node[1] if node else None,
        device=int(device[1]) if device else None,
    )
    steps = find_step_times(result.tail, year=year)
    clock = read_clock(result.tail, year=year)
    if not result.is_text or any(counts_as_failure(finding) for finding in findings):
        return ScannedLog(source, steps, result.size_bytes, result.is_text, clock)
    suspect = find_suspect(result.tail, year=year)
    if suspect is not None:
        placed = replace(suspect.finding, offset=suspect.finding.offset + shift)
        suspect = replace(suspect, finding=placed)
    return ScannedLog(
        source, steps, result.size_bytes, is_text=True, clock=clock,
        has_ended_well=has_ended_well(result.tail), suspect=suspect,
    )  # fmt: skip


def _judge_checkpoint(finding: Finding, text: str) -> Finding:
    """Judge a damaged checkpoint: the run's own has an earlier one, a user's has none."""
    if finding.fault_class is not FaultClass.CHECKPOINT_CORRUPT or finding.recoverable_by:
        return finding
    is_own = _OWN_CHECKPOINT.search(text) is not None
    return replace(
        finding, recoverable_by=RecoverableBy.RETRY if is_own else RecoverableBy.USER_FIX
    )


def read_context(file: Path, line: str, *, radius: int, near: int = 0) -> list[str]:
    """Read the lines around the first that equals `line`; empty when no line does.

    Args:
        file: the log.
        line: text of the line after the scan's cleaning.
        radius: number of lines before and after it.
        near: offset of the line in the cleaned output, which is never behind that in the file.

    Raises:
        InputError: the file cannot be read.
    """
    previous: deque[str] = deque(maxlen=radius)
    try:
        with _open(file) as stream:
            if not isinstance(stream, codecs.StreamRecoder):  # which begins with its byte order
                stream.seek(max(0, near - BLOCK_SIZE_BYTES))
            lines = _read_lines(stream)
            for text in lines:
                if text.strip() == line.strip():
                    return [*previous, text, *islice(lines, radius)]
                previous.append(text[:MAX_LINE_CHARS])
    except _UNREADABLE as error:
        raise InputError("PATH", f"{str(file)!r}: {error}") from error
    return []


def _read_lines(stream: BinaryIO) -> Iterator[str]:
    """Split lines as the scan does: without colours, each state of a progress bar by itself."""
    while line := stream.readline(MAX_LINE_SIZE_BYTES):
        text = _COLOURS.sub("", line.decode("utf-8", "replace")).rstrip()
        yield from (part.rstrip() for part in text.split("\r"))


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """Open a file or standard input as plain UTF-8, whatever its encoding."""
    with ExitStack() as stack:
        stream: Any
        if str(file) == STANDARD_INPUT:
            stream = io.BufferedReader(sys.stdin.buffer)
            stack.callback(stream.detach)
        else:
            stream = stack.enter_context(file.open("rb"))
        if stream.peek(2)[:2] == _GZIP_MAGIC:
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            stream = codecs.EncodedFile(stream, "utf-8", "utf-16", errors="replace")
        yield stream


def _read_chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(BLOCK_SIZE_BYTES):
        yield chunk
