"""The Prefect server of this machine, for users who have configured none.

It listens on loopback and keeps its SQLite database in `$PERDURE_HOME/prefect`. It outlives the
command that started it, so the UI still shows runs that have ended. Times are seconds.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer
from pydantic import ValidationError

from perdure.console import warn
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.proxies import bypass_proxies, export_line, proxy_of
from perdure.training.errors import InputError, PerdureError
from perdure.training.files import home_folder, private_folder, write_whole
from perdure.training.masking import mask_text
from perdure.training.processes import free_port, is_alive

app = typer.Typer(help="The Prefect server of this machine.", no_args_is_help=True)

PORTS = range(4200, 4300)  # from Prefect's own on
ANOTHER_PORT = "choose another port with 'perdure server start --port N'"
REMEMBERED = (
    "change the port: {port} is remembered from an earlier 'perdure server start --port {port}'; "
    "'perdure server start --port N' changes it, --port 0 forgets it"
)
START_TIMEOUT_S = 120.0  # 18 s were measured for a first start, 23 s on a loaded machine
ANNOUNCED_AFTER_S = 10.0
STOP_TIMEOUT_S = 8.0
MAX_COMMAND = 80  # characters
_PREFECT_APP = "prefect.server.api.server"  # in the command of uvicorn, whoever starts it (3.8.8)
_ANSWER_S = 2.0
_started: list[int] = []  # servers of this process

CLIENT_SETTINGS = {
    # Ten wait half an hour for a server that is down. After the default five, a minute, a flow
    # cannot set its final state and stays Running for ever (3.8.8).
    "PREFECT_CLIENT_MAX_RETRIES": "10",
    # The shortest that Prefect allows; the automations that resurrect a run rely on it.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Rather no server than one inside the flow's process that ends with it.
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
SERVER_SETTINGS = {
    # In memory, the default, a restarted server ends runs that hold a concurrency slot (3.8.8).
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}


class ServerRecord(FrozenModel):
    """The server that runs on this machine."""

    pid: int
    process_started_s: float  # another process may have the pid by now
    port: int

    @property
    def api_url(self) -> str:
        """What PREFECT_API_URL is set to."""
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def ui_url(self) -> str:
        """The address for a browser."""
        return f"http://127.0.0.1:{self.port}"


class ServerSettings(FrozenModel):
    """What a user chose for the server, for its next starts.

    Attributes:
        port: None: the first free one of `PORTS`.
    """

    port: int | None = None


Port = Annotated[
    int | None,
    typer.Option(
        "--port", min=0, max=65_535, show_default=False,
        help="to listen on, also at the next starts; 0: the first free one from "
        f"{PORTS.start}, which is the default",
    ),
]  # fmt: skip


@app.command("start")
def start(port: Port = None) -> None:
    """Start the server unless it already runs."""
    with _one_start():
        record = _running_server()
        if record is not None and port and port != record.port:
            raise InputError(
                "--port",
                f"{port}: the server of this PERDURE_HOME already runs on port {record.port}; stop "
                "it first with 'perdure server stop'",
            )
        if record is None:
            record = _start_as_before() if port is None else start_server(port=port or None)
    if port is not None:
        _remember(ServerSettings(port=port or None))
    print(f"Prefect UI: {record.ui_url}\nexport PREFECT_API_URL={record.api_url}")
    if no_proxy := export_line(record.api_url):
        print(no_proxy)
    if os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        print('export PREFECT_API_AUTH_STRING="$PREFECT_SERVER_API_AUTH_STRING"')


@app.command("stop")
def stop() -> None:
    """Stop the server."""
    print("stopped" if stop_server() else "no server was running")


def configured_api() -> str | None:
    """The API address that environment or profile give, None when there is none."""
    # Reading settings imports Prefect: a second, which a mistyped job should not cost.
    from prefect.settings import PREFECT_API_URL  # noqa: PLC0415

    url: str | None = PREFECT_API_URL.value()
    return url


def use_server(*, must_answer: bool = True) -> str:
    """Make sure that a Prefect server answers, and have Prefect use it.

    Args:
        must_answer: whether a proxy that refuses to reach it is an error, or a warning.

    Returns:
        Address of the UI.

    Raises:
        InputError: the server asks for another auth string than this shell has, or a proxy
            refuses to reach it.
        PerdureError: the server did not start.
    """
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    api_url = os.environ.get("PREFECT_API_URL") or configured_api()
    if not api_url:
        with _one_start():
            record = _running_server() or _start_as_before()
        api_url = os.environ["PREFECT_API_URL"] = record.api_url
        # This machine's server has it from the same shell as its clients.
        if of_server := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
            os.environ.setdefault("PREFECT_API_AUTH_STRING", of_server)
        _reload_settings()
    bypass_proxies(os.environ, (api_url,))
    _check_answer(api_url, must_answer=must_answer)
    return api_url.removesuffix("/api")


def _check_answer(api_url: str, *, must_answer: bool) -> None:
    """Refuse a wrong auth string, or a proxy, on one line; the flow would fail with a traceback.

    Raises:
        InputError: the server refuses requests with this auth string, or without one; or a proxy
            does not reach it.
    """
    from perdure.tasks.prefect_client import client_without_retries  # noqa: PLC0415 imports Prefect

    try:
        with client_without_retries() as client:
            client.api_version()
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            raise InputError(
                "PREFECT_API_AUTH_STRING",
                f"differs from the auth string of the Prefect server at {api_url}",
            ) from None
        _explain_proxy(api_url, f"it answers {error.response.status_code}", is_error=must_answer)
    except httpx.HTTPError as error:  # without a proxy, the flow waits for its server
        _explain_proxy(api_url, str(error) or type(error).__name__, is_error=must_answer)


def _explain_proxy(api_url: str, reason: str, *, is_error: bool) -> None:
    """Name the proxy through which the server is not reached, if there is one.

    Raises:
        InputError: there is one, and that is an error.
    """
    proxy = proxy_of(api_url)
    if proxy is None:
        return
    host = httpx.URL(api_url).host
    text = (
        f"the Prefect server at {api_url} is not reached through the proxy of {proxy}: {reason}; "
        f"if it needs no proxy, add {host} to no_proxy"
    )
    if is_error:
        raise InputError("PREFECT_API_URL", text)
    warn(text)


@contextmanager
def _one_start() -> Iterator[None]:
    """Have one command at a time look for the server and start it; the others then find it."""
    folder = private_folder(_record_path().parent)
    with (folder / "start.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _running_server() -> ServerRecord | None:
    """The server that runs on this machine, once it answers; a busy one gets time to do so."""
    wait = _Wait()
    while (record := _alive_server()) is not None and wait.goes_on(record):
        if _answers(record):
            return record
        time.sleep(0.5)
    return None


class _Wait:
    """A wait for a server that has started, with a line about it once it is long."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._is_announced = False

    def goes_on(self, record: ServerRecord) -> bool:
        """Whether there is time left; prints the line when it is due."""
        waited_s = time.monotonic() - self._started_s
        if waited_s > ANNOUNCED_AFTER_S and not self._is_announced:
            self._is_announced = True
            warn(
                f"waiting up to {START_TIMEOUT_S:g} s for the Prefect server at {record.ui_url} "
                f"(pid {record.pid}); its log: {_log_path()}"
            )
        return waited_s < START_TIMEOUT_S


def stop_started() -> None:
    """Stop the server if this process has started it."""
    record = _alive_server()
    if record is not None and record.pid in _started:
        stop_server()


def _start_as_before() -> ServerRecord:
    """Start a server on the port that the user chose at an earlier start, or on a free one.

    Raises:
        InputError: another process has the port that was chosen.
        PerdureError: it ended, or did not answer in time.
    """
    port = _chosen_port()
    if port is not None and (problem := _why_taken(port, advice=REMEMBERED.format(port=port))):
        raise InputError("", problem)
    return start_server(port=port)


def start_server(*, port: int | None = None) -> ServerRecord:
    """Start a server in a session of its own and wait until it answers.

    Args:
        port: default: the first free one from 4200.

    Raises:
        InputError: another process has that port.
        PerdureError: it ended, or did not answer in time.
    """
    if port is not None:
        if problem := _why_taken(port):
            raise InputError("--port", problem)
        return _launch(port)
    while True:
        with suppress(PortTakenError):  # by another server that started in the same moment
            return _launch(_first_free())


class PortTakenError(PerdureError):
    """Another program listens on a port that was free a moment before."""


def _launch(port: int) -> ServerRecord:
    folder = private_folder(_record_path().parent)  # its database holds the jobs of all flow runs
    log_path = _log_path()
    settings = {
        **CLIENT_SETTINGS,
        **SERVER_SETTINGS,
        "PREFECT_HOME": str(folder),
        # On another port than 4200 its pages would call whatever server is there (3.8.8).
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_UI_URL": f"http://127.0.0.1:{port}",  # of links in notifications
    }
    environment = {**os.environ, **settings}
    bypass_proxies(environment, (settings["PREFECT_UI_URL"],))
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C in the terminal of this command is not for it
        )
    _started.append(process.pid)
    started_s = psutil.Process(process.pid).create_time()
    record = ServerRecord(pid=process.pid, process_started_s=started_s, port=port)
    # Before it answers: a second command waits for this server instead of starting its own.
    write_whole(_record_path(), record.model_dump_json(), private=True)
    wait = _Wait()
    while not (answers := _answers(record)) and process.poll() is None and wait.goes_on(record):
        time.sleep(0.3)
    owner = owner_of(port)
    if answers and _is_in_family(owner, process.pid):
        return record
    process.kill()
    _record_path().unlink(missing_ok=True)
    if owner is not None and not _is_in_family(owner, process.pid):
        raise PortTakenError(owner_text(owner, port))
    raise PerdureError(f"the Prefect server did not start; see {log_path}")


def _is_in_family(owner: PortOwner | None, pid: int) -> bool:
    """Whether the owner of a port is a process or its descendant, as far as this user sees it."""
    if owner is None or owner.pid is None:
        return True
    try:
        ancestors = [parent.pid for parent in psutil.Process(owner.pid).parents()]
    except psutil.Error:
        return False
    return pid in (owner.pid, *ancestors)


def _why_taken(port: int, *, advice: str = ANOTHER_PORT) -> str | None:
    """The reason why a port cannot be used, with advice; None: it is free."""
    try:
        free_port(ports=(port,))
    except OSError:
        return owner_text(owner_of(port), port, advice=advice)
    return None


def _first_free() -> int:
    """The first free port of `PORTS`; where that is not the usual one, the user learns why."""
    try:
        port = free_port(ports=PORTS)
    except OSError as error:
        span = f"{PORTS.start} to {PORTS.stop - 1}"
        raise PerdureError(f"no free port from {span} for the Prefect server") from error
    if port != PORTS.start:
        warn(f"{owner_text(owner_of(PORTS.start), PORTS.start)}; now using port {port}")
    return port


def stop_server() -> bool:
    """End the server of this machine; return whether it ran."""
    record = _alive_server()
    _record_path().unlink(missing_ok=True)
    if record is None:
        return False
    try:
        process = psutil.Process(record.pid)
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
    except psutil.NoSuchProcess:
        return True  # the end of an allocation has reached it, too
    _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
    for survivor in alive:
        survivor.kill()
    return True


def _reload_settings() -> None:
    """Have Prefect read the environment again: it did so when it was imported, too early."""
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415 costs a second

    refresh_global_settings_context()


def _alive_server() -> ServerRecord | None:
    """The server started before, when its process is alive; it may be too busy to answer."""
    try:
        record = ServerRecord.model_validate_json(_record_path().read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None
    return record if is_alive(record.pid, record.process_started_s) else None


def _answers(record: ServerRecord) -> bool:
    try:
        answer = httpx.get(f"{record.api_url}/health", timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == httpx.codes.OK


def _chosen_port() -> int | None:
    """The port that a user chose at an earlier start."""
    try:
        text = _settings_path().read_text(encoding="utf-8")
        return ServerSettings.model_validate_json(text).port
    except (OSError, ValidationError):
        return None


def _remember(settings: ServerSettings) -> None:
    write_whole(_settings_path(), settings.model_dump_json(), private=True)


def _settings_path() -> Path:
    return home_folder() / "prefect" / "settings.json"


def _log_path() -> Path:
    return home_folder() / "prefect" / "server.log"


def _record_path() -> Path:
    return home_folder() / "prefect" / "server.json"


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
    """The process that listens on a port, as far as this user may see it; None: no process."""
    listening = [
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == port
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
