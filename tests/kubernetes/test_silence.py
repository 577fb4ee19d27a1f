"""Of nodes and agents nothing is known: isolation holds, and silence ends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.runs import (
    STEPS,
    Deed,
    await_wait,
    deletes_pod,
    play,
    powers_off,
)

SILENT_S = 25.0  # more than a lone silent agent is given
LONG = 2 * STEPS  # longer than the silence

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1500)]


def test_isolation_holds_where_the_nodes_of_the_cluster_are_not_known(runs, lab, account):
    account()
    # Of three nodes two are lost: by the job's own count, no healthy one would be left.
    deeds = (powers_off(lab, 0), powers_off(lab, 0), deletes_pod(runs, 0, "--grace-period=1"))
    played = play(runs, "isolated", *deeds, engine={"nodes": 1, "spares": 1})
    history = played.history
    assert len(set(history.isolated)) == 2
    last = history.placements[-1]
    assert set(history.isolated) <= set(last.avoid)
    assert {member.node for member in last.members}.isdisjoint(history.isolated)
    assert [fault for fault, _ in played.answers] == ["node_lost", "node_lost", "container_lost"]


def unheard_agents(silence: Callable[[bool], None]) -> Deed:
    """Nothing gets through to any agent for a while."""

    def fall_silent(_run: RunSupervisor) -> None:
        silence(True)
        time.sleep(SILENT_S)
        silence(False)

    return Deed(fall_silent, ends_attempt=False)


def test_agents_that_nobody_hears_train_on_and_are_reached_through_the_api_server(runs, silence):
    played = play(runs, "unheard", unheard_agents(silence), steps=LONG)
    assert played.answers == []
    assert len(played.history.attempts) == 1
    assert played.history.isolated == ()


def test_agents_that_can_be_reached_by_no_way_train_on_in_pods_that_are_ready(
    runs, silence, account
):
    account("pods/portforward")

    def silent(run: RunSupervisor) -> None:
        silence(True)
        await_wait(run, "waiting for an answer of any agent", "their containers run")
        time.sleep(SILENT_S)
        silence(False)

    played = play(runs, "no-way", Deed(silent, ends_attempt=False), steps=LONG)
    assert played.answers == []
    assert len(played.history.attempts) == 1
    assert played.history.isolated == ()
