"""Errors raised by storage.

StorageError
  + TransientError          retry with back-off
      - Throttled           the store asks for fewer requests
      - ServerError         the store failed (5xx)
      - TimedOut            no answer: time-out, refused or broken connection
      - StoreMissing        the folder of the store holds none: it is not mounted
      - NotCopied           a share did not get from one node to another
  + PermanentError          do not retry
      - NotFound            no object of that key
      - PreconditionFailed  another writer published first
      - AccessDenied        credentials are missing, wrong or not enough
      - StorageFull         no room is left, and no retry makes any
      - Corrupt             size, hash or format differ from what was published
      - StaleAttempt        a newer attempt owns the run; this one must stop

Each takes one message, so that it can be pickled between ranks and raised again with more context.
"""
# ruff: noqa: N818 the names are states of affairs, as they are shown

from __future__ import annotations


def describe(problem: BaseException) -> tuple[str, str]:
    """Class and text of what went wrong, for another process; see `error_of`."""
    if isinstance(problem, StorageError):
        return type(problem).__name__, str(problem)
    if isinstance(problem, (KeyError, RuntimeError, ValueError)):
        return "ValueError", str(problem)
    return "StorageError", repr(problem)


def error_of(kind: str, text: str) -> StorageError | ValueError:
    """The error that another process described."""
    if kind == "ValueError":
        return ValueError(text)
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, StorageError):
        return error_class(text)
    return StorageError(text)


class StorageError(Exception):
    """Root of the errors of this layer; the text is one line and holds no secrets."""


class TransientError(StorageError):
    """May pass by itself: retry with back-off."""

    retry_after_s: float | None = None  # how long the store asks to wait, where it does


class Throttled(TransientError):
    """The store asks for fewer requests."""


class ServerError(TransientError):
    """The store failed while it handled the request."""


class TimedOut(TransientError):
    """No answer: time-out, refused or broken connection."""


class StoreMissing(TransientError):
    """The folder holds no store: its file system is not mounted, or it was moved away."""


class NotCopied(TransientError):
    """A share did not get from one node's memory to another's."""


class PermanentError(StorageError):
    """A failure that a repeated request would meet again."""


class NotFound(PermanentError):
    """No object of that key."""


class PreconditionFailed(PermanentError):
    """Another writer published first."""


class AccessDenied(PermanentError):
    """Credentials are missing, wrong or not enough."""


class StorageFull(PermanentError):
    """The disk, or the quota, is full: somebody must make room."""


class Corrupt(PermanentError):
    """Size, hash or format differ from what was published: never fall back silently."""


class StaleAttempt(PermanentError):
    """A newer attempt owns the run; this one must stop."""
