"""The demonstration: the main job on the embedded default, with two real faults.

Four ranks on two nodes and a spare pretrain a small decoder on the standard library's sources.
One worker is killed, later a whole node; the run mends itself.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path

from storage.address import StorageSpec
from training.injection.outside import Kill, KillInjector, LocalRun, Victim
from training.job import Job
from training.specs.data import DataSpec
from training.specs.engine import LocalEngineSpec
from training.specs.model import BatchSpec, ModelSpec, OptimizerSpec
from training.specs.recovery import CheckpointSpec, RestartSpec

STEPS = 120
SAVE_EVERY_STEPS = 10
KILLS = (
    Kill(victim=Victim.RANK, index=1, step=34),
    Kill(victim=Victim.NODE, index=1, step=77),
)


def demo_job(home: Path) -> Job:
    """The demonstration's job; a run id of its own each time."""
    return Job(
        run_id=f"demo-{time.strftime('%m%d-%H%M%S')}",
        storage=StorageSpec(address=f"file://{home / 'store'}"),
        steps=STEPS,
        seed=7,
        data=DataSpec(sources=(sysconfig.get_path("stdlib") + "/*.py",), shard_size_bytes=1 << 20),
        model=ModelSpec(num_layers=4, hidden_size=128, num_heads=4, seq_len=128),
        batch=BatchSpec(global_batch_size=16, micro_batch_size=2),
        optimizer=OptimizerSpec(lr=2e-3, warmup_steps=10),
        checkpoint=CheckpointSpec(every_steps=SAVE_EVERY_STEPS),
        restart=RestartSpec(max_restarts=3, pod_retries=1),
        engine=LocalEngineSpec(nodes=2, slots_per_node=2, spares=1, grace_s=10),
    )


def demo_faults(home: Path, run_id: str) -> KillInjector:
    """The two faults of the demonstration."""
    return KillInjector(LocalRun(home, run_id), KILLS)
