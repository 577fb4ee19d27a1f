"""`perdure notify`: where the server sends a message when somebody has to act."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure import server


def notify(
    block: Annotated[
        str, typer.Argument(metavar="TYPE/NAME", help="a notification block of the Prefect server")
    ],
) -> None:
    """Have the server send a message when a run has failed or needs you.

    Creates two automations, or changes where they send to.
    """
    server.use_server()
    from perdure.flows.notifications import ensure  # noqa: PLC0415 imports Prefect

    print(ensure(block)["automations"])
