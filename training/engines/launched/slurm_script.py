"""The batch script of a Slurm job that runs a job file on its nodes.

The script starts `perdure launch` once per node, and does what its exit code asks for: Slurm itself
knows no exit code that means "start me again". Slurm's own requeue waits 120 s; nothing is lost
meanwhile.
"""

from __future__ import annotations

import shlex

from perdure.training.config.job import Job
from perdure.training.engines.launched.ends import ENDS, LaunchEnd
from perdure.training.engines.launched.platforms import Platform

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={run_id}
#SBATCH --nodes={num_nodes}
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={run_id}-%j.out
{lines}
# {nodes} nodes train, the others are spares, which a run does without where Slurm has fewer.
# --no-kill lets the nodes go on when one is lost.
export PERDURE_HOME="${{PERDURE_HOME:-/tmp/perdure-$USER}}"  # of each node's own
secret="$HOME/.perdure/launch-secret-{run_id}"  # in a folder that all nodes have
if [ ! -s "$secret" ]; then
  mkdir -p "$HOME/.perdure"
  (umask 077; head -c 32 /dev/urandom | base64 > "$secret")
fi
end=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null)
rm -f "$secret.end"  # of an allocation that was cut off
srun --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --label \\
  {launch} --secret-file "$secret" --end-file "$secret.end" ${{end:+--deadline "$end"}}
read -r code nodes < "$secret.end" || code=1

patiently() {{  # slurmctld may be away for a while
  for _ in $(seq 90); do "$@" && return; sleep 10; done
  exit "$code"
}}
case "$code" in
  {again})
    patiently scontrol requeue "$SLURM_JOB_ID"
    exit ;;
  {elsewhere})
    trap '' TERM  # requeued, this script has half a minute left: only a waiting job takes a list
    patiently scontrol requeuehold "$SLURM_JOB_ID"
    for _ in 1 2 3; do  # not for long: a job that is left held never starts again
      timeout 4 scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$nodes" && break
      sleep 2
    done
    patiently scontrol release "$SLURM_JOB_ID"
    exit ;;
esac
exit "$code"
"""


def slurm_script(job: Job, launch: tuple[str, ...], options: tuple[str, ...] = ()) -> str:
    """Compose the batch script.

    Args:
        job: to be run.
        launch: words of the `perdure launch` command.
        options: further options of sbatch, one a line.
    """
    ends = ENDS[Platform.SLURM]
    return _SCRIPT.format(
        run_id=job.run_id,
        nodes=job.engine.nodes,
        num_nodes=_num_nodes(job.engine.nodes, job.engine.spares),
        lines="".join(f"#SBATCH {option}\n" for option in options),
        launch=shlex.join(launch),
        again=ends[LaunchEnd.START_AGAIN].code,
        elsewhere=ends[LaunchEnd.START_ELSEWHERE].code,
    )


def _num_nodes(nodes: int, spares: int) -> str:
    """The least and the most nodes: a node that is away must not keep the run from starting."""
    return f"{nodes}-{nodes + spares}" if spares else str(nodes)
