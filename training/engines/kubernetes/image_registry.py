"""Questions to the registry of an image: the image's full name, a Secret's credentials, a HEAD.

Names have the grammar of https://github.com/distribution/reference; missing parts stand for Docker
Hub, its library, and the tag "latest". Secrets are read as the kubelet reads them
(https://kubernetes.io/docs/concepts/containers/images/#config-json): keys are hosts with a port and
the beginning of a path, where `*` stands for a part of the host's name; the longest goes first.

The question is a HEAD of the manifest, as a node's container runtime sends it before it pulls
(https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md#checking-if-content-exists-in-the-registry),
with a token where the registry requires it
(https://distribution.github.io/distribution/spec/auth/token/). Passwords and tokens go only to the
registry and the address that it names for tokens, and never into a message. A host that the
registry redirects to may have the manifest and gets neither. Times are seconds.
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

from perdure.storage.proxies import is_direct
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
        """The complete name."""
        mark = "@" if ":" in self.reference else ":"
        return f"{self.registry}/{self.repository}{mark}{self.reference}"


def image_name(text: str) -> ImageName:
    """Parse an image's name.

    Raises:
        ValueError: it is not the name of an image.
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
OLD_KIND = "kubernetes.io/dockercfg"  # has the entries below the newer kind's "auths"
_KEYS = {KIND: ".dockerconfigjson", OLD_KIND: ".dockercfg"}
# Docker Hub's key is one of its former addresses.
_HUB_KEYS = frozenset({"index.docker.io", "registry-1.docker.io"})


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials in a Secret, by registry and path."""

    by_place: Mapping[str, Credential]

    def for_image(self, image: ImageName) -> list[Credential]:
        """Select the credentials for an image, in the order in which nodes try them."""
        places = sorted(self.by_place, reverse=True)
        return [self.by_place[place] for place in places if _is_for(place, image)]


def credentials_of(secret: Document) -> Credentials:
    """Parse the credentials in a Secret.

    Raises:
        ValueError: the Secret has another type, or cannot be parsed. The message quotes none of
            its content.
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
    """Strip a key of the parts that the kubelet ignores."""
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
    """Parse an entry; None: it has no name and password, such as the entry of a helper.

    As for the kubelet, `auth` wins over the two, and may lack its padding
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


REQUEST_TIMEOUT_S = 5.0  # for each step of a request; each credential takes at most three
TIMEOUT_S = 20.0  # for the whole question
THREAD_NAME = "image-registry"
TOKEN_LIMIT_BYTES = 1024 * 1024  # for the answer with the token, which has a few KB
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# The host of Docker Hub's API is not that of its images' names.
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
    """A registry's verdict on an image."""

    FOUND = "found"
    ABSENT = "absent"
    DENIED = "denied"
    NOT_ASKED = "not_asked"  # the registry could not be reached, or did not answer the question


@dataclass(frozen=True, slots=True)
class Credential:
    """Name and password of a registry's user."""

    username: str
    password: SecretStr

    @property
    def basic(self) -> httpx.BasicAuth:
        """The credential as the client sends it."""
        return httpx.BasicAuth(self.username, self.password.get_secret_value())


@dataclass(frozen=True, slots=True)
class Answer:
    """A registry's verdict, with its words on a single line."""

    presence: Presence
    said: str


@dataclass(frozen=True, slots=True)
class Challenge:
    """A registry's demand for credentials: a scheme in small letters, and its parameters."""

    scheme: str
    parameters: Mapping[str, str]


def challenges(text: str) -> list[Challenge]:
    """Parse a WWW-Authenticate header."""
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
    """Ask an image's registry whether it has the image.

    Args:
        image: the image's full name.
        credentials: tried in turn, as a node does; empty: the question is anonymous.
        timeout_s: limit after which the registry counts as not asked.
        transport: carries the requests, in tests.
    """
    done: Future[Answer] = Future()
    ends_s = time.monotonic() + timeout_s

    def work() -> None:
        try:
            done.set_result(_ask(image, credentials, ends_s, transport))
        except BaseException as error:  # noqa: BLE001 raised by result()
            done.set_exception(error)

    # A name's resolution has no time-out, and headers may come byte by byte.
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
        timeout=REQUEST_TIMEOUT_S,
        follow_redirects=True,
        transport=transport,
        trust_env=not is_direct(base_url(image.registry)),
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
    """Compose a registry's URL: without TLS only on this machine, as container runtimes do."""
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
    """The question for an image with a credential.

    Attributes:
        client: sends the requests.
        image: the image's full name.
        credential: None: the question is anonymous.
        ends_s: when requests end, by the monotonic clock.
    """

    client: httpx.Client
    image: ImageName
    credential: Credential | None
    ends_s: float

    def answer(self) -> Answer:
        """Ask the registry.

        Raises:
            ValueError: the server of tokens gave no token, or a password would cross a network in
                the clear.
            httpx.HTTPError: the registry, or the server of its tokens, does not answer.
        """
        base = base_url(self.image.registry)
        response = self._head({})
        if response.status_code == HTTPStatus.UNAUTHORIZED and _is_from(response, base):
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
        self._check_time()
        image = self.image
        url = f"{base_url(image.registry)}/v2/{image.repository}/manifests/{image.reference}"
        headers = {"Accept": ", ".join(MANIFESTS), **headers}
        return self.client.head(url, headers=headers, auth=auth)

    def _token(self, parameters: Mapping[str, str]) -> SecretStr | None:
        """Get a token for pulls; None: the server refuses the credential, or its absence."""
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
        """Read the answer of the server of tokens; None: it refuses."""
        self._check_time()
        content = bytearray()
        with self.client.stream(
            "GET",
            url,
            # The size of a compressed answer is not known beforehand.
            headers={"Accept-Encoding": "identity"},
            auth=self.credential.basic if self.credential is not None else _NO_AUTH,
            # The registry does not name the address of a redirect.
            follow_redirects=False,
        ) as response:
            if response.status_code in _DENIED:
                return None
            response.raise_for_status()
            if "content-encoding" in response.headers:
                raise ValueError(f"{url.host} answers in a form that was not asked for")
            for part in response.iter_bytes():
                self._check_time()
                content += part
                if len(content) > TOKEN_LIMIT_BYTES:
                    raise ValueError(f"{url.host} answers more than {TOKEN_LIMIT_BYTES} bytes")
        return bytes(content)

    def _check_time(self) -> None:
        if time.monotonic() >= self.ends_s:
            raise httpx.TimeoutException("no answer in time")


def _is_from(response: httpx.Response, base: str) -> bool:
    """Whether the registry itself answered, and not a host that it redirects to."""
    ours, theirs = httpx.URL(base), response.url
    return (ours.scheme, ours.host, ours.port) == (theirs.scheme, theirs.host, theirs.port)


def _answer(response: httpx.Response, base: str) -> Answer:
    status = f"answers {response.status_code} {response.reason_phrase}".rstrip()
    said = f"it {status}"
    if response.status_code in _DENIED and not _is_from(response, base):
        where = f"{response.url.scheme}://{response.url.netloc.decode()}"
        return Answer(Presence.NOT_ASKED, f"it redirects to {where}, which {status}")
    if response.is_success:
        return Answer(Presence.FOUND, said)
    if response.status_code == HTTPStatus.NOT_FOUND:
        return Answer(Presence.ABSENT, said)
    if response.status_code in _DENIED:
        return Answer(Presence.DENIED, said)
    return Answer(Presence.NOT_ASKED, said)
