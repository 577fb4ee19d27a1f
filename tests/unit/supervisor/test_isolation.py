"""Isolation where an engine chooses nodes: what is not known of them is not counted."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from perdure.training.engines.base import Placement
from perdure.training.errors import NoCapacity
from perdure.training.journal.records import AttemptEnded, AttemptStarted, DecisionMade
from perdure.training.recovery.faults import Fault, FaultClass
from perdure.training.recovery.rungs import Decision, Rung
from perdure.training.supervisor import placing
from perdure.training.supervisor.finishing import Decider
from tests.unit.supervisor.cluster import Cluster, FakeFleet, ScheduledRun


@pytest.fixture
def make_run(job, tmp_path, monkeypatch) -> Callable[..., ScheduledRun]:
    monkeypatch.setattr(placing, "SPARE_POLL_S", 0.0)

    def make_run(usable: Collection[str] | None, **restart: object) -> ScheduledRun:
        update = {"restart": job.restart.model_copy(update=restart)}
        run = ScheduledRun(job.model_copy(update=update), home=tmp_path / "home")
        run.usable = frozenset(usable) if usable is not None else None
        run.cluster = Cluster(["done"])
        run.take()
        return run

    return make_run


def fail(
    run: ScheduledRun,
    rung: Rung,
    *,
    isolate: str | None = None,
    fault_class: FaultClass = FaultClass.NODE_LOST,
    code: str | None = None,
) -> None:
    """An attempt on the newest placement that ends by a fault, and the answer to it."""
    at = {"placement": run.place().number, "attempt": 1}
    run.ledger.append(AttemptStarted, **at, from_step=0)
    fault = Fault(fault_class, 5.0, "lost", node=isolate, code=code)
    run.ledger.append(
        AttemptEnded, **at, outcome="failed", to_step=4, proc_start_cnt={}, fault=fault,
        duration_s=5.0,
    )  # fmt: skip
    run.ledger.append(DecisionMade, **at, decision=Decision(rung, isolate, "test"))
    run.refresh()


def isolate(run: ScheduledRun, count: int) -> tuple[str, ...]:
    nodes = []
    for _ in range(count):
        run.place()
        node = run.refresh().placements[-1].members[0].node
        fail(run, Rung.JOB_RESCHEDULE_ISOLATED, isolate=node)
        nodes.append(node)
    return tuple(nodes)


@pytest.mark.parametrize("usable", [None, [f"k{i}" for i in range(7)]], ids=["unknown", "seven"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_isolation_holds_while_healthy_nodes_are_left_or_their_number_is_unknown(
    make_run, usable, count
):
    run = make_run(usable)
    isolated = isolate(run, count)
    assert run.place().nodes
    fail(run, Rung.JOB_RESCHEDULE)
    placement = run.place()
    assert set(isolated) <= set(placement.avoid)
    assert not set(isolated) & set(placement.nodes)


@pytest.mark.parametrize(("may", "avoid"), [(True, ()), (False, ("k0", "k2"))])
def test_too_few_known_nodes_let_the_job_go_back_where_its_policy_allows_that(make_run, may, avoid):
    run = make_run(["k0", "k1", "k2"], allow_without_isolation=may)
    assert isolate(run, 2) == ("k0", "k2")
    run.place()
    fail(run, Rung.JOB_RESCHEDULE)
    assert run.place().avoid == avoid


def test_where_nodes_are_unknown_a_wait_for_room_that_is_over_lets_the_job_go_back(
    make_run, monkeypatch
):
    run = make_run(None, spare_wait_s=0.0, max_restarts=20)
    assert isolate(run, 2) == ("k0", "k2")
    run.place()
    fail(run, Rung.JOB_RESCHEDULE)
    submitted: list[tuple[str, ...]] = []
    submit = FakeFleet.submit

    def refuse_once(fleet: FakeFleet, placement: Placement) -> None:
        submitted.append(placement.avoid)
        if placement.avoid:
            raise NoCapacity("0/6 nodes are available")
        submit(fleet, placement)

    monkeypatch.setattr(FakeFleet, "submit", refuse_once)
    assert run.place().avoid == ()
    assert submitted == [("k0", "k2"), ()]


@pytest.mark.parametrize(
    ("usable", "isolated", "at_fault", "healthy"),
    [
        (None, (), None, None),
        (None, ("k1", "k2"), None, None),
        (["k0", "k1", "k2", "k3"], ("k1",), None, 3),
        (["k0", "k2", "k3"], ("k1",), None, 3),
        (["k0", "k2"], (), "k1", 3),
        (["k0", "k1"], (), "k1", 2),
    ],
    ids=str,
)
def test_nodes_are_counted_where_they_are_known_with_the_one_at_fault(
    make_run, usable, isolated, at_fault, healthy
):
    run = make_run(usable)
    assert isinstance(run._decider, Decider)
    assert run._decider.num_healthy(isolated, at_fault=at_fault) == healthy


@pytest.mark.parametrize(
    ("usable", "may_have", "has"),
    [(None, False, False), (["k0", "k1"], False, False), (["k0", "k1", "k2"], True, False)],
    ids=str,
)
def test_a_member_that_cannot_stay_moves_where_a_node_fits(
    make_run, usable, may_have, has, monkeypatch
):
    run = make_run(usable)
    run.place()
    run.refresh()
    monkeypatch.setattr(run.fleet.spare_containers, "ready", frozenset, raising=False)
    assert run._placer.has_room(is_sure=False) is may_have
    assert run._placer.has_room() is has
