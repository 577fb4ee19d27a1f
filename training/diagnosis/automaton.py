"""All patterns of the diagnosis compiled together, to find the lines that are worth reading.

Compiling takes seconds, so the compiled form is kept on this machine, under a name that holds
for these patterns, this Hyperscan and this kind of machine alone. It is trusted like Python's
own bytecode cache: a file of the user's, with a checksum against damage. Without a place for it
the patterns are compiled each time.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import hyperscan

from training.diagnosis import codes, exceptions
from training.diagnosis.recognise import UNEXPLAINED
from training.diagnosis.rules import load_rules
from training.files import home_folder

_FLAGS = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER


@cache
def patterns() -> Sequence[bytes]:
    """One pattern per rule, in their order, then those of the general recognisers.

    The last one is the beginning of a traceback.
    """
    specs = (rule.spec for rule in load_rules())
    general = (*codes.PATTERNS.values(), exceptions.PREFILTER, UNEXPLAINED, exceptions.TRACEBACK)
    return [portable(text) for text in (*(s.prefilter or s.pattern for s in specs), *general)]


@cache
def every_match() -> hyperscan.Database:
    """Reports every place where a pattern matches."""
    wanted = patterns()
    key = hashlib.sha256(
        b"\n".join(
            [
                *wanted,
                importlib.metadata.version("hyperscan").encode(),
                platform.machine().encode(),
            ]
        )
    ).hexdigest()
    path = home_folder() / "cache" / f"diagnosis-{key[:32]}"
    found = _load(path)
    if found is None:
        found = _compile(wanted)
        _keep(path, found)
    return found


def portable(pattern: str) -> bytes:
    """A rule's pattern for the automaton: nothing may run past the end of a line."""
    without_names = re.sub(r"\(\?P<\w+>", "(", pattern)
    return re.sub(r"(?<!\\)\[\^", r"[^\\n", without_names).encode()


def _compile(wanted: Sequence[bytes]) -> hyperscan.Database:
    database = hyperscan.Database()
    database.compile(
        expressions=wanted,
        ids=list(range(len(wanted))),
        elements=len(wanted),
        flags=[_FLAGS] * len(wanted),
    )
    return database


def _load(path: Path) -> hyperscan.Database | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    told, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != told:
        return None
    try:
        database = hyperscan.loadb(body, mode=hyperscan.HS_MODE_BLOCK)
    except hyperscan.error:
        return None  # compiled for other processors
    database.scratch = hyperscan.Scratch(database)
    return database


def _keep(path: Path, database: hyperscan.Database) -> None:
    body = hyperscan.dumpb(database)
    temporary = path.with_suffix(f".{id(database):x}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(body).digest() + body)
        temporary.replace(path)
    except OSError:
        return  # nowhere to keep it: the next process compiles again
