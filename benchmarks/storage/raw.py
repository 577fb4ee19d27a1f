"""The best that can be had without any format: copies in memory, parts and ranges by boto3.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from benchmarks.storage.measuring import (
    BUCKET,
    Action,
    Contender,
    MemoryBody,
    Setting,
    s3_client,
)
from benchmarks.storage.state import check, clear, size_of

KEY = "raw"


@dataclass(slots=True)
class Buffer:
    """One piece of memory that is kept, and where each tensor lies in it."""

    setting: Setting
    memory: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.memory = torch.zeros(size_of(self.setting.state), dtype=torch.uint8)

    def places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every tensor as bytes, and its place in the buffer."""
        at = 0
        for tensor in self.setting.state.values():
            flat = tensor.view(-1).view(torch.uint8)
            yield flat, self.memory[at : at + flat.numel()]
            at += flat.numel()

    def fill(self) -> None:
        """Copy every tensor in."""
        for tensor, place in self.places():
            place.copy_(tensor)

    def empty(self) -> None:
        """Copy every tensor out."""
        for tensor, place in self.places():
            tensor.copy_(place)


def copy_in(*, by_torch: bool) -> Contender:
    """Copies of the state into a kept buffer: torch's, on all cores, or the C library's."""
    return _copying(by_torch=by_torch, out=False)


def copy_out(*, by_torch: bool) -> Contender:
    """Likewise from the buffer to the tensors."""
    return _copying(by_torch=by_torch, out=True)


def hashing(update: Callable[[], Callable[[memoryview], object]]) -> Contender:
    """The hash of every tensor's bytes, one after the other.

    Args:
        update: begins a hash; gives what takes the next bytes in.
    """

    @contextmanager
    def contender(setting: Setting) -> Iterator[Action]:
        views = [place.numpy().data for _, place in Buffer(setting).places()]

        def run() -> float:
            began_s = time.perf_counter()
            take = update()
            for view in views:
                take(view)
            return time.perf_counter() - began_s

        yield Action(run)

    return contender


def _copying(*, by_torch: bool, out: bool) -> Contender:
    @contextmanager
    def contender(setting: Setting) -> Iterator[Action]:
        buffer = Buffer(setting)
        buffer.fill()

        def run() -> float:
            began_s = time.perf_counter()
            for tensor, place in buffer.places():
                source, target = (place, tensor) if out else (tensor, place)
                if by_torch:
                    target.copy_(source)
                else:
                    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
            return time.perf_counter() - began_s

        yield Action(run)

    return contender


def put(*, part_size_bytes: int, num_threads: int) -> Contender:
    """A multipart upload of the buffer, each part sent from its memory."""

    @contextmanager
    def contender(setting: Setting) -> Iterator[Action]:
        buffer = Buffer(setting)
        buffer.fill()
        client = s3_client(setting, num_threads=num_threads)
        transfer = Transfer(client, buffer.memory.numpy().data, part_size_bytes, num_threads)
        yield Action(lambda: _timed(transfer.put), before=transfer.delete)
        transfer.delete()

    return contender


def get(*, part_size_bytes: int, num_threads: int, is_hashed: bool = False) -> Contender:
    """Ranges of one object, each read straight into memory that was there before.

    Args:
        part_size_bytes: of a range.
        num_threads: ranges at a time.
        is_hashed: each range is also hashed, by the thread that read it: what any check costs.
    """

    @contextmanager
    def contender(setting: Setting) -> Iterator[Action]:
        buffer = Buffer(setting)
        buffer.fill()
        client = s3_client(setting, num_threads=num_threads)
        view = buffer.memory.numpy().data
        transfer = Transfer(client, view, part_size_bytes, num_threads, is_hashed)
        transfer.put()

        def clear_buffer() -> None:
            buffer.memory.zero_()

        def compare() -> None:
            clear(setting.state)
            buffer.empty()
            check(setting.state)

        yield Action(
            lambda: _timed(transfer.get),
            before=clear_buffer,
            after=compare,
        )
        transfer.delete()

    return contender


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of memory, and the object that it is sent to and fetched from."""

    client: Any
    view: memoryview
    part_size_bytes: int
    num_threads: int
    is_hashed: bool = False

    def put(self) -> None:
        """Send all of it."""
        at = {"Bucket": BUCKET, "Key": KEY}
        upload_id = self.client.create_multipart_upload(**at)["UploadId"]

        def send(start: int) -> dict[str, Any]:
            number = start // self.part_size_bytes + 1
            body = MemoryBody(self.view[start : start + self.part_size_bytes])
            answer = self.client.upload_part(**at, UploadId=upload_id, PartNumber=number, Body=body)
            return {"ETag": answer["ETag"], "PartNumber": number}

        parts = {"Parts": self._each(send)}
        self.client.complete_multipart_upload(**at, UploadId=upload_id, MultipartUpload=parts)

    def get(self) -> None:
        """Fetch all of it."""

        def fetch(start: int) -> None:
            out = self.view[start : start + self.part_size_bytes]
            wanted = f"bytes={start}-{start + out.nbytes - 1}"
            answer = self.client.get_object(Bucket=BUCKET, Key=KEY, Range=wanted)
            # The response below urllib3's: its own readinto would copy once more.
            stream = answer["Body"]._raw_stream._fp  # noqa: SLF001
            filled = 0
            while filled < out.nbytes:
                filled += stream.readinto(out[filled:])
            answer["Body"].close()
            if self.is_hashed:
                xxhash.xxh3_128(out).digest()

        self._each(fetch)

    def delete(self) -> None:
        """Remove the object."""
        self.client.delete_object(Bucket=BUCKET, Key=KEY)

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        starts = range(0, self.view.nbytes, self.part_size_bytes)
        with ThreadPoolExecutor(self.num_threads) as pool:
            return list(pool.map(work, starts))


def _timed(action: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s
