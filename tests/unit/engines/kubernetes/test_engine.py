"""The engine and its fleet on a stand-in for the API server: what is lost, refused or silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from perdure.training.engines.base import ANY_NODE, Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.engines.kubernetes import pod_lifecycle
from perdure.training.journal.records import Member
from perdure.training.recovery.faults import FaultClass
from tests.unit.engines.kubernetes.api_server import ApiServer

BOTH = Placement(1, tuple(Member(index=i, node=ANY_NODE, schedule_cnt=1) for i in range(2)))


@pytest.fixture
def server(monkeypatch) -> Iterator[ApiServer]:
    monkeypatch.setattr(pod_lifecycle, "CONNECT_S", 0.2)
    monkeypatch.setattr(pod_lifecycle, "SILENT_END_S", 0.0)
    server = ApiServer("n1", "n2", "n3")
    yield server
    server.close()


@pytest.fixture
def supervisor(server, monkeypatch) -> Callable[..., Fleet]:
    """The fleet of another supervisor of the same run."""

    def supervisor(epoch: int = 1, **sections: object) -> Fleet:
        job = server.job(**sections)
        return Fleet(server.engine(monkeypatch, job), job, epoch=epoch)

    return supervisor


def lose(server: ApiServer, member: int) -> str:
    (name,) = server.pods_of(member)
    server.remove("secrets", name)
    return name


def empty(server: ApiServer, member: int) -> str:
    (name,) = server.pods_of(member)
    server.objects["secrets"][name]["data"] = {}
    return name


def garble(server: ApiServer, member: int) -> str:
    (name,) = server.pods_of(member)
    server.objects["secrets"][name]["data"] = {"agent.json": "bm8ganNvbg=="}
    return name


@pytest.mark.parametrize("damage", [lose, empty, garble])
@pytest.mark.parametrize("member", [0, 1])
def test_a_member_whose_secret_is_lost_is_a_lost_container_and_the_others_are_adopted(
    server, supervisor, damage, member
):
    supervisor().submit(BOTH)
    name = damage(server, member)
    fleet = supervisor(epoch=2)
    assert fleet.adopt(BOTH) == {1 - member}
    snapshot = fleet.poll()
    assert list(snapshot.agents) == [1 - member]
    (loss,) = fleet.losses(snapshot.lost)
    assert (loss.fault_class, loss.code) == (FaultClass.CONTAINER_LOST, "SECRET_LOST")
    assert name in loss.line


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)], ids=str)
def test_a_run_whose_secrets_are_lost_can_be_cancelled(server, supervisor, lost):
    supervisor().submit(BOTH)
    for member in lost:
        lose(server, member)
    fleet = supervisor(epoch=2)
    fleet.cancel(0.0)
    assert fleet.leftovers() == []
    assert not server.objects["pods"]


def test_a_container_whose_secret_is_lost_is_replaced_and_the_other_stays(server, supervisor):
    supervisor().submit(BOTH)
    lost = lose(server, 1)
    (stays,) = server.pods_of(0)
    fleet = supervisor(epoch=2)
    fleet.adopt(BOTH)
    moved = BOTH.members[1].model_copy(update={"schedule_cnt": 2})
    placement = Placement(2, (BOTH.members[0], moved))
    fleet.replace(placement, {1}, grace_s=0.0)
    assert server.pods_of(0) == [stays]
    assert server.pods_of(1) != [lost]
    assert sorted(fleet.poll().agents) == [0, 1]
