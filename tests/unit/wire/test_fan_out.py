"""Calls to all agents at once: as many as this process may have files for."""

from __future__ import annotations

import resource

import pytest

from perdure.training.wire.transport import OTHER_FILES, FanOut


@pytest.mark.parametrize(
    ("limit", "raised", "num_open"),
    [
        ((256, 4096), 1000 + OTHER_FILES, 1000),
        ((256, 800), 800, 800 - OTHER_FILES),
        ((800, 800), None, 800 - OTHER_FILES),
        ((1024, -1), 1000 + OTHER_FILES, 1000),
        ((-1, -1), None, 1000),
        ((20_000, 20_000), None, 1000),
    ],
    ids=["may be raised", "a little", "not at all", "without end", "none", "is enough"],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_must_and_may(
    limit, raised, num_open, monkeypatch
):
    became = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limit)
    monkeypatch.setattr(resource, "setrlimit", lambda _which, new: became.append(new[0]))
    assert FanOut(max_open=1000)._max_open == num_open
    assert became == ([raised] if raised is not None else [])
