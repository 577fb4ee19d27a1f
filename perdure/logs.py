"""`perdure logs`: what the nodes have put into the store of their attempts' logs.

Reads the store and the ledger alone, so that it also works where nothing of the run is. Sizes
are bytes.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.filesize import decimal
from rich.table import Table

from perdure.runs import make_console, named_run
from storage.objects import ObjectStore
from training.agent.log_collection import COLLECTED_FILE, logs_prefix
from training.errors import InputError
from training.job import Job
from training.journal.history import RunHistory
from training.journal.ledger import Ledger
from training.wire.agent import Collected

_KEY = re.compile(r"p(\d+)-a(\d+)/([^/]+)/(.+)")
_RANK = re.compile(r"rank-(\d+)\.")
_PACKED = ".gz"

Key = tuple[int, int]  # placement and attempt
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="run_id of a run that is known on this machine, or a job file",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class LogRow:
    """One log in the store.

    Attributes:
        file: its name on the node.
        rank: global rank whose it is, None when it is no rank's.
        size_bytes: compressed.
        cut_bytes: of the log that are left out before it; None while that is not known.
    """

    placement: int
    attempt: int
    node: str
    file: str
    rank: int | None
    size_bytes: int
    cut_bytes: int | None
    key: str


@dataclass(frozen=True, slots=True)
class Shelf:
    """The logs of a run.

    Attributes:
        rows: by attempt, node and file.
        indexes: what nodes told when they had put everything there.
    """

    rows: Sequence[LogRow]
    indexes: dict[tuple[Key, str], Collected]


def logs(
    run: RunName,
    *,
    attempt: Annotated[
        str | None, typer.Option(metavar="P.A", help="placement and attempt, such as 1.2")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, help="print the logs of this rank; default: list")
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="print the logs of this name, such as coordinator.log")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="list for scripts")] = False,
) -> None:
    """List the logs of a run that are in its store, or print those of a rank.

    Nodes put them there at the end of each attempt, secrets masked. Printed are those of the
    newest attempt that has any, unless --attempt names one.
    """
    job, store = named_run(run)
    wanted = _attempt_of(attempt)
    shelf = read_shelf(store, job.run_id)
    rows = [row for row in shelf.rows if wanted in (None, (row.placement, row.attempt))]
    if rank is not None or file is not None:
        chosen = _chosen(rows, rank=rank, file=file)
        if chosen:
            _print_logs(store, chosen)
        elif rows and file is None and rank in range(job.engine.world_size):
            print(f"perdure: rank {rank} wrote nothing that is kept", file=sys.stderr)
        else:
            ranks = sorted({row.rank for row in rows if row.rank is not None})
            told = f"there are none of these in the store; ranks: {ranks or 'none'}"
            raise InputError("logs", told)
        return
    history = Ledger(store, job.run_id).read()
    gaps = list(gaps_of(shelf, history, wanted))
    if as_json:
        print(json.dumps({"logs": list(map(asdict, rows)), "gaps": gaps}, indent=1))
    else:
        _show(job, rows, gaps)


def read_shelf(store: ObjectStore, run_id: str) -> Shelf:
    """What there is in the store."""
    found: list[tuple[Key, str, str, str, int]] = []
    indexes: dict[tuple[Key, str], Collected] = {}
    prefix = logs_prefix(run_id)
    for info in store.list(prefix):
        match = _KEY.fullmatch(info.key.removeprefix(prefix))
        if match is None:
            continue  # somebody else's
        key, node, name = (int(match[1]), int(match[2])), match[3], match[4]
        if name == COLLECTED_FILE:
            indexes[(key, node)] = _index(store, info.key)
        elif name.endswith(_PACKED):
            found.append((key, node, name.removesuffix(_PACKED), info.key, info.size_bytes))
    cuts = {file.key: file.cut_bytes for index in indexes.values() for file in index.files}
    rows = [
        LogRow(*key, node, name, _rank_of(name), size, cuts.get(object_key), object_key)
        for key, node, name, object_key, size in sorted(found)
    ]
    return Shelf(rows, indexes)


def gaps_of(shelf: Shelf, history: RunHistory, wanted: Key | None = None) -> Iterator[str]:
    """What is missing of the attempts that have ended, and why, as far as that is known."""
    members = {placed.placement: placed.members for placed in history.placements}
    for view in history.attempts:
        if view.ended is None or wanted not in (None, view.key):
            continue
        name = ".".join(map(str, view.key))
        for member in members.get(view.key[0], ()):
            index = shelf.indexes.get((view.key, member.node))
            if index is None:
                yield f"attempt {name}: {member.node} was lost or did not come to its end with it"
            else:
                yield from (f"attempt {name}: {member.node}: {p}" for p in index.problems)


def _index(store: ObjectStore, key: str) -> Collected:
    try:
        return Collected.model_validate_json(store.get(key))
    except ValidationError as error:
        raise InputError(key, f"is damaged: {error.error_count()} problems") from error


def _rank_of(name: str) -> int | None:
    match = _RANK.match(name)
    return int(match[1]) if match is not None else None


def _attempt_of(text: str | None) -> Key | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None:
        raise InputError("--attempt", f"{text!r} is no placement and attempt, such as 1.2")
    return int(match[1]), int(match[2])


def _chosen(rows: Sequence[LogRow], *, rank: int | None, file: str | None) -> list[LogRow]:
    """The rows of a rank or file, of the newest attempt that has any."""
    fit = [row for row in rows if rank in (None, row.rank) and file in (None, row.file)]
    newest = max(((row.placement, row.attempt) for row in fit), default=None)
    return [row for row in fit if (row.placement, row.attempt) == newest]


def _print_logs(store: ObjectStore, rows: Sequence[LogRow]) -> None:
    out = sys.stdout.buffer
    for row in rows:
        cut = f", without its first {decimal(row.cut_bytes)}" if row.cut_bytes else ""
        head = f"==> {row.node}/{row.file}, attempt {row.placement}.{row.attempt}{cut} <==\n"
        out.write(head.encode())
        with gzip.open(BytesIO(store.get(row.key))) as text:
            shutil.copyfileobj(text, out)
        out.write(b"\n")
    out.flush()


def _show(job: Job, rows: Sequence[LogRow], gaps: Sequence[str]) -> None:
    console = make_console()
    said: dict[str, Any] = {"markup": False, "highlight": False}
    if not rows:
        limit = job.watch.log_limit_bytes
        why = "" if limit else ": watch.log_limit_bytes is 0"
        console.print(f"{job.run_id}: no logs in the store{why}", **said)
    else:
        table = Table(header_style="bold")
        for name in ("attempt", "node", "file", "size", "left out"):
            table.add_column(name, overflow="fold")
        for row in rows:
            cut = decimal(row.cut_bytes) if row.cut_bytes else ""
            where = f"{row.placement}.{row.attempt}"
            table.add_row(where, row.node, row.file, decimal(row.size_bytes), cut)
        console.print(table)
    for gap in gaps:
        console.print(gap, **said)
