"""Saves and restores beside other programs, in one run, against one server.

    python -m benchmarks.storage [--size-gib 1 4] [--rounds 3] [--repeats 3] [--only SECTION]

Each round runs every contender of a section in turn, each in a process of its own: one run to
warm up, in which memory is watched, then `--repeats` that are timed. The state is bf16 weights
and AdamW's fp32 moments in a few hundred tensors. The server is a sink in memory, in a process of
its own on the loopback interface; `--endpoint` names another, with a bucket called bench. With
what is set by default, a section takes about five minutes on two cores with 1 GiB, and twenty with
4 GiB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.storage.measuring import Measured, Setting, measure
from benchmarks.storage.sections import SECTIONS
from benchmarks.storage.state import make_state, size_of
from benchmarks.storage.tables import Column, is_met, table

GIBIBYTE = 2**30
RUN_TIMEOUT_S = 600.0


def main() -> int:
    """Print a table per section. Returns 1 when a target is missed."""
    arguments = _parser().parse_args()
    if arguments.contender is not None:
        return _run_contender(arguments)
    met = True
    with _server(arguments.endpoint) as endpoint:
        for size_gib in arguments.size_gib:
            met = _one_size(size_gib, arguments, endpoint) and met
    return 0 if met else 1


def _one_size(size_gib: float, arguments: argparse.Namespace, endpoint: str) -> bool:
    """Every section with a state of one size. Returns whether every target is met."""
    state_bytes = size_of(make_state(int(size_gib * GIBIBYTE)))
    print(f"{os.cpu_count()} cores, state of {state_bytes / GIBIBYTE:.2f} GiB")
    met = True
    for name in arguments.only or SECTIONS:
        columns = _section(name, size_gib, arguments, endpoint)
        print(table(SECTIONS[name], columns, state_bytes), flush=True)
        met = met and is_met(SECTIONS[name], columns, state_bytes)
    return met


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="saves and restores beside other programs; about five minutes per section"
    )
    parser.add_argument("--size-gib", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(SECTIONS))
    parser.add_argument("--endpoint", help="of an S3 server; default: a sink in memory")
    parser.add_argument("--contender", nargs=2, help=argparse.SUPPRESS)
    return parser


def _section(
    name: str, size_gib: float, arguments: argparse.Namespace, endpoint: str
) -> Mapping[str, Column]:
    measured: dict[str, list[Measured]] = {one: [] for one in SECTIONS[name].contenders}
    for _ in range(arguments.rounds):
        for contender, found in measured.items():
            found.append(_in_process((name, contender), size_gib, arguments, endpoint))
    return {contender: Column.of(found) for contender, found in measured.items()}


def _in_process(
    contender: tuple[str, str], size_gib: float, arguments: argparse.Namespace, endpoint: str
) -> Measured:
    command = [sys.executable, "-m", "benchmarks.storage", "--contender", *contender]
    command += ["--size-gib", str(size_gib), "--repeats", str(arguments.repeats)]
    command += ["--endpoint", endpoint]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        return Measured(missing=f"failed: {last[0][:100]}")
    return Measured.model_validate_json(done.stdout.splitlines()[-1])


def _run_contender(arguments: argparse.Namespace) -> int:
    """The child: measure one contender, and print what was found as JSON."""
    section, name = arguments.contender
    with tempfile.TemporaryDirectory() as folder:
        state = make_state(int(arguments.size_gib[0] * GIBIBYTE))
        setting = Setting(state, arguments.endpoint, Path(folder))
        contender = SECTIONS[section].contenders[name]
        print(measure(contender, setting, repeats=arguments.repeats).model_dump_json())
    return 0


@contextmanager
def _server(endpoint: str | None) -> Iterator[str]:
    """The server's endpoint; a sink of our own ends with the benchmark."""
    if endpoint is not None:
        yield endpoint
        return
    os.environ.update(
        AWS_ACCESS_KEY_ID="bench",
        AWS_SECRET_ACCESS_KEY="bench",  # noqa: S106 the sink does not look at it
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    command = [sys.executable, "-m", "benchmarks.storage.sink"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None  # noqa: S101 asked for
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
