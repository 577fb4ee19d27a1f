"""`perdure logs`: the logs of a run, from its store and from the nodes of the attempt that lives.

Of attempts that have ended it reads the store and the ledger alone, so that it works on any
machine. Sizes are bytes.
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
from perdure.log_following import follow_logs
from perdure.log_index import (
    Key,
    LogIndex,
    LogRow,
    Wanted,
    chosen,
    content_of,
    living_rows,
    living_text,
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
    node: Annotated[
        str | None, typer.Option(help="print what the ranks of this node wrote")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(help="print the logs of this name, such as coordinator.log or hang.txt"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="print what is written from now on")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the logs of a run, or print those of a rank.

    Nodes put them into the store at the end of each attempt, with secrets masked. Those of the
    attempt that lives are read from its nodes, when they run on this machine. Without --attempt,
    the logs of the newest attempt that has any are printed. All ranks of a command write into one
    log for each node.
    """
    observed = run_to_observe(run)
    key, wanted = _attempt_of(attempt), Wanted(rank, node, file)
    _check(observed.job, wanted)
    if follow:
        if key is not None or as_json:
            raise InputError("--follow", "goes neither with --attempt nor with --json")
        follow_logs(observed, wanted)
        return
    history = observed.refresh()
    index = read_index(observed.store, observed.job.run_id)
    known = {(row.placement, row.attempt, row.node, row.file) for row in index.rows}
    living = [
        row
        for row in living_rows(observed)
        if (row.placement, row.attempt, row.node, row.file) not in known
    ]
    rows = [r for r in (*index.rows, *living) if key in (None, (r.placement, r.attempt))]
    if wanted != Wanted():
        _print(observed, rows, wanted)
        return
    gaps = list(_gaps(index, history, key))
    if as_json:
        print_json({"logs": list(map(asdict, rows)), "gaps": gaps})
    else:
        _show(observed.job, rows, gaps)


def _check(job: Job, wanted: Wanted) -> None:
    if wanted.rank is not None and job.worker.is_launcher:
        raise InputError(
            "--rank", "the ranks of a command have one log for each node: --node, such as node-0"
        )


def _print(run: RunHandle, rows: Sequence[LogRow], wanted: Wanted) -> None:
    found = chosen(rows, wanted)
    if found:
        _print_logs(run, found)
    elif rows and wanted.file is None and wanted.rank in range(run.job.engine.world_size):
        # A rank that exists and printed nothing is no mistake of the user's.
        warn(f"rank {wanted.rank} wrote nothing that is kept")
    else:
        raise InputError("logs", f"no such logs; {_known(rows)}")


def _known(rows: Sequence[LogRow]) -> str:
    """What could have been named."""
    ranks = sorted({row.rank for row in rows if row.rank is not None})
    nodes = sorted({row.node for row in rows if row.node is not None})
    return f"nodes: {', '.join(nodes) or 'none'}; ranks: {ranks or 'none'}"


def _gaps(index: LogIndex, history: RunHistory, wanted: Key | None) -> Iterator[str]:
    """What is missing of the attempts that have ended, and why, as far as that is known."""
    members = {placed.placement: placed.members for placed in history.placements}
    for view in history.attempts:
        if view.ended is None or wanted not in (None, view.key):
            continue  # nodes collect when their attempt has ended: nothing is missing yet
        name = ".".join(map(str, view.key))
        for member in members.get(view.key[0], ()):
            collected = index.collected.get((view.key, member.node))
            if collected is None:
                yield f"attempt {name}: {member.node} was lost or did not finish collecting"
            else:
                yield from (f"attempt {name}: {member.node}: {p}" for p in collected.problems)


def _attempt_of(text: str | None) -> Key | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise InputError("--attempt", f"{text!r} is no placement and attempt, such as 1.2")
    return int(match[1]), int(match[2])


def _print_logs(run: RunHandle, rows: Sequence[LogRow]) -> None:
    out = sys.stdout.buffer  # bytes: what a rank prints need not be UTF-8
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


def _show(job: Job, rows: Sequence[LogRow], gaps: Sequence[str]) -> None:
    console = make_console()
    if not rows:
        why = "" if job.watch.log_limit_bytes else ": watch.log_limit_bytes is 0"
        console.print(f"{job.run_id}: no logs in the store{why}")
    else:
        table = make_table("attempt", "node", "file", "size", "left out")
        for row in rows:
            cut = decimal(row.cut_bytes) if row.cut_bytes else ""
            attempt = f"{row.placement}.{row.attempt}{' (living)' if row.is_living else ''}"
            table.add_row(attempt, row.node or "all", row.file, decimal(row.size_bytes), cut)
        console.print(table)
    for gap in gaps:
        console.print(gap)
