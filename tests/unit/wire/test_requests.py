"""What a user requests of a run, as the coordinator reads it."""

from __future__ import annotations

import json

import pytest

from perdure.storage.errors import Corrupt
from perdure.storage.local import LocalStore
from perdure.training.wire.requests import (
    Control,
    clear_requests,
    control_key,
    is_cancel_wanted,
    read_control,
    request_cancel,
    write_control,
)


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_run_without_a_request_is_not_to_pause(store):
    assert read_control(store, "run") == Control(pause=False, at_s=0.0)


def test_of_two_requests_the_later_one_counts(store):
    write_control(store, "run", pause=True, clock=lambda: 5.0)
    assert read_control(store, "run") == Control(pause=True, at_s=5.0)
    write_control(store, "run", pause=False, clock=lambda: 6.0)
    assert read_control(store, "run") == Control(pause=False, at_s=6.0)


def test_a_request_is_an_object_of_its_run_alone_and_plain_json(store):
    write_control(store, "run", pause=True, clock=lambda: 5.0)
    assert json.loads(store.get("runs/run/control.json")) == {
        "pause": True, "cancel": False, "at_s": 5.0,
    }  # fmt: skip
    assert not read_control(store, "run-2").pause


def test_a_request_to_cancel_is_seen_until_the_run_has_ended(store):
    assert not is_cancel_wanted(store, "run")
    request_cancel(store, "run")
    assert is_cancel_wanted(store, "run")
    clear_requests(store, "run")
    assert not is_cancel_wanted(store, "run")


@pytest.mark.parametrize("text", ["", "{", '{"pause": "often"}', '{"stop": true}'])
def test_an_object_that_is_no_request_is_reported_as_corrupt(store, text):
    store.put(control_key("run"), text.encode())
    with pytest.raises(Corrupt, match=r"runs/run/control\.json"):
        read_control(store, "run")


def test_a_request_can_be_withdrawn_even_where_it_cannot_be_read(store):
    store.put(control_key("run"), b"{")
    clear_requests(store, "run")
    assert not read_control(store, "run").pause


def test_withdrawing_where_there_is_no_request_writes_nothing(store):
    clear_requests(store, "run")
    assert list(store.list("runs/")) == []
    write_control(store, "run", pause=False, clock=lambda: 5.0)
    clear_requests(store, "run")
    assert read_control(store, "run").at_s == 5.0
