"""Errors of the training layer.

PerdureError
  + InputError          a value given by the user is wrong: field, value, what is allowed; exit 2
  + RunConflict         another supervisor or another job owns this run
      - AlreadySupervised  another supervisor lives: its process and flow run
  + EngineError         the engine could not do what was asked
      - NoCapacity      fewer healthy nodes than the job needs
      - ImageUnavailable   the image of a container cannot be pulled at the moment
      - OtherRelease      an agent is of another release of Perdure
  + AgentUnreachable    the agent of a node does not answer
"""

from __future__ import annotations

from collections.abc import Sequence


class PerdureError(Exception):
    """Root of the errors that a caller may show as one line."""


class InputError(PerdureError, ValueError):
    """A value given by the user is wrong.

    Attributes:
        field: dotted path of the field, "" when the whole document is meant.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(_on_a_line(f"{field}: {message}" if field else message))
        self.field = field


def _on_a_line(text: str) -> str:
    """Escape what would break the line, or tell a terminal to do something."""
    if text.isprintable():
        return text
    lines = " ".join(text.splitlines())
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in lines)


class RunConflict(PerdureError):  # noqa: N818 a state of affairs, named as it is shown
    """Another supervisor owns the run, or the run_id belongs to a different job."""


class AlreadySupervised(RunConflict):
    """Another supervisor of the run lives.

    Attributes:
        flow_run: id of the flow run that it is a process of; None without Prefect.
    """

    def __init__(self, message: str, *, flow_run: str | None) -> None:
        super().__init__(message)
        self.flow_run = flow_run


class EngineError(PerdureError):
    """The engine could not do what was asked."""

    @property
    def is_refusal(self) -> bool:
        """Whether the platform refuses, or does not answer: no node is at fault, and it passes."""
        return False


class OtherRelease(EngineError):  # noqa: N818 a state of affairs, named as it is shown
    """An agent is of another release of Perdure."""


class StopRequested(EngineError):  # noqa: N818 a state of affairs, named as it is shown
    """Somebody has asked for the end of the run."""

    def __init__(self) -> None:
        super().__init__("stopped on request")


class NoCapacity(EngineError):  # noqa: N818 a state of affairs, named as it is shown
    """Fewer healthy nodes than the job needs."""


class ImageUnavailable(EngineError):  # noqa: N818 a state of affairs, named as it is shown
    """The image of a container cannot be pulled at the moment.

    Attributes:
        containers: their names.
    """

    def __init__(self, message: str, containers: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.containers = containers

    @property
    def is_refusal(self) -> bool:
        """Whether it passes: the registry may answer again."""
        return True


class AgentUnreachable(PerdureError):  # noqa: N818 a state of affairs, named as it is shown
    """The agent of a node does not answer."""
