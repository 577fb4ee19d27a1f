"""The parts of an image's name, completed as container runtimes complete it. Pure.

The grammar is that of https://github.com/distribution/reference; what is left out stands for Docker
Hub, its library, and the tag "latest".

The users of registries that a Secret names, and which of them are for an image. Pure.

As the kubelet reads them
(https://kubernetes.io/docs/concepts/containers/images/#config-json): keys are hosts with a port and
the beginning of a path, where `*` stands for a part of the host's name; the longest goes first.

Whether an image is in its registry, asked of the registry itself. Times are seconds.

A HEAD of its manifest, as a node's container runtime asks before it pulls
(https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#checking-if-content-exists-in-the-registry),
with a token where the registry wants one
(https://distribution.github.io/distribution/spec/auth/token/). Passwords and tokens go nowhere but
to the registry and the address that it names for tokens, and never into a message. A host that it
redirects to may have the manifest, and is shown neither.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Any

import httpx
from pydantic import SecretStr

from perdure.training.engines.kubernetes.objects import Document

_HUB = "docker.io"
_DEFAULT_TAG = "latest"
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+|/)[a-z0-9]+)*")
_TAG = re.compile(r"[\w][\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[0-9a-fA-F]{32,}")


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image's complete name.

    Attributes:
        registry: host, and port where it has one.
        repository: path in it, such as "library/python".
        reference: digest where the name has one, else tag.
    """

    registry: str
    repository: str
    reference: str

    def __str__(self) -> str:
        """As it is written, complete."""
        mark = "@" if ":" in self.reference else ":"
        return f"{self.registry}/{self.repository}{mark}{self.reference}"


def image_name(text: str) -> ImageName:
    """The parts of an image's name.

    Raises:
        ValueError: it is none.
    """
    locator, _, digest = text.partition("@")
    first, slash, path = locator.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry = first
    else:
        registry, path = _HUB, locator
    repository, colon, tag = path.partition(":")
    if registry == _HUB and "/" not in repository:
        repository = f"library/{repository}"
    reference = digest or (tag if colon else _DEFAULT_TAG)
    form = _DIGEST if digest else _TAG
    if not (_REPOSITORY.fullmatch(repository) and form.fullmatch(reference)):
        raise ValueError(f"{text!r} is no name of an image")
    return ImageName(registry, repository, reference)


KIND = "kubernetes.io/dockerconfigjson"
OLD_KIND = "kubernetes.io/dockercfg"  # has what the other has below "auths", and nothing else
_KEYS = {KIND: ".dockerconfigjson", OLD_KIND: ".dockercfg"}
# The key of Docker Hub is an address of long ago.
_HUB_KEYS = frozenset({"index.docker.io", "registry-1.docker.io"})


@dataclass(frozen=True, slots=True)
class Credentials:
    """The users that a Secret names, by the registries and paths that they are for."""

    by_place: Mapping[str, Credential]

    def for_image(self, image: ImageName) -> list[Credential]:
        """Those for an image, in the order in which nodes try them."""
        places = sorted(self.by_place, reverse=True)
        return [self.by_place[place] for place in places if _is_for(place, image)]


def credentials_of(secret: Document) -> Credentials:
    """The credentials that a Secret has.

    Raises:
        ValueError: it is of another type, or cannot be read. The message has nothing of what is
            in it.
    """
    kind = secret.get("type")
    key = _KEYS.get(str(kind))
    if key is None:
        raise ValueError(f"its type is {kind}, and only {' and '.join(_KEYS)} are understood")
    try:
        content = json.loads(base64.b64decode((secret.get("data") or {})[key], validate=True))
        entries = content["auths"] if kind == KIND else content
        by_place = {_place(place): _credential(entry) for place, entry in entries.items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"its {key} is no configuration of Docker's client") from None
    return Credentials(
        {place: credential for place, credential in by_place.items() if credential is not None}
    )


def _place(key: str) -> str:
    """A key without what the kubelet does not look at."""
    _, mark, location = key.partition("://")
    host, _, path = (location if mark else key).rstrip("/").partition("/")
    if host in _HUB_KEYS:
        host = "docker.io"
    return f"{host}/{path}" if path not in ("", "v1", "v2") else host


def _is_for(place: str, image: ImageName) -> bool:
    wanted, _, path = place.partition("/")
    ours, theirs = image.registry.split("."), wanted.split(".")
    if len(ours) != len(theirs) or not all(map(fnmatchcase, ours, theirs)):
        return False
    return image.repository.startswith(path)


def _credential(entry: Mapping[str, Any]) -> Credential | None:
    """None: an entry without a name and a password, such as that of a helper.

    As the kubelet has it, `auth` wins over the two, and may lack its padding
    (https://github.com/kubernetes/kubernetes/blob/v1.31.0/pkg/credentialprovider/config.go).
    """
    username, password = entry.get("username"), entry.get("password")
    if entry.get("auth"):
        word = entry["auth"].strip().rstrip("=")
        decoded = base64.b64decode(word + "=" * (-len(word) % 4), validate=True).decode()
        username, colon, password = decoded.partition(":")
        if not colon:
            raise ValueError("auth is no name and password")
    if not (username and password):
        return None
    return Credential(str(username), SecretStr(str(password)))


REQUEST_TIMEOUT_S = 5.0  # of each step of a request; three requests at most for each credential
TIMEOUT_S = 20.0  # of the whole question
THREAD_NAME = "image-registry"
TOKEN_LIMIT_BYTES = 1024 * 1024  # of the answer that has it; a token has a few KB
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# Docker Hub's API is elsewhere than its name.
_API_HOSTS = {"docker.io": "registry-1.docker.io"}
_NO_AUTH = httpx.Auth()
_DENIED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# A scheme, or one of its parameters: https://www.rfc-editor.org/rfc/rfc9110#section-11.6.1
_CHALLENGE = re.compile(
    r"""(?P<scheme>[\w-]+)\s+(?=[\w-]+\s*=)
    | (?P<name>[\w-]+)\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s,]+))""",
    re.VERBOSE,
)


class Presence(StrEnum):
    """What a registry says of an image."""

    FOUND = "found"
    ABSENT = "absent"
    DENIED = "denied"
    NOT_ASKED = "not_asked"  # it could not be reached, or did not answer the question


@dataclass(frozen=True, slots=True)
class Credential:
    """Of a user of a registry."""

    username: str
    password: SecretStr

    @property
    def basic(self) -> httpx.BasicAuth:
        """For a request."""
        return httpx.BasicAuth(self.username, self.password.get_secret_value())


@dataclass(frozen=True, slots=True)
class Answer:
    """What a registry said, and in which words, on one line."""

    presence: Presence
    said: str


@dataclass(frozen=True, slots=True)
class Challenge:
    """How a registry wants to be asked: a scheme in small letters, and its parameters."""

    scheme: str
    parameters: Mapping[str, str]


def challenges(text: str) -> list[Challenge]:
    """The challenges of a WWW-Authenticate header."""
    pairs: list[tuple[str, dict[str, str]]] = []
    for part in _CHALLENGE.finditer(text):
        if part["scheme"]:
            pairs.append((part["scheme"].lower(), {}))
        elif pairs:
            quoted = part["quoted"]
            value = part["plain"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            pairs[-1][1][part["name"].lower()] = value
    return [Challenge(scheme, parameters) for scheme, parameters in pairs]


def ask(
    image: ImageName,
    credentials: Sequence[Credential],
    *,
    timeout_s: float = TIMEOUT_S,
    transport: httpx.BaseTransport | None = None,
) -> Answer:
    """Whether an image is in its registry.

    Args:
        image: its name.
        credentials: tried in turn, as a node does; none: it is asked as by anybody.
        timeout_s: after which it counts as not asked, whatever it waits for.
        transport: of the requests, in tests.
    """
    done: Future[Answer] = Future()
    ends_s = time.monotonic() + timeout_s

    def work() -> None:
        try:
            done.set_result(_ask(image, credentials, ends_s, transport))
        except BaseException as error:  # noqa: BLE001 raised by result()
            done.set_exception(error)

    # A look-up of a name has no time-out of its own, and headers may come byte by byte.
    threading.Thread(target=work, name=THREAD_NAME, daemon=True).start()
    try:
        return done.result(timeout_s)
    except TimeoutError:
        return Answer(Presence.NOT_ASKED, f"no answer within {timeout_s:g} s")


def _ask(
    image: ImageName,
    credentials: Sequence[Credential],
    ends_s: float,
    transport: httpx.BaseTransport | None,
) -> Answer:
    answer = Answer(Presence.NOT_ASKED, "")
    with httpx.Client(
        timeout=REQUEST_TIMEOUT_S, follow_redirects=True, transport=transport
    ) as client:
        for credential in credentials or (None,):
            try:
                answer = _Question(client, image, credential, ends_s).answer()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                said = " ".join(str(error).split()) or type(error).__name__
                return Answer(Presence.NOT_ASKED, said)
            if answer.presence is not Presence.DENIED:
                break
    return answer


def base_url(registry: str) -> str:
    """Where a registry is asked: without TLS only on this machine, as container runtimes do."""
    host = _API_HOSTS.get(registry, registry)
    return f"{'http' if _is_loopback(host) else 'https'}://{host}"


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked with one credential.

    Attributes:
        client: that asks.
        image: whose manifest is asked for.
        credential: None: as by anybody.
        ends_s: when nothing more is asked, by the monotonic clock.
    """

    client: httpx.Client
    image: ImageName
    credential: Credential | None
    ends_s: float

    def answer(self) -> Answer:
        """Ask.

        Raises:
            ValueError: what was answered is no token, or a password would go over a network in
                clear.
            httpx.HTTPError: the registry, or the server of its tokens, does not answer.
        """
        base = base_url(self.image.registry)
        response = self._head({})
        if response.status_code == HTTPStatus.UNAUTHORIZED and _is_of(response, base):
            offered = challenges(", ".join(response.headers.get_list("www-authenticate")))
            by_scheme = {challenge.scheme: challenge.parameters for challenge in offered}
            if "bearer" in by_scheme:
                token = self._token(by_scheme["bearer"])
                if token is None:
                    return Answer(Presence.DENIED, "it gives no token")
                response = self._head({"Authorization": f"Bearer {token.get_secret_value()}"})
            elif "basic" in by_scheme and self.credential is not None:
                response = self._head({}, self.credential.basic)
        return _answer(response, base)

    def _head(self, headers: Mapping[str, str], auth: httpx.Auth = _NO_AUTH) -> httpx.Response:
        self._look_at_the_clock()
        image = self.image
        url = f"{base_url(image.registry)}/v2/{image.repository}/manifests/{image.reference}"
        headers = {"Accept": ", ".join(MANIFESTS), **headers}
        return self.client.head(url, headers=headers, auth=auth)

    def _token(self, parameters: Mapping[str, str]) -> SecretStr | None:
        """A token for pulls; None: the credential, or its absence, is refused."""
        realm = httpx.URL(parameters.get("realm", ""))
        is_plain = base_url(self.image.registry).startswith("http:") and _is_loopback(realm.host)
        if realm.scheme != "https" and not is_plain:
            raise ValueError(f"it names {realm} for tokens, which is not https")
        query = {"scope": parameters.get("scope") or f"repository:{self.image.repository}:pull"}
        if "service" in parameters:
            query["service"] = parameters["service"]
        content = self._get(realm.copy_merge_params(query))
        if content is None:
            return None
        try:
            document = json.loads(content)
        except RecursionError:
            raise ValueError(f"{realm.host} answers without a token") from None
        tokens = document if isinstance(document, dict) else {}
        token = tokens.get("token") or tokens.get("access_token")
        if not isinstance(token, str):
            raise ValueError(f"{realm.host} answers without a token")  # noqa: TRY004 of a document
        return SecretStr(token)

    def _get(self, url: httpx.URL) -> bytes | None:
        """What the server of tokens answers; None: it refuses."""
        self._look_at_the_clock()
        content = bytearray()
        with self.client.stream(
            "GET",
            url,
            # What is compressed has no size that is known before.
            headers={"Accept-Encoding": "identity"},
            auth=self.credential.basic if self.credential is not None else _NO_AUTH,
            # It would be another address than the registry names.
            follow_redirects=False,
        ) as response:
            if response.status_code in _DENIED:
                return None
            response.raise_for_status()
            if "content-encoding" in response.headers:
                raise ValueError(f"{url.host} answers in a form that was not asked for")
            for part in response.iter_bytes():
                self._look_at_the_clock()
                content += part
                if len(content) > TOKEN_LIMIT_BYTES:
                    raise ValueError(f"{url.host} answers more than {TOKEN_LIMIT_BYTES} bytes")
        return bytes(content)

    def _look_at_the_clock(self) -> None:
        if time.monotonic() >= self.ends_s:
            raise httpx.TimeoutException("no answer in time")


def _is_of(response: httpx.Response, base: str) -> bool:
    """Whether it is the registry's own, and not of where that redirects to."""
    ours, theirs = httpx.URL(base), response.url
    return (ours.scheme, ours.host, ours.port) == (theirs.scheme, theirs.host, theirs.port)


def _answer(response: httpx.Response, base: str) -> Answer:
    status = f"answers {response.status_code} {response.reason_phrase}".rstrip()
    said = f"it {status}"
    if response.status_code in _DENIED and not _is_of(response, base):
        where = f"{response.url.scheme}://{response.url.netloc.decode()}"
        return Answer(Presence.NOT_ASKED, f"it redirects to {where}, which {status}")
    if response.is_success:
        return Answer(Presence.FOUND, said)
    if response.status_code == HTTPStatus.NOT_FOUND:
        return Answer(Presence.ABSENT, said)
    if response.status_code in _DENIED:
        return Answer(Presence.DENIED, said)
    return Answer(Presence.NOT_ASKED, said)
