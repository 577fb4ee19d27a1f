"""The action items of a run: isolated nodes, no spare, open alerts, a run that has failed.

Pure: from the ledger and the engine's nodes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from perdure.training.journal.history import RunHistory
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.recovery.rungs import RESCHEDULES
from perdure.training.reporting.markdown import (
    clock_text,
    code,
    counted,
    listed,
    text,
    with_commands,
)
from perdure.training.reporting.rows import OPEN, alert_rows

MAX_WHY = 160


@dataclass(frozen=True, slots=True)
class ActionItems:
    """The page of the UI about everything that needs a person.

    Attributes:
        title: with the number of needs.
        body: markdown.
    """

    title: str
    body: str
    needs: tuple[Need, ...] = ()


class NeedKind(StrEnum):
    """The reasons why a run needs a person."""

    FAILED = "failed"
    ISOLATED = "isolated"
    ALERT = "alert"
    WAITS = "waits"
    NO_SPARE = "no_spare"
    LIMIT = "limit"
    LEFT_OVER = "leftovers"


@dataclass(frozen=True, slots=True)
class Need:
    """One thing that needs a person; plain text, but for commands in backquotes.

    Attributes:
        title: a few words; they stay the same as long as the need does.
        since: UTC.
        why: the evidence, on one line.
        action: advice.
        node: None where the need is not about a node.
    """

    kind: NeedKind
    title: str
    since: str
    why: str
    action: str
    node: str | None = None


def spares_of(nodes: Sequence[str], history: RunHistory) -> list[str]:
    """List healthy nodes that the run does not use now."""
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


def attention(
    run_id: str,
    history: RunHistory,
    *,
    spares: Sequence[str] | None,
    warm: Sequence[str] = (),
    limits: Sequence[str] = (),
    wait: Wait | None = None,
) -> ActionItems:
    """Build the page about everything that needs a person now.

    Args:
        run_id: for the commands on the page.
        history: the ledger's content.
        spares: healthy nodes that are free; None: not known.
        warm: nodes with a warm spare.
        limits: concurrency limits of the server, each with the way to remove it.
        wait: for room or for the platform, once it lasts.
    """
    needs = [
        *_failed(history),
        *_leftovers(run_id, history),
        *_isolated(run_id, history),
        *_alerts(history),
    ]
    if history.ended is None and wait is not None:
        needs += _waits(run_id, wait)
    elif history.ended is None and spares is not None and not spares:
        needs += _no_spare(run_id, history)
    if history.ended is None:
        needs += _limits(history, limits)
    spares_lines = _spares_text(spares, _num_spares(history)), _warm_text(warm)
    spares_line = " ".join(filter(None, spares_lines))
    if not needs:
        body = f"Nothing needs you: no node is isolated and no alert is open.\n\n{spares_line}\n"
        return ActionItems("Nothing needs you", body)
    # No table: the UI does not fold a table's cells (3.8.8), and cuts off long ones.
    listing = "".join(
        f"### {text(need.title)}\n\nSince {need.since} UTC: {text(need.why)}\n\n"
        f"**What to do:** {with_commands(need.action)}\n\n"
        for need in needs
    )
    verb = "needs" if len(needs) == 1 else "need"
    title = f"{counted(len(needs), 'thing')} {verb} you"
    return ActionItems(title, f"{listing}{spares_line}\n", tuple(needs))


def _limits(history: RunHistory, limits: Sequence[str]) -> list[Need]:
    """List concurrency limits that can keep the next supervisor of the run waiting."""
    since = clock_text(history.created_s)
    return [
        Need(
            NeedKind.LIMIT,
            f"A concurrency limit of {limit.partition(' has ')[0]}",
            since,
            f"{limit.partition('; ')[0]}: a supervisor that has ended may wait for its slot",
            f"{limit.partition('; ')[2]}. The training goes on meanwhile; the ledger alone keeps "
            "two supervisors apart",
        )
        for limit in limits
    ]


def _num_spares(history: RunHistory) -> int:
    """Return how many spares the job asks for."""
    engine = (history.job or {}).get("engine") or {}
    return int(engine.get("spares") or 0)


def _spares_text(spares: Sequence[str] | None, num_spares: int) -> str:
    if spares is None:
        return ""
    if not spares:
        return "Spares left: none" + ("." if num_spares else "; the job asks for none.")
    return f"Spares left: {len(spares)} ({text(listed(list(spares)))})."


def _warm_text(warm: Sequence[str]) -> str:
    noun = "Warm spare" if len(warm) == 1 else "Warm spares"
    return f"{noun} on {text(listed(list(warm)))}." if warm else ""


def _failed(history: RunHistory) -> list[Need]:
    ended = history.ended
    if ended is None or ended.outcome != "failed":
        return []
    last = history.attempts[-1] if history.attempts else None
    fault = last.ended.fault if last is not None and last.ended is not None else None
    advice = fault.action if fault is not None and fault.action else "Mend the cause."
    run_again = f"{advice} Then {code('perdure run JOB.yaml')}"
    return [
        Need(
            NeedKind.FAILED,
            "The run has failed",
            clock_text(ended.at_s),
            _why(ended.message),
            run_again,
        )
    ]


def _leftovers(run_id: str, history: RunHistory) -> list[Need]:
    ended = history.ended
    if ended is None or not ended.leftovers:
        return []
    action = (
        f"keep-supervised tries again every ten minutes, {code(f'perdure cancel {run_id}')} now"
    )
    since = clock_text(ended.at_s)
    return [
        Need(NeedKind.LEFT_OVER, "Containers are left over", since, _why(ended.leftovers), action)
    ]


def _isolated(run_id: str, history: RunHistory) -> list[Need]:
    return [
        Need(
            NeedKind.ISOLATED,
            f"Node {isolation.node} is isolated",
            clock_text(isolation.at_s),
            _why(isolation.why),
            f"Have it mended, then {code(f'perdure nodes {run_id} --release {isolation.node}')}",
            isolation.node,
        )
        for isolation in history.isolated_nodes
    ]


def _alerts(history: RunHistory) -> list[Need]:
    return [
        Need(
            NeedKind.ALERT,
            f"Alert: {row.point}" + (f" on {row.where}" if row.where else ""),
            row.since,
            _why(row.what),
            f"Look at {row.where}" if row.where else "Look at the run",
        )
        for row in alert_rows(history)
        if row.state == OPEN
    ]


def _no_spare(run_id: str, history: RunHistory) -> list[Need]:
    """Describe that no healthy node is free; the run may wait for a node already."""
    action = f"Add a node, or release one that was mended: {code(f'perdure nodes {run_id}')}"
    if waits_for_node(history, spares=()):
        why = "no healthy node is free"
        return [
            Need(
                NeedKind.WAITS,
                "The run waits for a node",
                clock_text(history.updated_s),
                why,
                action,
            )
        ]
    if not _num_spares(history):
        return []
    since_s = history.placements[-1].at_s if history.placements else history.created_s
    why = "if another node is lost, the run has to wait for one"
    return [Need(NeedKind.NO_SPARE, "No spare is left", clock_text(since_s), why, action)]


def _waits(run_id: str, wait: Wait) -> list[Need]:
    """Describe a wait that no restart ends: for a node, a quota, a queue, rights, an image."""
    release = f"release one that was mended: {code(f'perdure nodes {run_id}')}"
    titles = {
        WaitKind.NODE: ("The run waits for a node", f"Make room, add a node, or {release}"),
        WaitKind.AGENTS: ("No agent answers", "Open the way to port `engine.agent_port` of pods"),
    }
    other = ("The platform starts no containers", "Mend what the platform names; the run goes on")
    title, action = titles.get(wait.kind, other)
    return [Need(NeedKind.WAITS, title, clock_text(wait.since_s), _why(wait.why), action)]


def _why(words: str) -> str:
    line = " ".join(words.split())
    return line if len(line) <= MAX_WHY else f"{line[: MAX_WHY - 3]}..."
