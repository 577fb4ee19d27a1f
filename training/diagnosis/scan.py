"""The scan of output for evidence, of any size in one pass and in bounded memory.

A multi-pattern automaton (Hyperscan) names the lines that some rule may match; Python reads only
those. A flood of equal messages costs little: the scan reads a bounded number of lines per block
and rule, and stores the first and the last findings of each rule in a source. Sizes and offsets
are bytes; offsets count in the cleaned output, where a carriage return ends a line like a newline
does and colours are gone.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import hyperscan

from perdure.training.diagnosis import exceptions
from perdure.training.diagnosis.compiled import wait_for_database
from perdure.training.diagnosis.lines import Origin, origin_of, time_of
from perdure.training.diagnosis.recognise import EXCEPTION_RULE, Finding, list_patterns, recognise
from perdure.training.diagnosis.rules import Role, load_rules
from perdure.training.diagnosis.series import StepCounts
from perdure.training.recovery.faults import FaultClass

CONTEXT_SIZE_BYTES = 8 << 10
TAIL_SIZE_BYTES = 1 << 20
MAX_LINE_CHARS = 4000
_MAX_TIME_CHARS = 200  # of a line are searched for its time
_TIME_LOOK_BACK_BYTES = 128 << 10
_NO_PATTERN = 1 << 20  # a line to be read though no pattern of the automaton matches
_MAX_HITS_PER_BLOCK = 2000
_MAX_LINES_PER_RULE_AND_BLOCK = 256  # that differ in more than digits
_MAX_LINES_ALIKE_AND_BLOCK = 64
_MAX_SHAPE_BYTES = 300
LINES_AT_EACH_END = 32

# Counts of steps are sampled in the first region at both ends, then in the last lines of each.
_FIRST_SAMPLE_BYTES = 32 << 10
_SAMPLE_BYTES = 4 << 10
_SAMPLE_LINES = 16
BLOCK_SIZE_BYTES = 1 << 20
MAX_LINE_SIZE_BYTES = 256 << 10

_ANY_CLOCK = re.compile(rb":[0-5]\d:[0-5]\d")  # begins with a rare byte, so the search is fast
_ANSI = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
# A line with several escaped newlines; no path of Windows, where small letters follow them all.
_QUOTED_TEXT = re.compile(rb"^[^\n]*\\n[^\n]*\\n[^\n]*$", re.MULTILINE)
_NEW_LINE = re.compile(rb"\\n[ \[{(A-Z]")
_SAMPLE_SIZE_BYTES = 64 << 10
# Classes whose first answer is to stop: either may stand for the other without loss.
_STOPS = frozenset(
    {FaultClass.USER_CODE_ERROR, FaultClass.LAUNCH_MISCONFIGURED, FaultClass.VERSION_MISMATCH}
)
_ONE_DIGIT = bytes.maketrans(b"123456789", b"000000000")


@dataclass(frozen=True, slots=True)
class Scan:
    """The evidence in a source of output, and the end of the source.

    Attributes:
        findings: ordered by offset, a bounded number per rule.
        tail: the end of the source, bounded.
        size_bytes: size of the source without colours.
        is_text: whether the source is text, not binary data.
    """

    findings: Sequence[Finding]
    tail: str
    size_bytes: int
    is_text: bool


@dataclass(slots=True)
class _State:
    """The memory of a pass between blocks."""

    year: int
    first: dict[str, list[Finding]] = field(default_factory=lambda: defaultdict(list))
    last: dict[str, deque[Finding]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=LINES_AT_EACH_END))
    )
    num_read: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    progress: StepCounts = field(default_factory=StepCounts)
    seen_s: float | None = None
    is_flooded: bool = False
    _region: bytes = b""
    _base: int = 0
    _timed_to: int = 0

    def begin_region(self, region: bytes, base: int) -> None:
        """Begin the next region: sample its counts of steps."""
        self._region, self._base, self._timed_to = region, base, 0
        size = _SAMPLE_BYTES if base else _FIRST_SAMPLE_BYTES
        if not base:
            self.progress.read(region[:size].decode("utf-8", "replace"), 0)
        begin = max(size if not base else 0, len(region) - size)
        begin = region.rfind(b"\n", 0, begin) + 1 if begin else 0
        begin = _last_lines(region, begin) if base else begin
        self.progress.read(region[begin:].decode("utf-8", "replace"), base + begin)

    def line_budget(self, rule_id: int) -> int:
        """Return how many different lines of a rule the next block may read; few after many."""
        many = self.num_read[rule_id] > 4 * _MAX_LINES_PER_RULE_AND_BLOCK
        return _MAX_LINES_PER_RULE_AND_BLOCK // 32 if many else _MAX_LINES_PER_RULE_AND_BLOCK

    def add(self, finding: Finding, offset: int) -> None:
        """Add a finding, unless its rule has enough of them."""
        own_s = finding.origin.at_s
        seen_s = own_s if own_s is not None else self.time_at(offset)
        placed = replace(finding, offset=offset, seen_s=seen_s)
        firsts = self.first[finding.rule]
        if len(firsts) < LINES_AT_EACH_END:
            firsts.append(placed)
        else:
            self.last[finding.rule].append(placed)

    def time_at(self, offset: int) -> float | None:
        """Return the time of the nearest line with a time before an offset; offsets ascend."""
        position = offset - self._base
        region, stop = self._region, position
        earliest = max(self._timed_to, position - _TIME_LOOK_BACK_BYTES)
        if _ANY_CLOCK.search(region, earliest, stop) is None:
            stop = earliest
        while stop > earliest:
            begin = region.rfind(b"\n", earliest, stop - 1) + 1 or earliest
            head = region[begin : min(stop, begin + _MAX_TIME_CHARS)].decode("utf-8", "replace")
            stamp = time_of(head, year=self.year)
            if stamp is not None:
                self.seen_s = stamp
                break
            stop = begin
        self._timed_to = max(self._timed_to, position)
        return self.seen_s

    def end_region(self) -> None:
        """End the region, with the time of its last line."""
        self.time_at(self._base + len(self._region))

    def findings(self) -> list[Finding]:
        every = [f for findings in (*self.first.values(), *self.last.values()) for f in findings]
        every.sort(key=lambda finding: finding.offset)
        around = zip([None, *every], every, [*every[1:], None], strict=False)
        every = [_demote_in_chain(f, previous, following) for previous, f, following in around]
        return [
            replace(
                f,
                is_survived=self.progress.goes_on_after(f.offset),
                is_after_steps=self.progress.began_before(f.offset),
            )
            for f in every
        ]


def _last_lines(region: bytes, begin: int) -> int:
    """Return where the last few lines of a region begin, not before `begin`."""
    newline = len(region)
    for _ in range(_SAMPLE_LINES + 1):
        newline = region.rfind(b"\n", begin, newline)
        if newline < 0:
            return begin
    return newline + 1


def _demote_in_chain(
    finding: Finding, previous: Finding | None, following: Finding | None
) -> Finding:
    """Lower the role of a finding if another finding of its chain of exceptions is the cause.

    The handling of an exception raised the next, and the last of them ended the process. A mistake
    in the handling of a fault says nothing about the fault.
    """
    if following is not None and _replaces(following, finding):
        is_cause = _is_mistake_over(following, finding)
    else:
        is_cause = previous is None or not (
            _replaces(finding, previous) and _is_mistake_over(finding, previous)
        )
    return finding if is_cause else replace(finding, role=max(finding.role, Role.CASCADE))


def _replaces(finding: Finding, earlier: Finding) -> bool:
    return finding.replaces and finding.origin.rank == earlier.origin.rank


def _is_mistake_over(finding: Finding, earlier: Finding) -> bool:
    mistake = finding.rule == EXCEPTION_RULE and finding.fault_class is FaultClass.USER_CODE_ERROR
    return mistake and earlier.fault_class not in _STOPS and earlier.role <= Role.SYMPTOM


def scan_output(chunks: Iterable[bytes], *, year: int) -> Scan:
    """Read output once, from its beginning.

    Args:
        chunks: the output in pieces of any size.
        year: taken where a line's own time has none.
    """
    state = _State(year)
    tail: deque[bytes] = deque()
    kept_bytes = 0
    context, size_bytes, is_text = b"", 0, True
    for region in _split_regions(chunks):
        if not size_bytes:
            is_text = _is_text(region)
        _read_region(region, context, size_bytes, state)
        short = len(region) < CONTEXT_SIZE_BYTES
        context = (context + region if short else region)[-CONTEXT_SIZE_BYTES:]
        size_bytes += len(region)
        tail.append(region)
        kept_bytes += len(region)
        while kept_bytes - len(tail[0]) >= TAIL_SIZE_BYTES:
            kept_bytes -= len(tail.popleft())
    text = b"".join(tail)[-TAIL_SIZE_BYTES:].decode("utf-8", "replace")
    return Scan(state.findings(), text, size_bytes, is_text)


def scan_text(text: str, *, year: int) -> Scan:
    """Read text that is in memory."""
    return scan_output((text.encode("utf-8", "replace"),), year=year)


def _read_region(region: bytes, context: bytes, base: int, state: _State) -> None:
    state.begin_region(region, base)
    page = _drop_repeats(region, base) if state.is_flooded else Page(region, base)
    limit = None if state.is_flooded else _MAX_HITS_PER_BLOCK
    reached = _read_page(page, context, state, limit)
    if reached is not None:
        remainder = _drop_repeats(region[reached:], base + reached)
        _read_page(remainder, region[:reached], state, None)
    state.is_flooded = reached is not None or (
        state.is_flooded and len(page.text) < len(region) // 2
    )
    state.end_region()


def _read_page(page: Page, context: bytes, state: _State, limit: int | None) -> int | None:
    """Read the matches of a page. Return where the reading stopped at its limit."""
    text = page.text
    hits, reached = _find_hits(text, limit)
    budget: dict[int, int] = {}
    alike: dict[bytes, int] = defaultdict(int)
    done_to = -1
    for end, rule_id in hits:
        if end - 1 <= done_to or budget.setdefault(rule_id, state.line_budget(rule_id)) <= 0:
            continue
        begin = text.rfind(b"\n", 0, end - 1) + 1 if end else 0
        stop = text.find(b"\n", max(begin, end - 1))
        done_to = stop = len(text) if stop < 0 else stop
        last = bisect_right(hits, (stop, len(hits) + 1_000_000))
        ids = {pattern_id for _, pattern_id in hits[bisect_left(hits, (begin + 1, -1)) : last]}
        kind = _shape_of(text[begin : min(stop, begin + _MAX_SHAPE_BYTES)])
        alike[kind] += 1
        if alike[kind] > _MAX_LINES_ALIKE_AND_BLOCK:
            continue
        if alike[kind] == 1:
            for pattern_id in ids:
                budget[pattern_id] = (
                    budget.setdefault(pattern_id, state.line_budget(pattern_id)) - 1
                )
                state.num_read[pattern_id] += 1
        finding = _read_line(text, context, (begin, stop, end), ids, state.year)
        if finding is not None:
            state.add(finding, page.offset_of(begin))
    return reached


def _find_hits(text: bytes, limit: int | None) -> tuple[list[tuple[int, int]], int | None]:
    """Return sorted matches (end, pattern), and where the search stopped at its limit."""
    hits: list[tuple[int, int]] = []
    has_traceback = False
    traceback_mark = len(list_patterns()) - 1

    def note(pattern: int, _start: int, end: int, _flags: int, _context: object) -> bool | None:
        nonlocal has_traceback
        if pattern == traceback_mark:
            has_traceback = True
            return None
        hits.append((end, pattern))
        return (limit is not None and len(hits) >= limit) or None

    try:
        wait_for_database().scan(text, match_event_handler=note)
    except hyperscan.ScanTerminated:
        # The last line may have more matches; it is read again with the rest.
        reached = text.rfind(b"\n", 0, hits[-1][0] - 1) + 1
        if reached > 0:
            return sorted({hit for hit in hits if hit[0] <= reached}), reached
    if has_traceback:
        hits += [(match.end(), _NO_PATTERN) for match in exceptions.DOTTED.finditer(text)]
    return sorted(set(hits)), None


def _read_line(
    region: bytes, context: bytes, where: tuple[int, int, int], ids: set[int], year: int
) -> Finding | None:
    """Recognise a line; `where` is its begin and end, and the end of the first match in it."""
    rules = load_rules()
    begin, stop, end = where
    if stop - begin > MAX_LINE_CHARS:
        begin, stop = (
            max(begin, end - 3 * MAX_LINE_CHARS // 4),
            min(stop, end + MAX_LINE_CHARS // 4),
        )
    line = region[begin:stop].decode("utf-8", "replace").rstrip()
    earlier = region[max(0, begin - CONTEXT_SIZE_BYTES) : begin]
    if len(earlier) < CONTEXT_SIZE_BYTES:
        earlier = context[len(earlier) - CONTEXT_SIZE_BYTES :] + earlier
    context_text = earlier.decode("utf-8", "replace")
    named = [rules[i] for i in sorted(ids) if i < len(rules)]
    later = region[stop : stop + CONTEXT_SIZE_BYTES // 4].decode("utf-8", "replace")
    finding = recognise(line, context_text, named, later=later)
    if finding is None:
        return None
    origin = origin_of(line, year=year)
    finding_origin = finding.origin
    origin = Origin(
        at_s=origin.at_s,
        rank=finding_origin.rank if finding_origin.rank is not None else origin.rank,
        node=finding_origin.node or origin.node,
        device=finding_origin.device if finding_origin.device is not None else origin.device,
        code=finding.code or origin.code,
    )
    return replace(
        finding,
        origin=origin,
        code=origin.code,
        replaces=exceptions.was_raised_in_handling(line, context_text),
    )


@dataclass(frozen=True, slots=True)
class Page:
    """Text to search, and the places of its lines in the output.

    Attributes:
        base: offset of the text in the output.
        starts: begin of each line of the text; empty for text that is a piece of the output.
        origins: begin of that line in the output, counted from `base`.
    """

    text: bytes
    base: int
    starts: Sequence[int] = ()
    origins: Sequence[int] = ()

    def offset_of(self, position: int) -> int:
        """Return the offset in the output of a line that begins at `position` of the text."""
        if not self.starts:
            return self.base + position
        return self.base + self.origins[bisect_right(self.starts, position) - 1]


def _split_regions(chunks: Iterable[bytes]) -> Iterable[bytes]:
    """Split output at line ends into pieces of at most a block; cut a line without end."""
    remainder = b""
    for chunk in chunks:
        for begin in range(0, len(chunk), BLOCK_SIZE_BYTES):
            data = remainder + chunk[begin : begin + BLOCK_SIZE_BYTES]
            cut = data.rfind(b"\n") + 1 or data.rfind(b"\r") + 1
            if not cut and len(data) < MAX_LINE_SIZE_BYTES:
                remainder = data
                continue
            cut = cut or len(data)
            remainder = data[cut:]
            yield _clean(data[:cut])
    if remainder:
        yield _clean(remainder)


def _clean(region: bytes) -> bytes:
    # A single byte is looked for many times faster than three.
    if b"{" in region and (region.startswith(b'{"') or b'\n{"' in region):
        # A line of JSON: the newlines inside its texts, of the same length as they were.
        region = region.replace(b"\\n", b" \n")
    if b"\\n" in region:  # text that was logged as a quoted string
        region = _QUOTED_TEXT.sub(_unquote, region)
    if b"\r" in region:
        region = region.replace(b"\r\n", b" \n").replace(b"\r", b"\n")
    return _ANSI.sub(b"", region) if b"\x1b" in region else region


def _unquote(match: re.Match[bytes]) -> bytes:
    if _NEW_LINE.search(match[0]) is None:
        return match[0]
    return match[0].replace(b"\\n", b"\n").replace(b'\\"', b'"')


def _is_text(region: bytes) -> bool:
    """Whether the beginning of some output is text: hardly any control characters."""
    sample = region[:_SAMPLE_SIZE_BYTES]
    control = sum(sample.count(bytes([code])) for code in (*range(9), *range(14, 27)))
    return control <= len(sample) // 20


def _shape_of(line: bytes) -> bytes:
    """Replace every digit by the same digit: equal for lines that differ in digits alone."""
    return line.translate(_ONE_DIGIT)


def _drop_repeats(region: bytes, base: int) -> Page:
    """Drop the lines of a region that differ from an earlier line in digits alone.

    A flood of one message, from a thousand ranks at slightly different times, becomes one line.
    """
    lines = region.split(b"\n")
    firsts = dict(zip(reversed(_shape_of(region).split(b"\n")),
                      range(len(lines) - 1, -1, -1), strict=True))  # fmt: skip
    indices = sorted(firsts.values())
    begins = list(accumulate(map(len, lines), initial=0))  # without the ends of the lines before
    starts = list(accumulate((len(lines[index]) + 1 for index in indices), initial=0))
    text = b"\n".join([lines[index] for index in indices])
    return Page(text, base, starts[:-1], [begins[index] + index for index in indices])
