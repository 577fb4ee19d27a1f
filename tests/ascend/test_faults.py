"""What torch_npu makes of each fault: its own exception, and what the diagnosis reads in that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from perdure.training.recovery.faults import FaultClass
from tests.ascend.programs import said
from tests.unit.recovery.diagnosed import of_log

PROGRAM = """
import json, os, sys, threading, traceback
import torch, torch_npu, ascend_emulator

kind = os.environ["KIND"]
x = torch.ones(4, 4, device="npu:0")

def raised(work):
    try:
        return ["nothing", str(work())]
    except Exception as error:
        return [type(error).__name__, "".join(traceback.format_exception(error))]

def compute():
    return (x + x).sum().item()

def communicate():
    torch.distributed.all_reduce(x)
    torch.npu.synchronize()

def stopped():
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(raised(compute)))
    thread.start()
    while torch.npu.default_stream(0).query():
        pass
    torch.npu.stop_device(0)
    thread.join()
    return outcome[0]

damaged = f" address={x.data_ptr()} size={x.nbytes}" if kind in ("uce", "ecc") else ""
if kind in ("link", "suspect-remote", "retry-failed"):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("hccl", store=store, rank=0, world_size=1)
torch.npu.synchronize()
ascend_emulator.fault(kind + " device=0" + damaged)
if kind == "oom":
    first = raised(lambda: torch.empty(1 << 28, device="npu:0"))
elif kind == "hang":
    first = stopped()
else:
    first = raised(communicate if torch.distributed.is_initialized() else compute)
found = {"raised": first}
if kind != "oom":
    found["stop"] = torch.npu.stop_device(0)
found["check"] = torch.npu.check_uce_in_memory(0)
ascend_emulator.fault("clear")
# torch_npu's queue ends for good with an error that it has no state for (NPUQueue.h, RepoStatus):
# what is put into it afterwards may wait for ever.
has_ended = kind.startswith("aicore") and os.environ.get("ASCEND_LAUNCH_BLOCKING") != "1"
if found.get("stop") or has_ended:
    found["after"] = ["not tried", ""]
else:
    torch.npu.restart_device(0)
    found["after"] = raised(lambda: (torch.ones(3, device="npu:0") * 2).sum().item())
    found["tensor"] = raised(lambda: x.cpu().sum().item())
print(json.dumps(found), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Case:
    """What is expected of a fault.

    Attributes:
        text: in the exception.
        fault_class: by the diagnosis.
        check: what check_uce_in_memory says; 0 is nothing, 3 is a tensor.
        heals: whether the device takes work again after stop_device and restart_device.
    """

    text: str
    fault_class: FaultClass
    exception: str = "RuntimeError"
    check: int = 0
    heals: bool = True


CASES = {
    "aicore": Case("error code is 507015", FaultClass.OPERATOR_ERROR),
    "aicore-timeout": Case("error code is 507014", FaultClass.OPERATOR_ERROR),
    "uce": Case("UCE ERROR", FaultClass.DEVICE_MEMORY_ERROR, check=3),
    "ecc": Case("HBM MULTI BIT ECC ERROR", FaultClass.DEVICE_MEMORY_ERROR, check=3),
    "suspect-memory": Case("SUSPECT MEM ERROR", FaultClass.DEVICE_MEMORY_ERROR),
    "lost": Case("error code is 507010", FaultClass.DEVICE_LOST, heals=False),
    "oom": Case("NPU out of memory", FaultClass.DEVICE_OOM, exception="OutOfMemoryError"),
    "link": Case("HCCS LINK ERROR", FaultClass.LINK_DOWN),
    "suspect-remote": Case("SUSPECT REMOTE ERROR", FaultClass.LINK_DOWN),
    "retry-failed": Case("HCCL OP RETRY FAILED", FaultClass.LINK_DOWN),
}


def kinds_of(*short: str) -> list[Any]:
    """All of them, the others than these in the long form: each test imports torch_npu anew."""
    return [kind if kind in short else pytest.param(kind, marks=pytest.mark.long) for kind in CASES]


@pytest.mark.parametrize("kind", kinds_of("aicore", "uce", "lost", "oom", "link"))
def test_a_fault_is_raised_by_torch_npu_and_known_to_the_diagnosis(kind):
    # Where the launch waits for the device, an error has its code in the text.
    found = said(PROGRAM, KIND=kind, ASCEND_LAUNCH_BLOCKING="1")
    case, (exception, text) = CASES[kind], found["raised"]
    assert exception == case.exception
    assert case.text in text
    assert of_log(text).fault_class is case.fault_class
    assert found["check"] == case.check
    assert found.get("stop", 0) == (0 if case.heals else 1)
    assert (found["after"] == ["nothing", "6.0"]) is case.heals


@pytest.mark.parametrize("kind", kinds_of("aicore"))
def test_a_fault_is_known_to_the_diagnosis_where_it_is_seen_later(kind):
    exception, text = said(PROGRAM, KIND=kind)["raised"]
    assert exception == CASES[kind].exception
    assert of_log(text).fault_class is CASES[kind].fault_class


def test_a_stopped_device_ends_what_never_ends_and_whoever_waits_for_it():
    found = said(PROGRAM, KIND="hang")
    exception, text = found["raised"]
    assert exception == "RuntimeError"
    assert "FORCE STOP" in text
    assert found["after"] == ["nothing", "6.0"]


def test_a_tensor_in_damaged_memory_may_not_be_read():
    found = said(PROGRAM, KIND="uce")
    assert found["tensor"][0] == "RuntimeError"
    assert "There is unsafe data in the input tensor" in found["tensor"][1]


def test_a_fault_may_spare_what_comes_before_it():
    outcome = said(
        """
        import json, os, torch, torch_npu, ascend_emulator
        x = torch.ones(4, device="npu:0")
        torch.npu.synchronize()
        ascend_emulator.fault("aicore device=0 after=20")
        done = 0
        try:
            for done in range(100):
                x.add_(1)
                torch.npu.synchronize()
        except RuntimeError:
            pass
        print(json.dumps(done), flush=True)
        os._exit(0)
        """
    )
    assert 10 <= outcome <= 20


def test_faults_are_commanded_from_another_process(tmp_path):
    outcome = said(
        """
        import json, os, socket, torch, torch_npu
        x = torch.ones(4, device="npu:0")
        answers = []
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(f"{os.environ['ASCEND_EMULATOR_FAULTS']}/{os.getpid()}.sock")
            for line in ("nonsense", "aicore device=99", "aicore device=0 after=x", "aicore"):
                door.sendall(line.encode() + b"\\n")
                answers.append(door.recv(100).decode())
        try:
            x.sum().item()
        except RuntimeError as error:
            answers.append("507015" in str(error) or "aicore exception" in str(error))
        print(json.dumps(answers), flush=True)
        os._exit(0)
        """,
        ASCEND_EMULATOR_FAULTS=str(tmp_path),
    )
    assert outcome == [
        "error: no such fault: nonsense\n",
        "error: no such device: 99\n",
        "error: not understood: after=x\n",
        "ok\n",
        True,
    ]


def test_a_line_that_is_not_understood_is_refused():
    import ascend_emulator

    with pytest.raises(ValueError, match="no such fault: earthquake"):
        ascend_emulator.fault("earthquake device=0")
    with pytest.raises(ValueError, match="address and size go together"):
        ascend_emulator.fault("uce device=0 address=0x1000")
