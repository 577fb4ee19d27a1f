"""The containers of the local engine, as they are remembered on disk.

The files hold tokens: only their owner may read them.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from storage.model import FrozenModel
from training.agent.control import ADDRESS_FILE
from training.errors import EngineError
from training.processes import is_alive
from training.wire.agent import AgentAddress


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


def last_line(path: Path) -> str:
    """The last line of a log, or why there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    return lines[-1] if lines else "its log is empty"


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
