"""How long the end of a pod is awaited, against a cluster that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from perdure.training.engines.kubernetes.pod_lifecycle import END_TIMEOUT_S, PodEnd
from perdure.training.engines.kubernetes.pods import Pod
from perdure.training.errors import EngineError
from tests.unit.engines.kubernetes.test_pods import ended, pod

NAME = "perdure-a-m1-s2-xyz"


@dataclass
class ScriptedCluster:
    """Its pod ends, and loses its volumes, so many seconds after it was deleted.

    Attributes:
        waited_s: how long its end was awaited.
        graces_s: grace period of each deletion.
    """

    ends_s: float
    unmounted_s: float
    waited_s: float = 0.0
    graces_s: list[int] = field(default_factory=list)

    @property
    def objects(self) -> Mapping[str, Any]:
        if self.waited_s >= self.unmounted_s or 0 in self.graces_s:
            return {}
        over = self.waited_s >= self.ends_s
        # Its agent does not listen yet, so that nothing asks it.
        document = pod(state=ended(0)) if over else pod(started=False)
        return {NAME: {**document, "metadata": {**document["metadata"], "uid": "u"}}}

    def wait(self, until: Callable[[Mapping[str, Any]], bool], *, timeout_s: float) -> bool:
        deadline_s = self.waited_s + timeout_s
        while not until(self.objects) and self.waited_s < deadline_s:
            self.waited_s += 1
        return until(self.objects)

    def delete(self, *_what: object, grace_s: int, uid: str | None) -> None:
        assert uid == "u"
        self.graces_s.append(grace_s)

    def refresh(self) -> None: ...


def end(cluster: ScriptedCluster, unmount_after_s: int) -> None:
    made: Any = cluster
    ending = PodEnd(made, made, made, lambda _: ("", 0), unmount_after_s=unmount_after_s)
    ending.end([Pod(cluster.objects[NAME])])


@pytest.mark.parametrize(
    ("unmount_after_s", "ends_s", "unmounted_s", "waited_s", "is_forced"),
    [
        (-1, 2, 30, 30, False),
        (-1, 2, 900, END_TIMEOUT_S, True),
        (10, 2, 5, 5, False),
        (10, 2, 900, 10, True),
        (10, 15, 900, 15, True),
        (0, 2, 900, 2, True),
        (900, 2, 900, END_TIMEOUT_S, True),
    ],
)
def test_a_pod_that_has_ended_is_awaited_as_long_as_the_platform_waits_for_its_volumes(
    unmount_after_s, ends_s, unmounted_s, waited_s, is_forced
):
    cluster = ScriptedCluster(ends_s, unmounted_s)
    end(cluster, unmount_after_s)
    assert (cluster.waited_s, 0 in cluster.graces_s) == (waited_s, is_forced)


@pytest.mark.parametrize("unmount_after_s", [-1, 0, 10])
def test_a_container_that_does_not_end_is_never_passed_over(unmount_after_s):
    cluster = ScriptedCluster(ends_s=900, unmounted_s=900)
    with pytest.raises(EngineError, match="does not end"):
        end(cluster, unmount_after_s)
    assert cluster.waited_s == END_TIMEOUT_S
