"""The database of all patterns, compiled together: it finds the lines that are worth reading.

Compilation takes seconds of a processor, so the compiled form stays on this machine, under a name
that stands for these patterns, this Hyperscan and this kind of machine. It is trusted like
Python's own bytecode cache: a file of the user's, with a checksum against damage. Without a place
for the file every process compiles the patterns.

A recovery must not wait for the compiler: `start_compiler` starts a process for it, of low
priority, when the run starts. In a thread the end of this process would cut the compiler off in
the middle of its work, which may crash.
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

_MAX_WAIT_S = 120.0  # for the compiler to end
_NICENESS = 10  # the processes of the starting run come first
_FLAGS = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER
_lock = threading.Lock()
_compiler: subprocess.Popen[bytes] | None = None


def start_compiler() -> None:
    """Start, once in a process, a process that compiles the patterns and stores them."""
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
            return  # the first scan compiles them
        atexit.register(_compiler.kill)


def wait_for_database() -> hyperscan.Database:
    """Return the database that reports every match of a pattern; wait for its compiler."""
    with _lock:
        if _compiler is not None:
            with suppress(subprocess.TimeoutExpired):
                _compiler.wait(_MAX_WAIT_S)  # two compilers at a time would both take longer
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
    """Return the path of the compiled form of these patterns."""
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
    """Compile the patterns, unless their compiled form is there."""
    os.nice(_NICENESS)
    wait_for_database()


if __name__ == "__main__":
    main()
