"""Containers that stand by: when one is started, checked, ended and made anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import ANY_NODE, AgentEndpoint, Placement
from perdure.training.errors import AgentUnreachable, NoCapacity
from perdure.training.journal.history import Isolation, RunHistory
from perdure.training.journal.records import Member, PlacementCreated
from perdure.training.recovery.faults import FaultClass
from perdure.training.supervisor.warm_spares import CHECK_AGAIN_S, RETRY_S, UP_S, WarmSpares
from perdure.training.wire.agent import AgentReply, CheckOrder, Order
from perdure.training.wire.agent_status import AgentState, AgentStatus
from perdure.training.wire.node import Check, CheckOutcome
from perdure.training.wire.transport import TimedLine
from tests.jobs import small_job

MEMBERS = (
    Member(index=0, node="node-0", schedule_cnt=1),
    Member(index=1, node="node-1", schedule_cnt=1),
)
UP = ("127.0.0.1", 1)


@dataclass
class Containers:
    """Those that stand by, as an engine has them; each answers at once, or never.

    Attributes:
        nodes: of the cluster; None: the engine chooses.
        is_warm: whether their imports are done.
        silent: nodes whose agent does not answer.
        checks: what a check of a node finds.
        checked: nodes that were, each time.
        refused: nodes that no placement is to use any more, with why.
    """

    nodes: list[str] | None = field(default_factory=lambda: [f"node-{n}" for n in range(5)])
    endpoints: dict[str, AgentEndpoint] = field(default_factory=dict)
    is_warm: bool = True
    silent: set[str] = field(default_factory=set)
    checks: dict[str, tuple[Check, ...]] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    avoided: list[tuple[str, ...]] = field(default_factory=list)
    room: bool = True
    sees_agents: bool = True
    vanished: set[str] = field(default_factory=set)

    def contacts(self) -> Mapping[str, AgentEndpoint]:
        return dict(self.endpoints)

    def start(self, placement: Placement, node: str) -> None:
        if not self.room:
            raise NoCapacity("no room")
        self.avoided.append(placement.avoid)
        self.endpoints[f"c{len(self.avoided)}"] = AgentEndpoint(node, "token", None, "host")

    def come_up(self) -> None:
        for name, endpoint in self.endpoints.items():
            self.endpoints[name] = AgentEndpoint(endpoint.node, endpoint.token, UP, endpoint.host)

    def end(self, names: Collection[str]) -> None:
        for name in names:
            del self.endpoints[name]

    def ask(self, name: str, order: Order, *, timeout_s: float) -> Future[TimedLine]:
        assert timeout_s > 0
        if name in self.vanished:
            raise AgentUnreachable(f"no container {name} stands by")
        sent: Future[TimedLine] = Future()
        sent.set_result(TimedLine(b"", 0.0, 0.0))
        return sent

    def reply(self, name: str, order: Order, sent: Future[TimedLine]) -> AgentReply:
        node = self.endpoints[name].node
        if node in self.silent:
            raise AgentUnreachable(f"the agent of {node} does not answer")
        if isinstance(order, CheckOrder):
            self.checked.append(node)
            return AgentReply(checks=self.checks.get(node, ()))
        status = AgentStatus(
            node=node, member=-1, state=AgentState.IDLE, schedule_cnt=0, proc_start_cnt=0,
            placement=0, attempt=0, is_warm=self.is_warm,
        )  # fmt: skip
        return AgentReply(status=status)

    def note_checked(self, name: str) -> None:
        self.passed.append(name)


class Spares:
    """The warm spares of a run, updated once a second."""

    def __init__(self, containers: Containers, folder: Any, **engine: Any) -> None:
        self.containers, self.now_s = containers, 0.0
        self.history = RunHistory()
        self.history.placements.append(
            PlacementCreated(at_s=0.0, epoch=1, placement=1, members=MEMBERS, avoid=())
        )
        section = {"kind": "kubernetes", "image": "i", "nodes": 2, "slots_per_node": 1, "spares": 3}
        job = small_job(folder, engine={**section, **engine})
        fleet: Any = self  # the fleet and the placer that it asks
        self.spares = WarmSpares(
            job, fleet, fleet, history=lambda: self.history, clock=lambda: self.now_s
        )

    # What it asks of the fleet.
    @property
    def spare_containers(self) -> Containers:
        return self.containers

    def nodes(self) -> list[str] | None:
        return self.containers.nodes

    # What it asks of the placer.
    def refuse(self, node: str, why: str) -> None:
        self.containers.refused[node] = why

    def run_for(self, seconds: float = 10.0, *, trains: bool = True) -> None:
        """Let time pass, with an update once a second."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 1.0
            self.spares.update(trains=trains)

    @property
    def on(self) -> list[str]:
        return [endpoint.node for endpoint in self.containers.endpoints.values()]


@pytest.fixture
def containers() -> Containers:
    return Containers()


@pytest.fixture
def spares(containers, tmp_path) -> Spares:
    return Spares(containers, tmp_path)


def test_one_is_started_once_the_attempt_trains_and_is_ready_when_its_imports_are_done(
    spares, containers
):
    spares.run_for(trains=False)
    assert spares.on == []
    spares.run_for()
    assert spares.on == ["node-2"]
    assert list(spares.spares.ready) == []
    containers.is_warm = False
    containers.come_up()
    spares.run_for()
    assert list(spares.spares.ready) == []
    containers.is_warm = True
    spares.run_for()
    assert list(spares.spares.ready) == ["node-2"]
    assert (containers.checked, containers.passed) == (["node-2"], ["c1"])


def test_as_many_stand_by_as_are_wanted_each_on_a_node_of_its_own(containers, tmp_path):
    spares = Spares(containers, tmp_path, warm_spares=2)
    spares.run_for()
    assert spares.on == ["node-2", "node-3"]


def test_none_is_started_where_none_is_wanted_or_no_node_is_free(containers, tmp_path):
    Spares(containers, tmp_path, warm_spares=0).run_for()
    Spares(containers, tmp_path, spares=0).run_for()
    containers.nodes = ["node-0", "node-1"]
    Spares(containers, tmp_path).run_for()
    assert containers.endpoints == {}


def test_where_the_engine_chooses_the_node_it_is_told_which_ones_not(containers, tmp_path):
    containers.nodes = None
    spares = Spares(containers, tmp_path)
    spares.history.isolations.append(Isolation("node-7", "a chip", 0.0))
    spares.run_for()
    assert (spares.on, containers.avoided) == ([ANY_NODE], [("node-7",)])


def test_one_whose_node_is_isolated_meanwhile_is_ended(spares, containers):
    spares.run_for()
    containers.come_up()
    spares.history.isolations.append(Isolation("node-2", "a chip", 0.0))
    spares.run_for()
    assert spares.on == ["node-3"]


def test_one_whose_agent_falls_silent_is_ended_and_another_one_is_made(spares, containers):
    spares.run_for()
    containers.come_up()
    spares.run_for()
    containers.silent = {"node-2"}
    spares.run_for(60.0)
    containers.silent = set()
    assert list(containers.endpoints) == ["c2"]


def test_nobody_is_silent_while_the_way_to_the_agents_is_cut_or_nobody_has_asked(
    spares, containers
):
    spares.run_for()
    containers.come_up()
    spares.run_for()
    containers.silent, containers.sees_agents = {"node-2"}, False
    spares.run_for(120.0)
    containers.sees_agents = True
    spares.run_for(10.0)
    spares.now_s += 300.0  # a member was moved
    spares.run_for(10.0)
    assert list(containers.endpoints) == ["c1"]


def test_one_that_was_slow_to_come_up_is_not_silent_at_its_first_word(spares, containers):
    spares.run_for(200.0)
    containers.silent = {"node-2"}
    containers.come_up()
    spares.run_for(10.0)
    containers.silent = set()
    spares.run_for(10.0)
    assert list(spares.spares.ready) == ["node-2"]


def test_one_that_vanishes_while_it_is_looked_at_ends_nothing_else(spares, containers, caplog):
    spares.run_for()
    containers.come_up()
    containers.vanished = {"c1"}
    spares.run_for()
    assert "no container c1 stands by" in caplog.text


def test_those_beyond_what_the_job_asks_for_now_are_ended(containers, tmp_path):
    Spares(containers, tmp_path, warm_spares=2).run_for()
    fewer = Spares(containers, tmp_path, warm_spares=0)
    fewer.run_for()
    assert containers.endpoints == {}


def test_on_this_machine_a_spare_is_not_checked_its_devices_are_in_use(containers, tmp_path):
    engine = {"kind": "local", "nodes": 2, "slots_per_node": 1, "spares": 3}
    spares = Spares(containers, tmp_path)
    job = small_job(tmp_path, engine=engine)
    fleet: Any = spares
    local = WarmSpares(
        job, fleet, fleet, history=lambda: spares.history, clock=lambda: spares.now_s
    )
    for second in range(30):
        spares.now_s = float(second)
        local.update(trains=True)
        containers.come_up()
    assert list(local.ready) == ["node-2"]
    assert containers.checked == []


def test_one_whose_container_is_lost_is_ended_and_said_so(spares, containers, caplog):
    spares.run_for()
    containers.come_up()
    spares.run_for()
    loss = NodeLoss("node-2", FaultClass.CONTAINER_LOST, "POD_DELETED", "the pod was deleted")
    containers.endpoints["c1"] = AgentEndpoint("node-2", "token", UP, "host", loss=loss)
    spares.run_for(1.0)
    assert containers.endpoints == {}
    assert "warm spare on node-2 is ended: the pod was deleted" in caplog.text


def test_one_that_never_comes_up_is_ended(spares, containers):
    spares.run_for()
    spares.run_for(UP_S + 1)
    assert "c1" not in containers.endpoints


def test_a_node_that_fails_its_check_is_refused_and_the_next_one_is_taken(spares, containers):
    bad = Check(name="devices", node="node-2", outcome=CheckOutcome.FAILED, seen="Alarm")
    containers.checks["node-2"] = (bad,)
    spares.run_for()
    containers.come_up()
    spares.run_for(5.0)
    assert containers.refused == {"node-2": "devices: Alarm"}
    assert containers.endpoints == {}
    spares.history.isolations.append(Isolation("node-2", "failed its checks", 0.0))
    spares.run_for(RETRY_S + 1)
    assert spares.on == ["node-3"]


def test_a_node_is_checked_again_now_and_then(spares, containers):
    spares.run_for()
    containers.come_up()
    spares.run_for(CHECK_AGAIN_S + 30)
    assert containers.checked == ["node-2", "node-2"]


def test_without_room_it_is_tried_again_ever_more_seldom(spares, containers, caplog):
    containers.room = False
    spares.run_for(600.0)
    tries = caplog.text.count("no warm spare can be started: no room")
    assert 5 <= tries <= 8, "after 5, 10, 20, 40, 80, 160, 320 s"
    containers.room = True
    spares.run_for(600.0)
    assert spares.on == ["node-2"]
