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
from pathlib import Path

from pydantic import ValidationError

from storage.frozen_model import FrozenModel
from training.agent.agent import CONFIG_FILE
from training.agent.control import ADDRESS_FILE
from training.engines.base import Contact, Placement, agent_config
from training.environment import worker_path
from training.errors import EngineError
from training.files import last_line, private_folder, write_whole
from training.job import Job
from training.processes import MARKER, is_alive, kill_container
from training.recovery.rungs import Rung
from training.wire.agent import AgentAddress

LOOPBACK = "127.0.0.1"
AGENT_START_TIMEOUT_S = 60.0
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

    def contact(self) -> Contact:
        """How its agent is reached."""
        address = self.address()
        at = (address.host, address.port) if address is not None else None
        return Contact(self.node, self.token, at, LOOPBACK)


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
        self.end()
        self._containers = {}
        self._launch(placement, [member.index for member in placement.members])

    def replace(self, placement: Placement, members: Collection[int]) -> None:
        """Start new containers for these members; the others keep theirs."""
        self._end([c for i, c in self._containers.items() if i in members])
        self._launch(placement, members)

    def adopt(self, placement: Placement) -> frozenset[int]:
        """Find the containers of a placement made earlier. Indices of the members that live."""
        if self._load() != placement.number:
            return frozenset()
        return frozenset(i for i, c in self._containers.items() if c.address() is not None)

    def contacts(self) -> Mapping[int, Contact]:
        """The containers of the placement that was submitted or adopted last."""
        self._reap()  # or an agent of ours that has ended would still be a process
        return {index: container.contact() for index, container in self._containers.items()}

    def inventory(self) -> Mapping[int, Contact]:
        """The containers that the run has on this machine."""
        self._load()
        return self.contacts()

    def end(self) -> None:
        """End every container of the run by force."""
        self._load()
        self._end(self._containers.values())

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
        life = folder.parent / f"{LIFE_PREFIX}{self._created_s:.0f}"
        config = agent_config(
            self._job, member, token=token, epoch=self._epoch, node_folder=str(life)
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
