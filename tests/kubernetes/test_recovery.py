"""Whatever happens to a run's ranks, pods, nodes and its cluster, it trains to the same digits."""

from __future__ import annotations

from contextlib import suppress

import psutil
import pytest

from perdure.training.engines.kubernetes.nodes import NO_NODE
from perdure.training.supervisor.run_supervisor import RunSupervisor
from tests.kubernetes.lab.cluster import Lab
from tests.kubernetes.runs import (
    LIMIT_S,
    START_S,
    STEPS,
    Deed,
    Played,
    assert_as_undisturbed,
    cuts_off,
    deletes_node,
    deletes_pod,
    evicts_pod,
    kills_rank,
    play,
    powers_off,
    removes,
    takes_api_away,
)
from tests.waiting import wait_for

API_AWAY_S = 60.0

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def ranks_on(lab: Lab, node: str) -> list[str]:
    """Names of the ranks that live on a node."""
    found = []
    for process in lab.processes_in(node):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return [name for name in found if name.startswith("rank-")]


def test_a_run_outlasts_the_loss_of_a_rank_and_of_pods(runs, lab):
    played = play(runs, "pods", kills_rank(lab, 2), deletes_pod(runs, 1), evicts_pod(runs, 0))
    assert played.answers == [
        ("native_crash", "process_replace"),
        ("container_lost", "pod_reschedule"),
        ("container_lost", "pod_reschedule"),
    ]
    assert ["the pod was deleted" in line for line in played.evidence] == [False, True, True]
    # A process that replaces another is a start more; the pod that stays keeps its count.
    assert played.counts == [[(1, 1), (1, 2)], [(1, 2), (2, 1)], [(2, 1), (2, 2)]]
    assert played.history.isolated == ()


def test_a_run_outlasts_the_loss_of_the_node_of_its_first_rank(runs, lab):
    played = play(runs, "power", powers_off(lab, 0))
    assert played.answers == [("node_lost", "node_replace")]
    assert played.counts == [[(2, 1), (1, 1)]], "the processes of the other node have lived on"
    (lost,) = played.history.isolated
    assert lost not in {member.node for member in played.history.placements[-1].members}


@pytest.mark.long
def test_the_member_of_a_lost_node_takes_the_pod_that_stands_by(runs, lab):
    seen: dict[str, list[str]] = {"before": [], "after": []}

    def await_one(run: RunSupervisor) -> None:
        wait_for(lambda: run.warm_spares, timeout_s=START_S, period_s=0.5, what="one stands by")
        seen["before"] = list(run.fleet.spare_containers.contacts())

    def look_at(run: RunSupervisor) -> None:
        seen["after"] = [runs.pod(run.job, 1)]

    played = play(
        runs,
        "warm",
        Deed(await_one, ends_attempt=False),
        Deed(powers_off(lab, 1).what, ends_attempt=False),
        Deed(look_at, ends_attempt=False),
        steps=2 * STEPS,
        engine={"warm_spares": 1},
    )
    assert played.answers == [("node_lost", "node_replace")]
    assert played.counts == [[(1, 1), (2, 1)]]
    assert len(seen["before"]) == 1
    assert seen["after"] == seen["before"]


@pytest.mark.long
def test_a_lost_node_without_replicas_costs_new_processes_everywhere(runs, lab):
    off = {"node_replace": False, "pod_retries": 1}
    played = play(runs, "rescheduled", powers_off(lab, 0), restart=off)
    assert played.answers == [("node_lost", "pod_reschedule")]
    assert played.counts == [[(1, 1), (1, 1)], [(2, 1), (1, 2)]]


@pytest.mark.long
def test_a_node_that_is_cut_off_is_left_and_can_commit_nothing(runs, lab):
    played = play(runs, "cut", cuts_off(lab, 1))
    assert played.answers == [("node_lost", "node_replace")]
    (lost,) = played.history.isolated
    # Nobody can have told them: the node is cut off still.
    wait_for(lambda: not ranks_on(lab, lost), period_s=1, what="its ranks ended")


def assert_left_for_good(played: Played, lab: Lab) -> None:
    """The run has left its node, knows why, and the lab is whole again."""
    assert played.answers == [("node_lost", "node_replace")]
    (evidence,) = played.evidence
    assert NO_NODE in evidence
    (lost,) = played.history.isolated
    assert lost not in lab.ready_nodes(), "the fault fired, and lasts"
    assert lost not in {member.node for member in played.history.placements[-1].members}
    lab.restore()
    assert lab.ready_nodes() == list(lab.nodes)


@pytest.mark.long
def test_a_node_that_is_taken_away_with_its_object_is_replaced(runs, lab):
    assert_left_for_good(play(runs, "removed", removes(lab, 1)), lab)


@pytest.mark.long
def test_a_living_node_whose_object_is_deleted_is_left_when_its_pod_is_removed(runs, lab):
    # The cluster removes pods of such a node after 40 s or more; it trains until then.
    played = play(runs, "deleted-node", deletes_node(lab, 1), steps=1000)
    (lost,) = played.history.isolated
    wait_for(lambda: not ranks_on(lab, lost), period_s=1, what="its ranks ended")
    assert_left_for_good(played, lab)


@pytest.mark.long
def test_a_run_loses_no_step_while_the_api_server_is_away(runs, lab):
    played = play(runs, "api", takes_api_away(lab, API_AWAY_S), steps=800)
    assert played.answers == []
    assert len(played.history.attempts) == 1


def test_the_next_supervisor_finds_the_gang_by_its_labels(runs, tmp_path):
    job = runs.job("adopted", steps=STEPS)
    first = runs.supervise(job, tmp_path / "first")

    def trained() -> bool:
        assert first.poll() is None, (tmp_path / "first" / "supervisor.out").read_text()
        return runs.kept(job) >= 20

    wait_for(trained, timeout_s=START_S, period_s=0.5, what="20 steps")
    first.kill()
    first.wait()
    kept = runs.kept(job)
    wait_for(lambda: runs.kept(job) > kept, timeout_s=START_S, period_s=0.5, what="it trains on")
    # Of another machine, as far as it can tell: nothing of the first one's folder is there.
    second = runs.supervise(job, tmp_path / "second")
    assert second.wait(timeout=LIMIT_S) == 0
    played = runs.played(job)
    assert_as_undisturbed(played, runs.undisturbed(job))
    assert played.answers == []
    assert len(played.history.attempts) == 1
