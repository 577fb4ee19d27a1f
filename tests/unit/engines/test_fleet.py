"""How a supervisor speaks to the agents of a run: to all at once, and to none for too long."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from perdure.training.agent.control import ControlServer
from perdure.training.config.drill import Victim
from perdure.training.engines import agent_calls
from perdure.training.engines import fleet as fleet_module
from perdure.training.engines.base import AgentEndpoint, Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.errors import AgentUnreachable, EngineError, OtherRelease
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.healing import HealPlan
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import (
    AgentReply,
    AssignOrder,
    CheckOrder,
    KillOrder,
    NodeLog,
    Order,
    Request,
    StartOrder,
    StatusQuery,
    StopOrder,
)
from perdure.training.wire.agent_status import AgentState, AgentStatus, ShownStep
from perdure.training.wire.logs import LogsQuery
from perdure.training.wire.node import DeviceAddress, DevicesQuery, HealOrder, NodeDevices
from perdure.training.wire.version import PERDURE_VERSION
from tests.jobs import small_job
from tests.waiting import BEYOND_A_TEST_S, PATIENCE_S

TOKEN = "t" * 32
NUM_MEMBERS = 200
BLACK_HOLE = 77
POLL_S = 1.0
HEAL = HealOrder(
    placement=1, attempt=1, rung=Rung.IN_PLACE_RESTART, plan=HealPlan(None), slots_per_node=1,
    variables={}, cwd="/",
)  # fmt: skip

ORDER = StartOrder(
    placement=1, attempt=1, num_nodes=NUM_MEMBERS, slots_per_node=1, hosts=(), master_addr="",
    master_port=1, command=(), is_command=False, is_launcher=False, cwd="/", grace_s=1.0,
    log_path=None, variables={}, job=small_job(), data_manifest_key=None,
)  # fmt: skip


class Agents:
    """All agents of a gang, on one port of many loopback addresses.

    Attributes:
        delay_s: that an answer takes.
        looks: set while they answer looks; others wait for it.
        refusal: the error that they answer with.
        version: theirs.
        num_killed: of them by an order to kill.
        received: every request.
        answered: how many requests have their answer.
        shown: the step in the output of each.
        devices: the answer about the addresses of devices.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.looks = threading.Event()
        self.looks.set()
        self.refusal: str | None = None
        self.version = PERDURE_VERSION
        self.num_killed = 0
        self.received: list[Request] = []
        self.answered = 0
        self.shown: ShownStep | None = None
        self.devices = AgentReply(error="no addresses")
        self._lock = threading.Lock()
        self.server = ControlServer.open("0.0.0.0", TOKEN, self.answer)  # noqa: S104 all of 127/8
        self.server.listeners[0].socket.listen(NUM_MEMBERS)
        self.server.start()

    def answer(self, request: Request) -> AgentReply:
        with self._lock:
            self.received.append(request)
        time.sleep(self.delay_s)
        if isinstance(request.order, StatusQuery):
            self.looks.wait(PATIENCE_S)
        with self._lock:
            self.answered += 1
        status = AgentStatus(
            node="some", member=0, state=AgentState.RUNNING, schedule_cnt=1, proc_start_cnt=1,
            placement=1, attempt=1, shown=self.shown, version=self.version,
        )  # fmt: skip
        if self.refusal:
            return AgentReply(error=self.refusal)
        if isinstance(request.order, DevicesQuery):
            return self.devices
        return AgentReply(status=status, at_s=1, port=1, num_killed=self.num_killed)


class Containers:
    """An engine whose containers are there; some may be gone."""

    capabilities = frozenset(Rung)
    poll_s = 0.0

    def __init__(self, contacts: Mapping[int, AgentEndpoint]) -> None:
        self.now = dict(contacts)
        self.spares: dict[str, AgentEndpoint] = {}
        self.ready_names: list[tuple[str, ...]] = []
        self.sees_agents = True

    def nodes(self) -> Sequence[str]:
        return [contact.node for contact in self.now.values()]

    def find_way(self) -> bool:
        return False

    def usable_nodes(self) -> Sequence[str]:
        return self.nodes()

    def failure_domains(self) -> Mapping[str, str]:
        return {}

    def submit(self, placement: Placement, *, ready: Collection[str] = ()) -> None:
        """They are there."""

    def replace(
        self, placement: Placement, members: Collection[int], *, ready: Collection[str] = ()
    ) -> None:
        """They are there; members take those that are ready."""
        self.ready_names.append(tuple(ready))

    def start_spare(self, placement: Placement, node: str) -> None:
        """None is made."""

    def warm_spares(self) -> Mapping[str, AgentEndpoint]:
        return self.spares

    def end_spares(self, names: Collection[str]) -> None:
        self.spares = {name: spare for name, spare in self.spares.items() if name not in names}

    def adopt(self, placement: Placement) -> frozenset[int]:
        return frozenset(self.now)

    def contacts(self) -> Mapping[int, AgentEndpoint]:
        return self.now

    inventory = contacts

    def texts(self, since_s: float) -> Sequence[tuple[str, NodeLog]]:
        return [(c.node, NodeLog(name="platform", text=f"{since_s:g}")) for c in self.now.values()]

    def end(self) -> None:
        self.now = {}

    def leftovers(self) -> Sequence[str]:
        return self.nodes()


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    agents.looks.set()
    agents.server.close()


@pytest.fixture
def black_hole() -> Iterator[tuple[str, int]]:
    """An address that takes connections and never answers, as one of a node that is cut off."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()


@pytest.fixture
def containers(agents, black_hole) -> Containers:
    def contact(index: int) -> AgentEndpoint:
        at = (f"127.0.1.{index + 1}", agents.server.port)
        return AgentEndpoint(
            f"node-{index}", TOKEN, black_hole if index == BLACK_HOLE else at, "host"
        )

    return Containers({index: contact(index) for index in range(NUM_MEMBERS)})


@pytest.fixture
def fleet(containers, monkeypatch, tmp_path) -> Fleet:
    for name in ("CALL_TIMEOUT_S", "EVIDENCE_TIMEOUT_S", "SHUTDOWN_TIMEOUT_S"):
        monkeypatch.setattr(fleet_module, name, BEYOND_A_TEST_S)  # whoever waits for the black hole
    monkeypatch.setattr(fleet_module, "GREET_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(agent_calls, "POLL_TIMEOUT_S", POLL_S)
    monkeypatch.setattr(fleet_module, "POLL_TIMEOUT_S", POLL_S)
    monkeypatch.setattr(fleet_module, "SHUTDOWN_MARGIN_S", 0.0)  # these containers never go
    fleet = Fleet(containers, small_job(tmp_path), epoch=3)
    fleet.adopt(Placement(1, ()))
    return fleet


def without_black_hole(containers: Containers) -> None:
    del containers.now[BLACK_HOLE]


def test_a_node_that_is_cut_off_delays_the_poll_of_199_others_by_its_own_deadline_at_most(fleet):
    answered: set[int] = set()
    while len(answered) < NUM_MEMBERS - 1:  # a busy machine needs more than one poll
        snapshot = fleet.poll()
        assert snapshot.lost == ()
        assert f"node-{BLACK_HOLE}" in snapshot.unanswered
        answered |= set(snapshot.agents)
    assert BLACK_HOLE not in answered


def test_a_member_that_has_not_answered_is_not_asked_again_and_is_lost_after_a_while(
    fleet, containers, agents, monkeypatch
):
    containers.now = {0: containers.now[0], BLACK_HOLE: containers.now[BLACK_HOLE]}
    assert fleet.poll().unanswered == (f"node-{BLACK_HOLE}",)
    monkeypatch.setattr(agent_calls, "SILENT_AGENT_S", 0.5)
    snapshot = fleet.poll()
    assert (snapshot.unanswered, snapshot.lost) == ((), (f"node-{BLACK_HOLE}",))
    assert len(agents.received) == 2, "the one that answers was asked twice"
    assert len(fleet._agents._polls) == 1


@pytest.fixture
def strangers() -> Iterator[Agents]:
    """Agents of another release."""
    strangers = Agents()
    strangers.version = "9.0.0"
    yield strangers
    strangers.server.close()


@pytest.mark.parametrize("stranger", [0, 1, 2])
def test_a_single_agent_of_another_release_is_a_lost_container_and_the_others_go_on(
    fleet, containers, strangers, stranger
):
    containers.now = {index: containers.now[index] for index in range(3)}
    at = (f"127.0.1.{stranger + 1}", strangers.server.port)
    containers.now[stranger] = replace(containers.now[stranger], address=at)
    for _ in range(2):
        snapshot = fleet.poll()
        assert set(snapshot.agents) == {0, 1, 2} - {stranger}
        assert snapshot.lost == (f"node-{stranger}",)
        (loss,) = fleet.losses(snapshot.lost)
        assert (loss.fault_class, loss.code) == (FaultClass.CONTAINER_LOST, "OTHER_RELEASE")
        assert "is 9.0.0, and this supervisor" in loss.line
    containers.now[stranger] = replace(containers.now[stranger], address=("127.0.1.9", at[1]))
    strangers.version = PERDURE_VERSION
    fleet.replace(Placement(1, ()), [stranger])
    assert set(fleet.poll().agents) == {0, 1, 2}
    assert fleet.losses(()) == []


@pytest.mark.parametrize("members", [1, 2])
def test_a_run_whose_agents_are_all_of_another_release_is_refused(
    fleet, containers, agents, members
):
    agents.version = "9.0.0"
    containers.now = {index: containers.now[index] for index in range(members)}
    for _ in range(2):
        with pytest.raises(OtherRelease, match="supervise the run with the image"):
            fleet.poll()
    assert {request.order.op for request in agents.received} == {"status"}


def test_a_busy_supervisor_does_not_take_its_own_delay_for_the_silence_of_an_agent(
    fleet, containers, agents, monkeypatch
):
    containers.now = {0: containers.now[0]}
    fleet.poll()
    fleet._agents._polled_s -= 10 * agent_calls.SILENT_AGENT_S
    monkeypatch.setattr(agent_calls, "POLL_TIMEOUT_S", 0.0)
    agents.looks.clear()
    snapshot = fleet.poll()
    agents.looks.set()
    assert (snapshot.unanswered, snapshot.lost) == (("node-0",), ())


def test_a_lost_member_keeps_no_recovery_waiting_for_its_logs(fleet, containers, monkeypatch):
    containers.now = {0: containers.now[0], BLACK_HOLE: containers.now[BLACK_HOLE]}
    fleet.poll()
    monkeypatch.setattr(agent_calls, "SILENT_AGENT_S", 0.5)
    assert fleet.poll().lost == (f"node-{BLACK_HOLE}",)
    fleet.texts(100, since_s=0.0)
    assert list(fleet.poll().agents) == [0], "polls go on: it may come back"
    assert len(fleet._agents._polls) == 1


def test_a_first_node_that_is_cut_off_keeps_the_poll_of_the_others_not_waiting_for_its_log(
    fleet, containers, monkeypatch
):
    containers.now = {0: containers.now[BLACK_HOLE], 1: containers.now[1]}
    asked: list[str] = []
    send = fleet._calls.send

    def note(contact: AgentEndpoint, order: Order, **limits: float) -> Any:
        asked.extend([order.op] * (contact is containers.now[0]))
        return send(contact, order, **limits)

    monkeypatch.setattr(fleet._calls, "send", note)
    for _ in range(3):
        assert fleet.metrics(7) == ("", 7)
        assert list(fleet.poll().agents) == [1]
    assert asked == ["metrics", "status"], "a log that is waited for, and an answer that it owes"


def test_the_log_of_a_command_is_on_the_first_member_that_prints_its_steps(
    fleet, containers, agents
):
    printing = Agents()
    printing.shown = ShownStep(step=3, age_s=0.0)
    at = ("127.0.1.2", printing.server.port)
    containers.now = {0: containers.now[0], 1: replace(containers.now[1], address=at)}
    fleet.metrics(0)
    assert [request.order.op for request in agents.received] == ["metrics"], (
        "before any step is known"
    )
    fleet.poll()
    fleet.metrics(0)
    assert [request.order.op for request in printing.received] == ["status", "metrics"]
    printing.server.close()


def test_a_member_that_is_lost_already_keeps_nothing_waiting_when_its_placement_is_found_again(
    fleet, containers, monkeypatch
):
    containers.now = {0: containers.now[0], BLACK_HOLE: containers.now[BLACK_HOLE]}
    fleet.poll()
    monkeypatch.setattr(agent_calls, "SILENT_AGENT_S", 0.5)
    assert fleet.poll().lost == (f"node-{BLACK_HOLE}",)
    fleet.adopt(Placement(1, ()))
    fleet.replace(Placement(1, ()), [BLACK_HOLE])


def test_members_take_the_spares_that_answer_and_their_agents_learn_whose_they_are(
    fleet, containers, agents
):
    good, silent = containers.now[1], containers.now[BLACK_HOLE]
    containers.spares = {"good": good, "silent": silent, "starting": replace(good, address=None)}
    containers.now = {0: containers.now[0], 1: replace(good, was_spare=True, schedule_cnt=4)}
    fleet.replace(Placement(1, ()), [1], grace_s=0.0)
    assert containers.ready_names == [("good",)]
    orders = [request.order for request in agents.received if request.order.op == "assign"]
    assert orders == [AssignOrder(member=1, schedule_cnt=4)]


def test_a_move_asks_nothing_of_members_that_do_not_move(fleet, containers, agents):
    hangs = replace(containers.now[BLACK_HOLE], was_spare=True)
    moves = replace(containers.now[2], was_spare=True, schedule_cnt=2)
    containers.now, containers.spares = {1: hangs, 2: moves}, {"good": containers.now[3]}
    fleet.replace(Placement(1, ()), [2], grace_s=0.0)
    assert containers.ready_names == [("good",)], "and the one that hangs keeps its container"


def test_a_supervisor_that_only_polls_a_run_gives_no_orders(fleet, containers, agents):
    containers.now = {0: replace(containers.now[0], was_spare=True, schedule_cnt=2)}
    fleet.adopt(Placement(1, ()))
    fleet.poll()
    assert {request.order.op for request in agents.received} == {"status"}


def test_a_member_gets_a_new_container_when_its_spare_does_not_obey(fleet, containers):
    containers.now = {0: replace(containers.now[0], address=None, was_spare=True)}
    fleet.replace(Placement(1, ()), [0])
    assert containers.ready_names == [(), ()], "once more, without a spare"


def test_a_silent_agent_is_not_lost_while_nobody_could_have_heard_it(
    fleet, containers, monkeypatch
):
    containers.now = {0: containers.now[0], BLACK_HOLE: containers.now[BLACK_HOLE]}
    containers.sees_agents = False
    fleet.poll()
    monkeypatch.setattr(agent_calls, "SILENT_AGENT_S", 0.5)
    assert fleet.poll().lost == ()


def test_an_answer_that_comes_after_the_poll_counts_in_the_next(fleet, containers, agents):
    without_black_hole(containers)
    containers.now = {0: containers.now[0]}
    agents.looks.clear()
    assert fleet.poll().unanswered == ("node-0",)
    agents.looks.set()
    assert list(fleet.poll().agents) == [0]
    assert len(agents.received) == 1


def test_an_answer_from_before_a_stop_says_nothing_after_it(fleet, containers, agents):
    containers.now = {0: containers.now[0]}
    agents.looks.clear()
    fleet.poll()
    fleet.stop(5.0)
    agents.looks.set()
    assert list(fleet.poll().agents) == [0]
    ops = [request.order.op for request in agents.received]
    assert ops == ["status", "stop", "status"]


def test_a_container_that_is_gone_is_lost_at_once(fleet, containers):
    lost = containers.now[5]
    containers.now = {5: AgentEndpoint(lost.node, TOKEN, None, lost.host)}
    assert fleet.poll().lost == ("node-5",)
    with pytest.raises(AgentUnreachable, match="the agent of node-5 is gone"):
        fleet.heal("node-5", HEAL)


def test_agents_that_obey_another_supervisor_are_no_lost_nodes(fleet, containers, agents):
    containers.now = {0: containers.now[0], 1: containers.now[1]}
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
    probes = fleet.greet()
    assert len(probes) == NUM_MEMBERS - 1
    assert probes[3].node == "node-3"
    assert probes[3].clock_s == pytest.approx(1 - time.time(), abs=PATIENCE_S)
    assert 0.0 <= probes[3].doubt_s < PATIENCE_S


def test_all_members_are_ordered_to_stop_though_one_never_answers(
    fleet, containers, agents, monkeypatch
):
    monkeypatch.setattr(fleet_module, "CALL_TIMEOUT_S", 2.0)
    containers.now = {i: containers.now[i] for i in range(BLACK_HOLE - 5, BLACK_HOLE + 5)}
    fleet.stop(7.0)
    assert [request.order for request in agents.received] == [StopOrder(grace_s=7.0)] * 9


def test_an_order_that_a_member_refuses_has_reached_all_before_anybody_hears_of_it(
    fleet, containers, agents
):
    containers.now = {i: containers.now[i] for i in range(10)}
    agents.delay_s = 0.2
    agents.refusal = "epoch 3 is over"
    with pytest.raises(EngineError, match="refused stop"):
        fleet.stop(1.0)
    assert agents.answered == len(agents.received) == 10


@pytest.mark.parametrize(
    ("victim", "num_asked"),
    [
        *((victim, 1) for victim in Victim if victim not in (Victim.RANK, Victim.COORDINATOR)),
        (Victim.RANK, NUM_MEMBERS - 1),
        (Victim.COORDINATOR, NUM_MEMBERS - 1),
    ],
)
def test_every_member_that_may_have_a_victim_is_ordered_to_kill_it(
    fleet, containers, agents, victim, num_asked
):
    without_black_hole(containers)
    containers.spares = {"spare": containers.now[0]}
    assert not fleet.kill(victim, 3), "nobody had it"
    agents.num_killed = 1
    assert fleet.kill(victim, 3)
    orders = [request.order for request in agents.received]
    assert len(orders) == 2 * num_asked
    rank = 3 if victim is Victim.RANK else None
    assert set(orders) == {KillOrder(victim=victim, rank=rank)}


def test_a_run_that_is_no_drill_says_so_and_a_member_that_is_not_there_is_not_hit(
    fleet, containers, agents
):
    without_black_hole(containers)
    assert not fleet.kill(Victim.NODE, NUM_MEMBERS + 1)
    agents.refusal = "the run is no drill"
    with pytest.raises(EngineError, match="refused kill: the run is no drill"):
        fleet.kill(Victim.NODE, 3)


def test_what_the_platform_reports_is_known_of_nodes_without_an_agent_too(fleet, containers):
    lost = containers.now[5]
    containers.now = {5: AgentEndpoint(lost.node, TOKEN, None, lost.host)}
    assert fleet.texts(100, since_s=7.0) == [("node-5", NodeLog(name="platform", text="7"))]


def test_a_node_that_joins_costs_one_request_to_the_first_member_and_one_to_itself(
    agents, containers, fleet
):
    without_black_hole(containers)
    fleet.join(ORDER, {5}, generation=2)
    asked = Counter(request.order.op for request in agents.received)
    assert asked == {"rendezvous": 1, "start": 1}, f"of {NUM_MEMBERS} members"


def test_nodes_of_a_gang_ping_the_ports_that_other_nodes_know(agents, containers):
    addresses = [DeviceAddress(device_id=n, device_ip=f"10.1.0.{n}") for n in range(2)]
    agents.devices = AgentReply(devices=NodeDevices(devices=tuple(addresses)))
    containers.now = {index: containers.now[index] for index in range(3)}
    fleet = Fleet(containers, small_job(), epoch=1)
    alone = CheckOrder(
        job=small_job(), num_nodes=3, slots_per_node=2, state_bytes=None, is_new=True,
        gang_host=None, variables={}, timeout_s=5.0,
    )  # fmt: skip
    in_gang = alone.model_copy(update={"gang_host": "127.0.1.1"})
    fleet.check(dict.fromkeys(range(3), alone))
    assert not any(isinstance(request.order, DevicesQuery) for request in agents.received)
    agents.received.clear()
    fleet.check(dict.fromkeys(range(3), in_gang))
    pings = [r.order.pings for r in agents.received if isinstance(r.order, CheckOrder)]
    assert sorted([(t.device, t.member, t.address) for t in of] for of in pings) == [
        [(0, 0, "10.1.0.0"), (1, 1, "10.1.0.1")],
        [(0, 1, "10.1.0.0"), (1, 2, "10.1.0.1")],
        [(0, 2, "10.1.0.0"), (1, 0, "10.1.0.1")],
    ]


def test_nodes_that_do_not_know_their_ports_are_checked_all_the_same(agents, containers):
    containers.now = {index: containers.now[index] for index in range(2)}
    fleet = Fleet(containers, small_job(), epoch=1)
    order = CheckOrder(
        job=small_job(), num_nodes=2, slots_per_node=2, state_bytes=None, is_new=True,
        gang_host="127.0.1.1", variables={}, timeout_s=5.0,
    )  # fmt: skip
    assert fleet.check(dict.fromkeys(range(2), order)) == []
    checks = [r.order for r in agents.received if isinstance(r.order, CheckOrder)]
    assert [check.pings for check in checks] == [(), ()]
