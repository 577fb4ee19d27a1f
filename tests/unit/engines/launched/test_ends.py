"""Every platform is told every end."""

from __future__ import annotations

import pytest

from perdure.training.engines.launched.ends import ENDS, LaunchEnd, again_without, end_of
from perdure.training.engines.launched.platforms import Platform
from perdure.training.journal.history import Isolation, RunHistory
from perdure.training.recovery.faults import FaultClass

LOST, DEFECT = FaultClass.NODE_LOST, FaultClass.DEVICE_LOST
PODS = (Platform.ASCEND_OPERATOR, Platform.KUBEFLOW, Platform.INDEXED_JOB)


def test_every_platform_has_every_end_with_a_code_of_its_own():
    assert set(ENDS) == set(Platform)
    for ends in ENDS.values():
        assert set(ends) == set(LaunchEnd)
        assert len({end.code for end in ends.values()}) == len(LaunchEnd)
        assert ends[LaunchEnd.COMPLETED].code == 0


@pytest.mark.parametrize("platform", PODS)
def test_pods_are_started_again_only_where_that_helps(platform):
    again = {end for end, told in ENDS[platform].items() if told.code > 127}
    assert again == {LaunchEnd.START_AGAIN, LaunchEnd.START_ELSEWHERE}


@pytest.mark.parametrize(
    ("outcome", "user_fault", "short", "expected"),
    [
        ("completed", False, False, LaunchEnd.COMPLETED),
        ("completed", False, True, LaunchEnd.COMPLETED),
        ("cancelled", True, True, LaunchEnd.CANCELLED),
        ("failed", True, False, LaunchEnd.USER_MUST_MEND),
        ("failed", True, True, LaunchEnd.USER_MUST_MEND),
        ("failed", False, True, LaunchEnd.START_ELSEWHERE),
        ("failed", False, False, LaunchEnd.USER_MUST_MEND),
    ],
)
def test_the_end_of_a_run_says_what_the_platform_is_to_do(outcome, user_fault, short, expected):
    assert end_of(outcome, is_user_fault=user_fault, is_short_of_nodes=short) is expected


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        (Platform.SLURM, "ExcNodeList=n2,n3"),
        (Platform.BY_HAND, "without n2,n3"),
        (Platform.KUBEFLOW, "off n2,n3"),
        (Platform.MODELARTS, "take n2,n3 out"),
    ],
)
def test_the_nodes_at_fault_are_named_in_the_words_of_the_platform(platform, words):
    end = ENDS[platform][LaunchEnd.START_ELSEWHERE].without(["n2", "n3"])
    assert words in end.platform_does
    assert end.code == ENDS[platform][LaunchEnd.START_ELSEWHERE].code


@pytest.mark.parametrize(
    ("isolated", "nodes"),
    [
        ({}, ()),
        ({"n2": LOST}, ()),
        ({"n2": DEFECT}, ("n2",)),
        ({"n2": LOST, "n3": DEFECT, "n1": DEFECT}, ("n3", "n1")),
    ],
)
def test_a_run_is_started_again_without_the_nodes_at_fault(isolated, nodes):
    isolations = [Isolation(node, "why", 0.0, fault) for node, fault in isolated.items()]
    again = LaunchEnd.START_ELSEWHERE if nodes else LaunchEnd.START_AGAIN
    assert again_without(RunHistory(isolations=isolations)) == (again, nodes)
