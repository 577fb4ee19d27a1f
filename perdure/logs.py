"""`perdure logs`: lists, prints and follows the logs of a run.

Logs of attempts that have ended come from the store alone, so the command works on any machine;
those of a living attempt come from its nodes on this machine. Sizes are bytes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.filesize import decimal

from perdure.console import AsJson, RunName, make_console, make_table, print_json, warn
from perdure.log_reading import (
    Key,
    LogFilter,
    LogIndex,
    LogRow,
    all_rows,
    content_of,
    follow_logs,
    living_text,
    newest_matches,
    read_index,
)
from perdure.runs import run_to_observe
from perdure.training.config.job import Job
from perdure.training.errors import InputError
from perdure.training.journal.history import RunHistory
from perdure.training.supervisor.run_handle import RunHandle


def logs(
    run: RunName,
    *,
    attempt: Annotated[
        str | None, typer.Option(metavar="P.A", help="placement and attempt, such as 1.2")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="print the logs of this rank; default: list")
    ] = None,
    node: Annotated[str | None, typer.Option(help="print the output of this node's ranks")] = None,
    file: Annotated[
        str | None,
        typer.Option(help="print the logs of this name, such as coordinator.log or hang.txt"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="print new output until the run ends")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the logs of a run, or print those of a rank.

    Nodes upload their logs to the store at the end of each attempt, with secrets masked. The
    command reads the logs of a living attempt from its nodes, when they run on this machine.
    Without --attempt, it prints the logs of the newest attempt that has any. All ranks of a
    command write into one log for each node.
    """
    observed = run_to_observe(run)
    key, log_filter = _attempt_of(attempt), LogFilter(rank, node, file)
    if rank is not None and observed.job.worker.is_launcher:
        problem = "the ranks of a command share one log on each node: use --node, such as node-0"
        raise InputError("--rank", problem)
    if follow:
        if key is not None or as_json:
            raise InputError("--follow", "cannot be combined with --attempt or --json")
        follow_logs(observed, log_filter)
        return
    history = observed.refresh()
    index = read_index(observed.store, observed.job.run_id)
    rows = [r for r in all_rows(observed, index) if key in (None, (r.placement, r.attempt))]
    if log_filter != LogFilter():
        _print(observed, rows, log_filter)
        return
    missing = list(gaps(index, history, key))
    if as_json:
        print_json({"logs": list(map(asdict, rows)), "gaps": missing})
    else:
        _show(observed.job, rows, missing)


def _print(run: RunHandle, rows: Sequence[LogRow], log_filter: LogFilter) -> None:
    matches, rank = newest_matches(rows, log_filter), log_filter.rank
    if matches:
        _print_logs(run, matches)
    elif rows and log_filter.file is None and rank in range(run.job.engine.world_size):
        # A rank that exists and printed nothing is no mistake of the user's.
        warn(f"rank {rank} left no output in the logs that are kept")
    else:
        raise InputError("logs", f"no such logs; {_names_text(rows)}")


def _names_text(rows: Sequence[LogRow]) -> str:
    """The nodes and ranks that a user can ask for."""
    ranks = sorted({row.rank for row in rows if row.rank is not None})
    nodes = sorted({row.node for row in rows if row.node is not None})
    return f"nodes: {', '.join(nodes) or 'none'}; ranks: {ranks or 'none'}"


def gaps(index: LogIndex, history: RunHistory, key: Key | None) -> Iterator[str]:
    """The logs that are missing from ended attempts, with the reason where it is known."""
    members = {placed.placement: placed.members for placed in history.placements}
    for view in history.attempts:
        if view.ended is None or key not in (None, view.key):
            continue  # nodes collect when their attempt has ended: nothing is missing yet
        name = ".".join(map(str, view.key))
        for member in members.get(view.key[0], ()):
            collected = index.collected.get((view.key, member.node))
            if collected is None:
                yield f"attempt {name}: {member.node} was lost or did not finish uploading its logs"
            else:
                yield from (f"attempt {name}: {member.node}: {p}" for p in collected.problems)


def _attempt_of(text: str | None) -> Key | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise InputError("--attempt", f"{text!r} must name placement and attempt, such as 1.2")
    return int(match[1]), int(match[2])


def _print_logs(run: RunHandle, rows: Sequence[LogRow]) -> None:
    out = sys.stdout.buffer  # bytes: the output of a rank need not be UTF-8
    for row in rows:
        cut = f", without its first {decimal(row.cut_bytes)}" if row.cut_bytes else ""
        name = f"{row.node}/{row.file}" if row.node is not None else row.file
        head = f"==> {name}, attempt {row.placement}.{row.attempt}{cut} <==\n"
        out.write(head.encode())
        if row.is_living:
            out.writelines(text.encode() for text in living_text(run, row))
        else:
            out.write(content_of(run.store, row))
        out.write(b"\n")
    out.flush()


def _show(job: Job, rows: Sequence[LogRow], missing: Sequence[str]) -> None:
    console = make_console()
    if not rows:
        why = "" if job.watch.log_limit_bytes else ": watch.log_limit_bytes is 0"
        console.print(f"{job.run_id}: the store has no logs{why}")
    else:
        table = make_table("attempt", "node", "file", "size", "left out")
        for row in rows:
            cut = decimal(row.cut_bytes) if row.cut_bytes else ""
            attempt = f"{row.placement}.{row.attempt}{' (living)' if row.is_living else ''}"
            table.add_row(attempt, row.node or "all", row.file, decimal(row.size_bytes), cut)
        console.print(table)
    for gap in missing:
        console.print(gap)
