"""Reading output of any size, in any pieces, of any content: the lines that say something."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.training.diagnosis.recognise import Finding, recognise
from perdure.training.diagnosis.rules import Role
from perdure.training.diagnosis.scan import (
    BLOCK_SIZE_BYTES,
    LINES_AT_EACH_END,
    MAX_LINE_CHARS,
    TAIL_SIZE_BYTES,
    Scan,
    scan_output,
    scan_text,
)
from perdure.training.recovery.faults import FaultClass
from tests.values import not_none

YEAR = 2026
TYPE_ERROR = "TypeError: forward() missing 1 required positional argument: 'targets'"
ODD_ERROR = "FrobnicationError: the frobs do not fit"  # known to no rule
PEER_CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:4123"
DEVICE_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
NOTIFY = (
    "EI0002: [PID: 4711] 2026-03-21-02:07:08.639.860 Notify timeout: The wait execution of the "
    "Notify register times out."
)
STEP = " iteration      100/    1000 | lm loss: 2.345E+00 | grad norm: 0.9 |"
HANDLING = "During handling of the above exception, another exception occurred:"
FRAME = '  File "/w/train.py", line 3, in f'


@pytest.fixture(autouse=True, scope="module")
def _compiled():
    """Rules are compiled once; no example of a test is charged for it."""
    scan_text("noise", year=YEAR)


def traceback(line: str) -> str:
    return f"Traceback (most recent call last):\n{FRAME}\n    f(x)\n{line}\n"


def read(data: bytes | str) -> Scan:
    return scan_output([data.encode() if isinstance(data, str) else data], year=YEAR)


def lines_of(result: Scan) -> list[str]:
    return [finding.line for finding in result.findings]


def reported(result: Scan) -> list[tuple]:
    """What a finding says, without the parts that are only roughly known."""
    return [
        (f.rule, f.line, f.offset, f.role, f.seen_s, f.origin, f.frame) for f in result.findings
    ]


def pieces(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """The bytes in pieces of these sizes over and over."""
    begin, turn = 0, 0
    while begin < len(data):
        yield data[begin : begin + sizes[turn % len(sizes)]]
        begin += sizes[turn % len(sizes)]
        turn += 1


LOG_LINES = st.sampled_from(
    [TYPE_ERROR, PEER_CLOSED, DEVICE_OOM, NOTIFY, ODD_ERROR, STEP, FRAME, "", "noise",
     "Traceback (most recent call last):", "\x1b[31mERROR\x1b[0m odd", f"\r 3%\r 4%{DEVICE_OOM}",
     "2026-03-21 02:07:08 hello", HANDLING, "\u00e4\u00f6\u00fc \u4e2d\u6587", "step 3 loss 2.0"]
)  # fmt: skip
ENDS = st.sampled_from(["\n", "\r\n", "\r", "\n\n"])


@given(
    st.lists(st.tuples(LOG_LINES, ENDS), max_size=40),
    st.lists(st.integers(1, 200), min_size=1, max_size=6),
)
def test_the_pieces_in_which_output_arrives_do_not_matter(lines, sizes):
    data = "".join(f"{line}{end}" for line, end in lines).encode()
    whole, split = read(data), scan_output(pieces(data, sizes), year=YEAR)
    assert reported(split) == reported(whole)
    assert (split.size_bytes, split.is_text) == (whole.size_bytes, whole.is_text)


def test_a_time_long_before_a_finding_is_known_however_the_output_arrives():
    data = "2026-03-21 02:07:08 hello\n" + "noise\n" * 3000 + traceback(TYPE_ERROR)
    line_by_line = scan_output(
        (line.encode() for line in data.splitlines(keepends=True)), year=YEAR
    )
    assert reported(line_by_line) == reported(read(data))


def test_the_end_of_output_is_kept_however_it_arrives():
    line = f"{STEP}\n".encode()
    result = scan_output((line for _ in range(5000)), year=YEAR)
    assert len(result.tail) == 5000 * len(line)
    many = scan_output((line * 1000 for _ in range(60)), year=YEAR)
    assert TAIL_SIZE_BYTES // 2 < len(many.tail) <= TAIL_SIZE_BYTES


@pytest.mark.parametrize("before", range(0, len(TYPE_ERROR) + 2, 7))
def test_a_finding_across_the_border_of_blocks_is_found_whole(before):
    fill = b"x" * 79 + b"\n"
    data = fill * (BLOCK_SIZE_BYTES // len(fill) + 1)
    data = data[: BLOCK_SIZE_BYTES - before - 1] + b"\n" + TYPE_ERROR.encode() + b"\n" + fill
    for sizes in ([len(data)], [BLOCK_SIZE_BYTES], [4096], [1021]):
        result = scan_output(pieces(data, sizes), year=YEAR)
        assert lines_of(result) == [TYPE_ERROR]
        assert result.findings[0].offset == BLOCK_SIZE_BYTES - before


@pytest.mark.parametrize(
    "line",
    [
        "MemoryError",
        "KeyboardInterrupt:",
        "MyTimeout: x",
        "zipfile.BadZipFile: x",
        "torch._dynamo.exc.Unsupported: x",
        "[rank3]: my.FrobnicationFailed: x",
        "(pid=7) ray.exceptions.ActorDiedError: x",
        "pyarrow.lib.ArrowInvalid: x",
    ],
)
def test_every_form_of_an_exceptions_last_line_is_found_in_a_log(line):
    assert lines_of(read(f"noise\nTraceback (most recent call last):\n{FRAME}\n{line}\n")) == [line]


def test_the_traceback_of_an_exception_may_be_in_the_block_before():
    data = "x" * 79 + "\n"
    data = data * (BLOCK_SIZE_BYTES // 80) + traceback(ODD_ERROR)
    cut = len(data) - len(ODD_ERROR) - 1
    result = scan_output([data[:cut].encode(), data[cut:].encode()], year=YEAR)
    assert [f.frame for f in result.findings] == ["/w/train.py"]


def test_a_last_line_without_a_newline_counts():
    assert lines_of(read(f"noise\n{TYPE_ERROR}")) == [TYPE_ERROR]
    assert lines_of(scan_output([b"noise\nTypeErr", TYPE_ERROR[7:].encode()], year=YEAR)) == [
        TYPE_ERROR
    ]


BAR = "\r".join(f"{n:3d}%|##        | {n}/100 [00:01<00:02, 9.9it/s]" for n in range(100))


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        *((end.join(["noise", TYPE_ERROR, "noise", DEVICE_OOM, ""]), [TYPE_ERROR, DEVICE_OOM])
          for end in ("\r\n", "\r", "\n\r\n")),
        (f"{BAR}\r{TYPE_ERROR}\n", [TYPE_ERROR]),
        ("\x1b[1;31mTypeError\x1b[0m: \x1b[33mx\x1b[0m is odd\n", ["TypeError: x is odd"]),
        ("a\0b\n" * 3 + f"{TYPE_ERROR}\n\0\0\0\n{DEVICE_OOM}\n", [TYPE_ERROR, DEVICE_OOM]),
        (b"\xff\xfe\xc3\nValueError: \xff odd \xe4\xb8\n", ["ValueError: \ufffd odd \ufffd"]),
    ],
    ids=["CR LF", "CR", "LF CR LF", "progress bar", "colours", "zeros", "no UTF-8"],
)  # fmt: skip
def test_line_ends_bars_colours_and_odd_bytes_hide_no_finding(output, lines):
    result = read(output)
    assert lines_of(result) == lines
    assert result.is_text


@given(st.binary(max_size=2000), st.integers(1, 500))
def test_any_bytes_can_be_read(data, size):
    result = scan_output(pieces(data, [size]), year=YEAR)
    assert len(result.findings) <= 2000


def test_empty_output_holds_nothing():
    for chunks in ([], [b""], [b"", b""]):
        assert scan_output(chunks, year=YEAR) == Scan([], "", 0, is_text=True)
    assert lines_of(read("\n" * 1000)) == []


def test_binary_data_is_no_text():
    data = random.Random(7).randbytes(3 << 20)  # noqa: S311 no secret
    result = read(data)
    assert not result.is_text
    assert read("plain text\twith tabs\f and \x1b[31mcolours\x1b[0m\n").is_text


def test_a_line_of_five_megabytes_is_read_in_bounded_pieces():
    data = f"{'x ' * 2_500_000}{PEER_CLOSED} {'y ' * 100_000}\n{TYPE_ERROR}\n"
    result = read(data)
    assert [f.rule for f in result.findings][-1] == recognise(TYPE_ERROR, "").rule  # type: ignore[union-attr]
    assert any(PEER_CLOSED in line for line in lines_of(result))
    assert all(len(line) <= MAX_LINE_CHARS for line in lines_of(result))


FLOODS = [
    pytest.param(PEER_CLOSED, id="exception-of-a-rule"),
    pytest.param("ValueError: again", id="exception"),
    pytest.param("ERROR again", id="error-line"),
    pytest.param(NOTIFY, id="code"),
    pytest.param("[INFO] ValueError: again", id="information"),
]


@pytest.mark.parametrize("count", [70, 3000, 200_000])
@pytest.mark.parametrize("cause", [TYPE_ERROR, ODD_ERROR, DEVICE_OOM, "Killed"])
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_equal_lines_is_bounded_and_hides_no_other_cause(flood, cause, count):
    ending = traceback(cause) if "Error" in cause else f"{cause}\n"
    result = read(f"{flood}\n" * count + ending)
    assert len(result.findings) <= 2 * LINES_AT_EACH_END + 2
    assert lines_of(result)[-1] == cause


@pytest.mark.parametrize("cause", [TYPE_ERROR, ODD_ERROR])
def test_a_cause_in_the_midst_of_a_flood_is_found(cause):
    flood = f"{PEER_CLOSED}\n" * 100_000
    assert cause in lines_of(read(flood + traceback(cause) + flood))


def test_the_first_and_the_last_lines_of_a_flood_are_kept():
    count = 5000
    result = read("".join(f"ERROR again {n}\n" for n in range(count)))
    lines = lines_of(result)
    assert lines[:LINES_AT_EACH_END] == [f"ERROR again {n}" for n in range(LINES_AT_EACH_END)]
    assert len(lines) <= 2 * LINES_AT_EACH_END
    assert {finding.rule for finding in result.findings} == {"error-line"}


def test_memory_is_bounded_for_64_megabytes():
    lines = [f"2026-03-21 02:07:08 {STEP}", f"{PEER_CLOSED}", "noise " * 20, TYPE_ERROR]
    block = ("\n".join(lines * 2000) + "\n").encode()
    read(block)  # rules and automaton are compiled once
    tracemalloc.start()
    try:
        result = scan_output((block for _ in range(64_000_000 // len(block) + 1)), year=YEAR)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.size_bytes > 64_000_000
    assert peak_bytes < 32_000_000


@given(st.lists(LOG_LINES, max_size=60))
def test_offsets_ascend_and_point_at_the_line(lines):
    text = "\n".join(line.replace("\r", "").replace("\x1b", "") for line in lines)
    result = read(text)
    offsets = [finding.offset for finding in result.findings]
    assert offsets == sorted(set(offsets))
    for finding in result.findings:
        assert text.encode()[finding.offset :].startswith(finding.line.encode())


def clock(minute: int) -> float:
    return datetime(2026, 3, 21, 2, minute, 8, tzinfo=UTC).timestamp()


def test_a_line_without_a_time_was_seen_when_the_nearest_line_before_it_was_written():
    early, late = "2026-03-21 02:01:08 a\n", "2026-03-21 02:02:08 b\n"
    times = [f.seen_s for f in read(f"{TYPE_ERROR}\n{early}{late}{DEVICE_OOM}\n{NOTIFY}").findings]
    assert times == [None, clock(2), clock(7) + 0.63986]


def test_the_year_is_taken_where_the_time_has_none():
    result = scan_text(f"E0321 02:01:08.0 1 a.cc:1] x\n{TYPE_ERROR}\n", year=2024)
    assert result.findings[-1].seen_s == datetime(2024, 3, 21, 2, 1, 8, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    "prefix",
    ["[INFO] ", "2026-03-21 02:07:08,639 - WARNING - ", "W0809 10:11:12.1 1 x.go:1] ",
     "[rank0]:[W321 02:07:08.4 x.cpp:1] "],
)  # fmt: skip
def test_information_and_warnings_do_not_count(prefix):
    result = recognise(f"{prefix}{PEER_CLOSED}", "")
    assert result is None or result.is_low_level


def test_nccls_warnings_count():
    line = "node-1:5776:5902 [0] x.cc:60 NCCL WARN socketProgress: Connection closed by remote peer"
    assert not not_none(recognise(line, "")).is_low_level


TRACEBACK = f"Traceback (most recent call last):\n{FRAME}\n"
ADVICE = ("Possible Cause", "  Possible cause", "Solution", "  Suggestion")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"{TRACEBACK}    raise ValueError('CUDA out of memory')\n{ODD_ERROR}\n", [ODD_ERROR]),
        (f"{TRACEBACK}    check(x)  # ERROR\n{ODD_ERROR}\n", [ODD_ERROR]),
        *((f"{head}: the device is lost, error code is 507010\n", []) for head in ADVICE),
    ],
)
def test_source_code_in_a_traceback_and_advice_printed_with_an_error_are_no_evidence(text, lines):
    assert lines_of(read(text)) == lines


DIRECT = "The above exception was the direct cause of the following exception:"


def roles(text: str) -> dict[str, Role]:
    return {finding.line: finding.role for finding in read(text).findings}


@pytest.mark.parametrize(
    ("between", "last", "role"),
    [
        (HANDLING, traceback(ODD_ERROR), Role.CASCADE),
        (DIRECT, traceback(ODD_ERROR), Role.ROOT),
        (HANDLING, f"Traceback (most recent call last):\n[rank3]: {ODD_ERROR}\n", Role.ROOT),
    ],
    ids=["raised while another was handled", "of a direct cause", "of another rank"],
)
def test_an_exception_is_replaced_by_one_that_its_own_rank_raised_in_handling_it(
    between, last, role
):
    result = roles(f"{traceback('KeyError: 1')}\n{between}\n\n{last}")
    assert result.pop("KeyError: 1") is role
    assert list(result.values()) == [Role.ROOT]


def test_steps_are_counted_before_and_after_each_finding():
    steps = [f"step {number} loss 3.4\n" for number in range(1, 36)]
    text = "".join([f"{TYPE_ERROR}\n", *steps[:30], f"{DEVICE_OOM}\n", steps[30]])
    result = [(f.is_after_steps, f.is_survived) for f in read(text).findings]
    assert result == [(False, True), (True, False)]


@pytest.mark.parametrize(
    ("name", "is_after_steps"),
    [("Train: ", True), ("Steps: ", True), ("Training epoch 3: ", True), ("", False),
     ("Downloading: ", False), ("Loading checkpoint shards: ", False)],
)  # fmt: skip
def test_a_bar_shows_steps_if_its_name_says_so(name, is_after_steps):
    bar = f"{name} 97%|####| 72/74 [31:17<00:52, 26.10s/it]\n"
    assert [f.is_after_steps for f in read(f"{bar}{DEVICE_OOM}\n").findings] == [is_after_steps]


def test_changes_of_the_loss_scale_are_no_progress():
    result = read(f"{TYPE_ERROR}\n" + "reducing loss scale to 1024, loss_scale: 1024\n" * 30)
    assert [f.is_survived for f in result.findings] == [False]


def test_a_rule_wins_over_a_code_and_a_code_over_an_exception():
    by_rule = recognise(DEVICE_OOM, "")
    by_code = recognise("RuntimeError: x, error code is 507054", "")
    by_type = recognise(ODD_ERROR, "")
    by_level = recognise("ERROR something odd", "")
    result = [f for f in (by_rule, by_code, by_type, by_level) if f is not None]
    assert [f.rule for f in result] == ["cuda-oom", "code-acl", "exception", "error-line"]
    assert isinstance(result[0], Finding)
    assert result[1].fault_class is FaultClass.DEVICE_MEMORY_ERROR
    assert recognise("step 12 loss 3.4", "") is None
