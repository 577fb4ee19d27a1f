"""The documents of a run in a cluster, from its job."""

from __future__ import annotations

import re
from typing import Any

import pytest

from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.config.job import Job
from perdure.training.engines.base import Placement
from perdure.training.engines.kubernetes import objects
from perdure.training.engines.kubernetes.objects import Owner, PodPlan
from perdure.training.errors import InputError
from perdure.training.journal.records import Member
from perdure.training.wire.agent import NO_MEMBER
from tests.jobs import small_job
from tests.values import not_none

OWNER = Owner("perdure-a", "uid-1")


def job(run_id: str = "a", **engine: object) -> Job:
    return small_job(run_id=run_id, engine={"kind": "kubernetes", "image": "perdure:1", **engine})


def spec_of(spec_job: Job) -> KubernetesEngineSpec:
    assert isinstance(spec_job.engine, KubernetesEngineSpec)
    return spec_job.engine


def pod(pod_job: Job, *, node: str = "", store_secret: str | None = None, **placed: Any):
    member = Member(index=1, node=node, schedule_cnt=3)
    plan = PodPlan(member, "perdure-a-m1-s3-abcde", Placement(2, (member,), **placed))
    return objects.pod(pod_job, spec_of(pod_job), OWNER, plan, store_secret=store_secret)


def container(document):
    return document["spec"]["containers"][0]


def test_a_pod_runs_one_agent_that_nothing_restarts_and_belongs_to_the_run():
    document = pod(job())
    assert container(document)["command"][:3] == ["python3", "-m", "perdure.training.agent"]
    assert document["spec"]["restartPolicy"] == "Never"
    assert document["spec"]["automountServiceAccountToken"] is False
    assert document["metadata"]["ownerReferences"] == [OWNER.reference]
    labels = document["metadata"]["labels"]
    assert (labels[objects.MEMBER], labels[objects.SCHEDULE_CNT]) == ("1", "3")


def test_members_are_on_nodes_of_their_own_away_from_avoided_ones_and_where_they_were():
    affinity = pod(job(), node="n2", avoid=("n1", "n4"), last=("n3",))["spec"]["affinity"]
    apart = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["topologyKey"] for term in apart] == ["kubernetes.io/hostname"]
    nodes = affinity["nodeAffinity"]
    terms = nodes["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(terms) == 1, "terms are alternatives, the fields of one are not"
    assert [(field["operator"], field["values"]) for field in terms[0]["matchFields"]] == [
        ("NotIn", ["n1"]),
        ("NotIn", ["n4"]),
    ]
    preferred = [
        (entry["weight"], entry["preference"]["matchFields"][0]["operator"])
        for entry in nodes["preferredDuringSchedulingIgnoredDuringExecution"]
    ]
    assert preferred == [(50, "NotIn"), (100, "In")]


def test_a_node_that_is_silent_does_not_lose_its_pods_to_the_node_controller():
    keys = {
        toleration["key"]
        for toleration in pod(job())["spec"]["tolerations"]
        if "tolerationSeconds" not in toleration
    }
    assert keys == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}


def test_no_secret_value_is_in_a_pod():
    document = pod(job(env_secrets=["proxy"]), store_secret="perdure-a-store-keys")
    names = [source["secretRef"]["name"] for source in container(document)["envFrom"]]
    assert names == ["proxy", "perdure-a-store-keys"]
    assert all("value" not in variable or variable["name"] == "PERDURE_CONTAINER"
               for variable in container(document)["env"])  # fmt: skip


def test_resources_are_requests_and_limits_in_one_and_the_group_needs_them_all():
    resources = {"huawei.com/Ascend910": 8, "memory": "700Gi", "cpu": "1.5"}
    gang_job = job(nodes=4, slots_per_node=1, resources=resources, volcano={"queue": "train"})
    document = pod(gang_job)
    amounts = container(document)["resources"]
    assert amounts["requests"] == amounts["limits"] == {
        "huawei.com/Ascend910": "8", "memory": "700Gi", "cpu": "1.5",
    }  # fmt: skip
    spec = spec_of(gang_job)
    group = objects.pod_group(gang_job, spec, not_none(spec.volcano), OWNER)
    assert group["spec"]["minMember"] == 4
    assert group["spec"]["minResources"] == {
        "huawei.com/Ascend910": "32", "memory": "2800Gi", "cpu": "6",
    }  # fmt: skip
    assert document["spec"]["schedulerName"] == "volcano"
    name = document["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
    assert name == group["metadata"]["name"]


def test_the_blocks_of_super_pods_are_told_to_the_scheduler():
    gang_job = job(nodes=2, slots_per_node=2, volcano={"sp_block": 4})
    assert pod(gang_job)["metadata"]["annotations"]["sp-block"] == "4"
    spec = spec_of(gang_job)
    group = objects.pod_group(gang_job, spec, not_none(spec.volcano), OWNER)
    assert group["metadata"]["annotations"] == {"sp-block": "4"}
    without = job(nodes=2, slots_per_node=2, volcano={})
    assert "sp-block" not in pod(without)["metadata"]["annotations"]


@pytest.mark.parametrize("sp_block", [1, 3, 8])
def test_a_block_that_cuts_a_node_or_leaves_ranks_is_refused(sp_block):
    words = f"sp_block={sp_block} must be a multiple of slots_per_node=2 and divide all 4 ranks"
    with pytest.raises(InputError, match=words):
        job(nodes=2, slots_per_node=2, volcano={"sp_block": sp_block})


def test_on_the_host_network_two_agents_of_one_port_are_never_on_one_node():
    document = pod(job(host_network=True, agent_port=9000))
    assert container(document)["ports"][0]["hostPort"] == 9000
    assert document["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"


def test_what_is_merged_into_a_pod_keeps_what_it_does_not_name():
    overlay = {
        "metadata": {"annotations": {"team": "a"}},
        "spec": {
            "containers": [{"name": "agent", "securityContext": {"runAsUser": 1000}}],
            "enableServiceLinks": True,
        },
    }
    document = pod(job(pod=overlay))
    assert container(document)["securityContext"] == {"runAsUser": 1000}
    assert container(document)["image"] == "perdure:1"
    assert document["spec"]["enableServiceLinks"] is True
    assert document["metadata"]["annotations"] == {"team": "a"}


@pytest.mark.parametrize("length", [1, 40, 63])
def test_names_of_pods_are_names_of_hosts_however_long_the_run_is_called(length):
    member = Member(index=12, node="", schedule_cnt=345)
    name = objects.pod_name(job("r" * length), member, "abcde")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)
    assert name.endswith("-m12-s345-abcde")


TOPOLOGY = ("example.com/rack", "example.com/spine")


def terms(document: dict[str, Any], kind: str) -> list[tuple[str, int]]:
    """Labels that a pod prefers to share with others, or not to, with their weights."""
    preferred = (
        document["spec"]["affinity"]
        .get(kind, {})
        .get("preferredDuringSchedulingIgnoredDuringExecution", [])
    )
    return [(term["podAffinityTerm"]["topologyKey"], term["weight"]) for term in preferred]


def spare(spec_job: Job) -> dict[str, Any]:
    member = Member(index=NO_MEMBER, node="", schedule_cnt=0)
    plan = PodPlan(member, "perdure-a-standby-abcde", Placement(2, ()))
    return objects.pod(spec_job, spec_of(spec_job), OWNER, plan, store_secret=None)


@pytest.mark.parametrize(
    ("topology", "near"),
    [
        ((), []),
        (TOPOLOGY[:1], [("example.com/rack", 25)]),
        (TOPOLOGY, [("example.com/rack", 25), ("example.com/spine", 50)]),
        (("a", "b", "c", "d"), [("a", 25), ("b", 50), ("c", 100), ("d", 100)]),
    ],
)
def test_members_prefer_nodes_near_each_other_above_all_below_one_spine(topology, near):
    document = pod(job(topology=topology))
    assert terms(document, "podAffinity") == near
    assert terms(document, "podAntiAffinity") == []


@pytest.mark.parametrize(
    ("topology", "near", "apart"),
    [
        ((), [], []),
        (TOPOLOGY[:1], [], [("example.com/rack", 25)]),
        (TOPOLOGY, [("example.com/spine", 25)], [("example.com/rack", 25)]),
    ],
)
def test_a_spare_prefers_another_rack_below_the_same_spine(topology, near, apart):
    document = spare(job(topology=topology))
    assert terms(document, "podAffinity") == near
    assert terms(document, "podAntiAffinity") == apart
    hard = document["spec"]["affinity"]["podAntiAffinity"]
    assert len(hard["requiredDuringSchedulingIgnoredDuringExecution"]) == 1


@pytest.mark.parametrize(
    ("topology", "reason"),
    [
        (["rack", "rack"], "names a label twice"),
        (["rack!"], "is no name of a label"),
        (["a", "b", "c", "d", "e"], "at most 4"),
    ],
)
def test_labels_of_the_topology_are_names_of_labels_and_few(topology, reason):
    with pytest.raises(InputError, match=reason):
        job(topology=topology)


def test_pods_for_the_level_restricted_give_up_all_rights_of_root():
    document = pod(job(pod_security="restricted"))
    assert document["spec"]["securityContext"] == {
        "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert container(document)["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert "securityContext" not in pod(job())["spec"]


def test_another_user_may_be_merged_into_pods_for_the_level_restricted():
    user = {"spec": {"securityContext": {"runAsUser": 2000}}}
    document = pod(job(pod_security="restricted", pod=user))
    assert document["spec"]["securityContext"]["runAsUser"] == 2000
    assert document["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(
    "section",
    [
        {"node_path": "/var/lib/perdure"},
        {"host_network": True},
        {"volumes": [{"name": "a", "mount_path": "/a", "source": {"hostPath": {"path": "/a"}}}]},
    ],
)
def test_what_the_level_restricted_refuses_is_refused_with_the_job(section):
    with pytest.raises(InputError, match="pod_security=restricted does not allow"):
        job(pod_security="restricted", **section)


def group_of(gang_job: Job) -> dict[str, Any]:
    spec = spec_of(gang_job)
    return objects.pod_group(gang_job, spec, not_none(spec.volcano), OWNER)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, None),
        ({}, {"mode": "soft"}),
        ({"mode": "hard", "highest_tier": 2}, {"mode": "hard", "highestTierAllowed": 2}),
        ({"highest_tier": 0}, {"mode": "soft", "highestTierAllowed": 0}),
    ],
)
def test_a_gang_of_volcano_may_be_kept_near_each_other(section, expected):
    group = group_of(job(volcano={"network_topology": section}))
    assert group["spec"].get("networkTopology") == expected


def test_warm_spares_do_not_stand_for_members_of_a_volcano_group():
    gang_job = job(nodes=4, slots_per_node=1, volcano={})
    assert group_of(gang_job)["spec"]["minTaskMember"] == {"member": 4}
    task = "volcano.sh/task-spec"
    assert pod(gang_job)["metadata"]["annotations"][task] == "member"
    assert spare(gang_job)["metadata"]["annotations"][task] == "spare"
    member = Member(index=2, node="n1", schedule_cnt=2)
    changes = objects.taken(member, Placement(4, (member,)), spec_of(gang_job))["metadata"]
    assert changes["annotations"] == {task: "member"}
    assert changes["labels"][objects.MEMBER] == "2"
    plain = objects.taken(member, Placement(4, (member,)), spec_of(job()))["metadata"]
    assert "annotations" not in plain


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_the_members_are_one_group_of_kueue(nodes):
    section = {"queue": "research", "priority_class": "batch"}
    document = pod(job("llm", nodes=nodes, slots_per_node=1, kueue=section, priority_class="high"))
    labels = document["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/pod-group-name"] == "llm"
    assert labels["kueue.x-k8s.io/priority-class"] == "batch"
    count = document["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"]
    assert count == str(nodes)
    assert document["spec"]["priorityClassName"] == "high"
    assert "schedulingGates" not in document["spec"], "Kueue's webhook adds its own"
    retriable = "kueue.x-k8s.io/retriable-in-group"
    assert retriable not in document["metadata"]["annotations"], "a pod may be replaced"
    assert objects.LAST_OF_GROUP["metadata"]["annotations"] == {retriable: "false"}


def test_without_kueue_no_pod_has_its_labels():
    text = str(pod(job()))
    assert "kueue" not in text


def test_a_group_of_kueue_has_no_warm_spares():
    assert job(spares=2, kueue={"queue": "a"}).engine.num_warm_spares == 0
    assert job(spares=2, warm_spares=0, kueue={"queue": "a"}).engine.num_warm_spares == 0
    assert job(spares=2).engine.num_warm_spares == 1


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"kueue": {"queue": "a"}, "volcano": {}}, "kueue and volcano both hold pods back"),
        ({"kueue": {"queue": "a"}, "warm_spares": 1}, "warm_spares=1 must be 0 with kueue"),
        ({"kueue": {}}, "kueue.queue: is missing"),
        ({"kueue": {"queue": "No Queue"}}, "is no name"),
        ({"volcano": {"network_topology": {"mode": "near"}}}, "network_topology.mode"),
    ],
)
def test_settings_of_queues_that_contradict_each_other_are_refused(section, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        job(**section)
