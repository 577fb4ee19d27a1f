"""Of nodes and agents nothing is known: isolation holds, and silence ends nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.accounts import NEEDED, kubeconfig_of, role
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
AGENTS = ("OUTPUT", "-p", "tcp", "--dport", "8470", "-j", "DROP")

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture
def account(runs, create, tmp_path, monkeypatch):
    """Has the supervisor act with the rights of a plain job, without any on nodes, or fewer."""

    def act(*without: str) -> None:
        create(*role({name: verbs for name, verbs in NEEDED.items() if name not in without}))
        config = kubeconfig_of(runs.cluster, runs.namespace, tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(config))

    return act


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


@pytest.fixture
def silence(lab) -> Iterator[None]:
    """Lets nothing through to the agents, as a default-deny policy would; afterwards all."""
    yield lambda: subprocess.run(["iptables", "-A", *AGENTS], check=True)
    subprocess.run(["iptables", "-D", *AGENTS], check=False)


def test_agents_that_nobody_hears_train_on_and_are_reached_through_the_api_server(runs, silence):
    def silent(_run: RunSupervisor) -> None:
        silence()
        time.sleep(SILENT_S)

    # The silence lasts to the end of the run.
    played = play(runs, "unheard", Deed(silent, ends_attempt=False), steps=LONG)
    assert played.answers == []
    assert len(played.history.attempts) == 1
    assert played.history.isolated == ()


def test_agents_that_can_be_reached_by_no_way_train_on_in_pods_that_are_ready(
    runs, silence, account
):
    account("pods/portforward")

    def silent(run: RunSupervisor) -> None:
        silence()
        await_wait(run, "waiting for an answer of any agent", "their containers run")
        time.sleep(SILENT_S)
        subprocess.run(["iptables", "-D", *AGENTS], check=True)

    played = play(runs, "no-way", Deed(silent, ends_attempt=False), steps=LONG)
    assert played.answers == []
    assert len(played.history.attempts) == 1
    assert played.history.isolated == ()
