"""The embedded engine: nodes of this machine, each container an agent in its own session.

A node is a name and a scratch folder; a container is an agent process with a folder of its own
below it, so that losing a node, replacing a container and restarting in place differ really.
The list of containers is on disk before they start: a supervisor that takes over finds them.
Times are seconds.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from storage.frozen_model import FrozenModel
from training.agent.agent import CONFIG_FILE
from training.agent.control import ADDRESS_FILE, AgentClient
from training.agent.device_addresses import VISIBLE
from training.engines.base import Greeting, Placement, Snapshot
from training.engines.rank_table import Server, rank_table
from training.environment import variables_of, worker_path
from training.errors import AgentUnreachable, EngineError
from training.files import last_line, private_folder, write_whole
from training.job import Job
from training.processes import MARKER, is_alive, kill_container
from training.recovery.rungs import Rung
from training.specs.watch import HangAction
from training.wire.agent import (
    AgentAddress,
    AgentConfig,
    AgentReply,
    AgentStatus,
    CheckOrder,
    EvidenceQuery,
    GreetQuery,
    MetricsQuery,
    NodeText,
    Order,
    RendezvousOrder,
    ShutdownOrder,
    StacksQuery,
    StartOrder,
    StatusQuery,
    StopOrder,
)
from training.wire.healing import Healing, HealOrder
from training.wire.logs import (
    Collected,
    CollectOrder,
    LogPiece,
    LogsQuery,
    ReadLogsQuery,
    WorkerLog,
)
from training.wire.node import Check, unanswered
from training.wire.rank_table import DevicesQuery, NodeDevices

LOOPBACK = "127.0.0.1"
AGENT_START_TIMEOUT_S = 60.0
RENDEZVOUS_TIMEOUT_S = 120.0  # the first one imports torch, which a cold disk makes slow
SILENT_AGENT_S = 15.0  # an agent that lives but does not answer for this long is lost
SHUTDOWN_MARGIN_S = 10.0
CALL_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0  # for the answer; one that hangs is ended by force
COLLECT_TIMEOUT_S = 3.0  # it answers at once, and a recovery must not wait for one that does not
CHECK_MARGIN_S = 15.0  # beyond what the node gives itself for its checks
EVIDENCE_TIMEOUT_S = 60.0  # the driver's tools are asked one by one for every device
LIFE_PREFIX = "life-"
_CONTAINERS_FILE = "containers.json"
# A supervisor's own flow run, container or rank is not that of its workers.
_NOT_INHERITED = ("PREFECT_", "MA_", "VC_", "TORCHELASTIC_")


class Container(FrozenModel):
    """One container as it is remembered on disk."""

    member: int
    node: str
    schedule_cnt: int
    folder: str
    token: str

    @property
    def path(self) -> Path:
        """Its folder."""
        return Path(self.folder)

    def address(self) -> AgentAddress | None:
        """Where its agent listens, None when there is none or it is dead."""
        try:
            text = (self.path / ADDRESS_FILE).read_text(encoding="utf-8")
            address = AgentAddress.model_validate_json(text)
        except (OSError, ValidationError):
            return None
        return address if is_alive(address.pid, address.process_started_s) else None


class Containers(FrozenModel):
    """The containers of a placement, as remembered on disk."""

    placement: int
    containers: tuple[Container, ...]


def read_containers(path: Path) -> Containers | None:
    """The containers of a file, None when there is none.

    Raises:
        EngineError: the file is damaged.
    """
    try:
        return Containers.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise EngineError(f"{path} is damaged: {error}") from error


class LocalEngine:
    """Containers as processes of this machine; the arguments are those of `make_engine`."""

    def __init__(
        self,
        job: Job,
        *,
        home: Path,
        epoch: int,
        secrets_env: Mapping[str, str] | None = None,
        created_s: float = 0.0,
    ) -> None:
        self._job = job
        self._root = home / "runs" / job.run_id
        self._epoch = epoch
        self._created_s = created_s
        self._secrets_env = dict(secrets_env or {})
        self._containers: dict[int, Container] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answered_s: dict[int, float] = {}

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Every rung of the ladder."""
        return frozenset(Rung)

    def nodes(self) -> Sequence[str]:
        """node-0 up to the last spare."""
        spec = self._job.engine
        return [f"node-{index}" for index in range(spec.nodes + spec.spares)]

    def submit(self, placement: Placement) -> None:
        """Start a container for every member; the run's former containers are ended first."""
        self._load()
        self._shut_down(self._containers.values(), self._job.engine.grace_s)
        self._containers = {}
        self._launch(placement, [member.index for member in placement.members])

    def replace(self, placement: Placement, members: Collection[int]) -> None:
        """Start new containers for these members; the others keep theirs."""
        leaving = [c for i, c in self._containers.items() if i in members]
        self._shut_down(leaving, self._job.engine.grace_s)
        self._launch(placement, members)

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of a placement made earlier. Indices of the members that live."""
        if self._load() != placement.number:
            return frozenset()
        # Silence counts from here: a new supervisor has not asked anybody yet.
        self._answered_s = dict.fromkeys(self._containers, time.monotonic())
        return frozenset(i for i, c in self._containers.items() if c.address() is not None)

    def greet(self) -> dict[int, Greeting]:
        """The members that answer, by their index."""
        found = {}
        for index, container in self._containers.items():
            sent_s = time.time()
            with suppress(AgentUnreachable, EngineError):  # its check reports it
                reply = self._client(container).call(GreetQuery())
                times = {"sent_s": sent_s, "answered_s": time.time()}
                found[index] = Greeting.of(container.node, LOOPBACK, reply, **times)
        return found

    def check(self, orders: Mapping[int, CheckOrder]) -> Sequence[Check]:
        """Check all members at once; one that does not answer has failed."""

        def ask(index: int) -> Sequence[Check]:
            container, order = self._containers[index], orders[index]
            limit_s = order.timeout_s + CHECK_MARGIN_S
            try:
                return self._client(container, timeout_s=limit_s).call(order).checks
            except (AgentUnreachable, EngineError) as error:
                return [unanswered(container.node, str(error))]

        with ThreadPoolExecutor(max_workers=max(1, len(orders))) as pool:
            return [check for answer in pool.map(ask, orders) for check in answer]

    def heal(self, node: str, order: HealOrder) -> Healing:
        """Heal the chips of one node, in the background; repeated: how far it is."""
        container = next((c for c in self._containers.values() if c.node == node), None)
        if container is None:
            raise AgentUnreachable(f"no container is on {node}")
        return self._client(container).call(order).healing or Healing()

    def start(self, order: StartOrder) -> None:
        """Start the processes of an attempt in every container."""
        hosts = tuple(LOOPBACK for _ in self._containers)
        rendezvous = RendezvousOrder(
            port=self._job.comm.master_port,
            start=order.without_secrets(),
            supported=tuple(rung for rung in Rung if rung in self.capabilities),
        )
        first = self._client(self._containers[0], timeout_s=RENDEZVOUS_TIMEOUT_S)
        reply = first.call(rendezvous)
        opened = {"master_port": reply.port, "coordinator": reply.coordinator}
        placed = {"hosts": hosts, "master_addr": LOOPBACK, "rank_table": self._rank_table()}
        filled = order.model_copy(update={**placed, **opened})
        for container in self._containers.values():
            self._client(container).call(filled)

    def _rank_table(self) -> str | None:
        form, job = self._job.comm.rank_table, self._job
        if form is None:
            return None
        slots, visible = job.engine.slots_per_node, job.env.get(VISIBLE, "")
        query = DevicesQuery(form=form, slots=slots, visible=visible)
        servers = []
        for _, container in sorted(self._containers.items()):
            devices = self._client(container).call(query).devices
            servers.append(Server(container.node, LOOPBACK, devices or NodeDevices(devices=())))
        return rank_table(form, servers)

    def poll(self) -> Snapshot:
        """The state of the members."""
        agents: dict[int, AgentStatus] = {}
        lost: list[str] = []
        unanswered: list[str] = []
        for index, container in sorted(self._containers.items()):
            status = self._status(index, container)
            if status is not None:
                agents[index] = status
            elif container.address() is None or self._is_silent(index):
                lost.append(container.node)
            else:
                unanswered.append(container.node)
        return Snapshot(agents, tuple(lost), tuple(unanswered))

    def stop(self, grace_s: float) -> None:
        """Stop the processes in every container that answers."""
        for container in self._containers.values():
            self._try(container, StopOrder(grace_s=grace_s))

    def metrics(self, offset: int) -> tuple[str, int]:
        """Step records that the first rank wrote after `offset` bytes, and the new offset."""
        try:
            reply = self._client(self._containers[0]).call(MetricsQuery(offset=offset))
        except (AgentUnreachable, EngineError):
            return "", offset
        return reply.text or "", reply.offset if reply.offset is not None else offset

    def logs(self, tail_bytes: int) -> Sequence[tuple[str, WorkerLog]]:
        """The end of each worker's output, of the containers that answer."""
        replies = self._ask_all(LogsQuery(tail_bytes=tail_bytes), timeout_s=CALL_TIMEOUT_S)
        return [(node, log) for node, reply in replies for log in reply.logs]

    def read_logs(self, query: ReadLogsQuery) -> Sequence[tuple[str, LogPiece]]:
        """What logs of the newest attempt hold, of the containers that answer."""
        replies = self._ask_all(query, timeout_s=CALL_TIMEOUT_S)
        return [(node, piece) for node, reply in replies for piece in reply.pieces]

    def texts(self, tail_bytes: int) -> Sequence[tuple[str, NodeText]]:
        """Device logs and the output of the driver's tools, of the containers that answer."""
        return self._texts(EvidenceQuery(tail_bytes=tail_bytes))

    def stacks(self) -> Sequence[tuple[str, NodeText]]:
        """The stack of every thread of the workers, of the containers that answer."""
        return self._texts(StacksQuery())

    def _texts(self, query: EvidenceQuery | StacksQuery) -> Sequence[tuple[str, NodeText]]:
        replies = self._ask_all(query, timeout_s=EVIDENCE_TIMEOUT_S)
        return [(node, text) for node, reply in replies for text in reply.texts]

    def collect_logs(self, placement: int, attempt: int) -> Sequence[tuple[str, Collected]]:
        """Have the containers put their logs into the store; how far those are that answer."""
        order = CollectOrder(placement=placement, attempt=attempt)
        replies = self._ask_all(order, timeout_s=COLLECT_TIMEOUT_S)
        return [(node, reply.collected) for node, reply in replies if reply.collected is not None]

    def _ask_all(self, query: Order, *, timeout_s: float) -> Sequence[tuple[str, AgentReply]]:
        def ask(container: Container) -> tuple[str, AgentReply] | None:
            try:
                return container.node, self._client(container, timeout_s=timeout_s).call(query)
            except (AgentUnreachable, EngineError):
                return None  # the caller does without; what is gone is named already

        with ThreadPoolExecutor(max_workers=16) as pool:
            answers = pool.map(ask, self._containers.values())
            return [answer for answer in answers if answer is not None]

    def cancel(self, grace_s: float) -> None:
        """Stop the processes, end the containers, wait until nothing is left."""
        self._load()
        self._shut_down(self._containers.values(), grace_s)

    def _shut_down(self, containers: Collection[Container], grace_s: float) -> None:
        """Have containers end by themselves, saves and uploads included; then by force."""
        order = ShutdownOrder(grace_s=grace_s)
        with ThreadPoolExecutor(max_workers=16) as pool:
            asked = pool.map(
                lambda one: self._try(one, order, timeout_s=SHUTDOWN_TIMEOUT_S), containers
            )
            # A container that does not answer cannot end by itself.
            ending = [one for one, received in zip(containers, asked, strict=True) if received]
        deadline_s = time.monotonic() + grace_s + SHUTDOWN_MARGIN_S
        while time.monotonic() < deadline_s and any(one.address() is not None for one in ending):
            self._reap()
            time.sleep(0.1)
        self._end(containers)

    def _status(self, index: int, container: Container) -> AgentStatus | None:
        try:
            reply = self._client(container).call(StatusQuery())
        except AgentUnreachable:
            return None
        self._answered_s[index] = time.monotonic()
        return reply.status

    def _is_silent(self, index: int) -> bool:
        return time.monotonic() - self._answered_s.get(index, 0.0) > SILENT_AGENT_S

    def _try(
        self,
        container: Container,
        order: StopOrder | ShutdownOrder,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> bool:
        """Whether it answered; if not, the caller ends it by force, or it is lost already."""
        try:
            self._client(container, timeout_s=timeout_s).call(order)
        except AgentUnreachable:
            return False
        return True

    def _client(self, container: Container, *, timeout_s: float = CALL_TIMEOUT_S) -> AgentClient:
        address = container.address()
        if address is None:
            raise AgentUnreachable(f"the agent of {container.node} is gone")
        return AgentClient(address, token=container.token, epoch=self._epoch, timeout_s=timeout_s)

    def _launch(self, placement: Placement, members: Collection[int]) -> None:
        for member in placement.members:
            if member.index in members:
                self._containers[member.index] = self._create(placement, member.index)
        # Before they start: the next supervisor has to find and end what this one leaves.
        self._save(placement.number)
        fresh = [self._containers[index] for index in sorted(members)]
        self._await_agents(fresh, [self._spawn(container) for container in fresh])

    def _create(self, placement: Placement, index: int) -> Container:
        member = placement.members[index]
        name = f"p{placement.number:04d}-m{index}-s{member.schedule_cnt}"
        folder = self._root / "nodes" / member.node / name
        # Left by a supervisor that died between this line and the save below.
        shutil.rmtree(folder, ignore_errors=True)
        self._forget_other_lives(folder.parent)
        private_folder(self._root)
        folder.mkdir(mode=0o700, parents=True)
        token = secrets.token_hex(16)
        config = AgentConfig(
            run_id=self._job.run_id,
            node=member.node,
            member=index,
            schedule_cnt=member.schedule_cnt,
            token=token,
            epoch=self._epoch,
            orphan_timeout_s=self._job.engine.orphan_timeout_s,
            start_timeout_s=self._job.restart.start_timeout_s,
            hang_timeout_s=self._job.restart.hang_timeout_s,
            save_timeout_s=self._job.watch.save_timeout_s,
            restore_timeout_s=self._job.watch.restore_timeout_s,
            evaluate_timeout_s=self._job.watch.evaluate_timeout_s,
            command_quiet_s=self._job.watch.command_quiet_s,
            detect_hangs=self._job.restart.hang,
            hangs_end_attempt=self._job.watch.hang_action is HangAction.RESTART,
            node_folder=str(folder.parent / f"{LIFE_PREFIX}{self._created_s:.0f}"),
            variables=None if self._job.worker.is_command else variables_of(self._job),
        )
        write_whole(folder / CONFIG_FILE, config.model_dump_json(), private=True)
        return Container(
            member=index,
            node=member.node,
            schedule_cnt=member.schedule_cnt,
            folder=str(folder),
            token=token,
        )

    def _forget_other_lives(self, node: Path) -> None:
        """Free the node's disk of a run of the same name that is no more."""
        own = f"{LIFE_PREFIX}{self._created_s:.0f}"
        for folder in node.glob(f"{LIFE_PREFIX}*"):
            if folder.name != own:
                shutil.rmtree(folder, ignore_errors=True)

    def _spawn(self, container: Container) -> subprocess.Popen[bytes]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        own = {"PATH": worker_path(), MARKER: container.folder}
        with (container.path / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "training.agent", container.folder],
                cwd=container.path,
                env={**kept, **self._secrets_env, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # lives on when the supervisor's session ends
            )
        self._processes.append(process)
        return process

    def _await_agents(
        self, containers: Sequence[Container], processes: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        deadline_s = time.monotonic() + AGENT_START_TIMEOUT_S
        while waiting := [c for c in containers if c.address() is None]:
            if time.monotonic() > deadline_s or any(p.poll() is not None for p in processes):
                names = ", ".join(c.node for c in waiting)
                log = last_line(waiting[0].path / "agent.log")
                raise EngineError(f"the agents of {names} did not start: {log}")
            time.sleep(0.05)
        for container in containers:
            self._answered_s[container.member] = time.monotonic()

    def _end(self, containers: Collection[Container]) -> None:
        for container in containers:
            if not kill_container(container.folder):
                raise EngineError(f"processes on {container.node} cannot be killed")
        self._reap()

    def _reap(self) -> None:
        self._processes = [process for process in self._processes if process.poll() is None]

    def _save(self, placement: int) -> None:
        containers = tuple(c for _, c in sorted(self._containers.items()))
        document = Containers(placement=placement, containers=containers)
        private_folder(self._root)
        write_whole(self._root / _CONTAINERS_FILE, document.model_dump_json(), private=True)

    def _load(self) -> int | None:
        """Read the containers from disk. Returns their placement's number."""
        if (document := read_containers(self._root / _CONTAINERS_FILE)) is None:
            return None
        self._containers = {c.member: c for c in document.containers}
        return document.placement
