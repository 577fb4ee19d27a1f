"""The emulator's libhccl.so, called by its C functions: no torch_npu between a test and it.

Buffers are tensors of the host, which the emulated devices' memory is as well.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    torch.int8: 0,
    torch.int16: 1,
    torch.int32: 2,
    torch.float16: 3,
    torch.float32: 4,
    torch.int64: 5,
    torch.uint8: 7,
    torch.float64: 10,
    torch.bfloat16: 11,
}
REDUCTIONS = {"sum": 0, "product": 1, "maximum": 2, "minimum": 3}
ROOT_INFO_BYTES = 4108

SUCCESS = 0
TIMEOUT = 9  # HCCL_E_TIMEOUT
REMOTE = 21  # HCCL_E_REMOTE
SUSPENDING = 22  # HCCL_E_SUSPENDING


class HcclError(RuntimeError):
    """A function of HCCL failed.

    Attributes:
        code: HcclResult.
        text: what aclGetRecentErrMsg says.
    """

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(f"{name} returned {code}: {text}")
        self.code = code
        self.text = text


class StreamError(RuntimeError):
    """What a stream ran has failed; the attributes are those of HcclError, with an aclError."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"the stream has error {code}: {text}")
        self.code = code
        self.text = text


class SendReceive(ctypes.Structure):
    """HcclSendRecvItem."""

    _fields_ = (
        ("direction", c_int32),
        ("buffer", c_void_p),
        ("count", c_uint64),
        ("type", c_int32),
        ("peer", c_uint32),
    )


class Libraries:
    """libascendcl.so and libhccl.so with one stream of one device.

    Args:
        device: index among the visible ones.
    """

    def __init__(self, device: int) -> None:
        folder = Path(os.environ["ASCEND_EMULATOR"]) / "lib"
        self.acl = ctypes.CDLL(str(folder / "libascendcl.so"), mode=ctypes.RTLD_GLOBAL)
        self.hccl = ctypes.CDLL(str(folder / "libhccl.so"))
        self.acl.aclGetRecentErrMsg.restype = c_char_p
        self.acl.ascend_command_fault.restype = c_char_p
        self.acl.aclInit(None)
        self.acl.aclrtSetDevice(device)
        self.device = device
        self.stream = c_void_p()
        self.acl.aclrtCreateStream(byref(self.stream))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of HCCL.

        Raises:
            HcclError: it did not return HCCL_SUCCESS.
        """
        code = getattr(self.hccl, name)(*arguments)
        if code != SUCCESS:
            raise HcclError(name, code, self.acl.aclGetRecentErrMsg().decode())

    def synchronize(self) -> None:
        """Wait for the stream.

        Raises:
            StreamError: it failed.
        """
        code = self.acl.aclrtSynchronizeStream(self.stream)
        if code != SUCCESS:
            raise StreamError(code, self.acl.aclGetRecentErrMsg().decode())

    def root_info(self) -> bytes:
        """What the ranks of one new communicator need to find each other."""
        info = ctypes.create_string_buffer(ROOT_INFO_BYTES)
        self.call("HcclGetRootInfo", info)
        return info.raw

    def arm(self, fault: str) -> None:
        """Have a fault strike the device of this process."""
        wrong = self.acl.ascend_command_fault(f"{fault} device={self.device}".encode())
        assert not wrong, wrong

    def abort_device(self) -> None:
        """End what the device runs, as torch_npu.npu.stop_device does."""
        assert self.acl.aclrtDeviceTaskAbort(self.device, 0) == 0


class Communicator:
    """One rank of a communicator.

    Args:
        libraries: of this process.
        root: what `Libraries.root_info` returned on one rank.
        size: number of ranks.
        rank: of this one.
    """

    def __init__(self, libraries: Libraries, root: bytes, size: int, rank: int) -> None:
        self.libraries = libraries
        self.size = size
        self.rank = rank
        self.handle = c_void_p()
        libraries.call(
            "HcclCommInitRootInfo", c_uint32(size), root, c_uint32(rank), byref(self.handle)
        )

    def start(self, name: str, *arguments: Any) -> None:
        """Call an operation, whose last arguments are the communicator and the stream."""
        converted = [
            c_void_p(one.data_ptr()) if isinstance(one, Tensor) else one for one in arguments
        ]
        self.libraries.call(name, *converted, self.handle, self.libraries.stream)

    def run(self, name: str, *arguments: Any) -> None:
        """Call an operation and wait for it."""
        self.start(name, *arguments)
        self.libraries.synchronize()

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        """The reduction over all ranks, as a new tensor."""
        result = torch.empty_like(tensor)
        count, kind = c_uint64(tensor.numel()), TYPES[tensor.dtype]
        self.run("HcclAllReduce", tensor, result, count, kind, REDUCTIONS[reduction])
        return result

    def async_error(self) -> int:
        """What HcclGetCommAsyncError says."""
        code = c_int32()
        self.libraries.call("HcclGetCommAsyncError", self.handle, byref(code))
        return code.value

    def resume(self) -> None:
        """Take operations again after the device's tasks were aborted; on every rank."""
        self.libraries.call("HcclCommResume", self.handle)

    def destroy(self) -> None:
        """End it."""
        self.libraries.call("HcclCommDestroy", self.handle)
