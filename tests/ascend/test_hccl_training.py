"""Data-parallel training over HCCL has, bit by bit, the curve of the CPU over gloo."""

from __future__ import annotations

import pytest

from tests.ascend import hccl_ranks


@pytest.mark.parametrize(
    ("parallelism", "size"),
    [
        ("ddp", 2),
        pytest.param("ddp", 4, marks=pytest.mark.long),
        pytest.param("fsdp2", 2, marks=pytest.mark.long),
        pytest.param("fsdp2", 4, marks=pytest.mark.long),
        pytest.param("hsdp", 4, marks=pytest.mark.long),
        pytest.param("hsdp", 8, marks=pytest.mark.long),
    ],
)
def test_losses_and_parameters_are_those_of_the_cpu(tmp_path, parallelism, size):
    trained = {
        kind: hccl_ranks.results(
            hccl_ranks.run("training", kind, parallelism, size=size, folder=tmp_path / kind)
        )
        for kind in ("cpu", "npu")
    }
    assert trained["npu"] == trained["cpu"]
    losses = trained["npu"][0]["losses"]
    assert len(set(losses)) == len(losses)


def test_each_rank_calls_hccl_equally_often(tmp_path):
    ended = hccl_ranks.run("training", "npu", "ddp", size=2, folder=tmp_path)
    hccl_ranks.results(ended)
    first, second = (dict(one.counts) for one in ended)
    assert first.pop("HcclGetRootInfo") == 1
    assert "HcclGetRootInfo" not in second
    for counts in (first, second):
        counts.pop("HcclGetCommAsyncError", None)  # the watchdog's, by the clock
    assert first == second
    assert first["HcclCommInitRootInfoConfig"] == first["HcclCommDestroy"] == 1
    assert first["HcclAllReduce"] >= 8
