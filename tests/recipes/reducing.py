"""A program for torchrun as people write them: gloo, its own checkpoint, output of rank 0."""

import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

folder, steps, pace_s = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
checkpoint = folder / "checkpoint.json"
dist.init_process_group("gloo")
rank = dist.get_rank()
step = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
beat = None
if "--beat" in sys.argv:
    from perdure.training.liveness.heartbeat import HeartbeatWriter, Phase

    writer = HeartbeatWriter(pathlib.Path(os.environ["PERDURE_HEARTBEAT"]))
    beat = lambda step: writer.beat(phase=Phase.STEP, step=step)  # noqa: E731
    beat(step)
print(f"rank {rank} goes on from step {step}", flush=True)
while step < steps:
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.sum() == 4 * dist.get_world_size()
    step += 1
    if beat is not None:
        beat(step)
    (folder / f"step-{rank}").write_text(str(step))
    if rank == 0:
        print(f"step {step}", flush=True)
        if step % 5 == 0:
            temporary = checkpoint.with_suffix(".tmp")
            temporary.write_text(json.dumps({"step": step}))
            temporary.replace(checkpoint)
    time.sleep(pace_s)
if beat is not None:
    writer.beat(phase=Phase.DONE)
dist.destroy_process_group()
