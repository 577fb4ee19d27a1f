"""Reading output of any size in one pass and bounded memory: which lines say something.

A multi-pattern automaton (Hyperscan) names the lines that some rule may match; only those are
looked at by Python. A flood of equal messages costs little: per block and rule a bounded number
of lines is read, per rule the first and the last ones of a source are kept. Sizes are bytes.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import hyperscan

from training.diagnosis import codes, exceptions
from training.diagnosis.lines import Origin, is_low_level, origin_of, time_of
from training.diagnosis.rules import Role, Rule, load_rules
from training.policy.faults import FaultClass, RecoverableBy

BLOCK_SIZE_BYTES = 1 << 20
CONTEXT_SIZE_BYTES = 8 << 10
TAIL_SIZE_BYTES = 2 << 20
MAX_LINE_SIZE_BYTES = 256 << 10
MAX_LINE_CHARS = 4000
MAX_HITS_PER_BLOCK = 2000
MAX_LINES_PER_RULE_AND_BLOCK = 64
KEPT_AT_EACH_END = 32

# What training prints because it goes on; counted, not read.
_PROGRESS_MARK = b"loss"
_SCALE_MARKS = (b"loss scal", b"loss_scal")
_ANSI = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
CODE_RULE = "code-"
EXCEPTION_RULE = "exception"
_LEVEL_RULE = "error-line"
# An error that no rule, code or exception type explains is still worth showing.
_UNEXPLAINED_PATTERN = r"\b(?:ERROR|FATAL|CRITICAL)\b|[Ff]atal [Ee]rror\b|^[Ee]rror: |^panic: |\[[EF]\d{0,4} "
_PART_OF_TRACEBACK = re.compile(r'File "|\^\^\^|~~~|Trace[Bb]ack \(most recent')
_UNEXPLAINED = re.compile(_UNEXPLAINED_PATTERN)


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that says something about a fault.

    Attributes:
        rule: id of the rule that recognised it; "code-" with a table's name, "exception" and
            "error-line" for the general ones.
        offset: where the line begins in its source.
        origin: what the line itself tells about time and place.
        seen_s: time of the line, or of the nearest line before it that has one.
        is_low_level: logged as information or a warning, and its rule does not count those.
        progress_before: lines of training progress before it in the same source, roughly.
        progress_after: the same after it.
        frame: file that raised the exception, for exceptions.
        replaces: raised while the exception before it was being handled, so that one was not
            the end.
    """

    rule: str
    fault_class: FaultClass
    role: Role
    line: str
    offset: int
    origin: Origin
    seen_s: float | None = None
    code: str | None = None
    recoverable_by: RecoverableBy | None = None
    user_fault: bool | None = None
    hardware_fault: bool | None = None
    why: str = ""
    action: str = ""
    is_low_level: bool = False
    progress_before: int = 0
    progress_after: int = 0
    frame: str | None = None
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Scan:
    """What one source of output holds.

    Attributes:
        findings: by offset, a bounded number per rule.
        tail: the end of the source, bounded.
        size_bytes: how much was read.
        is_text: whether it looks like text at all.
    """

    findings: Sequence[Finding]
    tail: str
    size_bytes: int
    is_text: bool


def recognise(line: str, before: str, candidates: Iterable[Rule] | None = None) -> Finding | None:
    """What a line says: by the first rule that matches, else by a code, else as an exception.

    Args:
        line: one line of output.
        before: text shortly before it.
        candidates: rules to try, in order; None: all.
    """
    if _says_nothing(line, before):
        return None
    for rule in load_rules() if candidates is None else candidates:
        found = rule.pattern.search(line)
        if found and (rule.after is None or rule.after.search(before)):
            return _by_rule(rule, found, line)
    return _by_code(line) or _by_exception(line, before) or _by_level(line)


# CANN's own guesses at causes, and the box that rich draws around a traceback.
_ADVICE = re.compile(
    r"^\s*(?:Possible [Cc]ause|Solution|Suggestion|Rectify|\u2502|\u2503)|\braise [\w.]+\("
)
_FRAME_END = re.compile(r'File "[^"\n]+", line \d+(?:, in [^\n]+)?$')


def _says_nothing(line: str, before: str) -> bool:
    """Whether a line is advice, or source code quoted in a traceback."""
    if _ADVICE.search(line):
        return True
    quoted = _FRAME_END.search(before.rstrip()) is not None
    return quoted and not exceptions.names_exception(line)


def _by_rule(rule: Rule, found: re.Match[str], line: str) -> Finding:
    spec, groups = rule.spec, found.groupdict()
    rank, device = groups.get("rank"), groups.get("device")
    return Finding(
        rule=rule.id,
        fault_class=rule.fault_class,
        role=rule.role,
        line=line,
        offset=0,
        origin=Origin(
            rank=int(rank) if rank and rank.isdigit() else None,
            node=groups.get("node"),
            device=int(device) if device and device.isdigit() else None,
        ),
        code=groups.get("code") or spec.code,
        recoverable_by=spec.recoverable_by,
        user_fault=spec.user_fault,
        hardware_fault=spec.hardware_fault,
        why=spec.why,
        action=spec.action,
        is_low_level=not spec.any_level and is_low_level(line),
    )


def _by_code(line: str) -> Finding | None:
    fact = codes.look_up(line)
    if fact is None:
        return None
    spec = fact.spec
    return Finding(
        rule=f"{CODE_RULE}{fact.table}",
        fault_class=spec.fault_class,
        role=fact.role,
        line=line,
        offset=0,
        origin=Origin(),
        code=fact.code,
        recoverable_by=spec.recoverable_by,
        user_fault=spec.user_fault,
        hardware_fault=spec.hardware_fault,
        why=f"Code {fact.code}: {spec.means}.",
        is_low_level=is_low_level(line),
    )


def _by_exception(line: str, before: str) -> Finding | None:
    raised = exceptions.judge(line, before)
    if raised is None:
        return None
    spec = raised.spec
    return Finding(
        rule=EXCEPTION_RULE,
        fault_class=spec.fault_class,
        role=raised.role,
        line=line,
        offset=0,
        origin=Origin(),
        recoverable_by=raised.recoverable_by,
        user_fault=spec.user_fault,
        hardware_fault=spec.hardware_fault,
        why=f"Python raised {raised.type}"
        + (f" in {raised.frame}." if raised.frame is not None else "."),
        is_low_level=is_low_level(line),
        frame=raised.frame,
    )


def _by_level(line: str) -> Finding | None:
    if _UNEXPLAINED.search(line) is None or _PART_OF_TRACEBACK.search(line):
        return None
    return Finding(
        rule=_LEVEL_RULE,
        fault_class=FaultClass.UNKNOWN,
        role=Role.HINT,
        line=line,
        offset=0,
        origin=Origin(),
        is_low_level=is_low_level(line),
    )


@dataclass(frozen=True, slots=True)
class _Automaton:
    """All patterns compiled together; ids up to the number of rules are rules."""

    every_match: hyperscan.Database
    first_match: hyperscan.Database
    rules: Sequence[Rule]


@cache
def _automaton() -> _Automaton:
    rules = load_rules()
    general = [*codes.PATTERNS.values(), exceptions.PATTERN, _UNEXPLAINED_PATTERN]
    patterns = [portable(text) for text in (*(rule.spec.pattern for rule in rules), *general)]
    flags = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER
    databases = []
    for more in (0, hyperscan.HS_FLAG_SINGLEMATCH):
        database = hyperscan.Database()
        database.compile(
            expressions=patterns,
            ids=list(range(len(patterns))),
            elements=len(patterns),
            flags=[flags | more] * len(patterns),
        )
        databases.append(database)
    return _Automaton(databases[0], databases[1], rules)


def portable(pattern: str) -> bytes:
    """A rule's pattern for the automaton: nothing may run past the end of a line."""
    without_names = re.sub(r"\(\?P<\w+>", "(", pattern)
    return re.sub(r"(?<!\\)\[\^", r"[^\\n", without_names).encode()


@dataclass(slots=True)
class _State:
    """What a pass remembers between blocks."""

    year: int
    first: dict[str, list[Finding]] = field(default_factory=lambda: defaultdict(list))
    last: dict[str, deque[Finding]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=KEPT_AT_EACH_END))
    )
    progress: int = 0
    seen_s: float | None = None

    def keep(self, finding: Finding) -> None:
        kept = self.first[finding.rule]
        if len(kept) < KEPT_AT_EACH_END:
            kept.append(finding)
        else:
            self.last[finding.rule].append(finding)

    def findings(self) -> list[Finding]:
        every = [f for kept in (*self.first.values(), *self.last.values()) for f in kept]
        every.sort(key=lambda finding: finding.offset)
        following = [*every[1:], None]
        every = [_replaced(f, after) for f, after in zip(every, following, strict=False)]
        return [replace(f, progress_after=self.progress - f.progress_before) for f in every]


def _replaced(finding: Finding, after: Finding | None) -> Finding:
    """A finding with its role lowered when the next one was raised while it was handled."""
    if after is None or not after.replaces or finding.origin.rank != after.origin.rank:
        return finding
    return replace(finding, role=max(finding.role, Role.CASCADE))


def scan(chunks: Iterable[bytes], *, year: int) -> Scan:
    """Read output once, from its beginning.

    Args:
        chunks: the output in pieces of any size.
        year: taken where a line's own time has none.
    """
    state = _State(year)
    tail: deque[bytes] = deque(maxlen=max(1, TAIL_SIZE_BYTES // BLOCK_SIZE_BYTES) + 1)
    context, size_bytes, is_text = b"", 0, True
    for region in _regions(chunks):
        if not size_bytes:
            is_text = _looks_like_text(region)
        _read(region, context, size_bytes, state)
        context = (context + region)[-CONTEXT_SIZE_BYTES:]
        size_bytes += len(region)
        tail.append(region)
    text = b"".join(tail)[-TAIL_SIZE_BYTES:].decode("utf-8", "replace")
    return Scan(state.findings(), text, size_bytes, is_text)


def scan_text(text: str, *, year: int) -> Scan:
    """`scan` for text that is in memory already."""
    return scan((text.encode("utf-8", "replace"),), year=year)


def _regions(chunks: Iterable[bytes]) -> Iterable[bytes]:
    """Pieces that end at the end of a line, with plain newlines and without colours."""
    rest = b""
    for chunk in chunks:
        for begin in range(0, len(chunk), BLOCK_SIZE_BYTES):
            data = rest + chunk[begin : begin + BLOCK_SIZE_BYTES]
            cut = data.rfind(b"\n") + 1 or data.rfind(b"\r") + 1
            if not cut and len(data) < MAX_LINE_SIZE_BYTES:
                rest = data
                continue
            cut = cut or len(data)
            rest = data[cut:]
            yield _clean(data[:cut])
    if rest:
        yield _clean(rest)


def _clean(region: bytes) -> bytes:
    if b"\r" in region:
        region = region.replace(b"\r\n", b" \n").replace(b"\r", b"\n")
    return _ANSI.sub(b"", region) if b"\x1b[" in region else region


def _looks_like_text(region: bytes) -> bool:
    sample = region[:65536]
    control = sum(sample.count(bytes([code])) for code in (*range(9), *range(14, 27)))
    return control <= len(sample) // 20


def _read(region: bytes, context: bytes, base: int, state: _State) -> None:
    hits = _hits(region)
    counted_to = 0
    budget: dict[int, int] = defaultdict(lambda: MAX_LINES_PER_RULE_AND_BLOCK)
    done_to = -1
    for end, rule_id in hits:
        if end - 1 <= done_to or budget[rule_id] <= 0:
            continue
        begin = region.rfind(b"\n", 0, end - 1) + 1 if end else 0
        stop = region.find(b"\n", max(begin, end - 1))
        stop = len(region) if stop < 0 else stop
        ids = {i for _, i in hits[bisect_left(hits, (begin + 1, -1)) : bisect_right(hits, (stop, 1 << 30))]}
        for one in ids:
            budget[one] -= 1
        done_to = stop
        finding = _finding(region, context, begin, stop, end, ids, state)
        if finding is not None:
            state.progress += _count_progress(region, counted_to, begin)
            counted_to = begin
            state.keep(replace(finding, offset=base + begin, progress_before=state.progress))
    state.progress += _count_progress(region, counted_to, len(region))
    stamp = _last_time(region, len(region), state)
    state.seen_s = stamp if stamp is not None else state.seen_s


def _hits(region: bytes) -> list[tuple[int, int]]:
    """(end, pattern) of matches, sorted; after a flood only the first of each pattern."""
    automaton = _automaton()
    hits: list[tuple[int, int]] = []

    def every(pattern: int, _start: int, end: int, _flags: int, _context: object) -> bool | None:
        hits.append((end, pattern))
        return len(hits) >= MAX_HITS_PER_BLOCK or None

    try:
        automaton.every_match.scan(region, match_event_handler=every)
    except hyperscan.ScanTerminated:
        begin = hits[-1][0]
        more: list[tuple[int, int]] = []

        def first(pattern: int, _s: int, end: int, _f: int, _c: object) -> None:
            more.append((begin + end, pattern))

        automaton.first_match.scan(region[begin:], match_event_handler=first)
        hits += more
    return sorted(set(hits))


def _finding(
    region: bytes,
    context: bytes,
    begin: int,
    stop: int,
    end: int,
    ids: set[int],
    state: _State,
) -> Finding | None:
    rules = _automaton().rules
    if stop - begin > MAX_LINE_CHARS:
        begin, stop = max(begin, end - 3 * MAX_LINE_CHARS // 4), min(stop, end + MAX_LINE_CHARS // 4)
    line = region[begin:stop].decode("utf-8", "replace").rstrip()
    earlier = region[max(0, begin - CONTEXT_SIZE_BYTES) : begin]
    if len(earlier) < CONTEXT_SIZE_BYTES:
        earlier = context[len(earlier) - CONTEXT_SIZE_BYTES :] + earlier
    before = earlier.decode("utf-8", "replace")
    named = [rules[i] for i in sorted(ids) if i < len(rules)]
    finding = recognise(line, before, named)
    if finding is None:
        return None
    origin = origin_of(line, year=state.year)
    told = finding.origin
    origin = Origin(
        at_s=origin.at_s,
        rank=told.rank if told.rank is not None else origin.rank,
        node=told.node or origin.node,
        device=told.device if told.device is not None else origin.device,
        code=finding.code or origin.code,
    )
    seen_s = origin.at_s if origin.at_s is not None else _last_time(region, begin, state)
    return replace(
        finding,
        origin=origin,
        code=origin.code,
        seen_s=seen_s,
        replaces=exceptions.was_raised_in_handling(line, before),
    )


def _last_time(region: bytes, until: int, state: _State) -> float | None:
    """Time of the nearest line before `until` that has one."""
    text = region[max(0, until - CONTEXT_SIZE_BYTES) : until].decode("utf-8", "replace")
    for line in reversed(text.splitlines()[-60:]):
        if (stamp := time_of(line[:200], year=state.year)) is not None:
            return stamp
    return state.seen_s


def _count_progress(region: bytes, begin: int, end: int) -> int:
    """Losses mentioned, without what is said about scaling them."""
    mentioned = region.count(_PROGRESS_MARK, begin, end)
    return mentioned - sum(region.count(mark, begin, end) for mark in _SCALE_MARKS)


def findings_by_rule(findings: Iterable[Finding]) -> Mapping[str, int]:
    """How often each rule recognised a line."""
    counts: dict[str, int] = defaultdict(int)
    for finding in findings:
        counts[finding.rule] += 1
    return counts
