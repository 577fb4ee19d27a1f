"""The parts of an image's name, completed as container runtimes complete it. Pure.

The grammar is that of https://github.com/distribution/reference; what is left out stands for Docker
Hub, its library, and the tag "latest".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    rest, _, digest = text.partition("@")
    first, slash, path = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry = first
    else:
        registry, path = _HUB, rest
    repository, colon, tag = path.partition(":")
    if registry == _HUB and "/" not in repository:
        repository = f"library/{repository}"
    reference = digest or (tag if colon else _DEFAULT_TAG)
    form = _DIGEST if digest else _TAG
    if not (_REPOSITORY.fullmatch(repository) and form.fullmatch(reference)):
        raise ValueError(f"{text!r} is no name of an image")
    return ImageName(registry, repository, reference)
