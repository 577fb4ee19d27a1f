"""What training and recovery cost in calls of HCCL; times of an emulator mean nothing.

docs/ascend.md has the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from perdure.training.drill.evaluation import list_recoveries
from perdure.training.recovery.rungs import Rung
from tests.ascend import hccl_ranks
from tests.ascend.product import runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SLOTS = 4  # of each node
FEW, MANY = 8, 16  # steps; a step is worth half of the difference
BY_THE_CLOCK = "HcclGetCommAsyncError"  # the watchdog's
# Questions to the library that no other rank takes part in.
LOCAL = ("HcclSetConfig", "HcclGetCommConfigCapability")
# Of each rank: one communicator is made, connected by an all-reduce, and the former one let go of;
# the broadcast and the all-reduce of the step come again; and the ranks agree once more on the plan
# of a save, as before the first one (all-reduce, gather and scatter of objects).
RECOVERY = {
    "HcclCommInitRootInfoConfig": 1,
    "HcclCommDestroy": 1,
    "HcclAllReduce": 3,
    "HcclAllGather": 4,
    "HcclBroadcast": 4,
    "HcclScatter": 2,
}


def per_rank(folder: Path) -> list[Counter[str]]:
    """The calls of each process that called HCCL at all, the one that names the root first."""
    counts = [Counter(hccl_ranks.read_counts(path)) for path in folder.glob("hccl-*.counts")]
    for one in counts:
        one.pop(BY_THE_CLOCK, None)
    return sorted(filter(None, counts), key=lambda one: -one["HcclGetRootInfo"])


def calls_of_job(
    home: Path, monkeypatch, num_ranks: int, *, steps: int, fault: runs.DeviceFault | None = None
) -> list[Counter[str]]:
    """The calls of each rank of a run without checkpoints."""
    name = f"counts-{num_ranks}-{steps}-{'fault' if fault else 'none'}"
    folder = home / name
    folder.mkdir()
    monkeypatch.setenv("ASCEND_EMULATOR_DEVICES", str(num_ranks))
    monkeypatch.setenv("ASCEND_EMULATOR_COUNTS", str(folder))
    outcome = runs.run(
        home / f"of-{num_ranks}",
        name,
        steps=steps,
        fault=fault,
        changes={
            "engine": {"nodes": num_ranks // SLOTS, "slots_per_node": SLOTS, "spares": 0},
            "checkpoint": {"every_steps": 1000},
        },
    )
    told = runs.summary(outcome)
    assert fault is None or (home / f"of-{num_ranks}" / f"{name}.fired").exists()
    assert outcome.ended == "completed", told
    rungs = [one.rung for one in list_recoveries(outcome.history)]
    assert rungs == ([] if fault is None else [Rung.STEP_RETRY]), told
    counts = per_rank(folder)
    assert len(counts) == num_ranks
    return counts


def calls_of_plain_program(home: Path, num_ranks: int, *, steps: int) -> list[Counter[str]]:
    """The calls of each rank of the same model under DDP alone."""
    folder = home / f"plain-{num_ranks}-{steps}"
    devices = {"ASCEND_EMULATOR_DEVICES": str(num_ranks)}
    hccl_ranks.results(
        hccl_ranks.run("plain", str(steps), size=num_ranks, folder=folder, variables=devices)
    )
    return per_rank(folder)


def without_local(calls: Mapping[str, int]) -> dict[str, int]:
    """Those in which other ranks take part."""
    return {name: count for name, count in calls.items() if name not in LOCAL}


def each_step(few: list[Counter[str]], many: list[Counter[str]]) -> Mapping[str, float]:
    """Calls of a rank in a step; the same on every rank."""
    first, *others = (
        {name: (more[name] - less[name]) / (MANY - FEW) for name in more}
        for less, more in zip(few, many, strict=True)
    )
    found = {name: count for name, count in first.items() if count}
    assert all({n: c for n, c in one.items() if c} == found for one in others)
    return found


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_a_step_has_the_calls_that_it_has_without_perdure(home, monkeypatch, num_ranks):
    plain = each_step(
        *(calls_of_plain_program(home, num_ranks, steps=steps) for steps in (FEW, MANY))
    )
    ours = each_step(
        *(calls_of_job(home, monkeypatch, num_ranks, steps=steps) for steps in (FEW, MANY))
    )
    print(f"{num_ranks} ranks, calls of a rank in a step: {ours}, of DDP alone: {plain}")
    assert ours == plain
    assert sum(plain.values()) > 0


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_a_recovery_costs_each_rank_the_same_calls_however_many_there_are(
    home, monkeypatch, num_ranks
):
    whole = calls_of_job(home, monkeypatch, num_ranks, steps=12)
    # A rank that was still applying the step before would be given a state, by calls of its own;
    # one that was still computing would not have called the step's all-reduce.
    fault = runs.DeviceFault("link", wait_s=num_ranks)
    broken = calls_of_job(home, monkeypatch, num_ranks, steps=12, fault=fault)
    first, *others = (more - less for less, more in zip(whole, broken, strict=True))
    print(f"{num_ranks} ranks, calls of a rank in a recovery: {dict(first)}")
    assert first.pop("HcclGetRootInfo") == 1, "the first rank alone names the root"
    # The rank that is struck hears of it before it begins to reduce its gradients, or behind that.
    struck = [one for one in others if one != first]
    missing = [without_local(first - one) for one in struck]
    assert missing in ([], [{"HcclAllReduce": 1}])
    assert not any(one - first for one in struck)
    assert without_local(first) == RECOVERY
