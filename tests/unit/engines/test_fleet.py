"""How a supervisor speaks to the agents of a run: to all at once, and to none for too long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest

from tests.jobs import small_job
from training.agent.control import control_server
from training.engines import fleet as fleet_module
from training.engines.base import Contact, Placement
from training.engines.fleet import Fleet
from training.errors import AgentUnreachable, EngineError
from training.recovery.healing import HealPlan
from training.recovery.rungs import Rung
from training.wire.agent import AgentReply, AgentState, AgentStatus, Request, StopOrder
from training.wire.healing import HealOrder
from training.wire.logs import LogsQuery

TOKEN = "t" * 32
NUM_MEMBERS = 200
BLACK_HOLE = 77
LOOK_S = 1.0
HEAL = HealOrder(
    placement=1, attempt=1, rung=Rung.IN_PLACE_RESTART, plan=HealPlan(None), slots_per_node=1,
    variables={}, cwd="/",
)  # fmt: skip


class Agents:
    """All agents of a gang, on one port of many loopback addresses.

    Attributes:
        delay_s: that an answer takes.
        refusal: the error that they answer with.
        received: every request.
        answered: how many requests have their answer.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.refusal: str | None = None
        self.received: list[Request] = []
        self.answered = 0
        self._lock = threading.Lock()
        self.server = control_server("0.0.0.0", TOKEN, self.answer)  # noqa: S104 all of 127/8
        self.server.socket.listen(NUM_MEMBERS)
        self.server.start()

    def answer(self, request: Request) -> AgentReply:
        with self._lock:
            self.received.append(request)
        time.sleep(self.delay_s)
        with self._lock:
            self.answered += 1
        status = AgentStatus(
            node="some", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
            placement=1, attempt=1,
        )  # fmt: skip
        return AgentReply(error=self.refusal) if self.refusal else AgentReply(status=status, at_s=1)


class Containers:
    """An engine whose containers are there; some may be gone."""

    capabilities = frozenset(Rung)

    def __init__(self, contacts: Mapping[int, Contact]) -> None:
        self.now = dict(contacts)

    def nodes(self) -> Sequence[str]:
        return [contact.node for contact in self.now.values()]

    def submit(self, placement: Placement) -> None:
        """They are there."""

    def replace(self, placement: Placement, members: Collection[int]) -> None:
        """They are there."""

    def adopt(self, placement: Placement) -> frozenset[int]:
        return frozenset(self.now)

    def contacts(self) -> Mapping[int, Contact]:
        return self.now

    inventory = contacts

    def end(self) -> None:
        self.now = {}


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    agents.server.close()


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An address that takes connections and never answers, as one of a node that is cut off."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@pytest.fixture
def containers(agents, black_hole) -> Containers:
    def contact(index: int) -> Contact:
        at = (f"127.0.1.{index + 1}", agents.server.port)
        return Contact(f"node-{index}", TOKEN, black_hole if index == BLACK_HOLE else at, "host")

    return Containers({index: contact(index) for index in range(NUM_MEMBERS)})


@pytest.fixture
def fleet(containers, monkeypatch, tmp_path) -> Fleet:
    monkeypatch.setattr(fleet_module, "LOOK_TIMEOUT_S", LOOK_S)
    fleet = Fleet(containers, small_job(tmp_path), epoch=3)
    fleet.adopt(Placement(1, ()))
    return fleet


def without_black_hole(containers: Containers) -> None:
    del containers.now[BLACK_HOLE]


def test_a_node_that_is_cut_off_delays_the_look_at_199_others_by_its_own_deadline_at_most(fleet):
    began_s = time.monotonic()
    seen = fleet.poll()
    took_s = time.monotonic() - began_s
    assert len(seen.agents) == NUM_MEMBERS - 1
    assert (seen.unanswered, seen.lost) == ((f"node-{BLACK_HOLE}",), ())
    assert took_s < LOOK_S + 2.0


def test_who_has_not_answered_is_not_asked_again_and_is_lost_after_a_while(
    fleet, containers, agents, monkeypatch
):
    containers.now = {0: containers.now[0], BLACK_HOLE: containers.now[BLACK_HOLE]}
    assert fleet.poll().unanswered == (f"node-{BLACK_HOLE}",)
    monkeypatch.setattr(fleet_module, "SILENT_AGENT_S", 0.5)
    seen = fleet.poll()
    assert (seen.unanswered, seen.lost) == ((), (f"node-{BLACK_HOLE}",))
    assert len(agents.received) == 2, "the one that answers was asked twice"
    assert len(fleet._asked) == 1


def test_an_answer_that_comes_after_the_look_counts_in_the_next_one(fleet, containers, agents):
    without_black_hole(containers)
    containers.now = {0: containers.now[0]}
    agents.delay_s = 1.5 * LOOK_S
    assert fleet.poll().unanswered == ("node-0",)
    assert list(fleet.poll().agents) == [0]
    assert len(agents.received) == 1


def test_an_answer_from_before_a_stop_says_nothing_after_it(fleet, containers, agents):
    containers.now = {0: containers.now[0]}
    agents.delay_s = 1.5 * LOOK_S
    fleet.poll()
    agents.delay_s = 0.0
    fleet.stop(5.0)
    assert list(fleet.poll().agents) == [0]
    ops = [request.order.op for request in agents.received]
    assert ops == ["status", "stop", "status"]


def test_a_container_that_is_gone_is_lost_at_once(fleet, containers):
    gone = containers.now[5]
    containers.now = {5: Contact(gone.node, TOKEN, None, gone.host)}
    assert fleet.poll().lost == ("node-5",)
    with pytest.raises(AgentUnreachable, match="the agent of node-5 is gone"):
        fleet.heal("node-5", HEAL)


def test_agents_that_obey_another_supervisor_are_no_lost_nodes(fleet, containers, agents):
    without_black_hole(containers)
    agents.refusal = "epoch 3 is over"
    with pytest.raises(EngineError, match="refused status: epoch 3 is over"):
        fleet.poll()
    with pytest.raises(EngineError, match="refused stop: epoch 3 is over"):
        fleet.stop(1.0)
    assert fleet.logs(100) == [], "of evidence there is what there is"


def test_every_request_has_the_members_token_and_the_supervisors_epoch(fleet, containers, agents):
    containers.now = {0: containers.now[0]}
    fleet.logs(100)
    (request,) = agents.received
    assert isinstance(request.order, LogsQuery)
    assert request.token is not None
    assert (request.token.get_secret_value(), request.epoch) == (TOKEN, 3)
    assert TOKEN not in repr(containers.now[0])


def test_a_greeting_shows_the_clock_of_each_member(fleet, containers):
    without_black_hole(containers)
    found = fleet.greet()
    assert len(found) == NUM_MEMBERS - 1
    assert found[3].node == "node-3"
    assert found[3].clock_s == pytest.approx(1 - time.time(), abs=30.0)
    assert found[3].doubt_s < 30.0


def test_all_are_told_to_stop_though_one_of_them_never_answers(
    fleet, containers, agents, monkeypatch
):
    monkeypatch.setattr(fleet_module, "CALL_TIMEOUT_S", 2.0)
    containers.now = {i: containers.now[i] for i in range(BLACK_HOLE - 5, BLACK_HOLE + 5)}
    fleet.stop(7.0)
    assert [request.order for request in agents.received] == [StopOrder(grace_s=7.0)] * 9


def test_an_order_that_one_refuses_has_reached_all_before_anybody_hears_of_it(
    fleet, containers, agents
):
    containers.now = {i: containers.now[i] for i in range(10)}
    agents.delay_s = 0.2
    agents.refusal = "epoch 3 is over"
    with pytest.raises(EngineError, match="refused stop"):
        fleet.stop(1.0)
    assert agents.answered == len(agents.received) == 10
