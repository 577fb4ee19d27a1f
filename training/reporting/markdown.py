"""Markdown as the Prefect UI renders it; numbers and times in plain English."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import quote

_IN_ADDRESS = ":/?#&=%@+,~"


def text(value: object) -> str:
    """Escape plain text on a single line: `<region>` is not taken for a tag."""
    line = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\*_`\[\]])", r"\\\1", line)


def code(value: object) -> str:
    """Put a value on a single line in backquotes."""
    line = " ".join(str(value).split()).replace("`", "'")
    return f"`{line}`"


def plain(words: str) -> str:
    """Quote commands that are in backquotes, for a place that renders no markdown."""
    return re.sub(r"`([^`]*)`", r"'\1'", words)


def with_commands(words: str) -> str:
    """Make markdown from plain text in which commands are in backquotes."""
    parts = words.split("`")
    return "".join(
        # text() would drop the spaces at the ends.
        code(part) if n % 2 else part.replace(part.strip(), text(part), 1) if part.strip() else part
        for n, part in enumerate(parts)
    )


def link(url: str) -> str:
    """Make a link that shows its address: not every browser follows `s3://` or `file://`."""
    return f"[{code(url)}](<{quote(url, safe=_IN_ADDRESS)}>)"


def block(value: str) -> str:
    """Make a code block of lines as they are."""
    return f"```\n{value.replace('```', chr(39) * 3)}\n```\n"


def clock_text(at_s: float) -> str:
    """Write seconds since the epoch as `2026-01-31 23:59:59`, UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: `1 attempt`, `2 attempts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(words: Sequence[str]) -> str:
    """Write a list of words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
