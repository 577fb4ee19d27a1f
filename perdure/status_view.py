"""How a run stands, for a person: on a terminal with colours, piped the same in plain text.

Times are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.live import attempts_view, sparkline
from perdure.status import Looker, Status, notices, person_lines
from training.journal.wall_time import Account
from training.supervisor.accounts import COLOURS, coarse, duration_text, ettr_text, share_rows
from training.supervisor.report import OPEN, story_rows

REFRESH_S = 2.0
_WIDTH = 60
_MAX_RANKS = 8  # of a node by name; more of them are told as a range
_NUM_ATTEMPTS = 12
_COLOURS = {"completed": "green", "running": "green", "paused": "cyan", "failed": "red"}


def watch(console: Console, looker: Looker) -> None:
    """Show how the run stands until it ends or somebody presses Ctrl-C."""
    status = looker.look()
    # What is too high for the terminal is cut off below while it is live, and whole at the end.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        try:
            while status.history.ended is None:
                live.update(status_panel(status, console.width), refresh=True)
                time.sleep(REFRESH_S)
                status = looker.look()
        except KeyboardInterrupt:
            pass
    console.print(status_panel(status, console.width))


def status_panel(status: Status, width: int) -> RenderableType:
    """Everything, in a frame, for a terminal."""
    told = status.document
    colour = _COLOURS.get(told["state"], "yellow")
    rows: list[RenderableType] = [Text(_headline(told), style=f"bold {colour}")]
    if told["target_step"] is not None:
        bar = Table.grid()  # a bar alone would not end its line
        bar.add_row(ProgressBar(total=told["target_step"], completed=told["step"], width=_WIDTH))
        rows.append(bar)
    losses = [record.loss for record in status.records.values()]
    if losses:
        line = f"loss {sparkline(losses, _WIDTH)} {losses[-1]:.4f}"
        rows.append(Text(line, style="cyan"))
    if status.account.stretches:
        rows.append(Text(ettr_text(status.account)))
    rows += [Text(line) for line in notices(told)]
    rows += _details(status, width - 4)
    return Panel(Group(*rows), title=f"perdure: {told['run_id']}", border_style=colour)


def plain_status(status: Status, width: int) -> RenderableType:
    """Everything, line by line, for a pipe."""
    lines = [Text(line) for line in person_lines(status.document)]
    pace = Text(_headline(status.document))
    fault = status.document["fault"]
    rest = [Text("newest fault:")] if fault else []
    rest += [Text(f"    {name}: {value}") for name, value in (fault or {}).items()]
    return Group(*lines, pace, *_details(status, width), *rest)


def _headline(told: dict[str, Any]) -> str:
    """State, step, speed and what is left, in a line."""
    parts = [told["state"], f"step {told['step']} / {told['target_step'] or '?'}"]
    if told["tokens_per_s"] and told["state"] == "running":
        parts.append(f"{told['tokens_per_s']:,.0f} tokens/s")
    if told["eta_s"] is not None:
        parts.append(f"{duration_text(told['eta_s'])} left")
    if told["last_step_age_s"] is not None and told["state"] == "running":
        parts.append(f"last step {duration_text(told['last_step_age_s'])} ago")
    return ", ".join(parts)


def _details(status: Status, width: int) -> list[RenderableType]:
    told = status.document
    rows: list[RenderableType] = []
    rows += _alert_lines(told["alerts"])
    if told["nodes"]:
        rows += [Text("Nodes", style="bold"), *_node_lines(told["nodes"])]
    if told["faults"]:
        rows += [Text("Newest faults", style="bold"), *_fault_lines(told["faults"])]
    rows += [Text("Checkpoints", style="bold"), Text(_checkpoint_line(told["checkpoints"]))]
    if status.history.attempts:
        shown = story_rows(status.history)[-_NUM_ATTEMPTS:]
        rows += ["", attempts_view(shown, width)]
    if status.account.stretches:
        rows += [Text("Where the time went", style="bold")]
        rows += [account_bar(status.account, _WIDTH), account_table(status.account)]
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


def account_bar(account: Account, width: int) -> Text:
    """The wall time from left to right, in the colours of its owners."""
    bar = Text("  ")
    for stretch in coarse(account.stretches, width):
        cells = round(stretch.seconds / account.wall_s * width)
        bar.append("\u2588" * max(1, cells), style=COLOURS[stretch.owner])
    return bar


def account_table(account: Account) -> Table:
    """What every owner had of the wall time."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("owner", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("what")
    for row in share_rows(account):
        colour = COLOURS.get(row["owner"])
        mark = Text("\u2588 ", style=colour) if colour is not None else Text("  ")
        table.add_row(mark + Text(row["owner"]), row["time"], row["share"], row["what"])
    return table
