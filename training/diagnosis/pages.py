"""Output of any size in pieces that can be searched: whole lines, bounded, cleaned.

Sizes and offsets are bytes. Offsets count in the cleaned output, where a carriage return ends a
line like a newline does and colours are gone.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

BLOCK_SIZE_BYTES = 1 << 20
MAX_LINE_SIZE_BYTES = 256 << 10

_ANSI = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_SAMPLE_SIZE_BYTES = 64 << 10
_ONE_DIGIT = bytes.maketrans(b"123456789", b"000000000")


@dataclass(frozen=True, slots=True)
class Page:
    """Text to search, and where its lines stood.

    Attributes:
        base: offset of the text in the output.
        starts: where each line of the text begins; empty for text that is a piece of the output.
        origins: where that line begins in the output, counted from `base`.
    """

    text: bytes
    base: int
    starts: Sequence[int] = ()
    origins: Sequence[int] = ()

    def offset_of(self, position: int) -> int:
        """Where a line that begins at `position` of the text stands in the output."""
        if not self.starts:
            return self.base + position
        return self.base + self.origins[bisect_right(self.starts, position) - 1]


def regions(chunks: Iterable[bytes]) -> Iterable[bytes]:
    """Pieces of at most a block that end at the end of a line; a line without end is cut."""
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
    # A single byte is looked for many times faster than three.
    if b"{" in region and (region.startswith(b'{"') or b'\n{"' in region):
        # A line of JSON: the newlines inside its texts, of the same length as they were.
        region = region.replace(b"\\n", b" \n")
    if b"\r" in region:
        region = region.replace(b"\r\n", b" \n").replace(b"\r", b"\n")
    return _ANSI.sub(b"", region) if b"\x1b" in region else region


def looks_like_text(region: bytes) -> bool:
    """Whether the beginning of some output is text: hardly any control characters."""
    sample = region[:_SAMPLE_SIZE_BYTES]
    control = sum(sample.count(bytes([code])) for code in (*range(9), *range(14, 27)))
    return control <= len(sample) // 20


def shape_of(line: bytes) -> bytes:
    """A line with every digit made the same: equal for lines that differ in digits alone."""
    return line.translate(_ONE_DIGIT)


def distinct(region: bytes, base: int) -> Page:
    """The lines of a region without those that differ from an earlier one in digits alone.

    A flood of one message, from a thousand ranks at slightly different times, becomes one line.
    """
    lines = region.split(b"\n")
    firsts = dict(zip(reversed(shape_of(region).split(b"\n")),
                      range(len(lines) - 1, -1, -1), strict=True))  # fmt: skip
    kept = sorted(firsts.values())
    begins = list(accumulate(map(len, lines), initial=0))  # without the ends of the lines before
    starts = list(accumulate((len(lines[index]) + 1 for index in kept), initial=0))
    text = b"\n".join([lines[index] for index in kept])
    return Page(text, base, starts[:-1], [begins[index] + index for index in kept])
