"""Compares reductions of HCCL with those of gloo, bit by bit, over many sizes."""

from __future__ import annotations

import random
from ctypes import c_uint64

import torch
import torch.distributed as dist

from tests.ascend.hccl_ranks.library import REDUCTIONS, TYPES, Communicator, Libraries
from tests.ascend.hccl_ranks.meeting import RANK, SIZE, join, say, shared

OF_GLOO = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "maximum": dist.ReduceOp.MAX,
    "minimum": dist.ReduceOp.MIN,
}
# At 1 MiB for each of two segments a rank gloo begins to cut finer.
LARGE = (262_144 * 2 * SIZE + 1, 262_144 * 2 * SIZE + 100_003)


def data(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of very different size, so that each order of a sum rounds in its own way."""
    values = torch.randn(count) * torch.randn(count).exp()
    return values.to(dtype) if dtype.is_floating_point else (values * 10).to(dtype)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Comparison:
    """Both libraries side by side, and what differed."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.num_compared = 0
        self.different: list[str] = []

    def note(self, what: str, expected: torch.Tensor, got: torch.Tensor) -> None:
        """Record a comparison."""
        self.num_compared += 1
        if not is_same(expected, got):
            self.different.append(what)

    def all_reduce(self, count: int, dtype: torch.dtype, reduction: str) -> None:
        """The same all-reduce by both."""
        given = data(count, dtype)
        expected = given.clone()
        dist.all_reduce(expected, op=OF_GLOO[reduction])
        got = self.communicator.all_reduce(given, reduction)
        self.note(f"all_reduce {reduction} of {count} {dtype}", expected, got)

    def reduce_scatter(self, count: int) -> None:
        """The same reduce-scatter by both."""
        given = data(count * SIZE, torch.float32)
        expected, got = torch.empty(count), torch.empty(count)
        dist.reduce_scatter_single(expected, given.clone())
        kind = TYPES[torch.float32]
        self.communicator.run(
            "HcclReduceScatter", given, got, c_uint64(count), kind, REDUCTIONS["sum"]
        )
        self.note(f"reduce_scatter of {count}", expected, got)

    def reduce(self, count: int, root: int) -> None:
        """The same reduce by both."""
        given = data(count, torch.float32)
        expected, got = given.clone(), torch.empty(count)
        dist.reduce(expected, dst=root)
        kind = TYPES[torch.float32]
        self.communicator.run(
            "HcclReduce", given, got, c_uint64(count), kind, REDUCTIONS["sum"], root
        )
        if root == RANK:
            self.note(f"reduce of {count}", expected, got)


def main() -> None:
    """Compare."""
    join("gloo")
    libraries = Libraries(0)
    root = shared(libraries.root_info() if RANK == 0 else None)
    comparison = Comparison(Communicator(libraries, root, SIZE, RANK))
    torch.manual_seed(RANK)
    chosen = random.Random(SIZE)  # noqa: S311 sizes, no secrets
    sizes = [*range(1, 20), *(chosen.randrange(20, 300_000) for _ in range(30)), *LARGE]
    for count in sizes:
        comparison.all_reduce(count, torch.float32, "sum")
    for count in chosen.sample(sizes[:-2], 12):
        comparison.reduce_scatter(count)
        comparison.reduce(count, root=count % SIZE)
        for reduction in OF_GLOO:
            comparison.all_reduce(count, torch.float32, reduction)
        for dtype in (torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8):
            comparison.all_reduce(count, dtype, "sum")
            comparison.all_reduce(count, dtype, "maximum")
    say({"num_compared": comparison.num_compared, "different": comparison.different})


if __name__ == "__main__":
    main()
