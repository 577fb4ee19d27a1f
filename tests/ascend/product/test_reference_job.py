"""The reference job on emulated NPUs has the loss curve of the CPU, every digit."""

from __future__ import annotations

import pytest

from perdure.training.config.model import ParallelKind
from perdure.training.drill.evaluation import differences
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
