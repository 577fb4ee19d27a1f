"""`perdure nodes`: lists the isolated and sub-healthy nodes of a run, and releases a node.

The command reads and writes the ledger, which a supervisor reads before it makes a placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from perdure.console import AsJson, RunName, make_console, make_table, print_json
from perdure.runs import named_job, store_of
from perdure.training.errors import InputError
from perdure.training.journal.history import Isolation, RunHistory
from perdure.training.journal.ledger import Ledger
from perdure.training.journal.records import NodeReleased
from perdure.training.reporting.markdown import clock_text
from perdure.training.supervisor.sub_health import SubHealthyNode, sub_healthy_nodes


def nodes(
    run: RunName,
    *,
    release: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="treat a node as healthy again after its repair"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the nodes of a run that are isolated or sub-healthy, with the reason, or release one.

    A new placement uses a sub-healthy node last. A released node is a spare again: the next
    placement may use it, and its earlier faults no longer count. A living run stays on its nodes.
    """
    job = named_job(run)
    ledger = Ledger(store_of(job), job.run_id)
    history = ledger.read()
    if history.job is None:
        raise InputError("run", f"{job.run_id!r} was never started")
    if release is not None:
        _refuse_unknown(history, release)
        ledger.note(NodeReleased, node=release)
        history = ledger.read()
    if as_json:
        print_json(_document(history, release))
    elif release is not None:
        print(f"{job.run_id}: {release} is released; the next placement may use it")
    else:
        _show(job.run_id, history)


def _refuse_unknown(history: RunHistory, node: str) -> None:
    releasable = [
        *history.isolated,
        *(sub_healthy.node for sub_healthy in sub_healthy_nodes(history)),
    ]
    if node not in releasable:
        names = ", ".join(releasable) or "none"
        problem = f"{node!r} is neither isolated nor sub-healthy; nodes that are: {names}"
        raise InputError("--release", problem)


def _document(history: RunHistory, released: str | None) -> dict[str, Any]:
    placed = history.placement if history.ended is None else None
    return {
        "isolated": [asdict(isolation) for isolation in history.isolated_nodes],
        "sub_healthy": [asdict(sub_healthy) for sub_healthy in sub_healthy_nodes(history)],
        "in_use": [member.node for member in placed.members] if placed is not None else [],
        "released": released,
    }


def _show(run_id: str, history: RunHistory) -> None:
    sub_healthy = sub_healthy_nodes(history)
    if history.isolated_nodes:
        _print_nodes("isolated node", history.isolated_nodes)
    else:
        print(f"{run_id}: no node is isolated")
    if sub_healthy:
        _print_nodes("sub-healthy node, used last", sub_healthy)
    if sub_healthy or history.isolated_nodes:
        print(f"after the repair of a node: perdure nodes {run_id} --release NODE")


def _print_nodes(title: str, nodes: Sequence[Isolation | SubHealthyNode]) -> None:
    table = make_table(title, "since (UTC)", "why")
    for node in nodes:
        table.add_row(node.node, clock_text(node.at_s), " ".join(node.why.split()))
    make_console().print(table)
