"""How what nodes have of an image, and what its registry says, counts before a run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from perdure.training.engines.kubernetes.image_checks import PullSecrets, check_image
from perdure.training.engines.kubernetes.image_registry import Answer, Credential, Presence
from perdure.training.wire.node import CheckOutcome

IMAGE = "registry.example.com/team/perdure:1"
FAILED, SKIPPED, OK = CheckOutcome.FAILED, CheckOutcome.SKIPPED, CheckOutcome.OK
WARNING = CheckOutcome.WARNING
USER = Credential("robot", SecretStr("correct-horse"))


def node(name: str, *images: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"images": [{"names": list(images)}]}}


ALL = [node("n1", IMAGE), node("n2", IMAGE)]
SOME = [node("n1", IMAGE), node("n2", "<none>@<none>")]
NONE = [node("n1"), node("n2")]


def outcome(nodes, policy, presence=None, secrets=None):
    """How it counts, and in which words; without a presence the registry must not be asked."""

    def ask(name, credentials):
        assert presence is not None, "the registry is asked"
        assert str(name) == IMAGE
        return Answer(presence, "it answers 000")

    check = check_image(
        IMAGE,
        policy=policy,
        nodes=nodes,
        read_secrets=lambda _: secrets or PullSecrets([]),
        ask_registry=ask,
    )
    assert check.name == "image"
    assert IMAGE in check.seen
    return check.outcome, check.seen


def test_an_image_that_all_nodes_have_is_pulled_by_none():
    assert outcome(ALL, "IfNotPresent") == (OK, f"{IMAGE} has been pulled on 2 of 2 nodes")


@pytest.mark.parametrize(
    ("nodes", "expected"), [(ALL, OK), (SOME, OK), (NONE, WARNING), (None, SKIPPED)]
)
def test_of_one_that_is_never_pulled_no_registry_is_asked(nodes, expected):
    is_so, text = outcome(nodes, "Never")
    assert is_so is expected
    assert "imagePullPolicy is Never" in text


@pytest.mark.parametrize(
    ("nodes", "policy"),
    [(SOME, "IfNotPresent"), (NONE, "IfNotPresent"), (None, "IfNotPresent"), (ALL, "Always")],
)
@pytest.mark.parametrize(
    ("presence", "expected", "words"),
    [
        (Presence.FOUND, OK, "is in its registry"),
        (Presence.NOT_ASKED, SKIPPED, "could not be asked for from here"),
        (Presence.DENIED, WARNING, "names no pull secret"),
    ],
)
def test_one_that_may_have_to_be_pulled_is_asked_for(nodes, policy, presence, expected, words):
    is_so, text = outcome(nodes, policy, presence)
    assert is_so is expected
    assert words in text
    held = {id(SOME): "1 of 2", id(ALL): "2 of 2"}.get(id(nodes))
    assert ("has been pulled on" in text) is (held is not None)
    assert held is None or f"it has been pulled on {held} nodes" in text


@pytest.mark.parametrize(
    ("nodes", "policy", "expected"),
    [
        (NONE, "IfNotPresent", FAILED), (None, "IfNotPresent", FAILED), (NONE, "Always", FAILED),
        (SOME, "IfNotPresent", WARNING), (ALL, "Always", WARNING),
    ],
)  # fmt: skip
def test_one_that_its_registry_lacks_fails_unless_a_node_got_it_from_elsewhere(
    nodes, policy, expected
):
    is_so, text = outcome(nodes, policy, Presence.ABSENT)
    assert is_so is expected
    assert "is not in its registry" in text
    assert ("has been pulled on" in text) is (expected is WARNING)


@pytest.mark.parametrize(
    ("secrets", "expected", "words"),
    [
        (PullSecrets(["a"], [USER]), FAILED, "with the pull secret a"),
        (PullSecrets(["a", "b"]), WARNING, "the pull secret a, b has nothing for it"),
        (PullSecrets(["a", "b"], [USER], ["b"]), SKIPPED, "without the pull secret b"),
    ],
    ids=["refused", "of another registry", "not to be read"],
)
def test_a_refusal_names_the_pull_secret(secrets, expected, words):
    is_so, text = outcome(NONE, "IfNotPresent", Presence.DENIED, secrets)
    assert is_so is expected
    assert words in text
    assert "correct-horse" not in text


def test_what_is_no_name_of_an_image_fails_at_once():
    check = check_image(
        "no image", policy="Always", nodes=ALL, read_secrets=lambda _: PullSecrets([])
    )
    assert (check.outcome, check.seen) == (FAILED, "'no image' is no name of an image")
