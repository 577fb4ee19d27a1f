"""Which concurrency limits are named, and how to remove them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound

from perdure.tasks.limits import limits_of
from perdure.training.journal.history import RunHistory
from perdure.training.reporting.action_items import NeedKind, attention


class Pools:
    """The pools and queues of a server, and their limits."""

    def __init__(self, *, pool: int | None = None, queue: int | None = None) -> None:
        self.pool, self.queue = pool, queue

    def read_work_pool(self, name: str) -> Any:
        if name == "gone":
            raise ObjectNotFound(Exception())
        return SimpleNamespace(concurrency_limit=self.pool)

    def read_work_queue_by_name(self, name: str, work_pool_name: str) -> Any:
        return SimpleNamespace(concurrency_limit=self.queue)


def server_with(**limits: int) -> Any:
    return Pools(**limits)


def deployment(limit: int | None = None, pool: str | None = "perdure") -> Any:
    held = SimpleNamespace(limit=limit, name="deployment:1") if limit is not None else None
    return SimpleNamespace(
        name="local", global_concurrency_limit=held, work_pool_name=pool, work_queue_name="default"
    )


@pytest.mark.parametrize(
    ("server", "limit", "named", "removed_by"),
    [
        (server_with(), 1, "deployment 'local' of pretrain", "prefect gcl delete deployment:1"),
        (server_with(pool=1), None, "work pool 'perdure'", "clear-concurrency-limit perdure"),
        (server_with(queue=2), None, "work queue 'default'", "clear-concurrency-limit default"),
        (server_with(pool=0), None, "work pool 'perdure' has a concurrency limit of 0", "perdure"),
    ],
)
def test_a_limit_is_named_with_what_removes_it(server, limit, named, removed_by):
    (line,) = limits_of(server, [deployment(limit), deployment(limit)])
    assert line.startswith(named)
    assert removed_by in line


def test_without_limits_nothing_is_named():
    assert limits_of(server_with(), [deployment(), deployment(pool=None)]) == []
    assert limits_of(server_with(pool=1), [deployment(pool="gone")]) == []


def test_a_limit_needs_a_person_as_long_as_the_run_lasts():
    lines = limits_of(server_with(pool=1), [deployment(3)])
    items = attention("run", RunHistory(), spares=None, limits=lines)
    assert [need.kind for need in items.needs] == [NeedKind.LIMIT] * 2
    assert "The training goes on" in items.body
    assert "prefect gcl delete deployment:1" in items.body
    assert attention("run", RunHistory(), spares=None).needs == ()
