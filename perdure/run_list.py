"""`perdure status` without a name: the runs that were started on this machine.

Times are seconds since the epoch, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from perdure.console import make_console, make_table, print_json
from perdure.monitor import RunMonitor
from perdure.runs import run_to_observe
from perdure.storage.errors import StorageError
from perdure.training.errors import PerdureError
from perdure.training.files import home_folder
from perdure.training.reporting.ettr import duration_text
from perdure.training.supervisor.job_registry import known_runs

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run in few words.

    Attributes:
        state: None when it cannot be read.
        step: None when it is not known.
        target_step: None of a command.
        supervised: whether a process supervises it now.
        updated_s: of the newest record in its ledger; None: there is none.
        problem: why it cannot be read.
    """

    run_id: str
    state: str | None = None
    step: int | None = None
    target_step: int | None = None
    attempts: int = 0
    supervised: bool = False
    updated_s: float | None = None
    problem: str = ""


def list_runs(*, as_json: bool) -> None:
    """Print the runs, the one that changed last first."""
    home = home_folder()
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        rows = list(pool.map(_row, known_runs(home)))
    rows.sort(key=lambda row: (row.updated_s is None, -(row.updated_s or 0.0)))
    if as_json:
        print_json({"runs": [asdict(row) for row in rows]})
    else:
        _show(rows, home)


def _row(run_id: str) -> RunRow:
    try:
        status = RunMonitor(run_to_observe(run_id)).status()
    except (StorageError, PerdureError) as error:
        return RunRow(run_id, problem=" ".join(str(error).split()))
    document, history = status.document, status.history
    return RunRow(
        run_id,
        document["state"],
        document["step"],
        document["target_step"],
        len(history.attempts),
        document["supervised"],
        history.updated_s if history.job is not None else None,
    )


def _show(rows: Sequence[RunRow], home: Path) -> None:
    console = make_console()
    if not rows:
        console.print(f"no run was started on this machine (PERDURE_HOME is {home})")
        return
    table = make_table("run", "state", "step", "target", "attempts", "last record", "note")
    now_s = time.time()
    for row in rows:
        ago = f"{duration_text(now_s - row.updated_s)} ago" if row.updated_s is not None else ""
        is_alone = row.state in ("running", "paused") and not row.supervised
        table.add_row(
            row.run_id,
            row.state or "not known",
            str(row.step) if row.step is not None else "not known",
            str(row.target_step) if row.target_step is not None else "",
            str(row.attempts),
            ago,
            row.problem or ("no process supervises it" if is_alone else ""),
        )
    console.print(table)
