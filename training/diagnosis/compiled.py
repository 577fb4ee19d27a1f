"""All patterns compiled together: what finds the lines that are worth reading.

That takes seconds of a processor, so the compiled form is kept on this machine, under a name that
holds for these patterns, this Hyperscan and this kind of machine alone. It is trusted like
Python's own bytecode cache: a file of the user's, with a checksum against damage. Without a place
for it the patterns are compiled each time.

A recovery must not wait for it: `start_compiler` has a process of its own do it while the run
starts, with little claim to the processors. In a thread the end of this process would cut the
compiler off in the middle of its work, which may crash.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import hyperscan

from perdure.training.diagnosis.recognise import list_patterns
from perdure.training.files import home_folder

_MAX_WAIT_S = 120.0  # that the other process is waited for
_NICENESS = 10  # what starts meanwhile comes first
_FLAGS = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER
_lock = threading.Lock()
_compiler: subprocess.Popen[bytes] | None = None


def start_compiler() -> None:
    """Begin, once in a process, to have the patterns compiled and kept."""
    global _compiler  # noqa: PLW0603 one for each process, as the compiled form is
    with _lock:
        if _compiler is not None or _database.cache_info().currsize:
            return
        try:
            _compiler = subprocess.Popen(
                [sys.executable, "-m", "perdure.training.diagnosis.compiled"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            return  # whoever needs them first compiles them
        atexit.register(_compiler.kill)


def wait_for_database() -> hyperscan.Database:
    """Reports every place where a pattern matches."""
    with _lock:
        if _compiler is not None:
            with suppress(subprocess.TimeoutExpired):
                _compiler.wait(_MAX_WAIT_S)  # two at a time would both take longer
        return _database()


@cache
def _database() -> hyperscan.Database:
    wanted = list_patterns()
    path = _cache_path(wanted)
    database = _load(path)
    if database is None:
        database = _compile(wanted)
        _save(path, database)
    return database


def _cache_path(wanted: Sequence[bytes]) -> Path:
    """Where the compiled form of some patterns is kept."""
    version = importlib.metadata.version("hyperscan").encode()
    key = hashlib.sha256(b"\n".join([*wanted, version, platform.machine().encode()])).hexdigest()
    return home_folder() / "cache" / f"diagnosis-{key[:32]}"


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
    checksum, body = data[:32], data[32:]
    if hashlib.sha256(body).digest() != checksum:
        return None
    try:
        database = hyperscan.loadb(body, mode=hyperscan.HS_MODE_BLOCK)
    except hyperscan.error:
        return None  # compiled for other processors
    database.scratch = hyperscan.Scratch(database)
    return database


def _save(path: Path, database: hyperscan.Database) -> None:
    body = hyperscan.dumpb(database)
    temporary = path.with_suffix(f".{id(database):x}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(body).digest() + body)
        temporary.replace(path)
    except OSError:
        return  # nowhere to keep it: the next process compiles again


def main() -> None:
    """Compile them, unless that has been done."""
    os.nice(_NICENESS)
    wait_for_database()


if __name__ == "__main__":
    main()
