"""`perdure logs`: the logs of a run's attempts that its nodes have put into the store.

Reads the store and the ledger alone, so that it works on any machine. Sizes are bytes.
"""

from __future__ import annotations

import gzip
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.filesize import decimal

from perdure.console import AsJson, RunName, make_console, make_table, print_json, warn
from perdure.runs import named_job, store_of
from storage.objects import ObjectStore
from training.agent.log_collection import COLLECTED_FILE, logs_prefix
from training.errors import InputError
from training.job import Job
from training.journal.history import RunHistory
from training.journal.ledger import Ledger
from training.supervisor.run import HANG_REPORT
from training.wire.agent import Collected

_KEY = re.compile(r"p(\d+)-a(\d+)/(?:([^/]+)/)?([^/].*)")
_RANK = re.compile(r"rank-(\d+)\.")
_OUTPUT = re.compile(r"(?:rank|command)-\d+\.std(?:out|err)\.log")
_PACKED = ".gz"
_PLAIN = (HANG_REPORT,)

Key = tuple[int, int]  # placement and attempt


@dataclass(frozen=True, slots=True)
class LogRow:
    """One log in the store.

    Attributes:
        node: that wrote it, None for what is about all of them.
        file: its name on the node.
        rank: global rank that wrote it, None when no rank did.
        size_bytes: compressed.
        cut_bytes: left out at its beginning; None while that is not known.
    """

    placement: int
    attempt: int
    node: str | None
    file: str
    rank: int | None
    size_bytes: int
    cut_bytes: int | None
    key: str


@dataclass(frozen=True, slots=True)
class LogIndex:
    """The logs of a run in its store.

    Attributes:
        rows: by attempt, node and file.
        collected: what each node wrote when it had put all its logs there.
    """

    rows: Sequence[LogRow]
    collected: dict[tuple[Key, str], Collected]


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
    as_json: AsJson = False,
) -> None:
    """List the logs of a run that are in its store, or print those of a rank.

    Nodes put them there at the end of each attempt, with secrets masked. Without --attempt, the
    logs of the newest attempt that has any are printed. All ranks of a command write into one log
    for each node.
    """
    job = named_job(run)
    store = store_of(job)
    wanted = _attempt_of(attempt)
    if rank is not None and job.worker.is_command:
        raise InputError(
            "--rank", "the ranks of a command have one log for each node: --node, such as node-0"
        )
    index = _read_index(store, job.run_id)
    rows = [row for row in index.rows if wanted in (None, (row.placement, row.attempt))]
    if rank is not None or file is not None or node is not None:
        chosen = _chosen(rows, Wanted(rank, node, file))
        if chosen:
            _print_logs(store, chosen)
        elif rows and file is None and rank in range(job.engine.world_size):
            # A rank that exists and printed nothing is no mistake of the user's.
            warn(f"rank {rank} wrote nothing that is kept")
        else:
            raise InputError("logs", f"no such logs in the store; {_known(rows)}")
        return
    history = Ledger(store, job.run_id).read()
    gaps = list(_gaps(index, history, wanted))
    if as_json:
        print_json({"logs": list(map(asdict, rows)), "gaps": gaps})
    else:
        _show(job, rows, gaps)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which logs are to be printed; None: whatever it is."""

    rank: int | None = None
    node: str | None = None
    file: str | None = None

    def takes(self, row: LogRow) -> bool:
        """Whether a log is one of them; of a node, without a name, what its ranks wrote."""
        if self.rank is None and self.file is None and not _OUTPUT.match(row.file):
            return False
        return (
            self.rank in (None, row.rank)
            and self.node in (None, row.node)
            and self.file in (None, row.file)
        )


def _known(rows: Sequence[LogRow]) -> str:
    """What could have been named."""
    ranks = sorted({row.rank for row in rows if row.rank is not None})
    nodes = sorted({row.node for row in rows if row.node is not None})
    return f"nodes: {', '.join(nodes) or 'none'}; ranks: {ranks or 'none'}"


def _read_index(store: ObjectStore, run_id: str) -> LogIndex:
    found: list[tuple[Key, str, str, str, int]] = []
    collected: dict[tuple[Key, str], Collected] = {}
    prefix = logs_prefix(run_id)
    for info in store.list(prefix):
        match = _KEY.fullmatch(info.key.removeprefix(prefix))
        if match is None:
            continue  # not Perdure's
        key, node, name = (int(match[1]), int(match[2])), match[3] or "", match[4]
        if name == COLLECTED_FILE:
            collected[(key, node)] = _collected(store, info.key)
        elif name.endswith(_PACKED) or name in _PLAIN:
            found.append((key, node, name.removesuffix(_PACKED), info.key, info.size_bytes))
    cuts = {file.key: file.cut_bytes for one in collected.values() for file in one.files}
    rows = [
        LogRow(*key, node or None, name, _rank_of(name), size, cuts.get(object_key), object_key)
        for key, node, name, object_key, size in sorted(found)
    ]
    return LogIndex(rows, collected)


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


def _collected(store: ObjectStore, key: str) -> Collected:
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


def _chosen(rows: Sequence[LogRow], wanted: Wanted) -> list[LogRow]:
    """The rows that are wanted, of the newest attempt that has any."""
    fit = [row for row in rows if wanted.takes(row)]
    newest = max(((row.placement, row.attempt) for row in fit), default=None)
    return [row for row in fit if (row.placement, row.attempt) == newest]


def _print_logs(store: ObjectStore, rows: Sequence[LogRow]) -> None:
    out = sys.stdout.buffer  # bytes: what a rank prints need not be UTF-8
    for row in rows:
        cut = f", without its first {decimal(row.cut_bytes)}" if row.cut_bytes else ""
        name = f"{row.node}/{row.file}" if row.node is not None else row.file
        head = f"==> {name}, attempt {row.placement}.{row.attempt}{cut} <==\n"
        out.write(head.encode())
        content = store.get(row.key)
        if row.key.endswith(_PACKED):
            with gzip.open(BytesIO(content)) as text:
                shutil.copyfileobj(text, out)
        else:
            out.write(content)
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
            attempt = f"{row.placement}.{row.attempt}"
            table.add_row(attempt, row.node or "all", row.file, decimal(row.size_bytes), cut)
        console.print(table)
    for gap in gaps:
        console.print(gap)
