"""What is asked of a registry, to whom a password goes, and how each answer counts."""

from __future__ import annotations

import base64
import itertools
import socket
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from pydantic import SecretStr

from perdure.training.engines.kubernetes.image_registry import (
    MANIFESTS,
    THREAD_NAME,
    TOKEN_LIMIT_BYTES,
    Challenge,
    Credential,
    Presence,
    ask,
    base_url,
    challenges,
    image_name,
)

IMAGE = image_name("registry.example.com/team/perdure:1")
USER = Credential("robot", SecretStr("correct-horse"))
BASIC = "Basic " + base64.b64encode(b"robot:correct-horse").decode()
BEARER = 'Bearer realm="https://auth.example.com/token",service="registry"'

Handler = Callable[[httpx.Request], httpx.Response]


class Registry:
    """A transport that notes what it is asked, and answers as a test says."""

    def __init__(self, handler: Handler) -> None:
        self.requests: list[httpx.Request] = []
        self._handler = handler

    def ask(self, *credentials: Credential, image=IMAGE):
        return ask(image, credentials, transport=httpx.MockTransport(self.note))

    def note(self, request: httpx.Request) -> httpx.Response:
        """Answer a request."""
        self.requests.append(request)
        return self._handler(request)


def with_tokens(request: httpx.Request) -> httpx.Response:
    """A registry that wants a token, and gives one to the user alone."""
    if request.url.host == "auth.example.com":
        if request.headers.get("authorization") != BASIC:
            return httpx.Response(401)
        return httpx.Response(200, json={"token": "ticket"})
    if request.headers.get("authorization") == "Bearer ticket":
        return httpx.Response(200)
    return httpx.Response(401, headers={"www-authenticate": BEARER})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ('Basic realm="Registry Realm"', [Challenge("basic", {"realm": "Registry Realm"})]),
        (
            'Bearer realm="https://a.b/t",service="x, y",scope="repository:a/b:pull,push"',
            [
                Challenge(
                    "bearer",
                    {
                        "realm": "https://a.b/t",
                        "service": "x, y",
                        "scope": "repository:a/b:pull,push",
                    },
                )
            ],
        ),
        (
            'BASIC realm=plain, Bearer Realm="say \\"a\\"" , service = s',
            [
                Challenge("basic", {"realm": "plain"}),
                Challenge("bearer", {"realm": 'say "a"', "service": "s"}),
            ],
        ),
        ("Negotiate", []),
    ],
)
def test_challenges_are_read_as_the_standard_has_them(text, expected):
    assert challenges(text) == expected


def test_the_manifest_is_asked_for_in_all_forms_and_nothing_is_fetched():
    registry = Registry(lambda _: httpx.Response(200))
    assert registry.ask().presence is Presence.FOUND
    (request,) = registry.requests
    assert request.method == "HEAD"
    assert str(request.url) == "https://registry.example.com/v2/team/perdure/manifests/1"
    assert request.headers["accept"].split(", ") == list(MANIFESTS)
    assert "authorization" not in request.headers


def test_a_token_is_got_with_the_credential_and_shown_to_the_registry_alone():
    registry = Registry(with_tokens)
    assert registry.ask(USER).presence is Presence.FOUND
    first, token, second = registry.requests
    assert "authorization" not in first.headers
    assert dict(token.url.params) == {
        "scope": "repository:team/perdure:pull", "service": "registry",
    }  # fmt: skip
    assert (token.headers["authorization"], second.headers["authorization"]) == (
        BASIC, "Bearer ticket",
    )  # fmt: skip


def test_nobody_without_a_credential_gets_a_token():
    answer = Registry(with_tokens).ask()
    assert answer.presence is Presence.DENIED


def test_the_next_credential_is_tried_when_one_is_refused():
    registry = Registry(with_tokens)
    other = Credential("other", SecretStr("wrong"))
    assert registry.ask(other, USER).presence is Presence.FOUND
    assert Registry(with_tokens).ask(other).presence is Presence.DENIED


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, Presence.FOUND), (404, Presence.ABSENT), (403, Presence.DENIED),
        (401, Presence.DENIED), (429, Presence.NOT_ASKED), (503, Presence.NOT_ASKED),
    ],
)  # fmt: skip
def test_each_answer_has_its_meaning(status, expected):
    answer = Registry(lambda _: httpx.Response(status)).ask()
    assert answer.presence is expected
    assert str(status) in answer.said


def test_a_registry_that_is_not_reached_was_not_asked():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Name or service not known")

    answer = Registry(refuse).ask(USER)
    assert (answer.presence, answer.said) == (Presence.NOT_ASKED, "Name or service not known")


def test_no_password_is_sent_for_a_token_without_tls():
    plain = BEARER.replace("https", "http")
    registry = Registry(lambda _: httpx.Response(401, headers={"www-authenticate": plain}))
    answer = registry.ask(USER)
    assert answer.presence is Presence.NOT_ASKED
    assert "is not https" in answer.said
    assert [request.url.host for request in registry.requests] == ["registry.example.com"]


def test_a_registry_that_is_asked_over_tls_names_no_address_without_it_on_this_machine_either():
    plain = 'Bearer realm="http://127.0.0.1:5001/token"'
    registry = Registry(lambda _: httpx.Response(401, headers={"www-authenticate": plain}))
    assert registry.ask(USER).presence is Presence.NOT_ASKED
    assert [request.url.host for request in registry.requests] == ["registry.example.com"]


@pytest.mark.parametrize(
    "place",
    [
        "https://other.example.com", "http://other.example.com",
        "http://registry.example.com", "https://registry.example.com:444",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "challenge", ['Bearer realm="https://evil.example.com/token"', 'Basic realm="images"']
)
def test_where_the_registry_redirects_to_gets_no_password(place, challenge):
    def answer(request: httpx.Request) -> httpx.Response:
        if str(request.url).startswith("https://registry.example.com/"):
            return httpx.Response(307, headers={"location": f"{place}/manifest"})
        return httpx.Response(401, headers={"www-authenticate": challenge})

    registry = Registry(answer)
    answered = registry.ask(USER)
    assert answered.presence is Presence.NOT_ASKED
    assert place in answered.said
    assert [request.url.path for request in registry.requests][1:] == ["/manifest"]
    assert not any("authorization" in request.headers for request in registry.requests)


def test_a_redirect_to_where_the_manifest_is_is_followed_without_the_token():
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "store.example.com":
            return httpx.Response(200)
        answered = with_tokens(request)
        if request.url.host == "auth.example.com" or answered.status_code != 200:
            return answered
        return httpx.Response(307, headers={"location": "https://store.example.com/manifest"})

    registry = Registry(answer)
    assert registry.ask(USER).presence is Presence.FOUND
    assert registry.requests[-1].url.host == "store.example.com"
    assert "authorization" not in registry.requests[-1].headers


def test_tokens_are_asked_for_where_the_registry_says_and_nowhere_else():
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "auth.example.com":
            return httpx.Response(307, headers={"location": "https://evil.example.com/token"})
        return httpx.Response(401, headers={"www-authenticate": BEARER})

    registry = Registry(answer)
    assert registry.ask(USER).presence is Presence.NOT_ASKED
    assert [request.url.host for request in registry.requests] == [
        "registry.example.com", "auth.example.com",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"no json", b"[]", b'{"token": 7}'])
def test_what_is_no_token_is_no_answer(content):
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "auth.example.com":
            return httpx.Response(200, content=content)
        return httpx.Response(401, headers={"www-authenticate": BEARER})

    assert Registry(answer).ask(USER).presence is Presence.NOT_ASKED


class Parts(httpx.SyncByteStream):
    """A body whose parts are made when they are read."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self.read_bytes = 0
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            self.read_bytes += len(part)
            yield part

    def close(self) -> None:
        self.is_closed = True


def answers_tokens_with(body: httpx.SyncByteStream, **headers: str) -> Handler:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "auth.example.com":
            return httpx.Response(200, stream=body, headers=headers)
        return httpx.Response(401, headers={"www-authenticate": BEARER})

    return answer


def test_of_an_answer_without_end_no_more_is_read_than_a_token_needs():
    body = Parts(itertools.repeat(b" " * 4096))
    answer = Registry(answers_tokens_with(body)).ask(USER)
    assert answer.presence is Presence.NOT_ASKED
    assert answer.said == f"auth.example.com answers more than {TOKEN_LIMIT_BYTES} bytes"
    assert body.read_bytes == TOKEN_LIMIT_BYTES + 4096
    assert body.is_closed


def test_what_would_grow_as_it_is_unpacked_is_not_read():
    body = Parts(itertools.repeat(b" "))
    registry = Registry(answers_tokens_with(body, **{"content-encoding": "gzip"}))
    assert registry.ask(USER).presence is Presence.NOT_ASKED
    assert registry.requests[1].headers["accept-encoding"] == "identity"
    assert body.read_bytes == 0


def test_a_document_that_is_too_deep_is_no_token():
    body = Parts(iter([b"[" * 500_000]))
    answer = Registry(answers_tokens_with(body)).ask(USER)
    assert answer.said == "auth.example.com answers without a token"


def test_a_question_ends_in_time_whatever_it_waits_for(monkeypatch):
    is_over, looked_up = threading.Event(), threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        looked_up.set()
        is_over.wait(30)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        answer = ask(IMAGE, [USER], timeout_s=1)
        assert looked_up.wait(30)
        assert not is_over.is_set()
    finally:
        is_over.set()
    assert (answer.presence, answer.said) == (Presence.NOT_ASKED, "no answer within 1 s")


def test_no_password_is_sent_after_the_end():
    is_over = threading.Event()

    def late(request: httpx.Request) -> httpx.Response:
        assert is_over.wait(30)
        return with_tokens(request)

    registry = Registry(late)
    transport = httpx.MockTransport(registry.note)
    assert ask(IMAGE, [USER], timeout_s=0.2, transport=transport).presence is Presence.NOT_ASKED
    is_over.set()
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(30)
    assert all(request.url.host == "registry.example.com" for request in registry.requests)
    assert not any("authorization" in request.headers for request in registry.requests)


def test_a_mistake_in_the_question_is_not_an_answer():
    def broken(request: httpx.Request) -> httpx.Response:
        raise LookupError("broken")

    with pytest.raises(LookupError, match="broken"):
        Registry(broken).ask()


def test_a_password_stands_in_no_message():
    assert "correct-horse" not in repr(USER)
    for handler in (with_tokens, lambda _: httpx.Response(403)):
        assert "correct-horse" not in Registry(handler).ask(USER).said


@pytest.mark.parametrize(
    ("registry", "expected"),
    [
        ("docker.io", "https://registry-1.docker.io"),
        ("registry.example.com:5000", "https://registry.example.com:5000"),
        ("localhost:5000", "http://localhost:5000"),
        ("127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("127.example.com", "https://127.example.com"),
    ],
)
def test_a_registry_is_asked_over_tls_unless_it_is_on_this_machine(registry, expected):
    assert base_url(registry) == expected
