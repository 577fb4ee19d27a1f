"""Operations of HCCL that do not come to their end, each in a way of its own.

Argument: which; a function here. Its result is what the library and the stream say of it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.ascend.hccl_ranks.library import Communicator, HcclError, Libraries, StreamError
from tests.ascend.hccl_ranks.meeting import RANK, SIZE, join, say, shared

ONES = 1000
# By then what the others send has come, though the operation has not begun here.
HEAD_START_S = 1.0


def connected(libraries: Libraries) -> Communicator:
    """A communicator of all ranks, which have its links."""
    communicator = made(libraries)
    communicator.all_reduce(torch.ones(1))
    return communicator


def made(libraries: Libraries) -> Communicator:
    """A communicator of all ranks; links are made by the first operation."""
    root = shared(libraries.root_info() if RANK == 0 else None)
    return Communicator(libraries, root, SIZE, RANK)


def outcome(run: Callable[[], Any]) -> dict[str, Any]:
    """What became of it: where it failed, with which code and text, and after how long."""
    before_s = time.monotonic()
    try:
        run()
    except (HcclError, StreamError) as error:
        where = "call" if isinstance(error, HcclError) else "stream"
        duration_s = time.monotonic() - before_s
        return {"where": where, "code": error.code, "text": error.text, "duration_s": duration_s}
    return {"where": "nowhere", "code": 0, "text": ""}


def late(libraries: Libraries) -> Any:
    """The last rank does not take part in an operation."""
    communicator = connected(libraries)
    result = None
    if RANK != SIZE - 1:
        result = outcome(lambda: communicator.all_reduce(torch.ones(ONES)))
        result["async_error"] = communicator.async_error()
    dist.barrier()
    return result


def dead(libraries: Libraries) -> Any:
    """The last rank is killed while the others wait for it."""
    communicator = connected(libraries)
    dist.barrier()
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    result = outcome(lambda: communicator.all_reduce(torch.ones(ONES)))
    result["async_error"] = communicator.async_error()
    result["async_text"] = libraries.acl.aclGetRecentErrMsg().decode()
    return result


def absent(libraries: Libraries) -> Any:
    """The last rank does not come to make the communicator."""
    root = shared(libraries.root_info() if RANK == 0 else None)
    result = None
    if RANK != SIZE - 1:
        result = outcome(lambda: Communicator(libraries, root, SIZE, RANK))
    dist.barrier()
    return result


def unlinked(libraries: Libraries) -> Any:
    """The last rank makes the communicator, and calls no operation."""
    communicator = made(libraries)
    result = None
    if RANK != SIZE - 1:
        result = outcome(lambda: communicator.all_reduce(torch.ones(ONES)))
    dist.barrier()
    return result


def destroyed(libraries: Libraries) -> Any:
    """A thread destroys the communicator in which rank 0 waits."""
    communicator = connected(libraries)
    result = None
    if RANK == 0:
        threading.Timer(HEAD_START_S, communicator.destroy).start()
        result = outcome(lambda: communicator.all_reduce(torch.ones(ONES)))
    dist.barrier()
    return result


def stopped(libraries: Libraries) -> Any:
    """The device is stopped under an operation; the communicator goes on once it is resumed."""
    communicator = connected(libraries)
    first = None
    if RANK == 0:
        threading.Timer(HEAD_START_S, libraries.abort_device).start()
        first = outcome(lambda: communicator.all_reduce(torch.ones(ONES)))
    else:
        libraries.abort_device()
    suspended = outcome(lambda: communicator.all_reduce(torch.ones(ONES)))
    dist.barrier()
    communicator.resume()
    total = communicator.all_reduce(torch.full((ONES,), float(RANK + 1)))
    return {"first": first, "suspended": suspended, "total": total.unique().tolist()}


def struck(libraries: Libraries) -> Any:
    """The fault of the second argument strikes the last rank, which is the last to begin."""
    communicator = connected(libraries)
    if RANK == SIZE - 1:
        time.sleep(HEAD_START_S)
        libraries.arm(sys.argv[2])
    total = torch.zeros(ONES)

    def run() -> None:
        total.copy_(communicator.all_reduce(torch.full((ONES,), float(RANK + 1))))

    result = outcome(run)
    result["total"] = total.unique().tolist()
    result["async_error"] = communicator.async_error()
    dist.barrier()
    return result


def main() -> None:
    """Run one."""
    join("gloo")
    say(globals()[sys.argv[1]](Libraries(RANK % 8)))


if __name__ == "__main__":
    main()
