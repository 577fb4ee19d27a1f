"""`perdure status`: the state of a run, on a terminal and for scripts.

Nothing is taken or changed: the run may be supervised by another process, or by none. Times are
seconds since the epoch, durations seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.console import AsJson, RunName, make_console, print_json
from perdure.monitor import RunMonitor, Status
from perdure.run_list import list_runs
from perdure.runs import run_to_observe
from perdure.storage.errors import StorageError
from perdure.tables import WIDTH, account_bar, account_table, attempts_view, sparkline
from perdure.training.errors import PerdureError
from perdure.training.reporting.ettr import duration_text, ettr_text
from perdure.training.reporting.markdown import clock_text
from perdure.training.reporting.rows import (
    OPEN,
    losses_of_steps,
    story_rows,
)
from perdure.training.reporting.summary import abnormal_steps
from perdure.training.supervisor.store_outage import Outage, read_outage

LINES = ("run_id", "state", "step", "committed_step", "target_step", "ettr", "isolated")
NOT_KNOWN = "not known"
MAYBE_KNOWN = ("step", "committed_step", "target_step", "ettr")  # of a command
REFRESH_S = 2.0
UNWRITABLE = "its ledger cannot be written"
_MAX_RANKS = 8  # of a node by name; more of them are shown as a range
_NUM_ATTEMPTS = 12
_COLOURS = {"completed": "green", "running": "green", "paused": "cyan", "failed": "red"}


def status(
    run: RunName = "",
    *,
    once: Annotated[bool, typer.Option("--once", help="print it once, also on a terminal")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run, also when no process supervises it; without RUN, list all runs.

    From its ledger and its store, and from its node agents when they run on this machine. On a
    terminal it is refreshed until the run ends or Ctrl-C is pressed.
    """
    if not run:
        list_runs(as_json=as_json)
        return
    observed = run_to_observe(run)
    try:
        _show(RunMonitor(observed), once=once, as_json=as_json)
    except StorageError as error:
        outage = read_outage(observed.home, observed.job.run_id)
        if outage is None:
            raise
        text = f"{observed.job.run_id}: {UNWRITABLE} since {outage.since}: {error}"
        raise PerdureError(text) from error


def _show(monitor: RunMonitor, *, once: bool, as_json: bool) -> None:
    if as_json:
        print_json(monitor.status().document)
        return
    console = make_console()
    if not console.is_terminal:
        console.print(plain_status(monitor.status(), console.width))
    elif once:
        console.print(status_panel(monitor.status(), console.width))
    else:
        _watch(console, monitor)


def _watch(console: Console, monitor: RunMonitor) -> None:
    """Show the state until the run ends or Ctrl-C is pressed."""
    status = monitor.status()
    # What is too high for the terminal is cut off below while it is live, and whole at the end.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while status.history.ended is None:
                live.update(status_panel(status, console.width), refresh=True)
                time.sleep(REFRESH_S)
                status = monitor.status()
        except KeyboardInterrupt:
            pass
    console.print(status_panel(status, console.width))


def status_panel(status: Status, width: int) -> RenderableType:
    """Everything, in a frame, for a terminal."""
    document = status.document
    colour = _COLOURS.get(document["state"], "yellow")
    rows: list[RenderableType] = [Text(_headline(document), style=f"bold {colour}")]
    if document["target_step"] is not None and document["step"] is not None:
        bar = Table.grid()  # a bar alone would not end its line
        bar.add_row(
            ProgressBar(total=document["target_step"], completed=document["step"], width=WIDTH)
        )
        rows.append(bar)
    losses = list(losses_of_steps(status.records).values())
    if losses:
        line = f"loss {sparkline(losses, WIDTH)} {losses[-1]:.4f}"
        rows.append(Text(line, style="cyan"))
    if status.account.intervals:
        rows.append(Text(ettr_text(status.account)))
    rows += [Text(line) for line in _notices(status)]
    rows += _details(status, width - 4)
    return Panel(Group(*rows), title=f"perdure: {document['run_id']}", border_style=colour)


def plain_status(status: Status, width: int) -> RenderableType:
    """Everything, line by line, for a pipe."""
    document = status.document
    texts = [*(f"{name}: {_shown(document, name)}" for name in LINES), *_notices(status)]
    lines = [Text(line) for line in (*texts, _headline(document))]
    rest = list(_fault_text(document["fault"])) if document["fault"] else []
    return Group(*lines, *_details(status, width), *rest)


def _fault_text(fault: dict[str, Any]) -> Iterator[Text]:
    """Every fact about a fault; scripts have its time in seconds."""
    yield Text("newest fault:")
    for name, value in fault.items():
        is_time = name == "at_s"
        shown = f"at: {clock_text(value)} UTC" if is_time else f"{name}: {value}"
        yield Text(f"    {shown}")


def _shown(document: dict[str, Any], name: str) -> Any:
    """A fact for people; a state is as old as the newest record where none can be written."""
    if name == "state" and document["ledger_unwritable"]:
        return f"{document['state']}, but {UNWRITABLE}"
    return NOT_KNOWN if document[name] is None and name in MAYBE_KNOWN else document[name]


def _headline(document: dict[str, Any]) -> str:
    """State, step, speed and what is left, in a line."""
    target = f" / {document['target_step']}" if document["target_step"] is not None else ""
    parts = [_shown(document, "state"), f"step {_shown(document, 'step')}{target}"]
    if document["tokens_per_s"] and document["state"] == "running":
        parts.append(f"{document['tokens_per_s']:,.0f} tokens/s")
    if document["eta_s"] is not None:
        parts.append(f"{duration_text(document['eta_s'])} left")
    if document["last_step_age_s"] is not None and document["state"] == "running":
        parts.append(f"last step {duration_text(document['last_step_age_s'])} ago")
    return ", ".join(parts)


def _details(status: Status, width: int) -> list[RenderableType]:
    document = status.document
    rows: list[RenderableType] = []
    rows += _alert_lines(document["alerts"])
    if document["nodes"]:
        rows += [Text("Nodes", style="bold"), *_node_lines(document["nodes"])]
    if document["faults"]:
        rows += [Text("Newest faults", style="bold"), *_fault_lines(document["faults"])]
    if not status.history.is_command or "program" in document["checkpoints"]:
        rows += [Text("Checkpoints", style="bold"), Text(_checkpoint_line(document["checkpoints"]))]
    if status.history.attempts:
        shown = story_rows(status.history)[-_NUM_ATTEMPTS:]
        rows += ["", attempts_view(shown, width)]
    if status.account.intervals:
        rows += [Text("Where the time went", style="bold")]
        rows += [account_bar(status.account), account_table(status.account)]
    return rows


def _alert_lines(alerts: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """Open alerts; of past ones their number."""
    opened = [alert for alert in alerts if alert["state"] == OPEN]
    for alert in opened:
        where = f" ({alert['where']})" if alert["where"] else ""
        text = f"ALERT {alert['point']}: {alert['what']}{where}, since {alert['since']} UTC"
        yield Text(text, style="bold red")
    if len(alerts) > len(opened):
        yield Text(f"{len(alerts) - len(opened)} past alerts", style="dim")


def _node_lines(nodes: Sequence[dict[str, Any]]) -> Iterator[Text]:
    for node in nodes:
        if node["state"] is None:
            health = node.get("health", "not reachable from this machine")
            yield Text(f"  {node['node']}: {health}", style="dim")
            continue
        ranks = _ranks_text(node.get("ranks", []))
        is_well = node["health"] == "ok"
        shown = node.get("shown_step")
        ranks += f"; step {shown} by its output" if shown is not None else ""
        text = f"  {node['node']}: {node['state']}, {node['health']}{ranks}"
        yield Text(text, style="" if is_well else "bold red")


def _ranks_text(ranks: Sequence[dict[str, Any]]) -> str:
    if not ranks:
        return ""
    if len(ranks) > _MAX_RANKS:
        steps = [rank["step"] for rank in ranks if rank["step"] is not None]
        reached = f" at steps {min(steps)} to {max(steps)}" if steps else ""
        return f"; ranks {ranks[0]['rank']} to {ranks[-1]['rank']}{reached}"
    return "".join(f"; rank {rank['rank']} {_rank_text(rank)}" for rank in ranks)


def _rank_text(rank: dict[str, Any]) -> str:
    if rank["exit_code"] is not None:
        return f"ended with {rank['exit_code']}"
    step = f" after step {rank['step']}" if rank["step"] is not None else ""
    return f"{rank['phase'] or 'runs'}{step}"


def _fault_lines(faults: Sequence[dict[str, Any]]) -> Iterator[Text]:
    for fault in faults:
        at = datetime.fromtimestamp(fault["at_s"], UTC)
        step = f" at step {fault['step']}" if fault["step"] is not None else ""
        did = f" -> {fault['rung'] or 'undecided'} ({fault['outcome']})"
        evidence = " ".join(fault["evidence"].split())[:100]
        yield Text(
            f"  {at:%m-%d %H:%M:%S} {fault['fault_class']} on {fault['where']}{step}, "
            f"attempt {fault['attempt']}{did}: {evidence}"
        )


def _checkpoint_line(tiers: dict[str, Any]) -> str:
    parts = [
        f"{tier}: step {held['newest']} ({held['count']} held)"
        if held["count"]
        else f"{tier}: none"
        for tier, held in tiers.items()
    ]
    return "  " + ", ".join(parts)


def _notices(status: Status) -> list[str]:
    """What matters beyond the numbers."""
    document, abnormal = status.document, abnormal_steps(status.history)
    lines = []
    resume = f"`perdure resume {document['run_id']}` continues it"
    if document["ledger_unwritable"]:
        outage = Outage.model_validate(document["ledger_unwritable"])
        lines.append(f"{UNWRITABLE} since {outage.since}: {outage.why}")
    if document["state"] == "running" and not document["supervised"]:
        lines.append("no process supervises it; `perdure run` with its job file adopts it")
    if document["sub_healthy"]:
        lines.append(
            f"sub-healthy: connections broke {document['sub_healthy']} times under collectives, "
            "which were executed again; look at the network between its nodes"
        )
    if document["pause"] is not None:
        lines.append(f"paused at step {document['pause']['step']}; {resume}")
    elif document["pause_wanted"]:
        lines.append(f"pause requested; {resume}")
    if abnormal is not None:
        lines.append(abnormal.text)
    lines += [f"the program: {text}" for text in document["notices"]]
    if document["restored"]:
        last = document["restored"][-1]
        lines.append(f"attempt {last['attempt']}: {last['text']}")
    recoveries = document["recoveries"]
    if recoveries:
        last = recoveries[-1]
        text = f"{last['fault_class']} -> {last['rung']}: {last['outcome']}"
        lines.append(f"recoveries inside the processes: {len(recoveries)}, the last: {text}")
    return lines
