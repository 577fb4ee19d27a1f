"""The text of a job file: what is no YAML, and what YAML itself would pass over."""

from __future__ import annotations

import pytest

from perdure.training.config.job_file import read_document, read_document_file
from perdure.training.errors import InputError


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        read_document(text, where="job.yaml")
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("job.yaml: ")
    return line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 1\nseed: 2\nsteps: 3\n", "steps is given twice, in lines 1 and 3"),
        ("model:\n  seq_len: 8\n  seq_len: 9\n", "model.seq_len is given twice, in lines 2 and 3"),
        ("a: {b: [{c: 1}, {c: 1, c: 2}]}", "a.b.1.c is given twice, in line 1"),
        ('"steps": 1\nsteps: 2\n', "steps is given twice, in lines 1 and 2"),
        ('{"steps": 1,\n "steps": 2}', "steps is given twice, in lines 1 and 2"),
        ("env:\n  A=hunter2: 1\n  A=hunter2: 2\n", "env.a field is given twice, in lines 2 and 3"),
    ],
)
def test_a_field_that_is_given_twice_is_refused_with_its_lines(text, words):
    assert refusal(text) == f"job.yaml: {words}"


def test_a_merged_section_may_be_overridden_and_used_again():
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\nd: *b\n"
    document = read_document(text, where="job.yaml")
    assert document["b"] == document["d"] == {"x": 3, "y": 2}
    assert document["c"] == {"x": 3, "y": 4}


def test_of_two_merged_sections_the_first_counts():
    text = "a: &a {steps: 1}\nb: &b {steps: 2, seed: 3}\nc: {<<: [*a, *b]}\n"
    assert read_document(text, where="job.yaml")["c"] == {"steps": 1, "seed": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: \x01\n", "character 0x0001 is not allowed, line 2"),
        ("a: 1\n\tb: 2\n", "line 2"),
        ("a: [1, 2\nb: 3\n", "line 2"),
        ("a: *nobody\n", "found undefined alias, line 1"),
        ("a: 1\n---\na: 2\n", "line 2"),
        ("when: 2026-13-01\n", "quote it"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_is_named_with_its_line(text, words):
    line = refusal(text)
    assert words in line
    assert "unicode string" not in line


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"run_id: x\n# caf\xe9\n")
    with pytest.raises(InputError, match=r"byte 0xe9 is not UTF-8, line 2$"):
        read_document_file(path)


@pytest.mark.parametrize(
    ("text", "document"), [("", None), ("a: 1", {"a": 1}), ('{"a": 1}', {"a": 1})]
)
def test_a_document_is_what_yaml_makes_of_it(text, document):
    assert read_document(text, where="job.yaml") == document
