#!/bin/bash
# Started once on every node, as the scripts of many training repositories are.
# Without pipefail, the exit code of a pipe is that of its last program: tee ends well whatever
# becomes of torchrun, and a crash would look like the end of the training.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
mkdir -p "$OUT"

torchrun --nnodes="$MA_NUM_HOSTS" --node_rank="$VC_TASK_INDEX" --nproc_per_node="$MA_NUM_GPUS" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    "$here/train.py" --data "$DATA" --out "$OUT" "$@" 2>&1 | tee -a "$OUT/train.log"
