"""The embedded engine: nodes of this machine, each container an agent in its own session.

A node is a name and a scratch folder. A container is an agent process with a folder below its
node's, so that losing a node, replacing a container and restarting in place really differ. The
engine writes the list of containers before they start: a supervisor that takes over finds them.
Times are seconds.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from perdure.storage.frozen_model import FrozenModel
from perdure.training.agent.preparation import node_folder
from perdure.training.agent.unmarked import read_unmarked
from perdure.training.config.job import Job
from perdure.training.diagnosis.evidence import NodeLoss
from perdure.training.engines.base import AgentEndpoint, Placement, agent_config
from perdure.training.engines.containers import (
    Container,
    inherited_variables,
    start_agent,
    write_container,
)
from perdure.training.errors import EngineError
from perdure.training.files import last_line, private_folder, why_unwritable, write_whole
from perdure.training.injection.victims import processes_of
from perdure.training.journal.records import Member
from perdure.training.processes import kill_container
from perdure.training.recovery.chip_events import ChipReport
from perdure.training.recovery.faults import FaultClass
from perdure.training.recovery.rungs import Rung
from perdure.training.wire.agent import NO_MEMBER, NodeLog
from perdure.training.wire.node import VISIBLE

AGENT_START_TIMEOUT_S = 60.0
_CONTAINERS_FILE = "containers.json"
_DEVICE = re.compile(r"davinci([0-9]+)")


class Containers(FrozenModel):
    """The file of a run's containers."""

    placement: int
    containers: tuple[Container, ...]
    standing_by: tuple[Container, ...] = ()


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
        self._spares: dict[str, Container] = {}  # by node: each has at most one
        self._placement = 0  # number of the placement on disk
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # agents, by folder

    @property
    def capabilities(self) -> frozenset[Rung]:
        """Every rung of the ladder."""
        return frozenset(Rung)

    @property
    def sees_agents(self) -> bool:
        """True: the agents are on this machine."""
        return True

    @property
    def poll_s(self) -> float:
        """A short interval: a poll costs next to nothing."""
        return 0.2

    def nodes(self) -> Sequence[str]:
        """List node-0 up to the last spare node, first those with a spare container."""
        spec = self._job.engine
        names = [f"node-{index}" for index in range(spec.nodes + spec.spares)]
        return sorted(names, key=lambda name: name not in self._spares)

    def find_way(self) -> bool:
        """Return False: there is only one."""
        return False

    def usable_nodes(self) -> Sequence[str]:
        """Every node: nobody else uses them."""
        return self.nodes()

    def failure_domains(self) -> Mapping[str, str]:
        """Return none: what the nodes share is not known."""
        return {}

    def submit(self, placement: Placement, *, ready: Collection[str] = ()) -> None:
        """End the run's containers, and start one for every member."""
        self._load()
        self._end(self._containers.values())
        self._containers = {}
        self._launch(placement, [member.index for member in placement.members], ready)

    def replace(
        self, placement: Placement, members: Collection[int], *, ready: Collection[str] = ()
    ) -> None:
        """Start new containers for these members; the others keep theirs."""
        self._end([c for i, c in self._containers.items() if i in members])
        self._launch(placement, members, ready)

    def start_spare(self, placement: Placement, node: str) -> None:
        """Start a spare container; returns at once."""
        nobody = Member(index=NO_MEMBER, node=node, schedule_cnt=0)
        container = self._create(nobody, f"standby-{secrets.token_hex(4)}")
        self._spares[node] = container
        self._save(placement.number)
        self._spawn(container)

    def warm_spares(self) -> Mapping[str, AgentEndpoint]:
        """The spares that no member has taken yet, by node."""
        self._reap()
        return {node: self._with_loss(container) for node, container in self._spares.items()}

    def _with_loss(self, container: Container) -> AgentEndpoint:
        """Describe a spare to the fleet. Without an agent it is lost, unless it is starting."""
        contact = container.contact()
        is_starting = container.folder in self._processes and not container.was_up
        if contact.address is not None or is_starting:
            return contact
        node, text = container.node, "its agent is gone"
        return replace(contact, loss=NodeLoss(node, FaultClass.CONTAINER_LOST, "AGENT_GONE", text))

    def end_spares(self, names: Collection[str]) -> None:
        """End spares by force."""
        ended = [self._spares.pop(name) for name in names if name in self._spares]
        if ended:
            self._end(ended)
            self._save(self._placement)

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of an earlier placement. Returns the indices of living members."""
        if self._load() != placement.number:
            return frozenset()
        return frozenset(i for i, c in self._containers.items() if c.address() is not None)

    def contacts(self) -> Mapping[int, AgentEndpoint]:
        """The containers of the placement that was submitted or adopted last."""
        self._reap()  # or an ended agent of this supervisor would still be a process
        return {index: container.contact() for index, container in self._containers.items()}

    def inventory(self) -> Mapping[int, AgentEndpoint]:
        """The containers that the run has on this machine."""
        self._load()
        return self.contacts()

    def texts(self, since_s: float) -> Sequence[tuple[str, NodeLog]]:  # noqa: ARG002 the seam's
        """Return no reports: there is no platform below the nodes."""
        return []

    def chip_reports(self, since_s: float) -> Sequence[ChipReport]:  # noqa: ARG002 the seam's
        """Return no reports: there is no platform below the nodes."""
        return []

    def end(self) -> None:
        """End every container of the run by force."""
        self._load()
        self._end([*self._containers.values(), *self._spares.values()])
        self._spares = {}

    def leftovers(self) -> Sequence[str]:
        """Names of the run's processes."""
        nodes = f"{self._root / 'nodes'}/"
        return [process.name() for process in processes_of(lambda marker: marker.startswith(nodes))]

    def _launch(
        self, placement: Placement, members: Collection[int], ready: Collection[str]
    ) -> None:
        launched = [member for member in placement.members if member.index in members]
        node_by_member = {
            member.index: member.node
            for member in launched
            if member.node in ready and member.node in self._spares
        }
        fresh = [member for member in launched if member.index not in node_by_member]
        # A new container needs the node of a spare that is not ready.
        self.end_spares([member.node for member in fresh])
        for member in fresh:
            name = f"p{placement.number:04d}-m{member.index}-s{member.schedule_cnt}"
            self._containers[member.index] = self._create(member, name)
        for index, node in node_by_member.items():
            self._containers[index] = self._spares.pop(node).model_copy(
                update={
                    "member": index,
                    "schedule_cnt": placement.members[index].schedule_cnt,
                    "stood_by": True,
                }
            )
        # Before they start: the next supervisor has to find and end these containers.
        self._save(placement.number)
        started = [self._containers[member.index] for member in fresh]
        self._await_agents(started, [self._spawn(container) for container in started])

    def _create(self, member: Member, name: str) -> Container:
        with _as_engine_error(f"no container on {member.node}"):
            return self._write_container(member, name)

    def _write_container(self, member: Member, name: str) -> Container:
        folder = self._root / "nodes" / member.node / name
        private_folder(self._root)
        token = secrets.token_hex(16)
        disk = node_folder(folder.parent, self._created_s)
        config = agent_config(
            self._job, member, token=token, epoch=self._epoch, node_folder=str(disk)
        )
        return write_container(folder, config)

    def _spawn(self, container: Container) -> subprocess.Popen[bytes]:
        number = int(container.node.rpartition("-")[2])
        devices = devices_of_node(number, self._job.engine.slots_per_node, os.environ)
        environment = {**inherited_variables(os.environ), **self._secrets_env, **devices}
        with _as_engine_error(f"no agent on {container.node}"):
            process = start_agent(container, environment, cwd=container.path)
        self._processes[container.folder] = process
        return process

    def _await_agents(
        self, containers: Sequence[Container], processes: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        deadline_s = time.monotonic() + AGENT_START_TIMEOUT_S
        while waiting := [c for c in containers if c.address() is None]:
            if time.monotonic() > deadline_s or any(p.poll() is not None for p in processes):
                names = ", ".join(c.node for c in waiting)
                folder = waiting[0].path
                why = why_unwritable(folder) or last_line(folder / "agent.log")
                raise EngineError(f"the agents of {names} did not start: {why}")
            time.sleep(0.05)

    def _end(self, containers: Collection[Container]) -> None:
        for container in containers:
            if not kill_container(container.folder, recorded=read_unmarked(container.path)):
                raise EngineError(f"processes on {container.node} cannot be killed")
        self._reap()

    def _reap(self) -> None:
        self._processes = {
            f: process for f, process in self._processes.items() if process.poll() is None
        }

    def _save(self, placement: int) -> None:
        self._placement = placement
        document = Containers(
            placement=placement,
            containers=tuple(c for _, c in sorted(self._containers.items())),
            standing_by=tuple(c for _, c in sorted(self._spares.items())),
        )
        with _as_engine_error("the containers are not on record"):
            private_folder(self._root)
            write_whole(self._root / _CONTAINERS_FILE, document.model_dump_json(), private=True)

    def _load(self) -> int | None:
        """Read the containers from disk. Returns their placement's number; None: there is no file.

        Raises:
            EngineError: the file is damaged.
        """
        path = self._root / _CONTAINERS_FILE
        try:
            document = Containers.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise EngineError(f"{path} is damaged: {error}") from error
        self._containers = {c.member: c for c in document.containers}
        self._spares = {c.node: c for c in document.standing_by}
        self._placement = document.placement
        return document.placement


@contextmanager
def _as_engine_error(subject: str) -> Iterator[None]:
    """Tell a disk that takes no files as any other reason why a container does not start."""
    try:
        yield
    except OSError as error:
        raise EngineError(f"{subject}: {error.strerror}: {error.filename}") from error


def devices_of_node(
    number: int, slots: int, environment: Mapping[str, str], *, dev: Path = Path("/dev")
) -> dict[str, str]:
    """Set the variable that shows a node its NPUs, unless this machine has none.

    Each node has its own, as real nodes do: torch_npu counts the devices of a process from 0,
    whatever the variable names, so that local rank r of every node uses its device r. Where there
    are fewer devices than all nodes and spares need, the last nodes share the first devices: a
    spare does not use them before another node is gone.

    Args:
        number: number of the node, from 0.
        slots: devices of each node.
        environment: the supervisor's variables; ASCEND_RT_VISIBLE_DEVICES limits the devices.
        dev: folder of the driver's device files.
    """
    visible = environment.get(VISIBLE)
    if visible:
        devices = [part.strip() for part in visible.split(",")]
    else:
        matches = (_DEVICE.fullmatch(file.name) for file in dev.iterdir())
        devices = [str(index) for index in sorted(int(match[1]) for match in matches if match)]
    num_nodes = len(devices) // slots
    if num_nodes == 0:
        return {VISIBLE: visible} if visible else {}
    first = number % num_nodes * slots
    return {VISIBLE: ",".join(devices[first : first + slots])}
