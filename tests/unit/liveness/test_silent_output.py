"""Commands that print nothing any more."""

from __future__ import annotations

import pytest

from perdure.training.errors import InputError
from perdure.training.liveness.hang_limits import SilentOutputDetector
from tests.jobs import small_job


def test_it_is_silent_once_no_node_has_printed_for_the_limit():
    detector = SilentOutputDetector(limit_s=10)
    assert detector.judge({"a": 5, "b": 0}, now_s=100) is None
    assert detector.judge({"a": 5, "b": 0}, now_s=110) is None
    assert detector.judge({"a": 5, "b": 0}, now_s=110.5) == 10.5
    assert detector.judge({"a": 6, "b": 0}, now_s=111) is None
    assert detector.judge({"a": 6, "b": 0}, now_s=121) is None


def test_a_node_that_prints_speaks_for_those_that_never_do():
    detector = SilentOutputDetector(limit_s=10)
    looks = [detector.judge({"a": n, "b": 0}, now_s=5.0 * n) for n in range(20)]
    assert looks == [None] * 20


def test_a_node_without_an_answer_is_no_sign_of_life():
    detector = SilentOutputDetector(limit_s=10)
    detector.judge({"a": 1, "b": 1}, now_s=0)
    assert detector.judge({"a": 1}, now_s=6) is None
    assert detector.judge({}, now_s=9) is None
    assert detector.judge({"a": 1, "b": 1}, now_s=11) == 11


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, "for commands"),
        ({"worker": {"command": ["true"]}, "restart": {"hang": False}}, "needs restart.hang=true"),
    ],
)
def test_the_rule_is_refused_where_it_would_change_nothing(sections, words):
    with pytest.raises(InputError, match=words):
        small_job(watch={"output_quiet_s": 60}, **sections)
    assert (
        small_job(worker={"command": ["true"]}, watch={"output_quiet_s": 60}).watch.output_quiet_s
        == 60
    )
