"""Nodes find each other through the store, and one that may not join is told why."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.storage.address import open_store
from perdure.training.engines.launched.election import SPARES_WAIT_S, Gathering
from perdure.training.engines.launched.meeting import (
    Registrations,
    by_node,
    fingerprint,
    refusal_of,
    signed,
)
from perdure.training.engines.launched.messages import Claim, Registration
from perdure.training.engines.launched.secret import LaunchSecret
from perdure.training.errors import InputError
from tests.jobs import small_job

SECRET = LaunchSecret("of a test, 16 long", "run")


def registration(rank: int, **fields: Any) -> Registration:
    given = {
        "node": f"node-{rank}",
        "node_rank": rank,
        "instance": f"instance-{rank}",
        "started_s": 100.0 + rank,
        "host": "10.0.0.1",
        "port": 8000 + rank,
        "pid": 40 + rank,
        "version": "1.0",
        "job": "fingerprint",
    }
    return Registration.model_validate({**given, **fields})


@pytest.fixture
def registrations(tmp_path) -> Registrations:
    return Registrations(open_store(small_job(tmp_path).storage), "run", SECRET)


def test_a_registration_is_read_as_it_was_put(registrations):
    first, second = (signed(registration(rank), SECRET) for rank in (0, 1))
    registrations.put(second)
    registrations.put(first)
    registrations.put(first)
    assert registrations.read() == ([first, second], 0)
    registrations.delete(first)
    assert registrations.read() == ([second], 0)


@pytest.mark.parametrize(
    "forged",
    [
        registration(0),
        signed(registration(0), LaunchSecret("of somebody else, long", "run")),
        signed(registration(0), LaunchSecret("of a test, 16 long", "another run")),
        signed(registration(0), SECRET).model_copy(update={"port": 1}),
    ],
)
def test_a_registration_of_somebody_without_the_secret_is_none(registrations, forged):
    registrations.put(forged)
    assert registrations.read() == ([], 1)


def test_of_two_claims_one_wins(registrations):
    first, second = (Claim(instance=name, epoch=3, at_s=1.0) for name in ("a", "b"))
    assert registrations.claim(first)
    assert not registrations.claim(second)
    assert registrations.read_claim() == first
    registrations.withdraw_claim()
    assert registrations.read_claim() is None
    assert registrations.claim(second)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"node_rank": 1}, "--node-rank: node 1 is there already: process 41 on 10.0.0.1"),
        ({"node": "node-0"}, "--node-name: node-0 is there already, as node 0: process 40 on"),
        ({"version": "1.1"}, "version of Perdure: this node has 1.1, and node-0 has 1.0"),
        ({"job": "other"}, "job file: differs from that of node-0; all nodes need the same job"),
    ],
)
def test_the_later_of_two_that_exclude_each_other_is_told_why(own, expected):
    living = [registration(0), registration(1)]
    late = registration(2, **own)
    refusal = refusal_of(late, [*living, late])
    assert refusal is not None
    assert str(refusal).startswith(expected)
    assert "\n" not in str(refusal)
    assert [refusal_of(earlier, [*living, late]) for earlier in living] == [None, None]


def test_of_two_that_start_at_the_same_moment_one_stays():
    twins = [registration(0, instance=name, started_s=100.0) for name in ("a", "b")]
    assert [refusal_of(twin, twins) is None for twin in twins] == [True, False]


def test_a_node_that_is_started_again_takes_the_place_of_its_dead_registration():
    old, new = registration(1), registration(1, instance="new", started_s=200.0)
    assert refusal_of(new, [new]) is None
    assert by_node([new, old]) == {"node-1": new}


def test_another_seed_is_another_job():
    assert fingerprint(small_job()) == fingerprint(small_job())
    assert fingerprint(small_job()) != fingerprint(small_job(seed=5))


@pytest.mark.parametrize(
    ("num_living", "waited_s", "enough_s", "expected"),
    [
        (5, 0.0, 0.0, True),
        (4, 30.0, SPARES_WAIT_S / 2, False),
        (4, 30.0, SPARES_WAIT_S, True),
        (3, 599.0, 0.0, False),
    ],
)
def test_a_supervisor_waits_for_the_nodes_and_a_little_for_spares(
    num_living, waited_s, enough_s, expected
):
    gathering = Gathering(needed=4, all_nodes=5, timeout_s=600.0)
    assert gathering.is_over(num_living, waited_s=waited_s, enough_s=enough_s) is expected


def test_too_few_nodes_are_an_error_after_the_time_for_them():
    with pytest.raises(InputError, match=r"engine\.nodes: 4: only 3 came within 600 s"):
        Gathering(4, 5, 600.0).is_over(3, waited_s=601.0, enough_s=0.0)
