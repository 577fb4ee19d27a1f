"""What the processes' log lines look like, and where they go."""

from __future__ import annotations

import logging

import pytest

from perdure.training.log import start_logging

log = logging.getLogger("perdure.part")


@pytest.mark.parametrize(("is_command", "on_stdout"), [(False, True), (True, False)])
def test_lines_of_a_process_go_to_stdout_and_those_beside_results_to_stderr(
    is_command, on_stdout, capsys
):
    start_logging(is_command=is_command)
    start_logging()  # twice: once by the worker, once by its program
    log.info("step 7")
    log.warning("no disk")
    out, err = capsys.readouterr()
    assert (out if on_stdout else err) == "perdure: step 7\nperdure: warning: no disk\n"
    assert (err if on_stdout else out) == ""


def test_an_error_goes_to_stderr(capsys):
    start_logging()
    log.error("no such module")
    assert capsys.readouterr() == ("", "perdure: no such module\n")


def test_a_closed_stdout_does_not_end_the_process(monkeypatch, tmp_path):
    start_logging()
    with (tmp_path / "log").open("w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
    log.info("lost")
