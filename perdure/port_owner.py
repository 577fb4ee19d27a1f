"""The owner of a port that a Prefect server was to listen on, and the advice about it."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from perdure.training.masking import mask_text
from perdure.training.processes import free_port

ANOTHER_PORT = "choose another port with 'perdure server start --port N'"
MAX_COMMAND = 80  # characters
_PREFECT_APP = "prefect.server.api.server"  # in the command of uvicorn, whoever starts it (3.8.8)
_ANSWER_S = 2.0
_SAME_ADDRESSES = frozenset(
    ("127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::")  # noqa: S104 compared, not bound
)


@dataclass(frozen=True, slots=True)
class PortOwner:
    """The process that listens on a port.

    Attributes:
        pid: None where this user may not see it.
        command: its name, or its command line where that says more.
        is_prefect: whether it is a Prefect server.
        home: PERDURE_HOME of the command that started it as its own server, if one did.
    """

    pid: int | None
    command: str
    is_prefect: bool
    home: str | None = None


def owner_of(port: int) -> PortOwner | None:
    """The process that listens where the server would, as far as this user may see it.

    Listeners on other addresses of the machine do not keep the server from 127.0.0.1.
    """
    listening = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
        and connection.laddr.ip in _SAME_ADDRESSES
    ]
    if not listening:
        return None
    pid, command, home = listening[0], "", ""
    if pid is not None:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            command = shlex.join(process.cmdline()) or process.name()
            home = _home_of(process, port)
    is_prefect = _PREFECT_APP in command or _answers_as_prefect(port)
    return PortOwner(pid, mask_text(command, ())[:MAX_COMMAND], is_prefect, home or None)


def owner_text(owner: PortOwner | None, port: int, *, advice: str = ANOTHER_PORT) -> str:
    """A line that names the owner of a port and says what to do about it.

    Args:
        owner: the process that listens on it; None where this user may not bind it.
        port: the port that was asked for.
        advice: how to choose another port.
    """
    if owner is None:
        return f"port {port} cannot be bound by this user; {advice}"
    holder = f"pid {owner.pid}" if owner.pid is not None else "a process of another user"
    if owner.home is not None:
        return (
            f"port {port} is taken by the Prefect server of PERDURE_HOME={owner.home} ({holder}); "
            f"stop it with 'PERDURE_HOME={owner.home} perdure server stop', or {advice}"
        )
    if owner.is_prefect:
        return (
            f"port {port} is taken by a Prefect server that perdure did not start ({holder}); use "
            f"it with 'export PREFECT_API_URL=http://127.0.0.1:{port}/api', or {advice}"
        )
    program = f"{holder}: {owner.command}" if owner.command else holder
    return f"port {port} is taken by another program ({program}); {advice}"


def _home_of(process: psutil.Process, port: int) -> str:
    """The PERDURE_HOME whose record of a server has this port; "" where none has."""
    folder = process.environ().get("PREFECT_HOME", "")
    record = Path(folder) / "server.json"
    is_ours = bool(folder) and record.is_file() and f'"port":{port}' in record.read_text("utf-8")
    return str(Path(folder).parent) if is_ours else ""


def _answers_as_prefect(port: int) -> bool:
    try:
        address = f"http://127.0.0.1:{port}/api/health"
        answer = httpx.get(address, timeout=_ANSWER_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.text.strip() == "true" or "prefect" in answer.text.lower()


def why_taken(port: int, *, advice: str = ANOTHER_PORT) -> str | None:
    """Explain why a port cannot be used, with advice; None: it is free."""
    try:
        free_port(ports=(port,))
    except OSError:
        return owner_text(owner_of(port), port, advice=advice)
    return None


def is_in_family(owner: PortOwner | None, pid: int) -> bool:
    """Whether the owner of a port is a process or its descendant, as far as this user sees it."""
    if owner is None or owner.pid is None:
        return True
    try:
        ancestors = [parent.pid for parent in psutil.Process(owner.pid).parents()]
    except psutil.Error:
        return False
    return pid in (owner.pid, *ancestors)
