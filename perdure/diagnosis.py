"""`perdure diagnose`: diagnoses a failure from any logs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from perdure.console import EXIT_INPUT, AsJson, make_console, print_json, warn
from perdure.training.diagnosis.explanation import ExplainedFinding, explain_choice
from perdure.training.diagnosis.sources import (
    STANDARD_INPUT,
    PathDiagnosis,
    diagnose_files,
    list_logs,
    read_context,
)
from perdure.training.errors import InputError
from perdure.training.recovery.fault_names import name_fault
from perdure.training.recovery.faults import Fault
from perdure.training.recovery.ladder import decide
from perdure.training.recovery.rungs import Decision, Policy, Rung
from perdure.training.reporting.markdown import plain

CONTEXT_LINES = 3
LINE_WIDTH = 400
NOTHING = "No failure was found"


def diagnose(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help='log, folder of logs, or "-"')
    ],
    *,
    as_json: AsJson = False,
    is_explained: Annotated[
        bool, typer.Option("--explain", help="show every finding and why the cause won")
    ] = False,
    each: Annotated[
        bool, typer.Option("--each", help="diagnose every file of a folder by itself")
    ] = False,
) -> None:
    """Diagnose a failure from any logs; a folder holds the logs of one attempt's ranks."""
    objects, is_whole = [], True
    console = make_console()
    for case in _cases(paths, each=each):
        is_whole = is_whole and bool(case.readings)
        for line in case.unreadable:
            warn(f"cannot read {line}")
        if as_json:
            findings = {"findings": list(map(asdict, _explain(case)))} if is_explained else {}
            objects.append(_object(case) | findings)
        else:
            _show(console, case)
            if is_explained:
                console.print(_list_findings(case))
    if as_json:
        print_json(objects)
    if not is_whole:
        raise typer.Exit(EXIT_INPUT)


def _cases(paths: Sequence[str], *, each: bool) -> Iterator[PathDiagnosis]:
    """Diagnose the paths in their order; a path that cannot be read becomes a case that says so."""
    if paths.count(STANDARD_INPUT) > 1:
        raise InputError("PATH", "'-' (standard input) can be read only once")
    # All paths first, so that a mistyped one is refused before a long log has been read.
    path_files = [(path, list_logs(Path(path))) for path in paths]
    now_s = time.time()
    year = datetime.fromtimestamp(now_s, UTC).year
    for path, files in path_files:
        groups = [(str(file), [file]) for file in files] if each else [(path, files)]
        for name, group in groups:
            try:
                yield diagnose_files(name, group, at_s=now_s, year=year)
            except InputError as error:  # must not cost the others their diagnosis
                yield PathDiagnosis(name, None, (), [str(error)])


def _object(case: PathDiagnosis) -> dict[str, Any]:
    if case.diagnosis is None:
        # The same keys as with a diagnosis: scripts index them without asking.
        return {
            "path": case.path,
            "fault_class": None,
            "key_line": None,
            **dict.fromkeys(("file", "node", "rank", "device", "code", "name", "name_zh", "title")),
            "user_fault": False,
            "hardware_fault": False,
            "recoverable_by": None,
            "confidence": None,
            "explanation": _nothing(case),
            "action": "",
            "rung": None,
            "runners_up": [],
        }
    fault = case.diagnosis.fault
    name = name_fault(fault)
    return {
        "path": case.path,
        **_key_line(fault),
        "file": case.diagnosis.source,
        "node": fault.node,
        "rank": fault.rank,
        "device": fault.device,
        "code": fault.code,
        "name": name.english,
        "name_zh": name.chinese,
        "title": name.title,
        "user_fault": fault.user_fault,
        "hardware_fault": fault.hardware_fault,
        "recoverable_by": fault.recoverable_by,
        "confidence": fault.confidence,
        "explanation": fault.explanation,
        "action": fault.action,
        "rung": _first_decision(fault).rung,
        "runners_up": [_key_line(other) for other in case.diagnosis.runners_up],
    }


def _key_line(fault: Fault) -> dict[str, Any]:
    return {"fault_class": fault.fault_class, "key_line": fault.evidence}


def _nothing(case: PathDiagnosis) -> str:
    if not case.readings:
        return f"The logs could not be read: {'; '.join(case.unreadable)}."
    size_bytes = sum(reading.size_bytes for reading in case.readings)
    files = f"{len(case.readings)} files, " if len(case.readings) > 1 else ""
    garbled = [r.source.name for r in case.readings if not r.is_text]
    more = f"; {', '.join(garbled[:3])} is not text" if garbled else ""
    return f"{NOTHING} ({files}{size_bytes} bytes read{more})."


def _first_decision(fault: Fault) -> Decision:
    """The ladder's decision for a first fault when every rung is supported."""
    return decide(fault, now_s=fault.at_s, history=(), supported=frozenset(Rung), policy=Policy())


def _show(console: Console, case: PathDiagnosis) -> None:
    if case.diagnosis is None:
        console.print(f"{case.path}: {_nothing(case)}")
        return
    fault = case.diagnosis.fault
    is_located = fault.node is not None or fault.rank is not None
    title = f"{fault.fault_class} at {fault.where}" if is_located else str(fault.fault_class)
    body: list[RenderableType] = [*_context(case), Text(), _facts(fault)]
    if case.diagnosis.runners_up:
        body += [Text(), Text("Less likely:", style="dim")]
        body += [
            Text(f"  {other.fault_class}: {other.evidence[:160]}", style="dim")
            for other in case.diagnosis.runners_up
        ]
    panel = Panel(
        Group(*body),
        title=Text(title, style="bold red"),
        subtitle=Text(_label(case), style="dim"),
        title_align="left",
        subtitle_align="right",
    )
    console.print(panel)


def _explain(case: PathDiagnosis) -> list[ExplainedFinding]:
    return explain_choice([reading.source for reading in case.readings], case.diagnosis)


def _list_findings(case: PathDiagnosis) -> Table:
    """List every finding, what became of it, and by what it is explained."""
    table = Table("file", "role", "class", "rule", "line", "what became of it", expand=True)
    for row in _explain(case):
        line = plain(row.line[:LINE_WIDTH])
        by = f" <- {plain(row.explained_by[:80])}" if row.explained_by else ""
        cells = (row.source, row.role, row.fault_class, row.rule, line, f"{row.verdict}{by}")
        table.add_row(*map(Text, cells))
    return table


def _label(case: PathDiagnosis) -> str:
    source = case.diagnosis.source if case.diagnosis is not None else None
    name = Path(case.path).name
    return case.path if source in {None, name} else f"{case.path}: {source}"


def _context(case: PathDiagnosis) -> Iterator[Text]:
    assert case.diagnosis is not None  # noqa: S101 checked by the caller
    line = case.diagnosis.fault.evidence
    around = [line]  # all there is of standard input, which cannot be read twice
    if case.path != STANDARD_INPUT and case.diagnosis.source is not None:
        base = Path(case.path)
        file = base if base.is_file() else base / case.diagnosis.source
        around = (
            read_context(file, line, radius=CONTEXT_LINES, near=case.diagnosis.offset) or around
        )
    for text in around:
        is_key = text.strip() == line.strip()
        shown = text.strip("\r\n")[:LINE_WIDTH]
        yield Text(f"{'>' if is_key else ' '} {shown}", style="bold" if is_key else "dim")


def _facts(fault: Fault) -> Table:
    decision = _first_decision(fault)
    blame = [
        word
        for word, holds in (("the program", fault.user_fault), ("hardware", fault.hardware_fault))
        if holds
    ]
    rows = [
        ("known as", name_fault(fault).text),
        ("what it means", fault.explanation),
        ("code", fault.code or ""),
        ("device", "" if fault.device is None else str(fault.device)),
        ("cause lies in", " and ".join(blame)),
        ("recovered by", str(fault.recoverable_by)),
        ("how sure", "" if fault.confidence is None else f"{fault.confidence:.0%}"),
        ("Perdure would", f"{decision.rung}: {decision.reason}"),
        ("you should", fault.action),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        if value:
            table.add_row(name, Text(plain(value)))
    return table
