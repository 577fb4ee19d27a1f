"""`perdure status`: the state of a run, from its ledger, its store and its agents on this machine.

Nothing is taken or changed: the run may be supervised by another process, or by none. Times are
seconds since the epoch, durations seconds, steps completed optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from perdure.console import AsJson, RunName, make_console, print_json
from perdure.runs import OpenAttempt, run_to_observe
from perdure.tables import WIDTH, account_bar, account_table, attempts_view, sparkline
from storage.checkpoint import Tier
from storage.errors import StorageError
from training.engines.base import Snapshot
from training.errors import PerdureError
from training.files import home_folder
from training.journal.events import StepRecord
from training.journal.history import AttemptView, RunHistory
from training.journal.steps import kept_of
from training.journal.time_account import Account, account
from training.recovery.faults import Fault
from training.recovery.rungs import Rung
from training.supervisor.accounts import Accountant, duration_text, ettr_text
from training.supervisor.checkpoints import node_tiers
from training.supervisor.markdown import clock_text
from training.supervisor.report import (
    OPEN,
    alert_rows,
    attempt_rows,
    outcome_of,
    recovery_facts,
    story_rows,
)
from training.supervisor.run import Run
from training.supervisor.store_outage import read_outage
from training.supervisor.watch import AttemptSnapshot
from training.wire.agent import AgentStatus
from training.wire.requests import is_pause_wanted

LINES = ("run_id", "state", "step", "committed_step", "target_step", "ettr", "isolated")
CHECKPOINTS_PERIOD_S = 10.0  # listing them takes the store more than the rest together
ACCOUNT_SHARE = 0.1  # of the time, at most, goes into making accounts
_NUM_FAULTS = 5
_FAULT = TypeAdapter(Fault)
_PACE_STEPS = 50
REFRESH_S = 2.0
UNWRITABLE = "its ledger cannot be written"
_MAX_RANKS = 8  # of a node by name; more of them are shown as a range
_NUM_ATTEMPTS = 12
_COLOURS = {"completed": "green", "running": "green", "paused": "cyan", "failed": "red"}


def status(
    run: RunName = "",  # the error about no name lists the known runs
    *,
    once: Annotated[bool, typer.Option("--once", help="print it once, also on a terminal")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a run, also when no process supervises it.

    From its ledger and its store, and from its node agents when they run on this machine. On a
    terminal it is refreshed until the run ends or Ctrl-C is pressed.
    """
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


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run.

    Attributes:
        history: its ledger, with what the open attempt has logged since.
        document: the same for scripts.
        records: of every step that counts so far, by step.
    """

    history: RunHistory
    document: dict[str, Any]
    records: dict[int, StepRecord]
    account: Account


class RunMonitor:
    """Reads the state of one run, repeatedly; what was read once is not read again.

    Args:
        run: not taken by this process.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._accountant = Accountant(run.store, run.job.run_id)
        self._open_attempt = OpenAttempt(run)
        self._known_account: Account | None = None
        self._account_due_s = float("-inf")
        self._tiers: tuple[float, dict[str, Any]] = (float("-inf"), {})

    def status(self, *, now_s: float | None = None) -> Status:
        """The state of the run by now.

        Raises:
            StorageError: the store does not answer.
        """
        now_s = time.time() if now_s is None else now_s
        history = self._run.refresh()
        observer = self._open_attempt.observer(history)
        seen = observer.look() if observer is not None else AttemptSnapshot(None)
        self._accountant.saw(seen.steps)
        _add_events(history, seen)
        every = self._accountant.records(history)
        records, spent = kept_of(every), self._account(history, every, now_s)
        document = {
            **_facts(self._run, history, records, now_s=now_s),
            "ettr": round(spent.ettr, 4),
            "wall_s": round(spent.wall_s, 3),
            "time_s": {owner: round(s, 3) for owner, s in spent.seconds.items() if s > 0},
            "checkpoints": self._checkpoints(now_s),
            "nodes": _nodes(history, seen.snapshot),
            "metrics_url": _metrics_url(seen.snapshot),
        }
        return Status(history, document, records, spent)

    def _account(self, history: RunHistory, records: Sequence[StepRecord], now_s: float) -> Account:
        """The account; while a run of many steps goes on, perhaps an older one."""
        known = self._known_account
        if known is not None and history.ended is None and now_s < self._account_due_s:
            return known
        began_s = time.monotonic()
        made = self._known_account = account(history, records, now_s=now_s)
        self._account_due_s = now_s + (time.monotonic() - began_s) / ACCOUNT_SHARE
        return made

    def _checkpoints(self, now_s: float) -> dict[str, Any]:
        """Per tier how many checkpoints it holds, and the newest."""
        listed_s, known = self._tiers
        if now_s - listed_s < CHECKPOINTS_PERIOD_S:
            return known
        on_nodes = node_tiers(home_folder(), self._run.job.run_id)
        steps: dict[str, list[int]] = {tier.value: [] for tier in Tier}
        in_store = {step.step: step.tiers({}) for step in self._run.checkpoints.list_steps()}
        for step in sorted({*in_store, *on_nodes}):
            for tier in (*on_nodes.get(step, ()), *in_store.get(step, ())):
                steps[tier].append(step)
        found = {
            tier: {"newest": held[-1] if held else None, "count": len(held)}
            for tier, held in steps.items()
        }
        self._tiers = (now_s, found)
        return found


def _add_events(history: RunHistory, seen: AttemptSnapshot) -> None:
    """Add what the open attempt has logged and no supervisor has recorded yet."""
    view = history.open_attempt
    if view is None:
        return
    known = {(event.kind, event.number) for event in view.events}
    fresh = [event for event in seen.events if (event.kind, event.number) not in known]
    history.attempts[-1] = replace(view, events=(*view.events, *fresh))


def _facts(
    run: Run, history: RunHistory, records: dict[int, StepRecord], *, now_s: float
) -> dict[str, Any]:
    """What does not depend on the agents."""
    job, pause = run.job, history.pause
    target = None if job.worker.is_command else job.steps
    last = records[max(records)] if records else None
    # Records above the newest commit are lost with their attempt, and a command has none.
    step = max(last.step if last is not None else 0, history.committed_step)
    is_supervised = history.ended is None and run.ledger.is_supervised()
    return {
        "run_id": job.run_id,
        "state": _state(history),
        "supervised": is_supervised,
        "step": step,
        "committed_step": history.committed_step,
        "target_step": target,
        "eta_s": _eta_s(history, records, target),
        "tokens_per_s": last.tokens_per_s if last is not None else None,
        "loss": last.loss if last is not None else None,
        "last_step_age_s": round(now_s - last.at_s, 1) if last is not None else None,
        "isolated": list(history.isolated),
        "sub_healthy": len(history.sub_healthy),
        "pause_wanted": is_pause_wanted(run.store, job.run_id),
        "pause": pause.began.model_dump(include={"at_s", "step"}) if pause is not None else None,
        "attempts": [asdict(row) for row in attempt_rows(history)],
        "recoveries": [recovery_facts(v, one) for v in history.attempts for one in v.recoveries],
        "fault": _last_fault(history),
        "faults": _last_faults(history),
        "alerts": [asdict(row) for row in alert_rows(history)],
    }


def _eta_s(history: RunHistory, records: dict[int, StepRecord], target: int | None) -> float | None:
    """Until the target at the pace of the newest steps, saves included; None without a pace."""
    newest = list(records.values())[-_PACE_STEPS:]
    if target is None or history.ended is not None or not newest:
        return None
    attempt = (newest[-1].placement, newest[-1].attempt)
    # The downtime before a restart is no part of the pace.
    own = [one for one in newest if (one.placement, one.attempt) == attempt]
    first, last = own[0], own[-1]
    pace_s = (last.at_s - first.at_s + first.step_s) / len(own)
    return round(max(0, target - last.step) * pace_s, 1)


def _metrics_url(snapshot: Snapshot | None) -> str | None:
    """Where the open attempt answers Prometheus."""
    agents = snapshot.agents.values() if snapshot is not None else ()
    return next((status.metrics_url for status in agents if status.metrics_url), None)


def _nodes(history: RunHistory, snapshot: Snapshot | None) -> list[dict[str, Any]]:
    """The nodes of the run; without an answer only their names are known."""
    view = history.open_attempt
    if history.ended is not None or history.placement is None:
        return []
    if snapshot is None or view is None:
        return [{"node": m.node, "state": None} for m in history.placement.members]
    answered = [_node(status) for status in snapshot.agents.values()]
    lost = [{"node": node, "state": "lost", "health": "lost"} for node in snapshot.lost]
    busy = [{"node": n, "state": None, "health": "no answer"} for n in snapshot.unanswered]
    return [*answered, *lost, *busy]


def _node(status: AgentStatus) -> dict[str, Any]:
    return {
        "node": status.node,
        "state": status.state.value,
        "health": _health(status),
        "ranks": [
            worker.model_dump(include={"rank", "local_rank", "pid", "step", "phase", "exit_code"})
            for worker in status.known_ranks
        ],
        "sample": status.sample.model_dump(mode="json") if status.sample is not None else None,
    }


def _health(status: AgentStatus) -> str:
    """What is wrong with a node, "ok" when nothing is known to be."""
    wrong = []
    if status.hang is not None:
        who = f"rank {status.hang.rank}" if status.hang.rank is not None else "the command"
        wrong.append(f"{who} silent for {status.hang.silent_s:.0f} s")
    if status.staging_error is not None:
        wrong.append(status.staging_error)
    if status.oom_kills:
        wrong.append(f"{status.oom_kills} killed because memory ran out")
    devices = status.sample.devices if status.sample is not None else ()
    for device in devices:
        if not device.is_healthy:
            link = "link down" if device.link_is_up is False else None
            seen = ", ".join(filter(None, (device.health if device.is_ill else None, link)))
            wrong.append(f"device {device.index}: {seen}")
    return "; ".join(wrong) or "ok"


def _last_fault(history: RunHistory) -> dict[str, Any] | None:
    """The newest fault that ended an attempt, without the fields that have their defaults."""
    faults = [a.ended.fault for a in history.attempts if a.ended is not None and a.ended.fault]
    return _FAULT.dump_python(faults[-1], mode="json", exclude_defaults=True) if faults else None


def _last_faults(history: RunHistory) -> list[dict[str, Any]]:
    """The newest faults and what was done about each, newest first."""
    found = [fault for view in history.attempts for fault in _faults_of(view)]
    return sorted(found, key=lambda fault: -fault["at_s"])[:_NUM_FAULTS]


def _faults_of(view: AttemptView) -> list[dict[str, Any]]:
    found = [
        _fault_facts(view, one.began.fault, one.began.decision.rung, outcome_of(view, one))
        for one in view.recoveries
    ]
    fault = view.ended.fault if view.ended is not None else None
    if fault is not None:
        rung = view.decision.rung if view.decision is not None else None
        found.append(_fault_facts(view, fault, rung, "ended the attempt"))
    return found


def _fault_facts(
    view: AttemptView, fault: Fault, rung: Rung | None, outcome: str
) -> dict[str, Any]:
    return {
        "at_s": fault.at_s,
        "attempt": "{}.{}".format(*view.key),
        "fault_class": fault.fault_class.value,
        "where": fault.where,
        "step": fault.step,
        "evidence": fault.evidence,
        "rung": rung.value if rung is not None else None,
        "outcome": outcome,
    }


def _state(history: RunHistory) -> str:
    if history.ended is not None:
        return history.ended.outcome
    if history.job is None:
        return "not started"
    return "paused" if history.pause is not None else "running"


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
    if document["target_step"] is not None:
        bar = Table.grid()  # a bar alone would not end its line
        bar.add_row(
            ProgressBar(total=document["target_step"], completed=document["step"], width=WIDTH)
        )
        rows.append(bar)
    losses = [record.loss for record in status.records.values()]
    if losses:
        line = f"loss {sparkline(losses, WIDTH)} {losses[-1]:.4f}"
        rows.append(Text(line, style="cyan"))
    if status.account.intervals:
        rows.append(Text(ettr_text(status.account)))
    rows += [Text(line) for line in _notices(document)]
    rows += _details(status, width - 4)
    return Panel(Group(*rows), title=f"perdure: {document['run_id']}", border_style=colour)


def plain_status(status: Status, width: int) -> RenderableType:
    """Everything, line by line, for a pipe."""
    document = status.document
    texts = [*(f"{name}: {document[name]}" for name in LINES), *_notices(document)]
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


def _headline(document: dict[str, Any]) -> str:
    """State, step, speed and what is left, in a line."""
    parts = [document["state"], f"step {document['step']} / {document['target_step'] or '?'}"]
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


def _notices(document: dict[str, Any]) -> list[str]:
    """What matters beyond the numbers."""
    lines = []
    resume = f"`perdure resume {document['run_id']}` continues it"
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
    recoveries = document["recoveries"]
    if recoveries:
        last = recoveries[-1]
        text = f"{last['fault_class']} -> {last['rung']}: {last['outcome']}"
        lines.append(f"recoveries inside the processes: {len(recoveries)}, the last: {text}")
    return lines
