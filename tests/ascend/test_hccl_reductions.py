"""Sums over emulated NPUs have the bits of gloo's, so that a curve on them is that of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ascend import hccl_ranks


def long(size: int) -> Any:
    return pytest.param(size, marks=pytest.mark.long)


@pytest.mark.parametrize("size", [long(2), 3, long(4), long(8)])
def test_reductions_have_the_bits_of_gloo_whatever_their_size(tmp_path, size):
    results = hccl_ranks.results(hccl_ranks.run("reductions", size=size, folder=tmp_path))
    for rank, result in enumerate(results):
        assert result["different"] == [], f"rank {rank}"
        assert result["num_compared"] > 200


@pytest.mark.parametrize("size", [long(2), 4, long(8)])
def test_collectives_of_torch_give_on_npus_what_gloo_gives_on_the_host(tmp_path, size):
    results = hccl_ranks.results(hccl_ranks.run("collectives", size=size, folder=tmp_path))
    for rank, result in enumerate(results):
        assert result["different"] == [], f"rank {rank}"
        assert result["num_compared"] > 20
