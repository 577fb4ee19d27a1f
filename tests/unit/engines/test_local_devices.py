"""How the NPUs of a machine are divided among the nodes of the local engine."""

from __future__ import annotations

import pytest

from perdure.training.engines.local import devices_of_node
from perdure.training.wire.node import VISIBLE


@pytest.fixture
def dev(tmp_path):
    for index in (10, 2, 0, 1, 3):
        (tmp_path / f"davinci{index}").touch()
    for other in ("davinci_manager", "null"):
        (tmp_path / other).touch()
    return tmp_path


def test_a_machine_without_npus_shows_its_nodes_none(tmp_path):
    assert devices_of_node(0, 2, {}, dev=tmp_path) == {}


def test_every_node_has_devices_of_its_own_in_the_order_of_their_numbers(dev):
    (dev / "davinci11").touch()
    visible = [devices_of_node(number, 2, {}, dev=dev)[VISIBLE] for number in range(3)]
    assert visible == ["0,1", "2,3", "10,11"]


def test_what_the_supervisor_may_see_is_divided_and_no_more(dev):
    environment = {VISIBLE: "4, 5,6,7"}
    visible = [devices_of_node(number, 2, environment, dev=dev)[VISIBLE] for number in range(2)]
    assert visible == ["4,5", "6,7"]


def test_a_spare_beyond_the_last_device_begins_with_the_first(dev):
    assert devices_of_node(2, 2, {VISIBLE: "0,1,2,3"}, dev=dev) == {VISIBLE: "0,1"}


def test_a_machine_with_too_few_devices_for_one_node_is_left_as_it_is(dev):
    assert devices_of_node(1, 4, {VISIBLE: "0,1"}, dev=dev) == {VISIBLE: "0,1"}
    (dev / "davinci10").unlink()
    (dev / "davinci3").unlink()
    assert devices_of_node(1, 4, {}, dev=dev) == {}
