"""Waits of a run: for its store, room, the platform, a person. Times are epoch seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import Field

from perdure.storage.frozen_model import FrozenModel


class WaitKind(StrEnum):
    """What a run waits for."""

    STORE = "store"
    NODE = "node"
    PLATFORM = "platform"
    AGENTS = "agents"
    RESUME = "resume"
    SERVER = "server"
    LOCK = "lock"


_WORDS = {
    WaitKind.STORE: "waiting for the store",
    WaitKind.NODE: "waiting for a free node",
    WaitKind.PLATFORM: "waiting for the platform, which refuses or does not answer,",
    WaitKind.AGENTS: "waiting for an answer of any agent",
    WaitKind.RESUME: "paused",
    WaitKind.SERVER: "waiting for the Prefect server",
    WaitKind.LOCK: "waiting for the supervisor before it",
}


class Wait(FrozenModel):
    """A wait under way."""

    kind: WaitKind = Field(description="what the run waits for")
    since_s: float = Field(description="time at which the wait began")
    why: str = Field(description="the last answer: an error of the store, the lack of a node")

    @property
    def text(self) -> str:
        """For people, on one line."""
        since = f"{datetime.fromtimestamp(self.since_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
        why = " ".join(self.why.split())
        return f"{_WORDS[self.kind]} since {since}: {why}"
