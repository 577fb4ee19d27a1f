"""What of a run needs a person: isolated nodes, no spare, open alerts, a run that has failed.

Pure: from the ledger, the nodes that the engine has, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from training.journal.history import RunHistory
from training.recovery.rungs import RESCHEDULES
from training.supervisor.markdown import code, counted, listed, text
from training.supervisor.report import OPEN, alert_rows

MAX_WHY = 160


@dataclass(frozen=True, slots=True)
class Attention:
    """What needs a person, as the UI shows it.

    Attributes:
        title: how much there is.
        body: markdown.
    """

    title: str
    body: str


@dataclass(frozen=True, slots=True)
class _Need:
    what: str
    since: str
    why: str
    action: str


def spares_of(nodes: Sequence[str], history: RunHistory) -> list[str]:
    """Healthy nodes that the run does not use now."""
    placed = history.placement if history.ended is None else None
    used = {member.node for member in placed.members} if placed is not None else set()
    return [node for node in nodes if node not in used and node not in history.isolated]


def waits_for_node(history: RunHistory, *, spares: Sequence[str] | None) -> bool:
    """Whether the run stands still until a healthy node is free."""
    last = history.attempts[-1] if history.attempts else None
    if spares is None or spares or last is None or last.ended is None or history.ended is not None:
        return False
    decision = last.decision
    if decision is None or decision.isolate not in history.isolated:
        return False
    return decision.rung in RESCHEDULES and history.placements[-1].placement == last.key[0]


def attention(run_id: str, history: RunHistory, *, spares: Sequence[str] | None) -> Attention:
    """What needs a person now.

    Args:
        run_id: of the run.
        history: of the run.
        spares: healthy nodes that are free; None: not known.
    """
    needs = [*_failed(history), *_isolated(run_id, history), *_alerts(history)]
    if history.ended is None and spares is not None and not spares:
        needs += _no_spare(run_id, history)
    left = _spares_text(spares, _num_spares(history))
    if not needs:
        body = f"Nothing needs you: no node is isolated and no alert is open.\n\n{left}\n"
        return Attention("Nothing needs you", body)
    # No table: the UI does not fold the cells of one (3.8.8), and cuts off what is long.
    listing = "".join(
        f"### {one.what}\n\nSince {one.since} UTC: {one.why}\n\n**What to do:** {one.action}\n\n"
        for one in needs
    )
    verb = "needs" if len(needs) == 1 else "need"
    title = f"{counted(len(needs), 'thing')} {verb} you"
    return Attention(title, f"{listing}{left}\n")


def _num_spares(history: RunHistory) -> int:
    """Spares that the job asks for."""
    engine = (history.job or {}).get("engine") or {}
    return int(engine.get("spares") or 0)


def _spares_text(spares: Sequence[str] | None, num_spares: int) -> str:
    if spares is None:
        return ""
    if not spares:
        return "Spares left: none" + ("." if num_spares else "; the job asks for none.")
    return f"Spares left: {len(spares)} ({text(listed(list(spares)))})."


def _failed(history: RunHistory) -> list[_Need]:
    ended = history.ended
    if ended is None or ended.outcome != "failed":
        return []
    last = history.attempts[-1] if history.attempts else None
    fault = last.ended.fault if last is not None and last.ended is not None else None
    advice = text(fault.action) if fault is not None and fault.action else "Mend the cause."
    again = f"{advice} Then {code('perdure run JOB.yaml')}"
    return [_Need("The run has failed", _clock(ended.at_s), _why(ended.message), again)]


def _isolated(run_id: str, history: RunHistory) -> list[_Need]:
    return [
        _Need(
            f"Node {text(one.node)} is isolated",
            _clock(one.at_s),
            _why(one.why),
            f"Have it mended, then {code(f'perdure nodes {run_id} --release {one.node}')}",
        )
        for one in history.isolated_nodes
    ]


def _alerts(history: RunHistory) -> list[_Need]:
    return [
        _Need(
            f"Alert: {text(row.point)}",
            row.since,
            _why(row.what),
            f"Look at {text(row.where)}" if row.where else "Look at the run",
        )
        for row in alert_rows(history)
        if row.state == OPEN
    ]


def _no_spare(run_id: str, history: RunHistory) -> list[_Need]:
    """No healthy node is free: the run may be waiting for one already."""
    action = f"Add a node, or release one that was mended: {code(f'perdure nodes {run_id}')}"
    if waits_for_node(history, spares=()):
        why = text("no healthy node is free; after restart.spare_wait_s the ladder decides again")
        return [_Need("The run waits for a node", _clock(history.updated_s), why, action)]
    if not _num_spares(history):
        return []
    since_s = history.placements[-1].at_s if history.placements else history.created_s
    why = "if another node is lost, the run has to wait for one"
    return [_Need("No spare is left", _clock(since_s), why, action)]


def _why(words: str) -> str:
    line = " ".join(words.split())
    return text(line if len(line) <= MAX_WHY else f"{line[: MAX_WHY - 3]}...")


def _clock(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"
