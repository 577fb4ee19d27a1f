"""A training script as people write them: one process, its own checkpoint, its own resume."""

import itertools
import json
import math
import os
import pathlib
import sys
import time

out = pathlib.Path(sys.argv[1])
max_iters = int(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
checkpoint = out / "ckpt.json"
text = "to be or not to be that is the question " * 50
letters = sorted(set(text))
table = [[0.0] * len(letters) for _ in letters]
iteration = 0
if checkpoint.exists():
    state = json.loads(checkpoint.read_text())
    table, iteration = state["table"], state["iteration"]
    print(f"resuming from iteration {iteration}")
print(
    f"start {os.environ['MA_SCHEDULE_CNT']}.{os.environ['MA_PROC_START_CNT']} "
    f"hosts {os.environ['MA_NUM_HOSTS']} rank {'RANK' in os.environ}",
    flush=True,
)
while iteration < max_iters:
    loss = 0.0
    for here, there in itertools.pairwise(text):
        row = table[letters.index(here)]
        high = max(row)
        weights = [math.exp(value - high) for value in row]
        total = sum(weights)
        target = letters.index(there)
        loss -= math.log(weights[target] / total)
        for index, weight in enumerate(weights):
            row[index] -= 0.05 * (weight / total - (index == target))
    iteration += 1
    with (out / "losses.jsonl").open("a") as log:
        log.write(json.dumps([iteration, loss / len(text)]) + "\n")
    if iteration % 5 == 0:
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_text(json.dumps({"table": table, "iteration": iteration}))
        temporary.replace(checkpoint)
    time.sleep(0.05)
print("done")
