"""Containers that are processes of a node: an agent with a folder of its own.

The local engine starts them on its machine, and `perdure launch` on its node. Times are seconds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from perdure.storage.frozen_model import FrozenModel
from perdure.storage.proxies import users_environment
from perdure.training.agent.agent import CONFIG_FILE
from perdure.training.agent.control import ADDRESS_FILE, TERMINATED_FILE
from perdure.training.engines.base import AgentEndpoint, terminated
from perdure.training.files import write_whole
from perdure.training.processes import MARKER, is_alive
from perdure.training.wire.agent import AgentAddress, AgentConfig

LOOPBACK = "127.0.0.1"
# The supervisor's flow run, container and rank are not those of its workers.
_NOT_INHERITED = ("PREFECT_", "MA_", "VC_", "TORCHELASTIC_")


class Container(FrozenModel):
    """A container as the file of containers has it; `member` is NO_MEMBER for a spare."""

    member: int
    node: str
    schedule_cnt: int
    folder: str
    token: str
    stood_by: bool = False

    @property
    def path(self) -> Path:
        """The container's folder."""
        return Path(self.folder)

    @property
    def was_up(self) -> bool:
        """Whether the agent has ever listened; it may have died since."""
        return (self.path / ADDRESS_FILE).exists()

    def address(self) -> AgentAddress | None:
        """Read where the agent listens; None where it is dead or has not listened yet."""
        try:
            text = (self.path / ADDRESS_FILE).read_text(encoding="utf-8")
            address = AgentAddress.model_validate_json(text)
        except (OSError, ValidationError):
            return None
        return address if is_alive(address.pid, address.process_started_s) else None

    def contact(self) -> AgentEndpoint:
        """Describe the container to the fleet."""
        address = self.address()
        is_terminated = address is None and (self.path / TERMINATED_FILE).exists()
        return AgentEndpoint(
            self.node,
            self.token,
            (address.host, address.port) if address is not None else None,
            LOOPBACK,
            was_spare=self.stood_by,
            schedule_cnt=self.schedule_cnt,
            loss=terminated(self.node) if is_terminated else None,
        )


def write_container(folder: Path, config: AgentConfig) -> Container:
    """Make the folder of a container, with the configuration of its agent.

    Raises:
        OSError: the disk takes no files.
    """
    # An earlier supervisor left it, where it died between this line and the start.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    write_whole(folder / CONFIG_FILE, config.model_dump_json(), private=True)
    return Container(
        member=config.member,
        node=config.node,
        schedule_cnt=config.schedule_cnt,
        folder=str(folder),
        token=config.token,
    )


def inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Copy the variables of this process that are also those of its containers."""
    users = users_environment(environment)
    return {n: value for n, value in users.items() if not n.startswith(_NOT_INHERITED)}


def start_agent(
    container: Container, environment: Mapping[str, str], *, cwd: Path | None
) -> subprocess.Popen[bytes]:
    """Start the agent of a container, which lives on when this process does not.

    Args:
        container: whose folder is written.
        environment: variables of the agent, but for the container's mark.
        cwd: folder that it starts in; None: this process's.

    Raises:
        OSError: it cannot be started.
    """
    with (container.path / "agent.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "perdure.training.agent", container.folder],
            cwd=cwd,
            env={**environment, MARKER: container.folder},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the supervisor's session may end
        )
