"""The Prefect server that a command uses: a configured one, or that of this machine.

Prefect reads its settings when it is imported, so it is imported after the server is known. Times
are seconds.
"""

from __future__ import annotations

import os
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import typer

from perdure.console import warn
from perdure.server_process import (
    CLIENT_SETTINGS,
    PORTS,
    OnWait,
    ServerSettings,
    ServerWait,
    no_note,
    one_start,
    remember_settings,
    running_server,
    start_as_before,
    start_server,
    stop_server,
)
from perdure.storage.proxies import bypass_proxies, export_line, proxy_of
from perdure.training.errors import InputError

app = typer.Typer(help="The Prefect server of this machine.", no_args_is_help=True)

API_URL = "PREFECT_API_URL"
# Answers of a gateway, or of a server that has too much to do.
_PASSING_CODES = frozenset({408, 429, 502, 503, 504})
_PASSING_LOOKUP = "Temporary failure in name resolution"

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
    with one_start():
        record = running_server()
        if record is not None and port and port != record.port:
            raise InputError(
                "--port",
                f"{port}: the server of this PERDURE_HOME already runs on port {record.port}; stop "
                "it first with 'perdure server stop'",
            )
        if record is None:
            record = start_as_before() if port is None else start_server(port=port or None)
    if port is not None:
        remember_settings(ServerSettings(port=port or None))
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


def use_server(*, must_answer: bool = True, on_wait: OnWait = no_note) -> str:
    """Make sure that a Prefect server answers, and have Prefect use it.

    Args:
        must_answer: whether a configured server that does not is an error, or a warning.
        on_wait: called with each wait for the server, and with None when that is over.

    Returns:
        Address of the UI.

    Raises:
        InputError: the configured server does not answer, or asks for another auth string than
            this shell has, or a proxy refuses to reach it.
        PerdureError: the server of this machine did not start.
    """
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        api_url = os.environ.get(API_URL) or configured_api() or _use_own(on_wait)
        bypass_proxies(os.environ, (api_url,))
        _await_answer(api_url, ServerWait(on_wait), must_answer=must_answer)
    finally:
        on_wait(None)
    return api_url.removesuffix("/api")


def _use_own(on_wait: OnWait) -> str:
    """Have Prefect use the server of this machine, starting it unless it runs."""
    with one_start(on_wait):
        record = running_server(on_wait) or start_as_before(on_wait)
    os.environ[API_URL] = record.api_url
    # It has its auth string from the same shell as its clients.
    if of_server := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        os.environ.setdefault("PREFECT_API_AUTH_STRING", of_server)
    # Prefect has read the environment when it was imported, too early.
    from prefect.context import refresh_global_settings_context  # noqa: PLC0415 costs a second

    refresh_global_settings_context()
    return record.api_url


def _await_answer(api_url: str, wait: ServerWait, *, must_answer: bool) -> None:
    """Refuse on one line a server that a flow could not use; the flow would end in a traceback.

    A server that is busy is awaited, unless a proxy answers in its place.

    Raises:
        InputError: no answer came, or one that does not help.
    """
    problem = address_problem(api_url)
    if problem is not None:
        raise InputError(API_URL, _advice(api_url, problem))
    may_pass = must_answer and proxy_of(api_url) is None
    while (error := _request_version(api_url)) is not None:
        last_answer = f"{api_url}: {why_refused(error)}"
        if may_pass and passes(error) and wait.goes_on(last_answer):
            continue
        text = _advice(api_url, why_refused(error))
        if must_answer:
            raise InputError(API_URL, text)
        warn(text)
        return


def _request_version(api_url: str) -> Exception | None:
    """Ask the server for its version; return why that fails.

    Raises:
        InputError: it asks for another auth string.
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
        return error
    except (httpx.HTTPError, ValueError) as error:  # a page of another program is no JSON
        return error
    return None


def _advice(api_url: str, problem: str) -> str:
    """Say why a configured server cannot be used, and what to do; a proxy before it is named."""
    proxy = proxy_of(api_url) if address_problem(api_url) is None else None
    if proxy is not None:
        return (
            f"the Prefect server at {api_url} is not reached through the proxy of {proxy}: "
            f"{problem}; if it needs no proxy, add {httpx.URL(api_url).host} to no_proxy"
        )
    unset = "unset" if API_URL in os.environ else "prefect config unset"
    return (
        f"the Prefect server at {api_url} cannot be used: {problem}; start it, correct the "
        f"address, or have Perdure start a server of its own after '{unset} {API_URL}'"
    )


def address_problem(api_url: str) -> str | None:
    """Explain why an address is none, with which Prefect could not be imported; None: it is one."""
    try:
        parts = urlsplit(api_url)
        is_whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        return f"it is no address: {error}"
    return None if is_whole else "it is no address of the form http://HOST:PORT/api"


def passes(error: Exception) -> bool:
    """Whether the server may answer a moment later: it is busy, or its name is looked up."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in _PASSING_CODES
    if isinstance(error, httpx.ConnectError):
        return _PASSING_LOOKUP in str(error)
    if isinstance(error, httpx.UnsupportedProtocol):
        return False
    return isinstance(error, httpx.TransportError)


def why_refused(error: Exception) -> str:
    """Explain on a line why a server cannot be used."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answers {error.response.status_code}"
    if isinstance(error, httpx.HTTPError):
        return str(error) or type(error).__name__
    return "its answer is not that of a Prefect API, whose address ends with /api"
