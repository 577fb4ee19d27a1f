"""The users of registries that a Secret names, and which of them are for an image. Pure.

As the kubelet reads them
(https://kubernetes.io/docs/concepts/containers/images/#config-json): keys are hosts with a port and
the beginning of a path, where `*` stands for a part of the host's name; the longest goes first.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import SecretStr

from perdure.training.engines.kubernetes.image_name import ImageName
from perdure.training.engines.kubernetes.image_registry import Credential
from perdure.training.engines.kubernetes.objects import Document

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
        found = {_place(place): _credential(entry) for place, entry in entries.items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"its {key} is no configuration of Docker's client") from None
    return Credentials({place: one for place, one in found.items() if one is not None})


def _place(key: str) -> str:
    """A key without what the kubelet does not look at."""
    _, mark, rest = key.partition("://")
    host, _, path = (rest if mark else key).rstrip("/").partition("/")
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
