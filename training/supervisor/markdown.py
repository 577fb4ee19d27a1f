"""Markdown as the Prefect UI renders it, and counted words in plain English."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence


def text(value: object) -> str:
    """Plain text on one line: `<region>` is not taken for a tag."""
    line = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\*_`\[\]])", r"\\\1", line)


def code(value: object) -> str:
    """The same as code."""
    line = " ".join(str(value).split()).replace("`", "'")
    return f"`{line}`"


def block(value: str) -> str:
    """Lines as they are."""
    return f"```\n{value.replace('```', chr(39) * 3)}\n```\n"


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 attempt`, `2 attempts`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
