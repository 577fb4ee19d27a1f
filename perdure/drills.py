"""`perdure drill`: faults made on purpose on this machine, and what became of them.

Times are seconds.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from training.drill.drilling import Drilling, chosen, parallel_kind
from training.drill.verdict import Outcome
from training.errors import InputError

_COLUMNS = (
    "drill",
    "injected",
    "detected s",
    "rung",
    "recovered s",
    "steps lost",
    "curve equal",
    "left over",
    "as expected",
)


def run_drills(
    name: str, *, parallelism: str, home: Path | None, as_json: bool, console: Console
) -> bool:
    """Run the drills of a name and print what came of them. Whether all was as expected.

    Raises:
        InputError: no such drill or parallelism, or the folder cannot be used.
    """
    drills, kind = chosen(name), parallel_kind(parallelism)
    folder = _make_folder(home)
    drilling = Drilling(folder, kind)
    outcomes = []
    progress = Console(stderr=True)
    with progress.status("the same job without a fault") as status:
        drilling.undisturbed()
        for number, drill in enumerate(drills, start=1):
            status.update(f"{drill.name} ({number} of {len(drills)})")
            outcomes.append(drilling.run(drill))
    is_fine = all(outcome.as_expected for outcome in outcomes)
    if as_json:
        print(json.dumps([_document(outcome) for outcome in outcomes], indent=1))  # noqa: T201 for scripts
    else:
        _show(console, outcomes)
    if is_fine and home is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"perdure: logs and ledgers of the drills: {folder}", file=sys.stderr)  # noqa: T201 a command line prints
    return is_fine


def _make_folder(home: Path | None) -> Path:
    """A folder of its own, so that no run of an earlier drill has the name of one of these."""
    try:
        if home is not None:
            home.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="perdure-drill-", dir=home)).resolve()
    except OSError as error:
        raise InputError("--home", f"{str(home)!r}: {error.strerror}") from error


def _document(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "as_expected": outcome.as_expected}


def _show(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table(header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for one in outcomes:
        table.add_row(
            one.name,
            one.injected,
            _seconds(one.detected_s),
            " ".join(one.rungs) or "-",
            _seconds(one.recovered_s),
            str(one.steps_lost),
            _curve(one),
            str(one.left_over),
            "yes" if one.as_expected else "NO",
        )
    console.print(table)
    for one in outcomes:
        for problem in one.problems:
            console.print(f"{one.name}: {problem}", markup=False, highlight=False, soft_wrap=True)


def _curve(outcome: Outcome) -> str:
    if not outcome.curve_equal:
        return "no"
    return "yes" if outcome.differs_from is None else f"up to step {outcome.differs_from - 1}"


def _seconds(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"
