"""`perdure status`: the state of a run, or a list of all runs, on a terminal and for scripts.

The command changes nothing, so another process may supervise the run meanwhile, or none. Times
are seconds since the epoch, durations seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.console import (
    WIDTH,
    AsJson,
    RunName,
    account_bar,
    account_table,
    attempts_view,
    make_console,
    make_table,
    print_json,
    sparkline,
)
from perdure.monitor import RunMonitor, RunSnapshot
from perdure.norms import show_norms
from perdure.run_status import (
    HeldCheckpoints,
    NodeStatus,
    RankFacts,
    RecentFault,
    RunState,
    RunStatus,
)
from perdure.runs import run_to_observe
from perdure.storage.errors import StorageError
from perdure.training.errors import InputError, PerdureError
from perdure.training.files import home_folder
from perdure.training.journal.waits import WaitKind
from perdure.training.reporting.ettr import duration_text, ettr_text
from perdure.training.reporting.markdown import clock_text
from perdure.training.reporting.rows import OPEN, AlertRow, losses_of_steps, story_rows
from perdure.training.reporting.summary import abnormal_steps
from perdure.training.supervisor.job_registry import known_runs
from perdure.training.supervisor.store_outage import read_outage

LINES = ("run_id", "state", "step", "committed_step", "target_step", "ettr", "isolated")
NOT_KNOWN = "not known"
MAYBE_KNOWN = ("step", "committed_step", "target_step", "ettr")  # a command may not show them
REFRESH_S = 2.0
UNWRITABLE = "its ledger cannot be written"
_NUM_READERS = 8  # runs of the list that are read at the same time
_MAX_RANKS = 8  # of a node by name; more of them are shown as a range
_NUM_ATTEMPTS = 12
_COLOURS = {
    RunState.COMPLETED: "green",
    RunState.RUNNING: "green",
    RunState.PAUSED: "cyan",
    RunState.FAILED: "red",
}


def status(
    run: RunName = "",
    *,
    once: Annotated[bool, typer.Option("--once", help="print it once, also on a terminal")] = False,
    norms: Annotated[
        bool,
        typer.Option(
            "--norms", help="propose a threshold of the gradient norm from the run's own norms"
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run, also when no process supervises it; without RUN, list all runs.

    The command reads the run's ledger and its store, and asks its node agents when they run on
    this machine. On a terminal it refreshes the view until the run ends or you press Ctrl-C.
    """
    if not run:
        if norms:
            raise InputError("RUN", "--norms needs the name of a run")
        _list_runs(as_json=as_json)
        return
    if norms:
        show_norms(run_to_observe(run), as_json=as_json)
        return
    observed = run_to_observe(run, is_brief=True)
    try:
        _show(RunMonitor(observed), once=once, as_json=as_json)
    except StorageError as error:
        outage, run_id = read_outage(observed.home, observed.job.run_id), observed.job.run_id
        if outage is None:
            raise
        if as_json:
            document = {"run_id": run_id, "state": None, "waits": outage.wait.model_dump()}
            print_json({**document, "ledger_unwritable": outage.model_dump()})
        text = f"{run_id}: {UNWRITABLE} since {outage.since}: {error}; {outage.wait.text}"
        raise PerdureError(text) from error


def _show(monitor: RunMonitor, *, once: bool, as_json: bool) -> None:
    if as_json:
        print_json(monitor.snapshot().status.document)
        return
    console = make_console()
    if not console.is_terminal:
        console.print(plain_status(monitor.snapshot(), console.width))
    elif once:
        console.print(status_panel(monitor.snapshot(), console.width))
    else:
        _watch(console, monitor)


def _watch(console: Console, monitor: RunMonitor) -> None:
    """Show the state until the run ends or the user presses Ctrl-C."""
    snapshot = monitor.snapshot()
    # The live view cuts off what is too high for the terminal; the last view is whole.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while snapshot.history.ended is None:
                live.update(status_panel(snapshot, console.width), refresh=True)
                time.sleep(REFRESH_S)
                snapshot = monitor.snapshot()
        except KeyboardInterrupt:
            pass
    console.print(status_panel(snapshot, console.width))


def status_panel(snapshot: RunSnapshot, width: int) -> RenderableType:
    """The whole state in a frame, for a terminal."""
    status = snapshot.status
    colour = _COLOURS.get(status.state, "yellow")
    rows: list[RenderableType] = [Text(_headline(status), style=f"bold {colour}")]
    if status.target_step is not None and status.step is not None:
        bar = Table.grid()  # a bar alone would not end its line
        bar.add_row(ProgressBar(total=status.target_step, completed=status.step, width=WIDTH))
        rows.append(bar)
    losses = list(losses_of_steps(snapshot.records).values())
    if losses:
        line = f"loss {sparkline(losses, WIDTH)} {losses[-1]:.4f}"
        rows.append(Text(line, style="cyan"))
    if snapshot.account.intervals:
        rows.append(Text(ettr_text(snapshot.account)))
    rows += [Text(line) for line in _notices(snapshot)]
    rows += _details(snapshot, width - 4)
    return Panel(Group(*rows), title=f"perdure: {status.run_id}", border_style=colour)


def plain_status(snapshot: RunSnapshot, width: int) -> RenderableType:
    """The whole state line by line, for a pipe."""
    status = snapshot.status
    texts = [*(f"{name}: {_field_text(status, name)}" for name in LINES), *_notices(snapshot)]
    lines = [Text(line) for line in (*texts, _headline(status))]
    fault = status.document["fault"]
    fault_lines = list(_fault_text(fault)) if fault is not None else []
    return Group(*lines, *_details(snapshot, width), *fault_lines)


def _fault_text(fault: Mapping[str, Any]) -> Iterator[Text]:
    """Every fact about a fault, with its time as a clock shows it."""
    yield Text("newest fault:")
    for name, value in fault.items():
        is_time = name == "at_s"
        text = f"at: {clock_text(value)} UTC" if is_time else f"{name}: {value}"
        yield Text(f"    {text}")


def _field_text(status: RunStatus, name: str) -> str:
    """One field for people; marks the state as stale while the ledger cannot be written."""
    if name == "state" and status.ledger_unwritable is not None:
        return f"{status.state}, but {UNWRITABLE}"
    value = getattr(status, name)
    if isinstance(value, tuple):
        return str(list(value))
    return NOT_KNOWN if value is None and name in MAYBE_KNOWN else str(value)


def _headline(status: RunStatus) -> str:
    """State, step, speed and remaining time, in a line."""
    target = f" / {status.target_step}" if status.target_step is not None else ""
    is_waiting = status.waits is not None and status.waits.kind is not WaitKind.RESUME
    waits = [status.waits.text] if status.waits is not None and is_waiting else []
    parts = [_field_text(status, "state"), *waits, f"step {_field_text(status, 'step')}{target}"]
    is_running = status.state is RunState.RUNNING
    if status.tokens_per_s and is_running:
        parts.append(f"{status.tokens_per_s:,.0f} tokens/s")
    if status.eta_s is not None:
        parts.append(f"{duration_text(status.eta_s)} left")
    if status.last_step_age_s is not None and is_running:
        parts.append(f"last step {duration_text(status.last_step_age_s)} ago")
    return ", ".join(parts)


def _details(snapshot: RunSnapshot, width: int) -> list[RenderableType]:
    status, history = snapshot.status, snapshot.history
    rows: list[RenderableType] = []
    rows += _alert_lines(status.alerts)
    if status.nodes:
        rows += [Text("Nodes", style="bold"), *_node_lines(status.nodes)]
    if status.faults:
        rows += [Text("Newest faults", style="bold"), *_fault_lines(status.faults)]
    if not history.is_command or "program" in status.checkpoints:
        rows += [Text("Checkpoints", style="bold"), Text(_checkpoint_line(status.checkpoints))]
    if history.attempts:
        rows += ["", attempts_view(story_rows(history)[-_NUM_ATTEMPTS:], width)]
    if snapshot.account.intervals:
        rows += [Text("Where the time went", style="bold")]
        rows += [account_bar(snapshot.account), account_table(snapshot.account)]
    return rows


def _alert_lines(alerts: Sequence[AlertRow]) -> Iterator[RenderableType]:
    """The open alerts, and the number of past ones."""
    open_alerts = [alert for alert in alerts if alert.state == OPEN]
    for alert in open_alerts:
        where = f" ({alert.where})" if alert.where else ""
        text = f"ALERT {alert.point}: {alert.what}{where}, since {alert.since} UTC"
        yield Text(text, style="bold red")
    if len(alerts) > len(open_alerts):
        yield Text(f"{len(alerts) - len(open_alerts)} past alerts", style="dim")


def _node_lines(nodes: Sequence[NodeStatus]) -> Iterator[Text]:
    for node in nodes:
        if node.state is None:
            health = node.health or "not reachable from this machine"
            yield Text(f"  {node.node}: {health}", style="dim")
            continue
        ranks = _ranks_text(node.ranks)
        ranks += f"; step {node.shown_step} by its output" if node.shown_step is not None else ""
        text = f"  {node.node}: {node.state}, {node.health}{ranks}"
        yield Text(text, style="" if node.health == "ok" else "bold red")


def _ranks_text(ranks: Sequence[RankFacts]) -> str:
    if not ranks:
        return ""
    if len(ranks) > _MAX_RANKS:
        steps = [rank.step for rank in ranks if rank.step is not None]
        span = f" at steps {min(steps)} to {max(steps)}" if steps else ""
        return f"; ranks {ranks[0].rank} to {ranks[-1].rank}{span}"
    return "".join(f"; rank {rank.rank} {_rank_text(rank)}" for rank in ranks)


def _rank_text(rank: RankFacts) -> str:
    if rank.exit_code is not None:
        return f"ended with {rank.exit_code}"
    step = f" after step {rank.step}" if rank.step is not None else ""
    return f"{rank.phase or 'runs'}{step}"


def _fault_lines(faults: Sequence[RecentFault]) -> Iterator[Text]:
    for fault in faults:
        at = datetime.fromtimestamp(fault.at_s, UTC)
        step = f" at step {fault.step}" if fault.step is not None else ""
        answer = f" -> {fault.rung or 'undecided'} ({fault.outcome})"
        evidence = " ".join(fault.evidence.split())[:100]
        yield Text(
            f"  {at:%m-%d %H:%M:%S} {fault.fault_class} on {fault.where}{step}, "
            f"attempt {fault.attempt}{answer}: {evidence}"
        )


def _checkpoint_line(tiers: Mapping[str, HeldCheckpoints]) -> str:
    parts = [
        f"{tier}: step {held.newest} ({held.count} held)" if held.count else f"{tier}: none"
        for tier, held in tiers.items()
    ]
    return "  " + ", ".join(parts)


def _notices(snapshot: RunSnapshot) -> list[str]:
    """Lines that a user should read beside the numbers."""
    status, abnormal = snapshot.status, abnormal_steps(snapshot.history)
    lines = []
    resume = f"'perdure resume {status.run_id}' continues it"
    outage = status.ledger_unwritable
    if outage is not None:
        lines.append(f"{UNWRITABLE} since {outage.since}: {outage.why}")
    if status.state in (RunState.RUNNING, RunState.PAUSED) and not status.supervised:
        lines.append("no process supervises it; 'perdure run' with its job file adopts it")
    if status.sub_healthy:
        lines.append(
            f"sub-healthy: connections broke {status.sub_healthy} times during collectives, which "
            "were then repeated; check the network between its nodes"
        )
    if status.waits is not None:
        lines.append(f"phase: {status.waits.text}")
    if status.pause is not None:
        lines.append(f"paused at step {status.pause.step}; {resume}")
    elif status.pause_wanted:
        lines.append(f"a pause is requested; {resume}")
    if abnormal is not None:
        lines.append(abnormal.text)
    lines += [f"the program: {text}" for text in status.notices]
    if status.restored:
        last = status.restored[-1]
        lines.append(f"attempt {last.attempt}: {last.text}")
    if status.recoveries:
        newest = status.recoveries[-1]
        text = f"{newest.fault_class} -> {newest.rung}: {newest.outcome}"
        lines.append(f"recoveries inside the processes: {len(status.recoveries)}, the last: {text}")
    return lines


@dataclass(frozen=True, slots=True)
class _RunRow:
    """One run in the list.

    Attributes:
        state: None when the run cannot be read.
        step: None when it is not known.
        target_step: None for a command without one.
        supervised: whether a process supervises it now.
        updated_s: time of the newest record in its ledger; None: there is none.
        problem: why the run cannot be read.
    """

    run_id: str
    state: str | None = None
    step: int | None = None
    target_step: int | None = None
    attempts: int = 0
    supervised: bool = False
    updated_s: float | None = None
    problem: str = ""


def _list_runs(*, as_json: bool) -> None:
    """Print the runs that were started on this machine, beginning with the last to change."""
    home = home_folder()
    with ThreadPoolExecutor(max_workers=_NUM_READERS) as pool:
        rows = list(pool.map(_run_row, known_runs(home)))
    rows.sort(key=lambda row: (row.updated_s is None, -(row.updated_s or 0.0)))
    if as_json:
        print_json({"runs": [asdict(row) for row in rows]})
    else:
        _show_runs(rows, home)


def _run_row(run_id: str) -> _RunRow:
    try:
        snapshot = RunMonitor(run_to_observe(run_id, is_brief=True)).snapshot()
    except (StorageError, PerdureError) as error:
        return _RunRow(run_id, problem=" ".join(str(error).split()))
    status, history = snapshot.status, snapshot.history
    return _RunRow(
        run_id,
        status.state,
        status.step,
        status.target_step,
        len(history.attempts),
        status.supervised,
        history.updated_s if history.job is not None else None,
    )


def _show_runs(rows: Sequence[_RunRow], home: Path) -> None:
    console = make_console()
    if not rows:
        console.print(f"no run was started on this machine (PERDURE_HOME is {home})")
        return
    table = make_table("run", "state", "step", "target", "attempts", "last record", "note")
    now_s = time.time()
    for row in rows:
        ago = f"{duration_text(now_s - row.updated_s)} ago" if row.updated_s is not None else ""
        is_alone = row.state in (RunState.RUNNING, RunState.PAUSED) and not row.supervised
        table.add_row(
            row.run_id,
            row.state or NOT_KNOWN,
            str(row.step) if row.step is not None else NOT_KNOWN,
            str(row.target_step) if row.target_step is not None else "",
            str(row.attempts),
            ago,
            row.problem or ("no process supervises it" if is_alone else ""),
        )
    console.print(table)
