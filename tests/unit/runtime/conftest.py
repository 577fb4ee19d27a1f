"""Worlds of ranks, and clusters of nodes; no process of theirs outlives its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.runtime.worlds import Replay, World
from tests.unit.storage.nodes import Cluster


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """A world of ranks that run a program, with generation 1 announced once all are started."""
    worlds: list[World] = []

    def make(
        program: Callable[..., Any],
        replay: Replay | None,
        *,
        size: int,
        ranks: list[int] | None = None,
    ) -> World:
        world = World(size, replay)
        worlds.append(world)
        world.start(program, ranks=ranks)
        if ranks is None:
            world.announce(1)
        return world

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    """A cluster that has no nodes yet."""
    cluster = Cluster.at(tmp_path, keep_last=5)
    yield cluster
    cluster.close()
