"""A Prefect server that does not answer yet, or never will, and the wait for it."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from perdure import server, server_process
from perdure.server import address_problem, passes, use_server, why_refused
from perdure.server_process import ServerWait, one_start
from perdure.training.errors import InputError, PerdureError
from perdure.training.journal.waits import Wait, WaitKind
from perdure.training.processes import free_port

REQUEST = httpx.Request("GET", "http://prefect.example/api")


def status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(code))


@pytest.mark.parametrize(
    ("api_url", "is_address"),
    [
        ("http://127.0.0.1:4200/api", True),
        ("https://prefect.example/api", True),
        ("http://[::1]:4200/api", True),
        ("localhost:4200/api", False),
        ("127.0.0.1:4200", False),
        ("http:///api", False),
        ("http://[::1/api", False),
        ("http://127.0.0.1:99999/api", False),
        ("http://127.0.0.1:port/api", False),
        ("ftp://prefect.example/api", False),
    ],
)
def test_an_address_with_which_prefect_could_not_be_used_is_called_none(api_url, is_address):
    assert (address_problem(api_url) is None) == is_address


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (httpx.ConnectError("[Errno 111] Connection refused"), False),
        (httpx.ConnectError("[Errno -2] Name or service not known"), False),
        (httpx.ConnectError("[Errno -3] Temporary failure in name resolution"), True),
        (httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number"), False),
        (httpx.UnsupportedProtocol("'localhost://'"), False),
        (httpx.ConnectTimeout("timed out"), True),
        (httpx.ReadTimeout("timed out"), True),
        (httpx.RemoteProtocolError("Server disconnected"), True),
        (status(503), True),
        (status(502), True),
        (status(429), True),
        (status(404), False),
        (status(403), False),
        (json.JSONDecodeError("Expecting value", "<html>", 0), False),
    ],
)
def test_a_server_is_awaited_while_it_is_busy_and_not_where_there_is_none(error, may_pass):
    assert passes(error) == may_pass
    assert "\n" not in why_refused(error)


class Answers(ThreadingHTTPServer):
    """A server that gives these answers one after the other, and the last one again and again."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.remaining = list(answers)

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/api"


class _Answer(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        answers = self.server.remaining
        code, body = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(code)
        self.send_header("Retry-After", "0")  # or Prefect's client pauses for two seconds (3.8.8)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def answering(*answers: tuple[int, str]) -> Iterator[str]:
    with Answers(*answers) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.api_url
        running.shutdown()


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(server_process, "POLL_S", 0.0)


@pytest.fixture
def configure(monkeypatch):
    """Give the address in the environment, as a user's shell does."""

    @contextmanager
    def configured(api_url: str) -> Iterator[None]:
        monkeypatch.setenv("PREFECT_API_URL", api_url)
        with temporary_settings({PREFECT_API_URL: api_url}):
            yield

    return configured


def test_a_busy_server_is_awaited_and_the_wait_is_shown_with_its_last_answer(configure):
    waits: list[Wait | None] = []
    with answering((503, "busy"), (502, "busy"), (200, '"3.8.8"')) as url, configure(url):
        assert use_server(on_wait=waits.append) == url.removesuffix("/api")
    *shown, last = waits
    assert last is None
    assert [wait.kind for wait in shown if wait] == [WaitKind.SERVER, WaitKind.SERVER]
    assert [wait.why for wait in shown if wait] == [
        f"{url}: it answers 503", f"{url}: it answers 502"
    ]  # fmt: skip
    assert len({wait.since_s for wait in shown if wait}) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, "nothing here"), "it answers 404"),
        ((403, "no"), "it answers 403"),
        ((200, "<html>"), "whose address ends with /api"),
    ],
)
def test_another_program_at_the_address_is_named_on_one_line_with_advice(configure, answer, reason):
    with answering(answer) as url, configure(url), pytest.raises(InputError) as refused:
        use_server()
    text = str(refused.value)
    assert text.startswith(f"PREFECT_API_URL: the Prefect server at {url} cannot be used: ")
    assert reason in text
    assert text.endswith("'unset PREFECT_API_URL'")


def test_a_server_that_stays_busy_is_refused_once_the_wait_is_over(configure, monkeypatch, capsys):
    monkeypatch.setattr(server, "ServerWait", lambda on_wait: ServerWait(on_wait, timeout_s=0.0))
    with answering((503, "busy")) as url, configure(url):
        with pytest.raises(InputError, match="it answers 503"):
            use_server()
        use_server(must_answer=False)
    assert "it answers 503" in capsys.readouterr().err


def test_a_cancellation_goes_on_with_a_warning_where_nothing_listens(configure, capsys):
    url = f"http://127.0.0.1:{free_port()}/api"
    with configure(url):
        use_server(must_answer=False)
    assert f"the Prefect server at {url} cannot be used" in capsys.readouterr().err


def test_a_command_waits_for_another_that_starts_the_server_and_says_so(perdure_home):
    waits: list[Wait | None] = []
    with one_start():
        pass
    path = perdure_home / "prefect" / "start.lock"
    with path.open("a+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def look(wait: Wait | None) -> None:
            waits.append(wait)
            if len(waits) == 3:
                fcntl.flock(other, fcntl.LOCK_UN)

        with one_start(look):
            pass
    assert [wait.kind for wait in waits if wait] == [WaitKind.SERVER] * 3
    assert all(f"another command starts it; its lock: {path}" in wait.why for wait in waits if wait)


def test_a_command_that_holds_the_lock_for_ever_is_given_up_with_a_line(
    perdure_home, monkeypatch, capsys
):
    monkeypatch.setattr(server_process, "LOCK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(server_process, "ANNOUNCED_AFTER_S", -1.0)
    with one_start(), pytest.raises(PerdureError, match=r"fuser .*start\.lock"), one_start():
        pass
    assert "waiting for the Prefect server, up to 0 s" in capsys.readouterr().err
