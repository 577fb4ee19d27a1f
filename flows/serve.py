"""The pretrain flow without a work pool: `python -m perdure.flows.serve` starts flow runs.

With it come the automations and the minutely `keep-supervised`, which bring a supervisor back.

`pretrain.serve()` of Prefect does so too, but on SIGTERM it pauses the schedules and does not end
while a run trains (3.8.8). Here its supervisors end with it, the training goes on, and the next
process that serves takes the runs up.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL
from typing_extensions import override

from perdure.flows import automations
from perdure.flows.keep_supervised import keep_supervised
from perdure.flows.pretrain import pretrain
from perdure.storage.proxies import bypass_proxies
from perdure.tasks.relaunch import AUTO_RESUME

NAME = "served"
# Ticks that came due while nobody served are not made up for.
ONE_TICK = ConcurrencyLimitConfig(
    limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW, grace_period_seconds=60
)
HEARTBEAT_S = 30  # the shortest; the automation "heartbeat lost" relies on it


class LeavingRunner(Runner):
    """Ends on SIGTERM, and leaves its flow runs to the next one that serves them."""

    _serving: asyncio.Task[Any] | None = None

    @override
    async def start(self, run_once: bool = False, webserver: bool | None = None) -> None:
        self._serving = asyncio.current_task()
        await super().start(run_once, webserver)

    @override
    def handle_sigterm(self, *args: Any, **kwargs: Any) -> None:
        """Start nothing more, and have every supervisor release its run and end."""
        if self._serving is not None:
            self._serving.get_loop().call_soon_threadsafe(self._serving.cancel)
        for process in multiprocessing.active_children():
            process.terminate()


async def serve(name: str = NAME) -> None:
    """Serve `pretrain/NAME` until SIGTERM or Ctrl-C, with all that it relies on."""
    automations.ensure()
    # Schedules are not paused by the end of one process: another one may serve them.
    runner = LeavingRunner(name=name, pause_on_shutdown=False, heartbeat_seconds=HEARTBEAT_S)
    await runner.aadd_flow(pretrain, name=name, tags=["perdure", AUTO_RESUME])
    await runner.aadd_flow(
        keep_supervised, name=name, tags=["perdure"], cron="* * * * *", concurrency_limit=ONE_TICK
    )
    with suppress(asyncio.CancelledError):
        await runner.start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve under the name that is given."""
    argv = sys.argv[1:] if arguments is None else arguments
    bypass_proxies(os.environ, (PREFECT_API_URL.value() or "",))
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(*argv[:1]))


if __name__ == "__main__":
    main()
