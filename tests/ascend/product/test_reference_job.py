"""The reference job on emulated NPUs has the loss curve of the CPU, every digit."""

from __future__ import annotations

import pytest

from perdure.training.config.model import ParallelKind
from perdure.training.drill.evaluation import differences, list_recoveries
from tests.ascend.product import runs


def test_four_ranks_on_two_nodes_have_the_loss_curve_of_the_cpu(home, undisturbed):
    on_cpu = runs.run(home, "cpu", env=runs.ON_THE_CPU)
    assert undisturbed.ended == "completed", runs.summary(undisturbed)
    assert len(on_cpu.curve) == runs.STEPS
    assert differences(undisturbed.curve, on_cpu.curve) == []
    assert undisturbed.leftovers == ()


@pytest.mark.long
@pytest.mark.parametrize("kind", [ParallelKind.HSDP, ParallelKind.FSDP2])
def test_sharded_models_have_the_loss_curve_of_the_cpu(home, kind):
    sharded = runs.run(home, f"npu-{kind}", kind=kind)
    on_cpu = runs.run(home, f"cpu-{kind}", kind=kind, env=runs.ON_THE_CPU)
    assert sharded.ended == "completed", runs.summary(sharded)
    assert differences(sharded.curve, on_cpu.curve) == []


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_on_an_npu_as_on_the_cpu(home, precision):
    changes = {"precision": precision}
    on_npu = runs.run(home, f"npu-{precision}", top=changes)
    on_cpu = runs.run(home, f"cpu-{precision}", top=changes, env=runs.ON_THE_CPU)
    assert on_npu.ended == "completed", runs.summary(on_npu)
    assert list(on_npu.curve) == list(range(1, runs.STEPS + 1))
    assert on_npu.curve[runs.STEPS] < on_npu.curve[1]
    assert differences(on_npu.curve, on_cpu.curve) == []
    assert list_recoveries(on_npu.history) == []
