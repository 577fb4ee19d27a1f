"""Who listens on a port of this machine, for a user whose server cannot have it."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from perdure.training.masking import masked_text

MAX_COMMAND = 80  # characters
_PREFECT_APP = "prefect.server.api.server"  # in the command of uvicorn, whoever starts it (3.8.8)
ANOTHER_PORT = "choose another port with `perdure server start --port N`"
_ANSWER_S = 2.0


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
    """The process that listens on a port, as much of it as this user may see; None: none does."""
    listening = [
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
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
    return PortOwner(pid, masked_text(command, ())[:MAX_COMMAND], is_prefect, home or None)


def owner_text(owner: PortOwner | None, port: int, *, advice: str = ANOTHER_PORT) -> str:
    """Whose the port is, and what to do about it, on one line.

    Args:
        owner: of the port.
        port: that is taken.
        advice: how another port is chosen.
    """
    if owner is None:
        return f"port {port} cannot be bound by this user; {advice}"
    who = f"pid {owner.pid}" if owner.pid is not None else "a process of another user"
    if owner.home is not None:
        return (
            f"port {port} is taken by the Prefect server of PERDURE_HOME={owner.home} ({who}); "
            f"stop it with `PERDURE_HOME={owner.home} perdure server stop`, or {advice}"
        )
    if owner.is_prefect:
        return (
            f"port {port} is taken by a Prefect server that perdure did not start ({who}); use it "
            f"with `export PREFECT_API_URL=http://127.0.0.1:{port}/api`, or {advice}"
        )
    what = f"{who}: {owner.command}" if owner.command else who
    return f"port {port} is taken by another program ({what}); {advice}"


def _home_of(process: psutil.Process, port: int) -> str:
    """The PERDURE_HOME whose record of a server has this port; "" where none has."""
    folder = process.environ().get("PREFECT_HOME", "")
    record = Path(folder) / "server.json"
    is_ours = bool(folder) and record.is_file() and f'"port":{port}' in record.read_text("utf-8")
    return str(Path(folder).parent) if is_ours else ""


def _answers_as_prefect(port: int) -> bool:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/health", timeout=_ANSWER_S)
    except httpx.HTTPError:
        return False
    return answer.text.strip() == "true" or "prefect" in answer.text.lower()
