"""The engine and its fleet on a stand-in for the API server: what is lost, refused or silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from perdure.training.engines import agent_calls
from perdure.training.engines.base import ANY_NODE, Placement
from perdure.training.engines.fleet import Fleet
from perdure.training.engines.kubernetes import engine as engine_module
from perdure.training.engines.kubernetes import pod_launch, pod_lifecycle, watching
from perdure.training.engines.kubernetes.api import ApiError, Resource
from perdure.training.engines.kubernetes.objects import Document
from perdure.training.errors import EngineError, ImageUnavailable, NoCapacity
from perdure.training.journal.records import Member
from perdure.training.recovery.faults import FaultClass
from tests.unit.engines.kubernetes.api_server import ApiServer, Forwards
from tests.waiting import wait_for

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


@pytest.mark.parametrize(
    ("status", "text", "is_refusal"),
    [
        (403, 'pods is forbidden: User "a" cannot create resource "pods"', True),
        (403, "exceeded quota: small, requested: pods=1, used: pods=2, limited: pods=2", True),
        (403, 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation', True),
        (400, 'admission webhook "validate.kyverno.svc-fail" denied the request: no', True),
        (422, 'admission webhook "a.example" denied the request: too large', True),
        (401, "Unauthorized", True),
        (500, 'failed calling webhook "a.example": connection refused', True),
        (None, "the API server cannot be reached: timed out", True),
        (404, 'namespaces "gone" not found', False),
        (409, "exists", False),
        (410, "too old resource version", False),
        (422, "Pod is invalid: spec.containers[0].image: Required value", False),
        (400, "unknown field spec.a", False),
    ],
    ids=str,
)
def test_rights_quotas_and_webhooks_refuse_and_an_invalid_pod_is_wrong(status, text, is_refusal):
    assert ApiError(text, status=status).is_refusal is is_refusal


MOVED = Placement(2, (BOTH.members[0], BOTH.members[1].model_copy(update={"schedule_cnt": 2})))


@pytest.mark.parametrize("text", ["exceeded quota: small", "pods is forbidden"])
@pytest.mark.parametrize("kind", ["pods", "secrets", "configmaps"])
def test_a_member_that_the_api_server_does_not_take_leaves_the_other_its_pod(
    server, supervisor, kind, text
):
    fleet = supervisor()
    fleet.submit(BOTH)
    (stays,) = server.pods_of(0)
    placement = MOVED
    server.refused = {f"POST {kind}": text}
    for _ in range(3):
        with pytest.raises(EngineError, match=text) as refusal:
            fleet.replace(placement, {1}, grace_s=0.0)
        assert isinstance(refusal.value, NoCapacity) is ("quota" in text)
        assert refusal.value.is_refusal is ("quota" not in text)
    assert server.pods_of(0) == [stays]
    server.refused = {}
    fleet.replace(placement, {1}, grace_s=0.0)
    assert server.pods_of(0) == [stays]
    assert len(server.pods_of(1)) == 1
    assert sorted(fleet.poll().agents) == [0, 1]


def test_no_node_is_blamed_for_a_silent_agent_while_the_api_server_refuses_to_tell(
    server, supervisor, monkeypatch
):
    monkeypatch.setattr(watching, "RETRY_S", 0.01)
    monkeypatch.setattr(agent_calls, "SILENT_AGENT_S", 0.0)
    fleet = supervisor()
    fleet.submit(BOTH)
    server.refused = {"* *": "pods is forbidden"}
    wait_for(lambda: fleet._engine._informer.refusal, period_s=0.01, what="a refusal")
    (name,) = server.pods_of(1)
    server.remove("pods", name)
    snapshot = fleet.poll()
    assert list(snapshot.agents) == [0]
    (loss,) = fleet.losses(snapshot.lost)
    assert (loss.fault_class, loss.code) == (FaultClass.CONTAINER_LOST, "LOSS_UNKNOWN")
    assert "pods is forbidden" in loss.line
    server.refused = {}
    wait_for(lambda: not fleet._engine._informer.is_away, period_s=0.01, what="an answer")
    (loss,) = fleet.losses(snapshot.lost)
    assert loss.code == "POD_DELETED"


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_kueue_group_ends_with_its_run_alone(server, supervisor, monkeypatch, is_gone):
    fleet = supervisor(engine={"kueue": {"queue": "research"}})
    fleet.submit(BOTH)
    fleet.submit(replace(BOTH, number=2))
    marked: list[str] = []
    patch = fleet._engine._api.patch

    def note(resource: Resource, name: str, changes: Document) -> Document:
        marked.append(name)
        if is_gone:
            server.remove("pods", name)
        return patch(resource, name, changes)

    monkeypatch.setattr(fleet._engine._api, "patch", note)
    fleet.submit(replace(BOTH, number=3))
    assert marked == [], "others may join the group"
    names = {*server.objects["pods"]}
    fleet.cancel(0.0)
    assert {*marked} == names
    assert fleet.leftovers() == []


def test_agents_end_themselves_where_their_pods_may_not_be_deleted(server, supervisor):
    fleet = supervisor()
    fleet.submit(BOTH)
    server.refused = {"DELETE pods": "pods is forbidden"}
    with pytest.raises(EngineError, match="pods is forbidden"):
        fleet.cancel(0.0)
    assert {op for _, op in server.orders} == {"shutdown"}
    names = [*server.objects["pods"]]
    assert fleet.leftovers()[:2] == [f"pods/{name}" for name in names]
    server.refused = {}
    fleet.cancel(0.0)
    assert fleet.leftovers() == []


def test_nodes_that_could_take_a_pod_are_known_where_they_may_be_listed(server, supervisor):
    server.add_node("n4", unschedulable=True)
    server.add_node("n5", taints=[{"key": "other", "value": "a", "effect": "NoSchedule"}])
    server.add_node("n6")
    server.set_condition("nodes", "n6", "Ready", "False")
    fleet = supervisor()
    assert fleet.usable_nodes() is None, "nobody has looked yet"
    fleet.submit(BOTH)
    assert fleet.usable_nodes() == {"n1", "n2", "n3"}


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        (["example.com/rack", "example.com/spine"], {"n4": "r1", "n5": "r2"}),
        (["example.com/spine"], {"n4": "s1"}),
        ([], {}),
    ],
)
def test_the_narrowest_label_of_the_topology_is_the_failure_domain(
    server, supervisor, topology, expected
):
    server.add_node("n4", labels={"example.com/rack": "r1", "example.com/spine": "s1"})
    server.add_node("n5", labels={"example.com/rack": "r2"})
    fleet = supervisor(engine={"topology": topology})
    fleet.submit(BOTH)
    assert fleet.failure_domains() == expected


def test_without_the_right_to_list_nodes_their_number_is_unknown(server, supervisor):
    server.refused = {"* nodes": "nodes is forbidden"}
    fleet = supervisor()
    fleet.submit(BOTH)
    assert fleet.usable_nodes() is None


def test_a_cordon_of_the_run_does_not_hide_a_node_that_was_released(server, supervisor):
    fleet = supervisor(engine={"cordon": True})
    fleet.submit(Placement(1, BOTH.members, avoid=("n1",)))
    assert server.objects["nodes"]["n1"]["spec"]["unschedulable"] is True
    wait_for(lambda: fleet._engine._cluster_nodes.cordoned, period_s=0.01, what="the cordon")
    assert fleet.usable_nodes() == {"n1", "n2", "n3"}


@pytest.fixture
def hear(server, supervisor, monkeypatch) -> Callable[..., Fleet]:
    """A fleet of two members for which any silence is too long, and its second way."""
    monkeypatch.setattr(agent_calls, "SILENT_AGENT_S", 0.0)

    def hear(*, may_forward: bool) -> Fleet:
        forwards = Forwards(server, is_refused=not may_forward)
        monkeypatch.setattr(engine_module, "Forwarder", lambda *_: forwards)
        fleet = supervisor()
        fleet.submit(BOTH)
        assert sorted(fleet.poll().agents) == [0, 1]
        return fleet

    return hear


def test_agents_that_are_all_silent_are_reached_through_the_api_server(server, hear, caplog):
    fleet = hear(may_forward=True)
    server.hide(0, 1)
    assert fleet.poll().lost == ()
    assert sorted(fleet.poll().agents) == [0, 1]
    assert "all are reached through the API server" in caplog.text


def test_without_the_right_to_forward_the_word_of_the_cluster_counts(server, hear, caplog):
    fleet = hear(may_forward=False)
    server.hide(0, 1)
    for _ in range(3):
        snapshot = fleet.poll()
        assert (snapshot.lost, sorted(snapshot.unanswered)) == ((), ["n1", "n2"])
    assert "pods/portforward" in caplog.text
    for name in server.objects["pods"]:
        server.set_condition("pods", name, "Ready", "False")
    fleet._engine._informer.refresh()
    assert sorted(fleet.poll().lost) == ["n1", "n2"]


def test_nodes_that_are_all_lost_are_lost(server, hear):
    fleet = hear(may_forward=True)
    for agent in server.agents.values():
        agent.close()
    server.agents.clear()
    assert sorted(fleet.poll().lost) == ["n1", "n2"]


@pytest.mark.parametrize("may_forward", [True, False])
def test_an_agent_that_is_silent_alone_is_lost_as_before(server, hear, may_forward):
    fleet = hear(may_forward=may_forward)
    server.hide(1)
    snapshot = fleet.poll()
    assert (list(snapshot.agents), snapshot.lost) == ([0], ("n2",))


def test_silence_of_agents_and_api_server_at_once_is_that_of_the_supervisor(
    server, hear, monkeypatch
):
    monkeypatch.setattr(watching, "RETRY_S", 0.01)
    fleet = hear(may_forward=True)
    server.refused = {"* *": "no answer"}
    wait_for(lambda: fleet._engine._informer.is_away, period_s=0.01, what="silence")
    server.hide(0, 1)
    assert fleet.poll().lost == ()


class Waits:
    """What an engine waits for; the last one ends the wait."""

    def __init__(self, number: int) -> None:
        self.kinds: list[bool] = []
        self.whys: list[str] = []
        self._number = number

    def __call__(self, why: str, *, is_room: bool) -> None:
        self.kinds.append(is_room)
        self.whys.append(why)
        if len(self.kinds) == self._number:
            raise NoCapacity(why)


@pytest.fixture
def hurried(monkeypatch) -> None:
    monkeypatch.setattr(pod_lifecycle, "PENDING_AFTER_S", 0.0)
    monkeypatch.setattr(pod_launch, "PULLS_S", 0.0)
    monkeypatch.setattr(watching, "RETRY_S", 0.01)


@pytest.mark.usefixtures("hurried")
def test_a_pod_waits_in_the_scheduler_s_queue_until_the_wait_is_ended(server, supervisor):
    fleet = supervisor()
    fleet.submit(BOTH)
    (stays,) = server.pods_of(0)
    server.remove("pods", *server.pods_of(1))
    waits = Waits(3)
    placement = replace(MOVED, avoid=("n2", "n3"), on_pending=waits)
    with pytest.raises(NoCapacity, match="0/3 nodes are available"):
        fleet.replace(placement, {1}, grace_s=0.0)
    assert waits.kinds == [True] * 3
    assert list(server.objects["pods"]) == [stays]
    assert list(server.objects["secrets"]) == [stays], "no Secret of a pod that is gone"


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("without", [{"n2"}, {"n3"}, set()], ids=str)
def test_a_pod_whose_node_cannot_pull_the_image_gets_another(server, supervisor, caplog, without):
    fleet = supervisor()
    fleet.submit(BOTH)
    server.remove("pods", *server.pods_of(1))
    server.without_image = without
    fleet.replace(MOVED, {1}, grace_s=0.0)
    (name,) = server.pods_of(1)
    assert server.objects["pods"][name]["spec"]["nodeName"] == ("n3" if "n2" in without else "n2")
    assert ("another node is tried" in caplog.text) is ("n2" in without)
    assert sorted(fleet.poll().agents) == [0, 1]
    assert len(server.objects["secrets"]) == 2


@pytest.mark.usefixtures("hurried")
def test_an_image_that_no_node_can_pull_is_told_as_that(server, supervisor):
    fleet = supervisor(engine={"place_timeout_s": 1})
    fleet.submit(BOTH)
    (stays,) = server.pods_of(0)
    server.remove("pods", *server.pods_of(1))
    server.without_image = {"n1", "n2", "n3"}
    waits = Waits(1000)
    with pytest.raises(ImageUnavailable, match="ImagePullBackOff") as error:
        fleet.replace(replace(MOVED, on_pending=waits), {1}, grace_s=0.0)
    assert error.value.is_refusal
    assert list(server.objects["pods"]) == [stays]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("is_deleted", "code"), [(True, "POD_DELETED"), (False, "NOT_REPLACED")])
def test_a_member_that_could_not_be_replaced_is_lost_as_it_was_before(
    server, supervisor, is_deleted, code
):
    fleet = supervisor()
    fleet.submit(BOTH)
    (name,) = server.pods_of(1)
    if is_deleted:
        server.objects["pods"][name]["metadata"]["deletionTimestamp"] = "now"
    server.without_image = {"n1", "n2", "n3"}
    with pytest.raises(NoCapacity):
        fleet.replace(replace(MOVED, on_pending=Waits(1)), {1}, grace_s=0.0)
    assert fleet.poll().lost == ("n2",)
    (loss,) = fleet.losses(("n2",))
    assert (loss.node, loss.code) == ("n2", code)
    assert "by force" not in loss.line


def test_the_secret_of_a_pod_that_is_replaced_goes_at_once(server, supervisor):
    fleet = supervisor()
    fleet.submit(BOTH)
    fleet.replace(MOVED, {1}, grace_s=0.0)
    assert sorted(server.objects["secrets"]) == sorted(server.objects["pods"])


@pytest.mark.parametrize(
    ("role", "may_patch", "labeled"),
    [("supervisor", True, True), ("keeper", True, False), ("supervisor", False, False)],
)
def test_the_pod_of_a_supervisor_gets_the_label_of_its_run(
    server, supervisor, monkeypatch, role, may_patch, labeled
):
    labels = {"perdure.io/role": role}
    pod = {"metadata": {"name": "sly-termite", "labels": labels}, "spec": {}, "status": {}}
    server.objects["pods"]["sly-termite"] = pod
    monkeypatch.setenv("HOSTNAME", "sly-termite")
    server.refused = {} if may_patch else {"PATCH pods": "pods is forbidden"}
    fleet = supervisor()
    fleet.submit(BOTH)
    own = server.objects["pods"]["sly-termite"]["metadata"]["labels"]
    assert own.get("perdure.io/run") == ("run" if labeled else None)
    fleet.cancel(0.0)
    assert fleet.leftovers() == []
    assert "sly-termite" in server.objects["pods"]
