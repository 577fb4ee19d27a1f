"""The reference job on emulated NPUs has the loss curve of the CPU, every digit."""

from __future__ import annotations

import pytest

from perdure.training.config.model import ParallelKind
from perdure.training.drill.evaluation import differences, list_recoveries
from perdure.training.journal.events import ProgramNotice
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


@pytest.mark.long
def test_one_rank_that_drives_two_devices_goes_on_from_its_checkpoint_after_a_kill(home):
    recipe = {"recipe": "tests.recipes.data_parallel:main", "cwd": str(runs.ROOT)}
    changes = {
        "engine": {"nodes": 1, "slots_per_node": 1, "spares": 0},
        "worker": recipe,
        "checkpoint": {"every_steps": 4},
    }
    alone = runs.run(home, "one-rank", changes=changes)
    assert alone.ended == "completed", runs.summary(alone)
    kill = {"faults": [{"kind": "kill", "rank": 0, "step": 7}]}
    killed = runs.run(home, "one-rank-killed", changes={**changes, "drill": kill})
    assert killed.ended == "completed", runs.summary(killed)
    assert [view.from_step for view in killed.history.attempts] == [0, 4]
    assert differences(killed.curve, alone.curve) == []
    for outcome in (alone, killed):
        notices = [
            event.text
            for event in outcome.history.attempts[0].events
            if isinstance(event, ProgramNotice)
        ]
        assert notices
        assert "DistributedDataParallel" in notices[0]
