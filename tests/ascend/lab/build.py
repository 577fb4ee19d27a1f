"""Builds the emulator's libraries with g++, once for each state of its sources.

What torch_npu is linked with has the names of CANN's libraries. Objects are kept by what they are
made of, so that a change compiles one file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ascend.lab.places import CACHE, OBJECTS, SITE, SOURCES, built, package, versions

FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Wno-deprecated-declarations")
# Linked by libtorch_npu.so without a symbol of their own that is not also in libascendcl.so.
EMPTY = ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
# What torch_npu 2.13 reads of CANN's folder.
VERSION_INFO = "Version=8.5.0\nversion_dir=8.5.0\ntimestamp=20260101_000000000\n"


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library: its name without "lib" and ".so", its sources, and what it links."""

    name: str
    patterns: Sequence[str]
    links: Sequence[str] = ()
    is_of_torch: bool = False


LIBRARIES = (
    Library("ascendcl", ("[!h]*.cpp",)),
    Library("hccl", ("hccl*.cpp",), ("ascendcl",)),
    Library("opapi", ("opapi/*.cpp",), ("ascendcl",), is_of_torch=True),
    Library("ascend_operators", ("operators/*.cpp",), ("ascendcl",), is_of_torch=True),
)


class BuildFailed(RuntimeError):  # noqa: N818 named as what happened
    """g++ refused; the message is what it printed."""


def build() -> Path:
    """Build what is not there yet. Returns the folder with `lib`, `site` and `cann`.

    Raises:
        BuildFailed: a source does not compile or link.
        FileNotFoundError: there is no g++, torch or torch_npu.
    """
    target = built()
    with _alone():
        if not target.exists():
            if shutil.which("g++") is None:
                raise FileNotFoundError("there is no g++: apt-get install g++")
            unfinished = target.with_suffix(f".{os.getpid()}")
            shutil.rmtree(unfinished, ignore_errors=True)
            _fill(unfinished)
            unfinished.rename(target)
    return target


@contextmanager
def _alone() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "ascend.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(target: Path) -> None:
    (target / "lib").mkdir(parents=True)
    for library in LIBRARIES:
        _link(library, target / "lib")
    for name in EMPTY:
        _link(Library(name, (), ("ascendcl",)), target / "lib")
    for folder in ("runtime", "compiler", "opp"):
        (target / "cann" / folder).mkdir(parents=True)
    (target / "cann" / "runtime" / "version.info").write_text(VERSION_INFO, encoding="utf-8")
    shutil.copytree(SITE, target / "site", ignore=shutil.ignore_patterns("__pycache__"))


def _link(library: Library, folder: Path) -> None:
    found = [path for pattern in library.patterns for path in sorted(SOURCES.glob(pattern))]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = list(pool.map(lambda path: _compile(path, _flags(library)), found))
    command = ["g++", "-shared", "-o", str(folder / f"lib{library.name}.so"), *map(str, objects)]
    command += ["-Wl,--no-as-needed", f"-L{folder}", *(f"-l{name}" for name in library.links)]
    if library.is_of_torch:
        command += [f"-L{package('torch') / 'lib'}", "-ltorch_cpu", "-lc10"]
        command += [f"-L{package('torch_npu') / 'lib'}", "-l:libtorch_npu.so"]
        command += ["-Wl,--allow-shlib-undefined"]
    _run(command)


def _flags(library: Library) -> list[str]:
    npu = package("torch_npu") / "include"
    flags = [*FLAGS, f"-I{SOURCES}", f"-isystem{npu / 'third_party/acl/inc'}"]
    if library.is_of_torch:
        torch = package("torch") / "include"
        include = (npu, npu / "third_party/op-plugin", torch, torch / "torch/csrc/api/include")
        flags += [f"-isystem{folder}" for folder in include]
    return flags


def _compile(source: Path, flags: Sequence[str]) -> Path:
    digest = hashlib.sha256(repr((versions(), flags, str(source))).encode())
    for path in sorted(_included(source, set())):
        digest.update(path.read_bytes())
    target = OBJECTS / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        OBJECTS.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}.o")
        _run(["g++", *flags, "-c", str(source), "-o", str(unfinished)])
        unfinished.rename(target)
    return target


def _included(source: Path, seen: set[Path]) -> set[Path]:
    """The source and those of the emulator's headers that it includes."""
    seen.add(source)
    for name in INCLUDE.findall(source.read_text(encoding="utf-8")):
        for header in (source.parent / name, SOURCES / name):
            if header.exists() and header not in seen:
                _included(header, seen)
    return seen


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)}\n{done.stderr}")
