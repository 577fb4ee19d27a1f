"""Compares collectives of torch.distributed on NPUs with those on the host over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.ascend.hccl_ranks.meeting import RANK, SIZE, join, say

Arguments = Sequence[Any]  # tensors and lists of tensors
NEXT, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE
NPU = "npu"


def ints(low: int, high: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random whole numbers."""
    return torch.randint(low, high, (count,), dtype=dtype)


def zeros(count: int) -> list[Tensor]:
    """A tensor per rank."""
    return [torch.zeros(count) for _ in range(SIZE)]


def average(tensor: Tensor) -> None:
    """The mean; gloo's, too, would do, but divides in another place."""
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)


def transfer(sent: Tensor, received: Tensor) -> None:
    """From each even rank to the next one."""
    if RANK % 2 == 0 and RANK + 1 < SIZE:
        dist.send(sent, RANK + 1)
    elif RANK % 2:
        dist.recv(received, RANK - 1)


def around(sent: Tensor, received: Tensor) -> None:
    """A batch of transfers in a ring."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, NEXT), dist.P2POp(dist.irecv, received, BEFORE)]
    )
    for work in works:
        work.wait()


def uneven(rank: int, peer: int) -> int:
    """How many numbers a rank sends to another."""
    return (rank + 2 * peer) % 3 + 1


def all_to_all_uneven(received: Tensor, sent: Tensor) -> None:
    """Another number of elements for each pair of ranks."""
    dist.all_to_all_single(
        received,
        sent,
        [uneven(peer, RANK) for peer in range(SIZE)],
        [uneven(RANK, peer) for peer in range(SIZE)],
    )


def all_to_all(received: list[Tensor], sent: list[Tensor]) -> None:
    """Lists; gloo has only the one with one tensor."""
    if sent[0].device.type == NPU:
        dist.all_to_all(received, sent)
        return
    whole = torch.cat(received)
    dist.all_to_all_single(whole, torch.cat(sent))
    for part, got in zip(received, whole.chunk(SIZE), strict=True):
        part.copy_(got)


def reduce(tensor: Tensor) -> None:
    """To rank 0; what the others have afterwards is undefined."""
    dist.reduce(tensor, dst=0)
    if RANK:
        tensor.zero_()


def all_gather_uneven(received: list[Tensor], own: Tensor) -> None:
    """Another length on each rank; gloo does not have it."""
    if own.device.type == NPU:
        dist.all_gather(received, own)
        return
    received[RANK].copy_(own)
    for rank, part in enumerate(received):
        dist.broadcast(part, src=rank)


Case = tuple[Callable[[], Arguments], Callable[..., Any]]
FLOATS = torch.randn


def reduction(operation: Any) -> Callable[[Tensor], Any]:
    """An all-reduce with it."""
    return lambda tensor: dist.all_reduce(tensor, op=operation)


def cases() -> dict[str, Case]:
    """What is compared: arguments, and what is done with them."""
    even = dist.new_group(list(range(0, SIZE, 2)))
    return {
        "all_reduce": (lambda: [FLOATS(100_003)], dist.all_reduce),
        "all_reduce bfloat16": (lambda: [FLOATS(1003).bfloat16()], dist.all_reduce),
        "all_reduce float16": (lambda: [FLOATS(1003).half()], dist.all_reduce),
        "all_reduce int64": (lambda: [ints(-1000, 1000, 1003)], dist.all_reduce),
        "all_reduce maximum": (lambda: [FLOATS(1003)], reduction(dist.ReduceOp.MAX)),
        "all_reduce minimum": (lambda: [FLOATS(1003)], reduction(dist.ReduceOp.MIN)),
        "all_reduce product": (lambda: [FLOATS(1003)], reduction(dist.ReduceOp.PRODUCT)),
        "all_reduce of a part": (
            lambda: [FLOATS(503)],
            lambda tensor: dist.all_reduce(tensor, group=even) if RANK % 2 == 0 else None,
        ),
        "broadcast": (lambda: [FLOATS(1003)], lambda tensor: dist.broadcast(tensor, src=SIZE - 1)),
        "reduce": (lambda: [FLOATS(1003)], reduce),
        "all_gather": (lambda: [zeros(103), FLOATS(103)], dist.all_gather),
        "all_gather uneven": (
            lambda: [[torch.zeros(100 + rank) for rank in range(SIZE)], FLOATS(100 + RANK)],
            all_gather_uneven,
        ),
        "all_gather into one": (
            lambda: [torch.zeros(103 * SIZE), FLOATS(103)],
            dist.all_gather_into_tensor,
        ),
        # Sums without rounding: gloo's is an all-reduce of the list, in an order of its own.
        "reduce_scatter": (
            lambda: [torch.zeros(103), [FLOATS(103).round() for _ in range(SIZE)]],
            dist.reduce_scatter,
        ),
        "reduce_scatter of one": (
            lambda: [torch.zeros(1003), FLOATS(1003 * SIZE)],
            dist.reduce_scatter_single,
        ),
        "all_to_all": (lambda: [zeros(7), [FLOATS(7) for _ in range(SIZE)]], all_to_all),
        "all_to_all of one": (
            lambda: [torch.zeros(SIZE * 11), FLOATS(SIZE * 11)],
            dist.all_to_all_single,
        ),
        "all_to_all uneven": (
            lambda: [
                torch.zeros(sum(uneven(peer, RANK) for peer in range(SIZE))),
                FLOATS(sum(uneven(RANK, peer) for peer in range(SIZE))),
            ],
            all_to_all_uneven,
        ),
        "scatter": (
            lambda: [torch.zeros(9), [FLOATS(9) for _ in range(SIZE)]],
            lambda got, given: dist.scatter(got, None if RANK else given, src=0),
        ),
        "gather": (
            lambda: [FLOATS(9), zeros(9)],
            lambda given, got: dist.gather(given, None if RANK else got, dst=0),
        ),
        "transfer": (lambda: [FLOATS(50), torch.zeros(50)], transfer),
        "batch of transfers": (lambda: [FLOATS(50), torch.zeros(50)], around),
        "barrier": (lambda: [torch.zeros(1)], lambda _tensor: dist.barrier()),
    }


def on_npu(argument: Any) -> Any:
    """The same on the device."""
    if isinstance(argument, list):
        return [one.to(NPU) for one in argument]
    return argument.to(NPU)


def flat(arguments: Arguments) -> list[Tensor]:
    """Lists taken apart, on the host."""
    parts = (one if isinstance(one, list) else [one] for one in arguments)
    return [tensor.cpu() for part in parts for tensor in part]


def is_equal(name: str, case: Case) -> bool:
    """Whether both leave the same bits in all arguments."""
    make, run = case
    torch.manual_seed(sum(name.encode()) * SIZE + RANK)
    host = make()
    device = [on_npu(argument) for argument in host]
    run(*host)
    run(*device)
    torch.accelerator.synchronize()
    pairs = zip(flat(host), flat(device), strict=True)
    return all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in pairs)


def main() -> None:
    """Compare."""
    torch.accelerator.set_device_index(RANK % torch.accelerator.device_count())
    join("cpu:gloo,npu:hccl")
    compared = cases()
    different = [name for name, case in compared.items() if not is_equal(name, case)]
    mean = torch.full((5,), float(RANK), device=NPU)
    average(mean)
    if mean.tolist() != [(SIZE - 1) / 2] * 5:
        different.append("mean")
    objects: list[Any] = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    if objects != [{"rank": rank} for rank in range(SIZE)]:
        different.append("objects")
    dist.destroy_process_group()
    say({"num_compared": len(compared) + 2, "different": different})


if __name__ == "__main__":
    main()
