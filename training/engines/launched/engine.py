"""The engine of a run whose nodes a platform has given, with one `perdure launch` on each.

It takes and gives nothing of the platform's: a container is an agent that the node's `perdure
launch` starts. Nodes beyond those that train are spares. All that a supervisor must know to adopt
is at the nodes themselves. Times are seconds.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from pydantic import SecretStr

from perdure.storage.address import Credentials, open_store
from perdure.training.config.job import Job
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import AgentEndpoint, Placement, agent_config, terminated
from perdure.training.engines.launched.hosts import FIRST_WAIT_S, Hosts
from perdure.training.engines.launched.meeting import HostCalls, Registrations
from perdure.training.engines.launched.messages import (
    EndContainersOrder,
    HostedContainer,
    HostOrder,
    StartContainerOrder,
    TakeContainerOrder,
)
from perdure.training.engines.launched.secret import find_secret
from perdure.training.errors import EngineError
from perdure.training.journal.records import Member
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import NO_MEMBER, NodeLog

AGENT_START_TIMEOUT_S = 60.0
ORDER_TIMEOUT_S = 40.0
START_POLL_S = 0.1


class LaunchedEngine:
    """Containers on the nodes of an allocation; the arguments are those of `make_engine`."""

    def __init__(
        self,
        job: Job,
        *,
        home: Path,
        epoch: int,
        secrets_env: Mapping[str, str],
        created_s: float = 0.0,
    ) -> None:
        self._job, self._epoch, self._created_s = job, epoch, created_s
        self._home, self._secrets_env = home, secrets_env
        self._members: tuple[Member, ...] = ()

    @cached_property
    def _hosts(self) -> Hosts:
        """The nodes; looked for when they are needed, since a secret may have to be made."""
        keys, run_id = self._secrets_env, self._job.run_id
        secret = find_secret(run_id, home=self._home, environment=os.environ, store_keys=keys)
        store = open_store(self._job.storage, credentials_in(keys))
        return Hosts(Registrations(store, run_id, secret), HostCalls(secret, self._epoch))

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Every rung of the ladder, as long as there are spare nodes."""
        return frozenset(Rung)

    @property
    def sees_agents(self) -> bool:
        """True: the agents are on the network of the supervisor's node."""
        return True

    @property
    def poll_s(self) -> float:
        """A short interval: the nodes are near."""
        return 0.2

    def find_way(self) -> bool:
        """Return False: there is only one."""
        return False

    def nodes(self) -> Sequence[str]:
        """List the nodes that answer, in order of their ranks, first those with a spare."""
        now_s = time.monotonic()
        usable = [s for s in self._hosts.states().values() if s.is_usable(now_s)]
        spares = {s.registration.node for s in usable if any(map(_is_spare, s.held))}
        ordered = sorted(usable, key=lambda s: (s.registration.node_rank, s.registration.node))
        names = [state.registration.node for state in ordered]
        return sorted(names, key=lambda name: name not in spares)

    def usable_nodes(self) -> Sequence[str]:
        """Every node that answers: nobody else uses them."""
        return self.nodes()

    def failure_domains(self) -> Mapping[str, str]:
        """Return none: what the nodes share is not known."""
        return {}

    def submit(self, placement: Placement, *, ready: Collection[str] = ()) -> None:
        """End the run's containers, and start one for every member."""
        states = self._hosts.states(wait_s=FIRST_WAIT_S)
        self._end(
            {
                node: [h for h in state.held if not (_is_spare(h) and node in ready)]
                for node, state in states.items()
            }
        )
        self._members = placement.members
        self._launch(placement, [member.index for member in placement.members], ready)

    def replace(
        self, placement: Placement, members: Collection[int], *, ready: Collection[str] = ()
    ) -> None:
        """Start new containers for these members; the others keep theirs."""
        states = self._hosts.states()
        old = [member for member in self._members if member.index in members]
        ended: dict[str, list[HostedContainer]] = {}
        for member in old:
            if member.node in states:
                held = states[member.node].held
                ended[member.node] = [h for h in held if h.container.member == member.index]
        self._end(ended)
        self._members = placement.members
        self._launch(placement, members, ready)

    def start_spare(self, placement: Placement, node: str) -> None:
        """Start a spare container; returns at once."""
        self._members = placement.members
        self._end_stale([node])
        nobody = Member(index=NO_MEMBER, node=node, schedule_cnt=0)
        order = self._start_order(nobody, f"standby-{secrets.token_hex(4)}")
        self._hosts.order([(node, order)], timeout_s=ORDER_TIMEOUT_S, needs_all=True)

    def warm_spares(self) -> Mapping[str, AgentEndpoint]:
        """The spares that no member has taken yet, by node."""
        return {
            node: _spare_endpoint(held, state.registration.host)
            for node, state in self._hosts.states().items()
            for held in state.held
            if _is_spare(held)
        }

    def end_spares(self, names: Collection[str]) -> None:
        """End spares by force."""
        states = self._hosts.states()
        self._end({n: [h for h in states[n].held if _is_spare(h)] for n in names if n in states})

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of an earlier placement. Returns the indices of living members."""
        self._members = placement.members
        self._hosts.states(wait_s=FIRST_WAIT_S)
        contacts = self.contacts().items()
        return frozenset(index for index, contact in contacts if contact.address is not None)

    def contacts(self) -> Mapping[int, AgentEndpoint]:
        """The containers of the placement that was submitted or adopted last."""
        states = self._hosts.states()
        contacts = {}
        for member in self._members:
            lost_endpoint = AgentEndpoint(member.node, "", None, "")
            contacts[member.index] = lost_endpoint
            if member.node in states:
                state = states[member.node]
                held = next((h for h in state.held if _is_of(h, member)), None)
                if held is not None:
                    contacts[member.index] = _endpoint(held, state.registration.host)
        return contacts

    def inventory(self) -> Mapping[int, AgentEndpoint]:
        """All containers of the run's members, on the nodes that answer."""
        everything = {
            held.container.member: _endpoint(held, state.registration.host)
            for state in self._hosts.states().values()
            for held in state.held
            if not _is_spare(held)
        }
        current = {i: c for i, c in self.contacts().items() if c.address is not None}
        return {**everything, **current}

    def texts(self, since_s: float) -> Sequence[tuple[str, NodeLog]]:  # noqa: ARG002 the seam's
        """Return no reports: the platform below the nodes is not asked."""
        return []

    def chip_reports(self, since_s: float) -> Sequence[ChipReport]:  # noqa: ARG002 the seam's
        """Return no reports: the platform below the nodes is not asked."""
        return []

    def end(self) -> None:
        """End every container of the run by force, on the nodes that answer."""
        states = self._hosts.states(wait_s=FIRST_WAIT_S)
        self._end({node: list(state.held) for node, state in states.items()})

    def leftovers(self) -> Sequence[str]:
        """Names of containers that nodes still have."""
        states = self._hosts.states(wait_s=FIRST_WAIT_S)
        return [f"{node}/{h.container.path.name}" for node, s in states.items() for h in s.held]

    def _launch(
        self, placement: Placement, members: Collection[int], ready: Collection[str]
    ) -> None:
        states = self._hosts.states()
        launched = [member for member in placement.members if member.index in members]
        missing = [member.node for member in launched if member.node not in states]
        if missing:
            raise EngineError(f"no `perdure launch` is on {', '.join(missing)}")
        orders: list[tuple[str, HostOrder]] = []
        fresh: list[Member] = []
        for member in launched:
            spare = next(filter(_is_spare, states[member.node].held), None)
            if spare is not None and member.node in ready:
                orders.append((member.node, _take_order(spare, member)))
            else:
                fresh.append(member)
        # A new container needs the node of a spare that is not ready, or of one that is fenced.
        self.end_spares([member.node for member in fresh])
        self._end_stale([member.node for member in fresh])
        for member in fresh:
            name = f"p{placement.number:04d}-m{member.index}-s{member.schedule_cnt}"
            orders.append((member.node, self._start_order(member, name)))
        self._hosts.order(orders, timeout_s=ORDER_TIMEOUT_S, needs_all=True)
        self._await_agents(fresh)

    def _start_order(self, member: Member, name: str) -> StartContainerOrder:
        token = secrets.token_hex(16)
        config = agent_config(self._job, member, token=token, epoch=self._epoch, node_folder=None)
        return StartContainerOrder(name=name, config=config, created_s=self._created_s)

    def _await_agents(self, members: Sequence[Member]) -> None:
        deadline_s = time.monotonic() + AGENT_START_TIMEOUT_S
        while True:
            contacts = self.contacts()
            waiting = [m for m in members if contacts[m.index].address is None]
            if not waiting:
                return
            if time.monotonic() > deadline_s or any(map(self._has_failed, waiting)):
                names = ", ".join(member.node for member in waiting)
                raise EngineError(f"the agents of {names} did not start: {self._why(waiting[0])}")
            time.sleep(START_POLL_S)

    def _has_failed(self, member: Member) -> bool:
        """Whether the agent of a new container has ended, or its node is gone."""
        state = self._hosts.states().get(member.node)
        if state is None or state.is_gone:
            return True
        return any(_is_of(held, member) and not held.is_running for held in state.held)

    def _why(self, member: Member) -> str:
        state = self._hosts.states().get(member.node)
        if state is None or state.is_gone:
            return "its `perdure launch` is gone"
        lines = (held.last_line for held in state.held if _is_of(held, member))
        return next(lines, "the node does not have the container")

    def _end_stale(self, nodes: Collection[str]) -> None:
        """Fence nodes that were replaced and are back: what they still run is nobody's."""
        states = self._hosts.states()
        self._end(
            {
                node: [h for h in states[node].held if not (_is_spare(h) or self._is_current(h))]
                for node in nodes
                if node in states
            }
        )

    def _is_current(self, held: HostedContainer) -> bool:
        return any(_is_of(held, member) for member in self._members)

    def _end(self, ended: Mapping[str, Sequence[HostedContainer]]) -> None:
        orders = [
            (node, EndContainersOrder(folders=tuple(h.container.folder for h in held)))
            for node, held in ended.items()
            if held
        ]
        self._hosts.order(orders, timeout_s=ORDER_TIMEOUT_S, needs_all=False)


def credentials_in(variables: Mapping[str, str]) -> Credentials | None:
    """Read the store's keys from the variables that agents get; None: boto3's default chain."""
    if not variables.get("AWS_ACCESS_KEY_ID") or not variables.get("AWS_SECRET_ACCESS_KEY"):
        return None
    session = variables.get("AWS_SESSION_TOKEN")
    return Credentials(
        access_key=SecretStr(variables["AWS_ACCESS_KEY_ID"]),
        secret_key=SecretStr(variables["AWS_SECRET_ACCESS_KEY"]),
        session_token=SecretStr(session) if session else None,
    )


def _is_spare(held: HostedContainer) -> bool:
    return held.container.member == NO_MEMBER


def _is_of(held: HostedContainer, member: Member) -> bool:
    container = held.container
    place = (container.node, container.member, container.schedule_cnt)
    return place == (member.node, member.index, member.schedule_cnt)


def _take_order(spare: HostedContainer, member: Member) -> TakeContainerOrder:
    return TakeContainerOrder(
        folder=spare.container.folder, member=member.index, schedule_cnt=member.schedule_cnt
    )


def _endpoint(held: HostedContainer, host: str) -> AgentEndpoint:
    container, address = held.container, held.address
    return AgentEndpoint(
        container.node,
        container.token,
        (host, address.port) if address is not None else None,
        host,
        was_spare=container.stood_by,
        schedule_cnt=container.schedule_cnt,
        loss=terminated(container.node) if held.is_terminated else None,
    )


def _spare_endpoint(held: HostedContainer, host: str) -> AgentEndpoint:
    """Describe a spare to the fleet. Without an agent it is lost, unless it is starting."""
    node = held.container.node
    lost = held.was_up and held.address is None
    loss = NodeLoss(node, FaultClass.CONTAINER_LOST, "AGENT_GONE", "its agent is gone")
    contact = _endpoint(held, host)
    return AgentEndpoint(
        node, contact.token, contact.address, host, loss=loss if lost else contact.loss
    )
