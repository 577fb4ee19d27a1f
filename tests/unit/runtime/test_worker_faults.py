"""Which exceptions of a step are faults: the texts of libraries, and those of programs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from perdure.training.recovery.protocol import WorkerFaultKind
from perdure.training.runtime.errors import Interrupted, NotApplied
from perdure.training.runtime.recoverable import ERROR_PATTERNS, RecoverableError, classify

GLOO = "/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"
CLOSED = (
    f"[{GLOO}/pair.cc:553] Connection closed by peer [127.0.0.1]:8389. This is typically caused "
    "by a remote worker crashing. Check the logs of the remote worker before reporting an error."
)
TIMED_OUT = f"[{GLOO}/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
BROKEN = (WorkerFaultKind.CONNECTION, None)
KNOWN: dict[str, tuple[WorkerFaultKind, str | None]] = {
    CLOSED: BROKEN,
    f"[{GLOO}/pair.cc:530] Read error [127.0.0.1]:4269: Connection reset by peer": BROKEN,
    f"[{GLOO}/pair.cc:301] writev [127.0.0.1]:41811: Broken pipe": BROKEN,
    f"Gloo connectFullMesh failed with [{GLOO}/pair.cc:144] no error": BROKEN,
    "the connection was aborted while it was established": BROKEN,
    TIMED_OUT: (WorkerFaultKind.COLLECTIVE, None),
    "UCE ERROR reason=[device mem error]": (WorkerFaultKind.MEMORY, "507053"),
    "HBM MULTI BIT ECC ERROR.aclrtSynchronizeStream, time is 1700000000": (
        WorkerFaultKind.MEMORY,
        "507054",
    ),
    "SUSPECT MEM ERROR reason=[suspect device mem error]": (WorkerFaultKind.MEMORY, "507055"),
    "HCCS LINK ERROR reason=[link error]": (WorkerFaultKind.LINK, "507056"),
    "UB LINK ERROR reason=[link error]": (WorkerFaultKind.LINK, "507056"),
    "SUSPECT REMOTE ERROR reason=[suspect remote error]": (WorkerFaultKind.LINK, "507057"),
    "HCCL OP RETRY FAILED reason=[hccl op retry failed]": (WorkerFaultKind.LINK, "507904"),
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously "
    "reported at some other API call": (WorkerFaultKind.MEMORY, None),
    "CUDA error: uncorrectable NVLink error detected during the execution": (
        WorkerFaultKind.MEMORY,
        None,
    ),
    "NCCL error in: /opt/pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process "
    "exited or there was a network error, NCCL version 2.21.5": BROKEN,
    "NCCL communicator was aborted on rank 1.": BROKEN,
    "create_config:/build/HCCLUtils.cpp:124 HCCL function error: hcclCommInitRootInfoConfig("
    "numRanks, &rootInfo, rank, config, &(comm->hcclComm_)), error code is 9 \n[ERROR] "
    "2026-01-01-00:00:00 (PID:1, Device:0, RankID:0) ERR02200 DIST call hccl api failed.": BROKEN,
    "The Inner error is reported as above. The process exits for this inner error, and the current "
    "working operator name is HcclAllreduce. EI0002: The wait execution of the Notify register "
    "times out.": (WorkerFaultKind.COLLECTIVE, "EI0002"),
    "[1] is setting up HCCL communicator and retrieving hcclUniqueId from [0] via c10d key-value "
    "store by key '0', but store->get('0') got error: Connection reset by peer": BROKEN,
}
OWN = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed."),
    RuntimeError("Expected to have finished reduction in the prior iteration"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Timed out waiting for the tokenizer"),
    RuntimeError("the socket of my data server is closed: Broken pipe"),
    RuntimeError("FORCE STOP"),
    RuntimeError(
        "HCCL function error: HcclAllReduce(...), error code is 1 \n[ERROR] 2026-01-01-00:00:00 "
        "(PID:1, Device:0, RankID:0) ERR02200 DIST call hccl api failed."
    ),
    RuntimeError(""),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ConnectionResetError(104, "Connection reset by peer"),
    ValueError(CLOSED),
    AssertionError("UCE ERROR"),
    KeyboardInterrupt(),
    NotApplied("step 3: the body ended without step.apply()"),
]


def found(error: BaseException, *, is_interrupted: bool = False) -> RecoverableError:
    """What an exception is that is not the program's own."""
    result = classify(error, is_interrupted=is_interrupted)
    assert result is not None
    return result


@pytest.mark.parametrize("text", KNOWN, ids=lambda text: text[-40:])
def test_the_text_of_a_library_names_the_fault(text):
    kind, code = KNOWN[text]
    is_of_device = kind is WorkerFaultKind.MEMORY
    assert found(RuntimeError(text)) == RecoverableError(
        kind, text.splitlines()[0], code, is_of_device
    )


def test_the_device_is_not_asked_about_damage_that_a_drill_imitates():
    fault = found(RuntimeError("UCE ERROR reason=[device mem error] (imitated)"))
    assert (fault.kind, fault.is_of_device) == (WorkerFaultKind.MEMORY, False)


@pytest.mark.parametrize("error", OWN, ids=lambda error: f"{type(error).__name__}-{error}"[:40])
def test_an_exception_of_the_program_is_no_fault(error):
    assert classify(error, is_interrupted=False) is None


def test_every_pattern_decides_for_some_known_text():
    for pattern, _, _ in ERROR_PATTERNS:
        first = [next(p for p, _, _ in ERROR_PATTERNS if p.search(text)) for text in KNOWN]
        assert pattern in first, f"{pattern.pattern} is never the one that decides"


@pytest.mark.parametrize(
    "error",
    [
        dist.DistStoreError("wait timeout after 2000ms, keys: /g1/world/0/1"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout"),
    ],
)
def test_errors_of_the_distributed_library_are_broken_connections_by_their_type(error):
    assert found(error).kind is WorkerFaultKind.CONNECTION


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError(TIMED_OUT),
        RuntimeError("HCCL OP RETRY FAILED"),
        RuntimeError("FORCE STOP reason=[device task abort]"),
        RuntimeError(
            "npuSynchronizeStream:NPUStream.cpp:1 NPU function error: AclrtSynchronizeStream, "
            "error code is 507899\n[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:0) "
            "ERR00100 PTA call acl api failed"
        ),
        RuntimeError("the connection was aborted while it was established"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."),
        Interrupted("generation 3 is announced"),
        RuntimeError(
            "Got the following error when running the callback: RuntimeError: "
            "Interrupted: generation 3 is announced"
        ),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_what_a_new_generation_has_cut_short_is_not_reported(error):
    assert found(error, is_interrupted=True).kind is None


def test_damaged_memory_is_reported_whatever_else_happens():
    fault = found(RuntimeError("UCE ERROR"), is_interrupted=True)
    assert (fault.kind, fault.code) == (WorkerFaultKind.MEMORY, "507053")


@pytest.mark.parametrize("error", OWN[:6], ids=lambda error: str(error)[:30])
def test_a_new_generation_excuses_no_exception_of_the_program(error):
    assert classify(error, is_interrupted=True) is None


def test_an_error_that_comes_through_a_future_is_what_it_was():
    text = f"Got the following error when running the callback: RuntimeError: {CLOSED}"
    assert found(RuntimeError(text)) == RecoverableError(WorkerFaultKind.CONNECTION, CLOSED)
