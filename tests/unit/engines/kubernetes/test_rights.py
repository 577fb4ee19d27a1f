"""The rights of a supervisor are those that its job's settings need."""

from __future__ import annotations

from perdure.training.config.engine import KubernetesEngineSpec
from perdure.training.engines.kubernetes.cluster_checks import rights_of


def needed(*, in_cluster: bool = True, **section) -> set[str]:
    spec = KubernetesEngineSpec(image="perdure:1", **section)
    return {right.name for right in rights_of(spec, in_cluster=in_cluster) if right.is_needed}


def test_a_plain_job_needs_nothing_on_nodes():
    assert needed() == {
        *(f"{verb} pods" for verb in ("create", "get", "list", "watch", "delete")),
        *(f"{verb} secrets" for verb in ("create", "get", "list", "delete", "patch")),
        *(f"{verb} configmaps" for verb in ("create", "get", "list", "delete")),
    }


def test_from_outside_of_the_cluster_agents_are_reached_by_port_forward():
    assert needed(in_cluster=False) - needed() == {"get pods/portforward"}
    assert needed(in_cluster=True, reach="port_forward") == needed(in_cluster=False)
    assert needed(in_cluster=False, reach="direct") == needed()


def test_cordons_and_pod_groups_need_their_own():
    assert needed(cordon=True) - needed() == {"patch nodes", "list nodes", "watch nodes"}
    group = "podgroups.scheduling.volcano.sh"
    assert needed(volcano={}) - needed() == {
        f"{verb} {group}" for verb in ("create", "get", "list", "delete")
    }
