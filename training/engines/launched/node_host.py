"""The containers of this node, started and ended on a supervisor's orders.

The main thread of `perdure launch` starts the agents, since each ends when the thread that started
it does: losing this process is losing the node. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from perdure.training.agent.control import TERMINATED_FILE
from perdure.training.agent.preparation import node_folder
from perdure.training.agent.unmarked import read_unmarked
from perdure.training.engines.containers import (
    Container,
    inherited_variables,
    start_agent,
    write_container,
)
from perdure.training.engines.launched.messages import (
    HOST_REQUEST,
    ContainersQuery,
    EndContainersOrder,
    HelloQuery,
    HostedContainer,
    HostOrder,
    HostReply,
    LeaveOrder,
    StartContainerOrder,
    TakeContainerOrder,
)
from perdure.training.engines.launched.secret import SECRET_ENV, LaunchSecret
from perdure.training.files import last_line, private_folder, why_unwritable
from perdure.training.platforms.forms import GRACE
from perdure.training.processes import DIES_WITH_PARENT, kill_container
from perdure.training.wire.agent import NO_MEMBER
from perdure.training.wire.transport import RequestServer, is_authentic

SPAWN_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
# The launcher's place of this process, and the platform's rank table, are not those of ranks: a
# gang without its spares is smaller, and Perdure writes a table of its own.
_PLATFORMS_OWN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|NODE_RANK"
    r"|RANK_TABLE_FILE|JOB_COMPLETION_INDEX|(SLURM_|SLURMD_|PET_|OMPI_|PMI_|PMIX_|MPI_|MS_).*)"
)

T = TypeVar("T")


def variables_for_agents(environment: Mapping[str, str]) -> dict[str, str]:
    """Choose the variables of this process that its agents have, too."""
    variables = inherited_variables(environment)
    if GRACE in environment:
        variables[GRACE] = environment[GRACE]
    return {
        name: value
        for name, value in variables.items()
        if name != SECRET_ENV and not _PLATFORMS_OWN.fullmatch(name)
    }


class NodeHost:
    """The containers of one node, and the server that takes orders for them.

    Attributes:
        is_leaving: whether the allocation is about to end, as another node has said.
        has_trained: whether a member has had a container here.

    Args:
        node: name of the node.
        instance: of this `perdure launch`.
        folder: the run's folder on this node.
        host: address that the other nodes reach this one at.
        secret: the run's.
        secrets_env: the store's keys, for agents.
    """

    def __init__(
        self,
        node: str,
        instance: str,
        *,
        folder: Path,
        host: str,
        secret: LaunchSecret,
        secrets_env: Mapping[str, str],
    ) -> None:
        self.is_leaving = self.has_trained = False
        self._node, self._instance = node, instance
        self._root, self._folder = folder, folder / "nodes" / node
        self._host = host
        self._secret = secret
        self._token = secret.token(node, instance)
        self._secrets_env = dict(secrets_env)
        self._lock = threading.Lock()
        self._epoch = 0
        self._containers: dict[str, Container] = {}  # by folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._server = RequestServer(host, self._answer, token=self._token)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    def start(self) -> None:
        """Begin to answer.

        Raises:
            OSError: the folder of the node cannot be made.
        """
        private_folder(self._root)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server.start()

    def end_remains(self) -> None:
        """End what an earlier `perdure launch` left of this node, once it is known to be gone."""
        for agent_log in self._folder.glob("*/agent.log"):
            folder = agent_log.parent
            with self._lock:
                is_own = str(folder) in self._containers
            if not is_own:
                kill_container(str(folder), recorded=read_unmarked(folder))

    def close(self) -> None:
        """Stop answering, and end all containers by force."""
        self._server.close()
        self._end(tuple(self._containers))

    def work(self, timeout_s: float) -> None:
        """Start the agents that are asked for meanwhile; the main thread calls it all the time."""
        with suppress(queue.Empty):
            self._calls.get(timeout=timeout_s)()
        for folder, process in list(self._processes.items()):
            if process.poll() is not None:
                self._processes.pop(folder, None)

    def terminate(self) -> None:
        """Ask the agents to end with their last saves, as the platform asks this process."""
        for process in list(self._processes.values()):
            with suppress(ProcessLookupError):
                process.terminate()

    @property
    def is_empty(self) -> bool:
        """Whether all agents have ended."""
        return all(process.poll() is not None for process in list(self._processes.values()))

    def _answer(self, line: bytes) -> HostReply:
        try:
            request = HOST_REQUEST.validate_json(line)
        except ValidationError as error:
            return HostReply(error=f"not a request of this version: {error.error_count()} problems")
        if not is_authentic(request.token, self._token):
            return HostReply(error="wrong token")
        reply = self._refuse(request.epoch, request.order) or self._obey(request.order)
        reply = reply.model_copy(update={"instance": self._instance})
        signature = self._secret.sign(request.nonce + reply.signed_text)
        return reply.model_copy(update={"signature": signature})

    def _refuse(self, epoch: int, order: HostOrder) -> HostReply | None:
        if isinstance(order, HelloQuery | ContainersQuery):
            return None
        with self._lock:
            if epoch < self._epoch:
                return HostReply(error=f"epoch {epoch} is superseded by {self._epoch}")
            self._epoch = epoch
        return None

    def _obey(self, order: HostOrder) -> HostReply:
        try:
            match order:
                case StartContainerOrder():
                    self._in_main_thread(lambda: self._start(order))
                case TakeContainerOrder():
                    self._take(order)
                case LeaveOrder():
                    self.is_leaving = True
                case EndContainersOrder():
                    folders = tuple(self._containers) if order.folders is None else order.folders
                    left = self._end(folders)
                    if left:
                        return HostReply(error=f"processes cannot be killed: {', '.join(left)}")
        except OSError as error:
            return HostReply(error=f"{error.strerror}: {error.filename}")
        with self._lock:
            containers = list(self._containers.values())
            running = set(self._processes)
        return HostReply(
            containers=tuple(_hosted(c, is_running=c.folder in running) for c in containers)
        )

    def _in_main_thread(self, call: Callable[[], None]) -> None:
        """Carry out a call where agents are started, and wait for it.

        Raises:
            OSError: it failed, or the main thread does not answer.
        """
        done, errors = threading.Event(), list[OSError]()

        def carry_out() -> None:
            try:
                call()
            except OSError as error:
                errors.append(error)
            finally:
                done.set()

        self._calls.put(carry_out)
        if not done.wait(SPAWN_TIMEOUT_S):
            raise TimeoutError(0, "the node is too busy to start a process", self._node)
        if errors:
            raise errors[0]

    def _start(self, order: StartContainerOrder) -> None:
        if not _NAME.fullmatch(order.name):
            raise OSError(0, "no name of a container", order.name)
        folder = self._folder / order.name
        with self._lock:
            if str(folder) in self._containers:
                return  # a repeated order, after a lost reply
        disk = node_folder(self._folder, order.created_s)
        place = {"node": self._node, "host": self._host, "node_folder": str(disk)}
        container = write_container(folder, order.config.model_copy(update=place))
        variables = variables_for_agents(os.environ)
        environment = {**variables, **self._secrets_env, DIES_WITH_PARENT: str(os.getpid())}
        process = start_agent(container, environment, cwd=None)
        with self._lock:
            self.has_trained |= container.member != NO_MEMBER
            self._containers[container.folder] = container
            self._processes[container.folder] = process

    def _take(self, order: TakeContainerOrder) -> None:
        with self._lock:
            container = self._containers.get(order.folder)
            if container is not None:
                fields = {
                    "member": order.member,
                    "schedule_cnt": order.schedule_cnt,
                    "stood_by": True,
                }
                self._containers[order.folder] = container.model_copy(update=fields)
                self.has_trained = True

    def _end(self, folders: tuple[str, ...]) -> list[str]:
        """End containers by force. Returns those that could not be ended."""
        left: list[str] = []
        for folder in folders:
            with self._lock:
                container = self._containers.get(folder)
            if container is None:
                continue
            if not kill_container(folder, recorded=read_unmarked(container.path)):
                left.append(container.path.name)
                continue
            with self._lock:
                self._containers.pop(folder, None)
        return left


def _hosted(container: Container, *, is_running: bool) -> HostedContainer:
    address = container.address() if is_running else None
    is_gone = address is None
    return HostedContainer(
        container=container,
        address=address,
        is_running=is_running,
        was_up=container.was_up,
        is_terminated=is_gone and (container.path / TERMINATED_FILE).exists(),
        last_line=_last_words(container.path) if is_gone else "",
    )


def _last_words(folder: Path) -> str:
    return why_unwritable(folder) or last_line(folder / "agent.log")
