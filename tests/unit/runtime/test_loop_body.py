"""A statement behind `with step:` is found where a program has one."""

from __future__ import annotations

import pytest

from perdure.training.runtime.step_loop.loop_body import statement_behind

LOOP = """\
import perdure
for step in session.steps(until=9):
    prepare()
    with step:
        step.apply()
"""


@pytest.mark.parametrize(
    ("behind", "line"),
    [
        ("", None),
        ("    average.update(model)\n", 6),
        ("    # nothing\n\n    if step.number % 5 == 0:\n        save()\n", 8),
        ("    with session.evaluation():\n        evaluate()\n", 6),
        ("save()\n", None),
    ],
)
def test_the_first_statement_behind_the_block_is_found(behind, line):
    assert statement_behind(LOOP + behind, 2) == line


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("for step in steps:\n    with step as s, lock:\n        pass\n    f()\n", 4),
        ("def main():\n  for s in x:\n    with s:\n      pass\n    f(s)\n  g()\n", None),
        ("for step in steps:\n    with lock:\n        pass\n    f()\n", None),
        ("for step in steps:\n    with step\n", None),
        ("", None),
    ],
)
def test_other_loops_and_other_blocks_are_left_alone(source, line):
    assert statement_behind(source, 1) == line
