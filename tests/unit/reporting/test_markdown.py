"""Texts for pages that render markdown, and for places that do not."""

from __future__ import annotations

import pytest

from perdure.training.reporting.ettr import duration_text
from perdure.training.reporting.markdown import plain, with_commands


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("Leave `&` out, or end with `wait`.", "Leave '&' out, or end with 'wait'."),
        ("no command", "no command"),
        ("a lone ` stays", "a lone ` stays"),
    ],
)
def test_a_place_without_markdown_shows_commands_in_quotes(words, line):
    assert plain(words) == line


def test_a_page_shows_commands_as_code_and_the_rest_as_it_is():
    assert with_commands("Use `set -o pipefail`, not <tee>.") == (
        "Use `set -o pipefail`, not &lt;tee&gt;."
    )


def test_an_age_across_two_clocks_is_never_negative():
    assert duration_text(-3.2) == "0.0 s"
