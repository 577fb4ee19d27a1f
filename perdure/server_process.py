"""The process of the Prefect server of this machine: it is started once, awaited and stopped.

It listens on loopback and keeps its SQLite database in `$PERDURE_HOME/prefect`. It outlives the
command that started it, so the UI still shows runs that have ended. Times are seconds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
from pydantic import ValidationError

from perdure.console import warn
from perdure.port_owner import is_in_family, owner_of, owner_text, why_taken
from perdure.storage.frozen_model import FrozenModel
from perdure.storage.proxies import bypass_proxies
from perdure.training.errors import InputError, PerdureError
from perdure.training.files import home_folder, private_folder, write_whole
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.processes import free_port, is_alive

PORTS = range(4200, 4300)  # from Prefect's own on
REMEMBERED = (
    "change the port: {port} is remembered from an earlier 'perdure server start --port {port}'; "
    "'perdure server start --port N' changes it, --port 0 forgets it"
)
# 18 s were measured for a first start, and over 120 s on two cores with 40 processes that want one.
START_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 2 * START_TIMEOUT_S  # its holder may wait for a server, and then start another
ANNOUNCED_AFTER_S = 10.0
POLL_S = 0.3
STOP_TIMEOUT_S = 8.0
_started: list[int] = []  # servers of this process

OnWait = Callable[[Wait | None], None]

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


def no_note(_wait: Wait | None) -> None:
    """Show a wait to nobody but the terminal."""


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


class ServerWait:
    """A wait for a server: it has an end, and a line once it is long.

    Args:
        on_wait: called with the wait each time that it goes on.
        timeout_s: time after which it is over.
    """

    def __init__(self, on_wait: OnWait = no_note, *, timeout_s: float = START_TIMEOUT_S) -> None:
        self._on_wait = on_wait
        self._timeout_s = timeout_s
        self._began_s = time.time()
        self._started_s = time.monotonic()
        self._is_announced = False

    def goes_on(self, why: str) -> bool:
        """Whether there is time left; shows the wait, and sleeps for a moment.

        Args:
            why: the server that does not answer yet, and its last answer or its log.
        """
        waited_s = time.monotonic() - self._started_s
        if waited_s > ANNOUNCED_AFTER_S and not self._is_announced:
            self._is_announced = True
            warn(f"waiting for the Prefect server, up to {self._timeout_s:g} s: {why}")
        if waited_s >= self._timeout_s:
            return False
        self._on_wait(Wait(kind=WaitKind.SERVER, since_s=self._began_s, why=why))
        time.sleep(POLL_S)
        return True


def _described(record: ServerRecord) -> str:
    return f"{record.ui_url} does not answer yet (pid {record.pid}); its log: {_log_path()}"


@contextmanager
def one_start(on_wait: OnWait = no_note) -> Iterator[None]:
    """Have one command at a time look for the server and start it; the others then find it.

    Raises:
        PerdureError: another command does so for too long.
    """
    path = private_folder(_record_path().parent) / "start.lock"
    wait = ServerWait(on_wait, timeout_s=LOCK_TIMEOUT_S)
    with path.open("a+", encoding="ascii") as file:
        while not _is_locked(file.fileno()):
            if not wait.goes_on(f"another command starts it; its lock: {path}"):
                raise PerdureError(
                    f"another command has been starting the Prefect server for {LOCK_TIMEOUT_S:g} "
                    f"s; `fuser {path}` names its process"
                )
        yield


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def running_server(on_wait: OnWait = no_note) -> ServerRecord | None:
    """Return the server that runs on this machine, once it answers; None: none does in time."""
    wait = ServerWait(on_wait)
    while (record := _alive_server()) is not None:
        if _answers(record):
            return record
        if not wait.goes_on(_described(record)):
            break
    return None


def start_as_before(on_wait: OnWait = no_note) -> ServerRecord:
    """Start a server on the port that the user chose at an earlier start, or on a free one.

    Raises:
        InputError: another process has the port that was chosen.
        PerdureError: it ended, or did not answer in time.
    """
    port = _chosen_port()
    if port is not None and (problem := why_taken(port, advice=REMEMBERED.format(port=port))):
        raise InputError("", problem)
    return start_server(port=port, on_wait=on_wait)


def start_server(*, port: int | None = None, on_wait: OnWait = no_note) -> ServerRecord:
    """Start a server in a session of its own and wait until it answers.

    Args:
        port: default: the first free one from 4200.
        on_wait: called with the wait for its first answer.

    Raises:
        InputError: another process has that port.
        PerdureError: it ended, or did not answer in time.
    """
    if port is not None:
        if problem := why_taken(port):
            raise InputError("--port", problem)
        return _launch(port, on_wait)
    while True:
        with suppress(PortTakenError):  # by another server that started in the same moment
            return _launch(_first_free(), on_wait)


class PortTakenError(PerdureError):
    """Another program listens on a port that was free a moment before."""


def _launch(port: int, on_wait: OnWait) -> ServerRecord:
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
    wait, why = ServerWait(on_wait), _described(record)
    while not (answers := _answers(record)) and process.poll() is None and wait.goes_on(why):
        pass
    owner = owner_of(port)
    if answers and is_in_family(owner, process.pid):
        return record
    process.kill()
    _record_path().unlink(missing_ok=True)
    if owner is not None and not is_in_family(owner, process.pid):
        raise PortTakenError(owner_text(owner, port))
    raise PerdureError(f"the Prefect server did not start; see {log_path}")


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


def stop_started() -> None:
    """Stop the server if this process has started it."""
    record = _alive_server()
    if record is not None and record.pid in _started:
        stop_server()


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


def remember_settings(settings: ServerSettings) -> None:
    """Keep what a user chose, for the next starts."""
    write_whole(_settings_path(), settings.model_dump_json(), private=True)


def _settings_path() -> Path:
    return home_folder() / "prefect" / "settings.json"


def _log_path() -> Path:
    return home_folder() / "prefect" / "server.log"


def _record_path() -> Path:
    return home_folder() / "prefect" / "server.json"
