"""A rank of a MindSpore script: `python -m perdure.training.runtime.mindspore_worker`.

The process joins its run, forms MindSpore's cluster with the other ranks, and runs the script as
`python script.py` would. The first rank starts the cluster's scheduler, which needs no msrun: its
address goes to all ranks through the coordinator. Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path

from perdure.training.diagnosis.exits import EXIT_DONE, EXIT_RESTART_ME, EXIT_USER
from perdure.training.errors import InputError
from perdure.training.log import start_logging
from perdure.training.processes import free_port
from perdure.training.runtime.array_session import ArraySession, join_arrays
from perdure.training.runtime.errors import GivenUp, Interrupted, RecipeEndedEarly

_log = logging.getLogger("perdure.runtime")

# A scheduler stays inside init(), and never returns from it.
SCHEDULER = "from mindspore.communication import init; init()"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def form_cluster(session: ArraySession) -> subprocess.Popen[bytes] | None:
    """Set MindSpore's variables. Collective. Returns the scheduler, on the first rank."""
    context = session.context
    address = None
    if context.rank == 0:
        host = os.environ.get("MA_CURRENT_IP", "127.0.0.1")
        address = [host, str(free_port(host))]
    host, port = session.ranks.gather(address)[0]
    os.environ |= {
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": str(context.rank),
        "MS_WORKER_NUM": str(context.world_size),
        "MS_SCHED_HOST": host,
        "MS_SCHED_PORT": port,
        "RANK_ID": str(context.rank),
        "RANK_SIZE": str(context.world_size),
        "DEVICE_ID": str(context.local_rank),
    }
    os.environ.setdefault("MS_TOPO_TIMEOUT", "600")
    if context.rank != 0:
        return None
    # The agent ends it with the attempt's processes, should this one be killed.
    role = {"MS_ROLE": "MS_SCHED", "MS_NODE_ID": "scheduler"}
    return subprocess.Popen(
        [sys.executable, "-c", SCHEDULER], env={**os.environ, **role}, stdin=subprocess.DEVNULL
    )


def main() -> None:
    """Run worker.script to its end."""
    session = join_arrays()
    script = session.job.worker.script
    assert script is not None  # noqa: S101 else another program is started
    scheduler = form_cluster(session)
    path, *arguments = script
    sys.argv = [path, *arguments]
    sys.path[0] = str(Path(path).resolve().parent)
    try:
        runpy.run_path(str(Path(path).absolute()), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, EXIT_DONE):
            raise
    if session.ended_at < session.job.steps:
        raise RecipeEndedEarly(
            f"{path} returned before step {session.job.steps}: PerdureCallback of "
            "perdure.integrations.mindspore takes Model.train to that step; give it enough epochs"
        )
    session.leave()
    if scheduler is not None:
        scheduler.kill()  # without release() it would wait for half a minute
        scheduler.wait()


def run() -> None:
    """Run this rank as the whole of a process; ends it with the worker's exit code."""
    start_logging()
    sys.path.insert(0, "")
    try:
        main()
    except InputError as error:
        _log.error(str(error))
        sys.exit(EXIT_USER)
    except (GivenUp, Interrupted) as error:
        _log.info(f"this rank ends: {error}")
        sys.exit(EXIT_RESTART_ME)
    except Exception as error:
        _record(error)
        raise


def _record(error: Exception) -> None:
    """Leave the exception and its time for the node agent, as torch elastic's `record` does."""
    text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    text = text.removeprefix("builtins.")
    stack = "".join(traceback.format_exception(error))
    more = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    document = {"message": {"message": text, "extraInfo": more}}
    if ERROR_FILE in os.environ:
        Path(os.environ[ERROR_FILE]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    run()
