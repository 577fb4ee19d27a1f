"""Messages about the preparation of data by a command on a node. Times are seconds."""

from __future__ import annotations

from typing import Literal

from perdure.storage.frozen_model import FrozenModel


class PrepareOrder(FrozenModel):
    """Prepare data in the background, unless its outputs are there; repeated: how far.

    Attributes:
        number: of the try; the same number again starts nothing.
        starts: False only asks whether the outputs are there and whole.
        variables: environment of the command.
        cwd: its folder, from which relative paths count.
    """

    op: Literal["prepare"] = "prepare"
    number: int
    starts: bool
    command: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variables: dict[str, str]
    cwd: str


class PrepareReply(FrozenModel):
    """How far a node is with the preparation.

    Attributes:
        is_prepared: whether the outputs of these inputs are there and whole.
        is_running: whether the command runs.
        why: reason why the outputs are not there, where the job is wrong or nothing has run.
        exit_code: of a command that has failed; None while it runs or before it has run.
        last_line: newest line of its output.
        tail: end of its output, once it has ended.
        log_path: file with its output, on the node.
        seconds: duration of the command.
    """

    is_prepared: bool = False
    is_running: bool = False
    why: str = ""
    exit_code: int | None = None
    last_line: str = ""
    tail: str = ""
    log_path: str = ""
    seconds: float = 0.0
