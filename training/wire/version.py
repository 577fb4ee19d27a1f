"""The version of this Perdure, and which others it speaks to.

Releases that differ in their last number alone have the same messages. Others may not: an order
that an agent does not know would be refused in the middle of a recovery.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed_version() -> str:
    try:
        return version("perdure")
    except PackageNotFoundError:
        return ""


PERDURE_VERSION = _installed_version()


def is_of_this_release(other: str, *, current: str = PERDURE_VERSION) -> bool:
    """Whether the messages of two versions are the same; True where one is not known."""
    return not other or not current or _release(other) == _release(current)


def _release(text: str) -> list[str]:
    return text.split(".")[:2]
