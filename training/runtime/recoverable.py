"""Exceptions of a step that are faults which the process outlives.

Faults are recognized by their text, because torch and torch_npu raise RuntimeError for nearly
everything; docs/ascend.md has torch_npu's, as it raises them. An exception that is not recognized
is the program's own, and its step is never executed again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.distributed as dist

from perdure.training.recovery.protocol import WorkerFaultKind
from perdure.training.runtime.errors import GivenUp, Interrupted

# Pattern, kind of fault, and the runtime's own code for it. The first pattern that matches counts.
ERROR_PATTERNS: tuple[tuple[re.Pattern[str], WorkerFaultKind, str | None], ...] = tuple(
    (re.compile(pattern), kind, code)
    for pattern, kind, code in (
        # torch_npu: aclrt error text
        (r"UCE ERROR", WorkerFaultKind.MEMORY, "507053"),
        (r"HBM MULTI BIT ECC ERROR", WorkerFaultKind.MEMORY, "507054"),
        (r"SUSPECT MEM ERROR", WorkerFaultKind.MEMORY, "507055"),
        (r"(HCCS|UB) LINK ERROR", WorkerFaultKind.LINK, "507056"),
        (r"SUSPECT REMOTE ERROR", WorkerFaultKind.LINK, "507057"),
        (r"HCCL OP RETRY FAILED", WorkerFaultKind.LINK, "507904"),
        # HCCL_CHECK_ERROR of torch_npu, with those codes of hccl_types.h that come from a peer or
        # the network: unavailable, time-out, TCP, RoCE, network, again, remote, suspended
        (
            r"HCCL function error: .*error code is (7|9|1[1-4]|19|2[0-2])\b",
            WorkerFaultKind.CONNECTION,
            None,
        ),
        # a collective that waits for longer than HCCL_EXEC_TIMEOUT
        (r"\bEI0002\b", WorkerFaultKind.COLLECTIVE, "EI0002"),
        # ProcessGroupHCCL::broadcastMasterID, when the rendezvous store is cut off
        (r"retrieving hcclUniqueId from \[0\]", WorkerFaultKind.CONNECTION, None),
        # CUDA runtime
        (r"uncorrectable (NVLink|ECC) error", WorkerFaultKind.MEMORY, None),
        # ProcessGroupNCCL of torch
        (r"NCCL (error|operation|communicator)", WorkerFaultKind.CONNECTION, None),
        # gloo of torch 2.13
        (r"gloo/transport.* Timed out waiting", WorkerFaultKind.COLLECTIVE, None),
        (r"gloo/", WorkerFaultKind.CONNECTION, None),
        # process_group/generations.py
        (r"the connection was aborted", WorkerFaultKind.CONNECTION, None),
    )
)

# Marks a fault of the device's memory that a drill imitates: the device knows nothing of it.
IMITATED = "(imitated)"

# Once a device is stopped, whatever is asked of it fails: with FORCE STOP, or with the code of a
# call that was on its way. ERRmmccc ends every error of torch_npu (NPUException.cpp).
_OF_A_STOPPED_DEVICE = re.compile(r"FORCE STOP|\bERR\d{5} (PTA|OPS|DIST)\b")

# torch.futures puts this before the text of an error that a callback raised.
_WRAPPED = "Got the following error when running the callback: RuntimeError: "


@dataclass(frozen=True, slots=True)
class RecoverableError:
    """An exception of a step that the process outlives.

    Attributes:
        kind: fault to report; None when a newer generation ended the step.
        text: first line of the exception.
        code: the runtime's error code, as in its own tables.
        is_of_device: the device itself has reported that memory is damaged.
    """

    kind: WorkerFaultKind | None
    text: str
    code: str | None = None
    is_of_device: bool = False


def classify(error: BaseException, *, is_interrupted: bool) -> RecoverableError | None:
    """Classify an exception; None when it is the program's own.

    Args:
        error: left the step.
        is_interrupted: a newer generation is announced: connections were aborted under the step.
    """
    text = str(error).removeprefix(_WRAPPED)
    if isinstance(error, Interrupted | GivenUp):
        return RecoverableError(None, text)
    if not isinstance(error, RuntimeError | dist.DistError):
        return None
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    for pattern, kind, code in ERROR_PATTERNS:
        if pattern.search(text):
            is_memory = kind is WorkerFaultKind.MEMORY
            classified = None if is_interrupted and not is_memory else kind
            is_of_device = is_memory and IMITATED not in text
            return RecoverableError(classified, first, code, is_of_device)
    # An error raised under C++ comes back as another type, with the text that it had.
    if is_interrupted and Interrupted.__name__ in text:
        return RecoverableError(None, first)
    # Errors of the store have a type of their own.
    if isinstance(error, dist.DistError):
        return RecoverableError(None if is_interrupted else WorkerFaultKind.CONNECTION, first)
    is_stopped = is_interrupted and _OF_A_STOPPED_DEVICE.search(text)
    return RecoverableError(None, first) if is_stopped else None
