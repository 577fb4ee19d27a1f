"""What the agent puts into the store again and again while an attempt runs. Times are seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from perdure.storage.errors import StorageError
from perdure.storage.objects import ObjectStore

_log = logging.getLogger("perdure.agent")


def keep_storing(
    put: Callable[[ObjectStore], None],
    open_store: Callable[[], ObjectStore],
    *,
    what: str,
    every_s: float,
    is_over: threading.Event,
) -> None:
    """Begin, in a thread of its own: a store that is away keeps nothing else waiting.

    Args:
        put: puts what the store does not have; what fails is tried again the next time.
        open_store: the run's store.
        what: subject and verb of a warning.
        every_s: how often.
        is_over: ends it.
    """

    def keep_on() -> None:
        while not is_over.wait(every_s):
            try:
                put(open_store())
            except (StorageError, OSError) as error:  # the node's own disk may be away, too
                _log.warning(f"{what} put into the store later: {error}")

    threading.Thread(target=keep_on, daemon=True).start()
