"""docs/kubernetes.md lists the rights of each account, and the manifests ask for just those."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.deploy.conftest import KUBERNETES, ROOT, documents_of

# account, API group, resource, namespace ("*" for the whole cluster), verb, folder
Right = tuple[str, str, str, str, str, str]
OWN = "perdure"


def in_documents() -> Iterator[Right]:
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    table = text.split("\n## Rights\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    for row in rows[1:]:
        account, group, resource, verbs, folder, _why = (
            cell.strip() for cell in row.strip("|").split("|")
        )
        if resource == "-":
            continue
        plural, _, where = resource.partition(", in ")
        places = {"": [OWN], "the whole cluster": ["*"]}.get(where, where.split(" and "))
        for verb in verbs.split(", "):
            for place in places:
                core = "" if group == "core" else group
                yield f"perdure-{account}", core, plural, place, verb, folder


def in_manifests() -> Iterator[Right]:
    options = sorted(path.parent.name for path in KUBERNETES.glob("options/*/kustomization.yaml"))
    for folder in ["base", *(f"options/{name}" for name in options)]:
        found = documents_of(folder)
        roles = {
            (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]): one
            for one in found
        }
        for binding in found:
            if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
                continue
            namespace = binding["metadata"].get("namespace")
            role = roles[binding["roleRef"]["kind"], namespace, binding["roleRef"]["name"]]
            (subject,) = binding["subjects"]
            assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", OWN)
            for rule in role["rules"]:
                for group in rule["apiGroups"]:
                    for plural in rule["resources"]:
                        for verb in rule["verbs"]:
                            place = namespace or "*"
                            yield subject["name"], group, plural, place, verb, folder


def test_every_right_of_the_documents_is_in_a_role_and_the_other_way_round():
    documented, asked = set(in_documents()), set(in_manifests())
    assert documented
    assert documented - asked == set(), "documented, and in no manifest"
    assert asked - documented == set(), "asked for, and not documented"


@pytest.mark.parametrize("folder", ["base", "overlays/ascend"])
def test_no_role_has_all_of_anything_and_none_is_given_to_everybody(folder):
    for one in documents_of(folder):
        for rule in one.get("rules") or ():
            asked = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "*" not in asked, one["metadata"]["name"]
        for subject in one.get("subjects", ()):
            assert subject["kind"] == "ServiceAccount", one["metadata"]["name"]


def test_nothing_outside_of_the_namespace_is_asked_for_unless_an_option_is_chosen():
    assert {right[3] for right in in_manifests() if right[5] == "base"} == {OWN}
