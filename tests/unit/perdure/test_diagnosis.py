"""`perdure diagnose`: what it prints, on a terminal and for scripts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perdure.cli import app, main
from perdure.training.recovery.faults import FaultClass, RecoverableBy
from perdure.training.recovery.rungs import Rung
from tests.unit.perdure.commands import error_line, perdure

TYPE_ERROR = "TypeError: forward() missing 1 required positional argument: 'targets'"
FRAME = '  File "/w/train.py", line 3, in f'
FAILED = f"Traceback (most recent call last):\n{FRAME}\n    f()\n{TYPE_ERROR}\n"
WAITED = (
    "EI0002: [PID: 4711] 2026-03-21-02:07:08.639.860 Notify timeout: The wait execution of the "
    "Notify register times out.\n"
)
HEALTHY = "step 12 loss 3.4\n"
KEYS = {
    "path", "fault_class", "key_line", "file", "node", "rank", "device", "code", "user_fault",
    "name", "name_zh", "title", "hardware_fault", "recoverable_by", "explanation", "action", "rung",
    "runners_up",
    "confidence",
}  # fmt: skip


def diagnosis(*arguments: str | Path, given: str | bytes = "") -> str:
    return perdure("diagnose", *arguments, stdin=given)


def objects(*arguments: str | Path, given: str | bytes = "") -> list[dict]:
    return json.loads(diagnosis("--json", *arguments, given=given))


@pytest.fixture
def logs(tmp_path):
    """An attempt of three ranks, a healthy log, and a folder that holds nothing."""
    attempt = tmp_path / "attempt"
    for rank, text in enumerate((WAITED, FAILED, WAITED)):
        file = attempt / f"node-{rank}" / f"rank_{rank}.log"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "healthy.log").write_text(HEALTHY)
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_json_is_a_list_with_one_object_per_path_in_the_order_given(logs):
    paths = [logs / "healthy.log", logs / "attempt", logs / "attempt" / "node-0"]
    found = objects(*paths, logs / "healthy.log")
    assert [case["path"] for case in found] == [*map(str, paths), str(logs / "healthy.log")]
    classes = [case["fault_class"] for case in found]
    assert classes == [None, "user_code_error", "collective_timeout", None]
    assert all(set(case) == KEYS for case in found)


def test_an_explanation_names_the_cause_first_and_what_it_explains(logs):
    (case,) = objects("--explain", logs / "attempt")
    cause, *others = case["findings"]
    assert (cause["line"], cause["explained_by"]) == (TYPE_ERROR, None)
    assert {finding["explained_by"] for finding in others} <= {TYPE_ERROR, None}
    text = diagnosis("--explain", logs / "attempt")
    assert "what became of it" in text
    assert "the cause" in text


def test_json_shows_what_failed_where_and_what_can_be_done(logs):
    (case,) = objects(logs / "attempt")
    assert case == {
        "path": str(logs / "attempt"),
        "fault_class": FaultClass.USER_CODE_ERROR,
        "key_line": TYPE_ERROR,
        "file": "node-1/rank_1.log",
        "node": "node-1",
        "rank": 1,
        "device": None,
        "code": None,
        "name": "error in the training program",
        "name_zh": "\u8bad\u7ec3\u4ee3\u7801\u9519\u8bef",
        "title": "",
        "user_fault": True,
        "hardware_fault": False,
        "recoverable_by": RecoverableBy.USER_FIX,
        "explanation": case["explanation"],
        "action": case["action"],
        "rung": Rung.STOP,
        "confidence": 0.98,
        "runners_up": [{"fault_class": FaultClass.COLLECTIVE_TIMEOUT, "key_line": WAITED.strip()}],
    }
    assert case["explanation"]
    assert case["action"]


def test_json_of_a_healthy_log_shows_that_nothing_failed(logs):
    (case,) = objects(logs / "healthy.log")
    assert case["fault_class"] is None
    assert case["key_line"] is None
    assert case["explanation"] == f"No failure was found ({len(HEALTHY)} bytes read)."
    assert (case["user_fault"], case["hardware_fault"], case["runners_up"]) == (False, False, [])


def test_each_makes_every_file_of_a_folder_a_case_of_its_own(logs):
    found = objects(logs / "attempt", logs / "healthy.log", "--each")
    files = [logs / "attempt" / f"node-{rank}" / f"rank_{rank}.log" for rank in range(3)]
    assert [case["path"] for case in found] == [*map(str, files), str(logs / "healthy.log")]
    classes = [case["fault_class"] for case in found]
    assert classes == ["collective_timeout", "user_code_error", "collective_timeout", None]
    assert [case["rank"] for case in found] == [0, 1, 2, None]


def test_a_dash_is_the_standard_input():
    (case,) = objects("-", given=FAILED)
    assert (case["path"], case["key_line"]) == ("-", TYPE_ERROR)
    assert f"> {TYPE_ERROR}" in diagnosis("-", given=FAILED)


@pytest.mark.parametrize(
    "packed",
    [gzip.compress(FAILED.encode()), FAILED.encode("utf-16")],
    ids=["gzip", "utf-16"],  # the bytes of gzip have the time in them
)
def test_standard_input_may_be_compressed_or_utf_16(packed):
    (case,) = objects("-", given=packed)
    assert case["key_line"] == TYPE_ERROR


def test_text_that_is_no_ascii_is_printed_as_it_is(logs):
    (logs / "a.log").write_text("ValueError: \u4e2d\u6587\n", encoding="utf-8")
    assert "\u4e2d\u6587" in diagnosis("--json", logs / "a.log")


def test_a_file_that_is_not_text_is_reported(logs):
    (logs / "weights").write_bytes(bytes(range(7)) * 9999)
    (case,) = objects(logs / "weights")
    assert case["fault_class"] is None
    assert "weights is not text" in case["explanation"]


def test_the_key_line_is_shown_in_its_surroundings(logs):
    text = diagnosis(logs / "attempt" / "node-1" / "rank_1.log")
    lines = [line.strip("\u2502 ") for line in text.splitlines()]
    key = lines.index(f"> {TYPE_ERROR}")
    assert lines[key - 2 : key] == ['File "/w/train.py", line 3, in f', "f()"]
    assert sum(line.startswith(">") for line in lines) == 1


def test_the_place_of_the_failure_and_what_perdure_would_do_are_shown(logs):
    text = diagnosis(logs / "attempt")
    assert "user_code_error at rank 1 on node-1" in text
    assert f"> {TYPE_ERROR}" in text
    assert "node-1/rank_1.log" in text
    assert "Perdure would  stop: " in text
    assert "recovered by   user-fix" in text
    assert "cause lies in  the program" in text
    assert "Less likely:" in text
    assert "collective_timeout: EI0002" in text


def test_the_surroundings_are_shown_in_a_folder_with_one_log(logs):
    (logs / "attempt" / "node-0" / "rank_0.log").unlink()
    (logs / "attempt" / "node-2" / "rank_2.log").unlink()
    assert 'File "/w/train.py", line 3, in f' in diagnosis(logs / "attempt")


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (f"before\n\x1b[31m{TYPE_ERROR}\x1b[0m\nafter\n", (f"> {TYPE_ERROR}", "before", "after")),
        ("[bold]before[/]\nValueError: [red]odd[/red] [/]\n",
         ("[bold]before[/]", "> ValueError: [red]odd[/red] [/]")),
        (f"before\nValueError: odd {'x' * 3000}\nafter\n", ("> ValueError: odd",)),
    ],
    ids=["colours", "markup", "too long to be shown whole"],
)  # fmt: skip
def test_a_line_is_shown_in_its_surroundings_as_it_is_and_not_beyond_a_length(logs, log, shown):
    (logs / "a.log").write_text(log)
    text = diagnosis(logs / "a.log")
    assert [words for words in shown if words not in text] == []
    assert text.count("x") < 500
    assert "xx" not in log or text.count("x") > 300


def test_markup_in_a_path_is_shown_as_it_is(logs):
    (logs / "[red]a[").write_text(HEALTHY)
    assert diagnosis(logs / "[red]a[").startswith(f"{logs}/[red]a[: No failure")


def test_it_is_shown_when_nothing_failed(logs):
    text = diagnosis(logs / "healthy.log", logs / "healthy.log")
    assert text == f"{logs}/healthy.log: No failure was found ({len(HEALTHY)} bytes read).\n" * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing", "no such file or folder"), ("empty", "holds no logs")],
)
@pytest.mark.parametrize("more", [[], ["--json"], ["--each"]])
def test_input_that_cannot_be_read_is_refused_in_one_line_before_anything_is_printed(
    logs, capsys, name, message, more
):
    text = error_line(capsys, "diagnose", logs / "healthy.log", logs / name, *more)
    assert text.startswith("perdure: ")
    assert str(logs / name) in text
    assert message in text


def test_a_damaged_log_is_reported_and_the_others_are_diagnosed(logs):
    damaged = logs / "a.log.gz"
    damaged.write_bytes(b"\x1f\x8b\x08\x00" + b"\xff" * 50)
    cause = logs / "attempt" / "node-1" / "rank_1.log"
    done = CliRunner().invoke(app, ["diagnose", "--json", str(damaged), str(cause)])
    assert done.exit_code == 2
    assert f"perdure: cannot read PATH: '{damaged}'" in done.stderr
    unread, reported = json.loads(done.stdout)
    assert (unread["fault_class"], unread["path"]) == (None, str(damaged))
    assert "could not be read" in unread["explanation"]
    assert reported["key_line"] == TYPE_ERROR


def test_the_standard_input_can_be_named_once(capsys):
    assert "'-'" in error_line(capsys, "diagnose", "-", "-")


def test_without_a_path_the_use_is_explained(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["diagnose"])
    assert ended.value.code == 2
    assert "PATH" in capsys.readouterr().err
