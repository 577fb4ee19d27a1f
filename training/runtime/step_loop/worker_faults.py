"""Which exceptions of a step are faults that the process outlives.

By the text of the error, for torch and torch_npu raise RuntimeError for nearly everything. An
exception that is not known here is the program's own, and is never executed again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.distributed as dist

from training.recovery.protocol import WorkerFaultKind
from training.runtime.errors import GivenUp, Interrupted


@dataclass(frozen=True, slots=True)
class Sign:
    """What an error says.

    Attributes:
        pattern: found in its text.
        trouble: what it stands for.
        code: of the runtime, as in its own tables.
        source: where the text comes from.
    """

    pattern: re.Pattern[str]
    trouble: WorkerFaultKind
    code: str | None
    source: str


def _sign(pattern: str, trouble: WorkerFaultKind, code: str | None, source: str) -> Sign:
    return Sign(re.compile(pattern), trouble, code, source)


_TORCH_NPU = "torch_npu: aclrt error text"
_GLOO = "torch 2.13: gloo/transport/tcp"
SIGNS = (
    _sign(r"UCE ERROR", WorkerFaultKind.MEMORY, "507053", _TORCH_NPU),
    _sign(r"HBM MULTI BIT ECC ERROR", WorkerFaultKind.MEMORY, "507054", _TORCH_NPU),
    _sign(r"SUSPECT MEM ERROR", WorkerFaultKind.MEMORY, "507055", _TORCH_NPU),
    _sign(r"(HCCS|UB) LINK ERROR", WorkerFaultKind.COLLECTIVE, "507056", _TORCH_NPU),
    _sign(r"SUSPECT REMOTE ERROR", WorkerFaultKind.COLLECTIVE, "507057", _TORCH_NPU),
    _sign(r"HCCL OP RETRY FAILED", WorkerFaultKind.COLLECTIVE, "507904", _TORCH_NPU),
    _sign(r"uncorrectable (NVLink|ECC) error", WorkerFaultKind.MEMORY, None, "CUDA runtime"),
    _sign(
        r"NCCL (error|operation|communicator)",
        WorkerFaultKind.LINK,
        None,
        "torch: ProcessGroupNCCL",
    ),
    _sign(r"gloo/transport.* Timed out waiting", WorkerFaultKind.COLLECTIVE, None, _GLOO),
    # What the store says comes as an error of its own type.
    _sign(r"gloo/", WorkerFaultKind.LINK, None, _GLOO),
    _sign(r"the link was aborted", WorkerFaultKind.LINK, None, "links.py"),
)


# What torch.futures puts before the text of an error that a callback raised.
_WRAPPED = "Got the following error when running the callback: RuntimeError: "


@dataclass(frozen=True, slots=True)
class Seen:
    """A fault that a step ran into and the process outlives.

    Attributes:
        trouble: None when a newer generation had ended the step, so nothing needs telling.
    """

    trouble: WorkerFaultKind | None
    text: str
    code: str | None = None


def look_at(error: BaseException, *, is_interrupted: bool) -> Seen | None:
    """What an exception is, None when it is the program's own.

    Args:
        error: left the step.
        is_interrupted: a newer generation is announced: its links were cut under the step.
    """
    text = str(error).removeprefix(_WRAPPED)
    if isinstance(error, Interrupted | GivenUp):
        return Seen(None, text)
    if not isinstance(error, RuntimeError | dist.DistError):
        return None
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    for sign in SIGNS:
        if sign.pattern.search(text):
            own = (
                None
                if is_interrupted and sign.trouble is not WorkerFaultKind.MEMORY
                else sign.trouble
            )
            return Seen(own, first, sign.code)
    # What was raised under C++ comes back as another type, with the text that it had.
    if is_interrupted and Interrupted.__name__ in text:
        return Seen(None, first)
    if isinstance(error, dist.DistError):
        return Seen(None if is_interrupted else WorkerFaultKind.LINK, first)
    # What the device's task abort leaves behind, once recovery has begun.
    return Seen(None, first) if is_interrupted and "FORCE STOP" in text else None
