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
    """Whether the messages of two versions are the same.

    Args:
        other: of an agent; "" is that of a release before agents named theirs.
        current: this one; "", from a folder that was never installed, speaks to all.
    """
    return not current or _release(other) == _release(current)


def _release(text: str) -> list[str]:
    return text.split(".")[:2]
