"""When the command of a preparation has to run, by its inputs and its outputs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from perdure.training.commands.prepared import Preparation
from perdure.training.config.job import parse_job
from perdure.training.errors import InputError
from perdure.training.supervisor.preparing import PreparationError, fault_of
from perdure.training.wire.preparation import PrepareReply
from tests.jobs import job_document


def preparation(folder: Path, *, command="tokenize", outputs=("out", "vocab.txt")) -> Preparation:
    return Preparation([command], ["raw/*.txt", "more"], outputs, folder)


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A folder whose outputs are made of its inputs."""
    for name in ("raw", "more", "out"):
        (tmp_path / name).mkdir()
    for name in ("raw/a.txt", "raw/b.txt", "more/c", "out/0.bin", "out/1.bin", "vocab.txt"):
        (tmp_path / name).write_text(f"content of {name}")
    made = preparation(tmp_path)
    assert made.why_not() == "nothing is prepared yet"
    assert made.complete(made.fingerprint()) is None
    assert made.why_not() is None
    return tmp_path


def rewrite(path: Path, text: str) -> None:
    """Change a file, and its time as much as a disk with coarse times shows."""
    path.write_text(text)
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 10_000_000_000))


CHANGES = {
    "an input of other content": (lambda f: rewrite(f / "raw/a.txt", "new"), "inputs have changed"),
    "a further input": (lambda f: (f / "raw/z.txt").write_text("z"), "inputs have changed"),
    "an input less": (lambda f: (f / "raw/b.txt").unlink(), "inputs have changed"),
    "another file in a folder": (lambda f: (f / "more/d").write_text("d"), "inputs have changed"),
    "an output that is gone": (lambda f: (f / "out/1.bin").unlink(), "1.bin is missing"),
    "an output that was cut off": (lambda f: rewrite(f / "out/0.bin", "con"), "0.bin is damaged"),
    "other bytes of the same number": (
        lambda f: rewrite(f / "vocab.txt", "cOntent of vocab.txt"), "vocab.txt is damaged",
    ),
    "a record that was cut off": (
        lambda f: next(f.glob(".perdure-prepared-*")).write_text("{"), "is damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_the_command_runs_again_after(case, prepared):
    change, reason = CHANGES[case]
    change(prepared)
    assert reason in (preparation(prepared).why_not() or "")


def test_an_output_that_was_only_copied_back_is_whole(prepared):
    rewrite(prepared / "out/0.bin", "content of out/0.bin")
    assert preparation(prepared).why_not() is None


def test_another_command_has_the_data_prepared_again(prepared):
    assert preparation(prepared, command="tokenize-v2").why_not() == "the inputs have changed"


def test_outputs_are_not_trusted_while_the_command_writes_them(prepared):
    preparation(prepared).begin()
    assert preparation(prepared).why_not() == "nothing is prepared yet"


def test_an_output_that_the_command_has_not_written_is_named(prepared):
    made = preparation(prepared, outputs=("out", "index"))
    assert "index' is missing" in (made.complete(made.fingerprint()) or "")


def test_an_input_that_is_not_there_is_named(prepared):
    (prepared / "more/c").unlink()
    with pytest.raises(FileNotFoundError, match="'more' matches no file"):
        preparation(prepared).why_not()


@pytest.mark.parametrize(
    ("tail", "exit_code", "may_pass"),
    [
        (
            "Traceback (most recent call last):\n  File \"p.py\", line 1\nNameError: name 'x'\n",
            1,
            False,
        ),
        ("ModuleNotFoundError: No module named 'tokenizers'\n", 1, False),
        ("[Errno 2] No such file or directory: 'tokenise'\n", 127, False),
        ("", -9, True),
        ("OSError: [Errno 5] Input/output error\n", 1, True),
    ],
)
def test_a_command_is_tried_again_unless_its_user_must_put_it_right(tail, exit_code, may_pass):
    fault = fault_of("node-0", PrepareReply(exit_code=exit_code, tail=tail))
    error = PreparationError(fault)
    assert error.may_pass is may_pass
    assert str(error).startswith("prepare on node-0: ")


def test_a_job_whose_outputs_are_not_those_of_its_command_is_not_tried_again():
    why = "prepare.outputs: '/x' is missing after exit code 0"
    error = PreparationError(fault_of("node-0", PrepareReply(exit_code=1, why=why)))
    assert not error.may_pass
    assert str(error) == f"prepare on node-0: launch_misconfigured: {why}"


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"command": [], "outputs": ["out"]}, "prepare.command"),
        ({"command": ["true"], "outputs": []}, "prepare.outputs"),
        ({"command": ["true"], "outputs": [" "]}, "prepare.outputs"),
        ({"command": ["true"], "outputs": ["out"], "per": "rank"}, "prepare.per"),
        ({"command": ["true"], "outputs": ["out"], "per": "node"}, "restart.node_replace=false"),
    ],
)
def test_a_section_that_cannot_be_carried_out_is_refused_in_a_line(section, reason):
    with pytest.raises(InputError, match=reason) as refused:
        parse_job(job_document(prepare=section))
    assert "\n" not in str(refused.value)
